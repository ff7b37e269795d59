"""What the kernel counts per user: a guest that takes all it gets leaves the host's programs theirs.

Each test is one row of the table in `docs/limitations/local.md`.
"""

import asyncio
import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

import cloche
from cloche.backends.local.plan import OUTSIDE_IDS
from cloche.jail.procfs import descendants
from cloche.jail.setup.privileges import INOTIFY_INSTANCES, PART
from tests.harness.processes import run_pooled

libc = ctypes.CDLL(None, use_errno=True)
PATIENCE_S = 60.0
NS_GET_OWNER_UID = 0xB704
HEAD = """\
import array, ctypes, fcntl, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
held = 0
try:
    while held < {most}:
{taking}
        held += 1
except OSError as error:
    print(held, error.errno, flush=True)
else:
    print(held, 0, flush=True)
signal.pause()
"""
QUEUE = "queue-of-a-test"
# What one more of each takes; the errno that says there is no more; how many are tried.
TAKING = {
    "inotify instances": ("check(libc.inotify_init1(0))", 24, 1000),
    "inotify watches": (
        """
        fd = fd if held else check(libc.inotify_init1(0))
        os.mkdir(f"/tmp/{held}")
        check(libc.inotify_add_watch(fd, b"/tmp/%d" % held, 2))
        """,
        28,
        12_000,
    ),
    "pending signals": (
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
        check(libc.sigqueue(os.getpid(), signal.SIGRTMIN, 0))
        """,
        11,
        200_000,
    ),
    # Landlock lets nobody open one, but it is there by then.
    "message queues": (
        """
        if libc.mq_open(b"/%d" % held, os.O_CREAT | os.O_RDWR, 0o600, None) < 0 and ctypes.get_errno() != 13:
            check(-1)
        """,
        24,
        100,
    ),
    "locked memory": (
        """
        segment = check(libc.shmget(0, 1 << 15, 0o1600))
        check(libc.shmctl(segment, 11, None))
        """,
        12 if os.geteuid() == 0 else 1,  # without control groups there are no segments
        1000,
    ),
}
# Counted for the id itself, whatever the namespace: as root a guest has one of its own.
TAKING_OF_ID = {
    "descriptors in flight": (
        """
        ends = ends if held else socket.socketpair()
        socket.send_fds(ends[0], [b"x"], [ends[0].fileno()] * 200)
        """,
        109,
        1000,
    ),
    "pages of pipes": (
        """
        pipe = os.pipe()
        if held and fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ) < 65536:
            raise OSError(1, "no larger ones")
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 1 << 20)
        """,
        1,
        200,
    ),
}


def check(result: int) -> int:
    """Raise what the C library says of a call."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def take_instance() -> None:
    """Hold one for a moment."""
    os.close(check(libc.inotify_init1(0)))


def take_watch() -> None:
    """Watch a folder for a moment."""
    fd = check(libc.inotify_init1(0))
    try:
        check(libc.inotify_add_watch(fd, b"/", 2))
    finally:
        os.close(fd)


def take_signals() -> None:
    """Hold as many as a large program may, in a process of its own."""
    program = "signal.pthread_sigmask(0, {34}); exit(any(libc.sigqueue(os.getpid(), 34, 0) for _ in range(200)))"
    head = "import ctypes, os, signal; libc = ctypes.CDLL(None)"
    subprocess.run([sys.executable, "-c", f"{head}; {program}"], check=True)


def take_queue() -> None:
    """Make a queue of the usual size, and remove it."""
    name = f"/{QUEUE}-{os.getpid()}".encode()
    os.close(check(libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)))
    check(libc.mq_unlink(name))


def take_locked_memory() -> None:
    """Lock a segment of 32 KiB, and remove it."""
    segment = check(libc.shmget(0, 1 << 15, 0o1600))
    try:
        check(libc.shmctl(segment, 11, None))
    finally:
        check(libc.shmctl(segment, 0, None))


