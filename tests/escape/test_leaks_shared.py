"""Attempts to use what processes share without files: System V and POSIX objects, keyrings, locks, shared memory."""

from functools import partial
from typing import Any

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

OWNERS = ("host", "neighbour")


def on_both(name: str, code: str, **keywords: Any) -> tuple[Attempt, ...]:
    """Return the attempt against the host's process and against the neighbour's."""
    make = partial(Attempt, family="leaks", **keywords)
    return tuple(make(name=f"{name} ({owner})", code=f"at = T['{owner}']\n" + code) for owner in OWNERS)


leak = partial(Attempt, family="leaks")

ATTEMPTS = (
    *on_both(
        "shared memory by key",
        """
saw(ctypes.string_at(syscall(30, syscall(29, at["key"], 0, 0), 0, 0o10000), 64))
""",
    ),
    *on_both(
        "a message queue",
        """
room = ctypes.create_string_buffer(128)
syscall(70, syscall(68, at["key"], 0), room, 100, 0, 0o4000)
saw(room.raw)
""",
    ),
    *on_both(
        "the list of shared memory",
        """
if any(str(at["key"]) in line.split() for line in open("/proc/sysvipc/shm")):
    escaped("the segment is listed")
""",
    )[:1],
    *on_both(
        "a named message queue",
        """
room = ctypes.create_string_buffer(8192)
queue = syscall(240, at["mq"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, 0)
syscall(243, queue, room, 8192, 0, 0)
saw(room.raw)
""",
    ),
    *on_both("a file in shared memory", "saw(open(at['dev_shm'], 'rb').read())\n"),
    leak(
        name="the names in shared memory",
        code="""
        names = os.listdir("/dev/shm")
        if any(T[owner]["mark"] in names for owner in ("host", "neighbour")):
            escaped("they are listed")
        """,
    ),
    *on_both(
        "a file lock",
        """
import fcntl
file = open(at["flocked"])
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    escaped("learns that another holds the lock")
""",
    ),
    *on_both(
        "a record lock",
        """
import fcntl, struct
file = open(at["recorded"])
asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
kind, *_ , pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
if kind != fcntl.F_UNLCK:
    escaped(f"learns that {pid} holds the lock")
""",
    ),
    leak(
        name="the table of locks",
        code="""
        inode = os.stat(T["host"]["flocked"]).st_ino
        if any(line.split()[5].endswith(f":{inode}") for line in open("/proc/locks") if "->" not in line):
            escaped("the host's lock is listed")
        """,
    ),
    leak(
        name="keys of the caller's session",
        levels=BOTH,
        code="""
        key = syscall(250, 10, -3, b"user", T["key"].encode(), 0)
        room = ctypes.create_string_buffer(128)
        syscall(250, 11, key, room, 128, 0)
        saw(room.raw)
        """,
    ),
    leak(
        name="keys of the caller's user",
        levels=BOTH,
        code="""
        syscall(250, 8, -4, -2)
        key = syscall(250, 10, -4, b"user", T["key"].encode() + b"-user", 0)
        room = ctypes.create_string_buffer(128)
        syscall(250, 11, key, room, 128, 0)
        saw(room.raw)
        """,
    ),
    leak(
        name="the list of keys",
        levels=BOTH,
        code="""
        if T["key"] in open("/proc/keys").read():
            escaped("the caller's key is listed")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """Nothing that processes can share is shared with a sandbox."""
    controls.assert_contained(attempt, where)
