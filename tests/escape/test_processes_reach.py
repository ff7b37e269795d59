"""Attempts to see, signal, trace or steal from the processes of the host and of another live sandbox."""

from functools import partial
from typing import Any

from tests.harness.escape.attempts import BOTH, CONFINED, Attempt
from tests.harness.escape.controls import Controls

reach = partial(Attempt, family="processes")
OWNERS = ("host", "neighbour")

# Find the process of `owner` by its mark, wherever it can be seen; the number it has for itself is tried as well.
FIND = """
own = os.getpid(), os.getppid()
seen = [int(entry) for entry in filter(str.isdigit, os.listdir("/proc")) if is_of("{owner}", entry)]
pids = [p for p in seen or [T["{owner}"]["pid"]] if p not in own and p > 9]
if not pids:
    contained("sees no such process")
pid = pids[0]
"""


def on_both(name: str, code: str, **keywords: Any) -> tuple[Attempt, ...]:
    """Return the attempt against the host's process and against the neighbour's."""
    return tuple(reach(name=f"{name} ({owner})", code=FIND.format(owner=owner) + code, **keywords) for owner in OWNERS)


ATTEMPTS = (
    reach(
        name="see processes of others",
        code="""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = open(f"/proc/{entry}/cmdline", "rb").read()
            except OSError:
                continue
            saw(line)
            for owner in ("host", "neighbour"):
                if is_of(owner, entry):
                    escaped(f"sees the process of the {owner}")
        """,
    ),
    *on_both("signal", "os.kill(pid, 18); escaped(pid)", levels=BOTH),
    *on_both("signal by descriptor", "escaped(syscall(424, os.pidfd_open(pid), 18, 0, 0))", levels=BOTH),
    *on_both("signal by the kernel, about a file", "syscall(72, 0, 8, pid); escaped(pid)", levels=(CONFINED,)),
    *on_both("trace", "syscall(101, 0x4206, pid, 0, 0); escaped(f'seized {pid}')", levels=BOTH),
    reach(
        name="read memory",
        levels=BOTH,
        code=FIND.format(owner="host")
        + """
import struct
length, address = T["host"]["length"], T["host"]["address"]
data = ctypes.create_string_buffer(length)
vector = struct.pack("2Q", ctypes.addressof(data), length)
syscall(310, pid, vector, 1, struct.pack("2Q", address, length), 1, 0)
saw(data.raw)
""",
    ),
    reach(
        name="read memory by its file",
        levels=BOTH,
        code=FIND.format(owner="host")
        + """
with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
    memory.seek(T["host"]["address"])
    saw(memory.read(T["host"]["length"]))
""",
    ),
    reach(
        name="write memory",
        levels=BOTH,
        code=FIND.format(owner="host")
        + """
import struct
data = ctypes.create_string_buffer(b"c")
syscall(311, pid, struct.pack("2Q", ctypes.addressof(data), 1), 1, struct.pack("2Q", T["host"]["address"], 1), 1, 0)
escaped()
""",
    ),
    reach(
        name="steal a descriptor",
        levels=BOTH,
        code=FIND.format(owner="host")
        + """
os.set_blocking(stolen := syscall(438, os.pidfd_open(pid), T["host"]["fd"], 0), False)
escaped(f"holds descriptor {stolen}")
""",
    ),
    reach(
        name="compare resources", code=FIND.format(owner="host") + "escaped(syscall(312, pid, os.getpid(), 1, 0, 0))"
    ),
    reach(
        name="change priority",
        levels=BOTH,
        code=FIND.format(owner="host") + "os.setpriority(os.PRIO_PROCESS, pid, 1); escaped()",
    ),
    reach(
        name="change processors",
        levels=BOTH,
        code=FIND.format(owner="host") + "os.sched_setaffinity(pid, {0, 1}); escaped()",
    ),
    reach(
        name="change limits",
        levels=BOTH,
        code=FIND.format(owner="host")
        + """
import resource
resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
escaped()
""",
    ),
    reach(
        name="read the environment of processes",
        code="""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                saw(open(f"/proc/{entry}/environ", "rb").read())
            except OSError:
                pass
        """,
    ),
    reach(
        name="enter the namespaces of a process",
        root_only="needs CAP_SYS_ADMIN on the host",
        code=FIND.format(owner="host") + """syscall(308, os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY), 0); escaped()""",
    ),
    reach(
        name="kill everybody",
        destructive=True,
        code="""
        import time
        before = [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
        os.kill(-1, 9)
        time.sleep(0.05)
        for other in before:
            try:
                if open(f"/proc/{other}/stat").read().rpartition(")")[2].split()[0] == "Z":
                    escaped(f"killed {other}")
            except (FileNotFoundError, ProcessLookupError):
                escaped(f"killed {other}")
        """,
    ),
    reach(
        name="kill the parent",
        destructive=True,
        code="""
        import time
        parent = os.getppid()
        os.kill(parent, 9)
        time.sleep(0.05)
        if os.getppid() != parent:
            escaped("the parent died")
        """,
    ),
    reach(
        name="stop the parent",
        destructive=True,
        code="""
        import time
        parent = os.getppid()
        os.kill(parent, 19)
        time.sleep(0.05)
        state = open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0]
        os.kill(parent, 18)
        if state == "T":
            escaped("the parent stands still")
        """,
    ),
    reach(
        name="trace the parent",
        destructive=True,
        levels=BOTH,
        code="""escaped(syscall(101, 0x4206, os.getppid(), 0, 0))""",
    ),
    reach(
        name="run before everybody else",
        root_only="needs CAP_SYS_NICE on the host",
        levels=BOTH,
        code="""os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped()""",
    ),
    reach(
        name="raise its own priority",
        root_only="needs CAP_SYS_NICE on the host",
        levels=BOTH,
        code="""os.nice(-5); escaped()""",
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """No process of the host or of another sandbox can be reached."""
    controls.assert_contained(attempt, where)
