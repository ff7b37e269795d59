"""Two live sandboxes at level `confined`, and their caller: what one tries on the others, outside and inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from tests.harness.environments import run_as_user
from tests.harness.processes import descendants

pytestmark = pytest.mark.both_users
LONG_S = 120
VICTIM = """
import os, sys, time, tempfile
folder = sys.argv[1] if len(sys.argv) > 1 else os.getcwd()
os.mkfifo(f"{folder}/fifo")
open(f"{folder}/secret", "w").write("secret")
fifo = os.open(f"{folder}/fifo", os.O_RDWR)
print(os.getpid(), flush=True)
while True: time.sleep(1000)
"""
# Each is one attempt on process `pid` with its folder and terminal; what is printed are the names of those that worked.
TRIES = r"""
import ctypes, json, os, resource, signal, socket, sys
pid, folder, terminal = int(sys.argv[1]), sys.argv[2], sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
def checked(value):
    if value < 0: raise OSError(ctypes.get_errno(), "refused")
    return value
def put(path, flags=os.O_WRONLY):
    os.close(os.open(path, flags | os.O_NONBLOCK))
def pidfd(): return os.pidfd_open(pid)
def datagram():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.bind(f"{folder}/socket-{os.getpid()}")
attempts = {
    "kill": lambda: os.kill(pid, 0),
    # killpg(1) is kill(-1), which reaches one's own: in a container, what pid 1 has started may be in group 1
    "killpg": lambda: os.killpg(os.getpgid(pid), 0) if os.getpgid(pid) > 1 else os.kill(pid, 0),
    "tgkill": lambda: checked(libc.syscall(234, pid, pid, 0)),
    "sigqueueinfo": lambda: checked(libc.syscall(129, pid, 0, ctypes.byref((ctypes.c_int * 32)(0, 0, -1)))),
    "pidfd signal": lambda: signal.pidfd_send_signal(pidfd(), 0),
    "ptrace": lambda: checked(libc.ptrace(0x4206, pid, None, None)) or libc.ptrace(17, pid, None, None),
    "read memory": lambda: put(f"/proc/{pid}/mem", os.O_RDONLY),
    "write memory": lambda: put(f"/proc/{pid}/mem", os.O_RDWR),
    "its environment": lambda: open(f"/proc/{pid}/environ", "rb").read(1),
    "its command line": lambda: open(f"/proc/{pid}/cmdline", "rb").read(1),
    "its descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
    "its working directory": lambda: os.readlink(f"/proc/{pid}/cwd"),
    "its root": lambda: os.listdir(f"/proc/{pid}/root"),
    "its maps": lambda: open(f"/proc/{pid}/maps").read(1),
    "its score": lambda: put(f"/proc/{pid}/oom_score_adj"),
    "limits": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
    "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
    "read a file": lambda: open(f"{folder}/secret").read(),
    "write a file": lambda: put(f"{folder}/secret", os.O_WRONLY | os.O_APPEND),
    "list the folder": lambda: os.listdir(folder),
    "make a file": lambda: put(f"{folder}/made", os.O_WRONLY | os.O_CREAT),
    "link": lambda: os.link(f"{folder}/secret", f"{folder}/linked"),
    "symbolic link": lambda: os.symlink("secret", f"{folder}/symlinked"),
    "rename": lambda: os.rename(f"{folder}/secret", f"{folder}/secret"),
    "chmod": lambda: os.chmod(f"{folder}/secret", 0o644),
    "touch": lambda: os.utime(f"{folder}/secret"),
    "read the FIFO": lambda: put(f"{folder}/fifo", os.O_RDONLY),
    "write the FIFO": lambda: put(f"{folder}/fifo"),
    "bind a socket": datagram,
    "the terminal": lambda: put(terminal, os.O_RDWR | os.O_NOCTTY),
}
done = {}
for name, attempt in attempts.items():
    try:
        attempt()
        done[name] = "done"
    except (OSError, PermissionError, ValueError) as error:
        done[name] = f"{error}"
