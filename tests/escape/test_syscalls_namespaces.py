"""Attempts to build or enter namespaces, the first step of most escapes by way of the kernel."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

build = partial(Attempt, family="system calls", levels=BOTH)

NAMESPACES = {
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "network": 0x40000000,
    "time": 0x80,
}
BY_UNSHARE = "escaped(syscall(272, {flag}))"
BY_CLONE = """
child = syscall(56, {flag} | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
escaped(f"made process {{child}}")
"""
BY_CLONE3 = """
import struct
child = syscall(435, struct.pack("8Q", {flag}, 0, 0, 0, 17, 0, 0, 0), 64)
if child == 0:
    os._exit(0)
escaped(f"made process {{child}}")
"""

ATTEMPTS = (
    *(build(name=f"unshare: {name} namespace", code=BY_UNSHARE.format(flag=flag)) for name, flag in NAMESPACES.items()),
    *(
        build(name=f"clone: {name} namespace", code=BY_CLONE.format(flag=flag))
        for name, flag in NAMESPACES.items()
        if name in ("user", "mount", "pid", "network")
    ),
    build(name="clone: all namespaces", code=BY_CLONE.format(flag=sum(NAMESPACES.values()) - NAMESPACES["time"])),
    *(
        build(name=f"clone3: {name} namespace", code=BY_CLONE3.format(flag=flag))
        for name, flag in NAMESPACES.items()
        if name in ("user", "mount", "time")
    ),
    build(
        name="clone3: into another control group",
        root_only="opens the host's control groups",
        code="""
        import struct
        unified = "/sys/fs/cgroup/unified"
        group = os.open(unified if os.path.isdir(unified) else "/sys/fs/cgroup", os.O_RDONLY)
        child = syscall(435, struct.pack("11Q", 0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, group), 88)
        if child == 0:
            os._exit(0)
        escaped(f"made process {child}")
        """,
    ),
    build(
        name="clone: a thread with namespaces",
        code="""
        import threading
        failed = []
        def work():
            try:
                syscall(272, 0x4000000 | 0x400)
                escaped("in a thread")
            except OSError as error:
                failed.append(error)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise failed[0]
        """,
    ),
    build(
        name="setns: its own namespaces again",
        code="""
        last = PermissionError("none could be opened")
        for name in ("uts", "ipc", "net", "mnt", "cgroup"):
            try:
                syscall(308, os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0)
                escaped(f"entered {name}")
            except OSError as error:
                last = error
        raise last
        """,
    ),
    build(
        name="setns: by the descriptor of a process",
        code="""
        escaped(syscall(308, os.pidfd_open(os.getppid()), 0x4000000))
        """,
    ),
    build(
        name="a user namespace by the unshare program",
        language="bash",
        code="""
        unshare --user --map-root-user true && echo ESCAPED || echo "CONTAINED exit $?"
        """,
    ),
    build(
        name="see the host's namespaces",
        levels=("jail",),
        code="""
        shared = [n for n, place in T["namespaces"].items() if n not in ("time", "time_for_children")
                  and os.readlink(f"/proc/self/ns/{n}") == place]
        if shared:
            escaped(f"shares {shared}")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """No namespace can be made or entered."""
    controls.assert_contained(attempt, where)