def send_descriptors() -> None:
    """Have 200 in flight for a moment."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [0] * 200)


def take_pipe() -> None:
    """Make a pipe, which has the usual size."""
    reading, writing = os.pipe()
    try:
        assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) == 65536
    finally:
        os.close(reading)
        os.close(writing)


OUTSIDE: dict[str, Callable[[], None]] = {
    "inotify instances": take_instance,
    "inotify watches": take_watch,
    "pending signals": take_signals,
    "message queues": take_queue,
    "locked memory": take_locked_memory,
    "descriptors in flight": send_descriptors,
    "pages of pipes": take_pipe,
}


def program(row: tuple[str, int, int]) -> str:
    """Return a program that takes as many as it gets, says how many and why no more, and holds them."""
    return HEAD.format(most=row[2], taking=indent(dedent(row[0]), " " * 8))


@asynccontextmanager
async def guest(code: str, **options: Any) -> Any:
    """Run a program for as long as the block takes; yield the first that it says."""
    said: asyncio.Queue[bytes] = asyncio.Queue()
    run = asyncio.create_task(cloche.arun(code, on_output=lambda _, data: said.put_nowait(data), **options))
    first = asyncio.create_task(said.get())
    try:
        await asyncio.wait({run, first}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert first.done(), run
        yield first.result().decode()
    finally:
        first.cancel()
        run.cancel()
        await asyncio.wait({run})


def assert_left_for_others(name: str, row: tuple[str, int, int]) -> None:
    """Assert that a guest is refused what is counted per user, and nobody else is."""

    async def attempt() -> None:
        async with guest(program(row), warm=False) as said:
            held, errno = map(int, said.split())
            OUTSIDE[name]()  # raises where a guest has taken it all
            assert held > 0 or errno == 1
            assert errno == row[1], f"{held} were had"

    OUTSIDE[name]()
    asyncio.run(attempt())


@pytest.mark.both_users
@pytest.mark.parametrize("name", TAKING)
def test_a_guest_leaves_the_users_other_programs_theirs(name: str) -> None:
    """While a guest holds all that it gets of what the kernel counts per user, its caller gets more of it."""
    assert_left_for_others(name, TAKING[name])


@pytest.mark.root
@pytest.mark.parametrize("name", TAKING_OF_ID)
def test_a_guest_of_root_leaves_root_what_is_counted_by_id(name: str) -> None:
    """What cannot be limited in a namespace is counted, as root, for an id that the sandbox has for itself."""
    assert_left_for_others(name, TAKING_OF_ID[name])


@pytest.mark.root
@pytest.mark.parametrize("run", [partial(cloche.run, warm=False), run_pooled], ids=["cold", "pooled"])
def test_what_guests_of_root_use_is_charged_to_their_own_ids(run: Callable[..., Any]) -> None:
    """The kernel charges the owner of a user namespace, too: as root that is the sandbox's own id, so none add up."""
    found: list[tuple[int, int]] = []

    def look(_: str, data: bytes) -> None:
        del data
        found.extend(owners(os.getpid()))

    assert run("print(1, flush=True); input()", stdin="\n", on_output=look).ok
    assert found
    assert all(owner == guest for owner, guest in found), found


def owners(root: int) -> Iterator[tuple[int, int]]:
    """Yield, of each descendant in a jail, the owner of its user namespace, and the id that guests have there."""
    first, count = OUTSIDE_IDS
    for pid in descendants(root):
        try:
            rows = [line.split() for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines()]
            guests = [int(outside) for inside, outside, _ in rows if inside == "1000"]
            with open(f"/proc/{pid}/ns/user", "rb") as namespace:
                owner = array("I", [0])
                fcntl.ioctl(namespace, NS_GET_OWNER_UID, owner)
        except FileNotFoundError:
            continue  # it has ended
        if guests and first <= guests[0] < first + count:
            yield owner[0], guests[0]


@pytest.mark.both_users
def test_where_no_namespace_limits_them_there_are_no_instances() -> None:
    """At level confined a guest could watch nothing, and holds nothing that its caller's other programs might need."""
    code = "import ctypes; print(ctypes.CDLL(None).inotify_init(), ctypes.CDLL(None).inotify_init1(0))"
    assert cloche.run(code, level="confined").stdout == "-1 -1\n"


@pytest.mark.both_users
def test_limits_hold_wherever_a_guest_lives() -> None:
    """Cold, warm, in a live sandbox, in a session and in its fork a guest is refused what is above its share."""
    code = """
        import ctypes, os
        held = []
        while (fd := ctypes.CDLL(None).inotify_init1(0)) >= 0:
            held.append(fd)
        for fd in held:
            os.close(fd)
        print(len(held), open("/proc/sys/user/max_user_namespaces").read())
    """
    code = dedent(code)
    share = min(INOTIFY_INSTANCES, int(Path("/proc/sys/user/max_inotify_instances").read_text()) // PART)
    alone = [str(share), "0"]
    assert cloche.run(code, warm=False).stdout.split() == alone
    assert run_pooled(code).stdout.split() == alone
    with cloche.Sandbox(live=False) as sandbox:
        assert sandbox.run(code).stdout.split() == alone
        with sandbox.session() as session:
            assert session.run(code).stdout.split()[0] == str(share)
            with session.fork()[0] as fork:
                assert fork.run(code).stdout.split()[0] == str(share)