print(json.dumps(done))
"""

# Threads that write to a file by turns, from pages that must be read from disk one by one, hold its lock without end.
HOLDS = """
import mmap, os, threading, time
source, target = (os.open(name, os.O_RDWR | os.O_CREAT) for name in ("source", "target"))
for _ in range(100): os.write(source, os.urandom(1 << 20))
os.fsync(source)
def write():
    while True:
        with mmap.mmap(source, 100 << 20, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_RANDOM)
            os.pwrite(target, pages, 0)
for _ in range(50): threading.Thread(target=write, daemon=True).start()
def evict():
    while True:
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(0.01)
threading.Thread(target=evict, daemon=True).start()
while True: os.chmod("target", 0o600)
"""

# What a program has of its caller's capabilities, by itself and by who makes its calls in its place.
POWERS = """
import json, os
def powers():
    held = [row.split()[1] for row in open("/proc/self/status") if row.startswith("Cap") and "Bnd" not in row]
    open("file", "w").close()
    try:
        os.chown("file", 0, 0)
    except OSError as error:
        return {*held, error.strerror}
    return {*held, "done"}
print(sorted(powers()))
"""
GIVEN = f"""
import cloche, contextlib, io, json, os, tempfile
os.chdir(tempfile.mkdtemp())
with contextlib.redirect_stdout(io.StringIO()) as told:
    exec({POWERS!r})
with cloche.Sandbox(level="confined", live=True) as sandbox:
    runs = [cloche.run({POWERS!r}, level="confined"), sandbox.run({POWERS!r})]
print(json.dumps([told.getvalue(), *(run.stdout for run in runs)]))
"""


@pytest.fixture(scope="module")
def own_folder() -> Iterator[Path]:
    """Hold a folder that is the caller's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def victim(own_folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a process of the caller's."""
    words = [sys.executable, "-c", VICTIM, str(own_folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[tuple[cloche.Sandbox, cloche.Sandbox]]:
    """Open two live sandboxes."""
    rules = {"level": "confined", "live": True, "timeout": LONG_S}
    with cloche.Sandbox(**rules) as one, cloche.Sandbox(**rules) as other:
        yield one, other


def tried(sandbox: cloche.Sandbox, pid: int, folder: str, terminal: str) -> dict[str, str]:
    """Return what came of each attempt of a run in a sandbox."""
    result = sandbox.exec([sys.executable, "-c", TRIES, str(pid), folder, terminal])
    assert result.ok, result
    found: dict[str, str] = json.loads(result.stdout)
    return found


def test_each_attempt_works_outside(victim: subprocess.Popen[str], own_folder: Path) -> None:
    """The premise: a program of the caller's own can do all of it to another one."""
    master, terminal = os.openpty()
    words = [sys.executable, "-c", TRIES, str(victim.pid), str(own_folder), os.ttyname(terminal)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    os.close(master)
    os.close(terminal)
    assert {name: said for name, said in json.loads(done.stdout).items() if said != "done"} == {}


def test_a_sandbox_reaches_nothing_of_its_callers(
    sandboxes: tuple[cloche.Sandbox, cloche.Sandbox], victim: subprocess.Popen[str], own_folder: Path
) -> None:
    """Processes, files, FIFOs and terminals of the caller are out of reach, also where both have one id."""
    master, terminal = os.openpty()
    found = tried(sandboxes[0], victim.pid, str(own_folder), os.ttyname(terminal))
    os.close(master)
    os.close(terminal)
    assert [name for name, said in found.items() if said == "done"] == []
    found = tried(sandboxes[0], os.getpid(), str(own_folder), "/dev/ptmx")
    assert [name for name, said in found.items() if said == "done"] == []


def test_a_sandbox_reaches_nothing_of_another(sandboxes: tuple[cloche.Sandbox, cloche.Sandbox]) -> None:
    """Two live sandboxes are out of each other's reach, as are their terminals and workspaces."""
    one, other = sandboxes
    with (
        other.start([sys.executable, "-c", VICTIM]) as process,
        other.terminal(["sh", "-c", "tty; exec sleep 1000"]) as terminal,
    ):
        pid = int(process.stdout.read())
        slave = terminal.stdout.read().decode().strip()
        folder = other.exec(["pwd"]).stdout.strip()  # by itself: root in a container may not read it
        found = tried(one, pid, folder, slave)
        assert [name for name, said in found.items() if said == "done"] == []


def test_a_sandbox_reaches_nothing_of_what_holds_it(sandboxes: tuple[cloche.Sandbox, cloche.Sandbox]) -> None:
    """The helper, init and the reapers cannot be signalled, read, traced or limited by what they hold."""
    one, _ = sandboxes
    with one.start(["sleep", "1000"]) as process:
        reaper = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
        init = int(Path(f"/proc/{reaper}/stat").read_text().rpartition(")")[2].split()[1])
        helper = int(Path(f"/proc/{init}/stat").read_text().rpartition(")")[2].split()[1])
        files = ("read a file", "write a file", "list the folder", "make a file", "link", "symbolic link", "rename",
                 "chmod", "touch", "read the FIFO", "write the FIFO", "bind a socket")  # fmt: skip
        for pid in (reaper, init, helper):
            found = tried(one, pid, "/nowhere", "/dev/ptmx")
            assert [name for name, said in found.items() if said == "done" and name not in files] == []
        assert one.exec(["true"]).ok


def test_a_signal_to_everybody_ends_its_own_tree_alone(sandboxes: tuple[cloche.Sandbox, cloche.Sandbox]) -> None:
    """`kill(-1)` and `kill(0)` of a program reach neither the caller, nor init, nor another sandbox."""
    one, other = sandboxes
    with other.start(["sleep", "1000"]) as beside:
        for target in ("-1", "0"):
            one.run(f"import os\nos.kill({target}, 9)")
        assert one.exec(["true"]).ok
        assert Path(f"/proc/{beside.pid}").exists()
        assert other.exec(["true"]).ok


def test_nothing_is_left_when_the_helper_is_killed() -> None:
    """What a fork, a session of its own and a stopped process hide in ends with init, whoever ends that."""
    with cloche.Sandbox(level="confined", live=True, timeout=LONG_S) as sandbox:
        sandbox.run(
            "import os, signal, time\n"
            "for _ in range(8):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork(): os._exit(0)\n"
            "        os.kill(os.getpid(), signal.SIGSTOP)\n"
            "        time.sleep(1000)\n"
            "open('pids', 'w').write(str(os.getpid()))"
        )
        with sandbox.start(["sleep", "1000"]) as process:
            below = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            init = int(Path(f"/proc/{below}/stat").read_text().rpartition(")")[2].split()[1])
            pids = descendants(init)
            os.kill(init, signal.SIGKILL)
            deadline = time.monotonic() + LONG_S
            while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert left == []


@pytest.mark.root
def test_a_service_hands_on_none_of_its_capabilities() -> None:
    """An ordinary user's service may have been given some: neither guests nor who makes their calls keep them."""
    outside, *inside = run_as_user(GIVEN, capabilities="+chown,+fsetid")
    assert outside == "['0000000000000011', 'done']\n"
    assert inside == ["['0000000000000000', 'Operation not permitted']\n"] * 2


@pytest.mark.soak
def test_who_holds_up_its_reaper_is_ended_alone() -> None:
    """A call made in a guest's place may wait for others of the guest's: the time-out ends all these alone."""
    with cloche.Sandbox(level="confined", live=True, timeout=LONG_S) as sandbox:
        assert str(sandbox.exec([sys.executable, "-c", HOLDS], timeout=6).status) == "timeout"
        assert sandbox.exec(["true"]).ok
