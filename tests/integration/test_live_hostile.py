"""A guest that holds what its sandbox is made of: its owner can look and end things all the same."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.local import LocalBackend, live
from cloche.core.errors import SandboxFileError
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.execution.paths import PathOperations
from tests.harness.processes import descendants

pytestmark = pytest.mark.usefixtures("settings_of_nobody")
MARKS = 150  # more than the processes that have ended of which something is known
KEEPS = """
import socket
server, held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), []
server.bind('/tmp/keeper')
print('up', flush=True)
while True:
    held += socket.recv_fds(server, 10, 4)[1]
"""
GIVES = """
import os, socket
own = os.open('/proc/self/ns/uts', os.O_RDONLY)
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect('/tmp/keeper')
socket.send_fds(link, [b'x'], [own])
"""


@pytest.fixture
def sandbox() -> Iterator[cloche.Sandbox]:
    """Open a live sandbox."""
    with cloche.Sandbox(live=True, timeout=60) as found:
        yield found


@pytest.mark.both_users
def test_a_guest_that_keeps_the_namespaces_of_commands_hides_no_file(
    monkeypatch: pytest.MonkeyPatch, sandbox: cloche.Sandbox
) -> None:
    """When no command can be started any more, that is said; files are read and written, and the keeper is ended."""
    monkeypatch.setattr(live, "MOST_MARKS", MARKS)
    keeper = sandbox.start(["python3", "-c", KEEPS])
    assert next(iter(keeper.stdout)) == b"up\n"
    with pytest.raises(cloche.StartFailed, match="holds namespaces of other processes"):
        deque((sandbox.run(GIVES) for _ in range(2 * MARKS)), maxlen=0)
    content = b"x" * 1_000_000
    for _ in range(3):
        sandbox.write_file("file", content)
        assert sandbox.read_file("file", max_bytes=len(content)) == content
    assert sandbox.list_files() == ("file",)
    keeper.kill()
    assert keeper.wait().status is cloche.Status.SIGNALED
    assert sandbox.exec(["echo", "again"]).stdout == "again\n"


SHOWS = "print(open('/proc/1/cmdline').read())"


@pytest.mark.both_users
@pytest.mark.parametrize("options", [{"warm": False}, {"warm": True}, {"live": True}], ids=["cold", "warm", "live"])
def test_the_command_line_of_pid_1_says_nothing_of_the_host(options: dict[str, bool]) -> None:
    """Neither a control group's path nor who the caller is: that travels as a message."""
    with cloche.Sandbox(**options) as sandbox:  # type: ignore[arg-type]
        shown = sandbox.run(SHOWS).stdout
    assert "make_modules" in shown
    assert "cgroup/" not in shown
    assert f"cloche-{os.getpid()}" not in shown


STOPS = """
import os, signal
print('up', flush=True)
while True:
    for pid in filter(str.isdigit, os.listdir('/proc')):
        if int(pid) not in (1, os.getpid()):
            try:
                os.kill(int(pid), signal.SIGSTOP)
            except OSError:
                pass
"""


@pytest.mark.root
def test_a_guest_that_stops_everything_stops_no_file_call(sandbox: cloche.Sandbox) -> None:
    """What works on files has another real id, with the rights of the sandbox's user and no others."""
    stopper = sandbox.start(["python3", "-c", STOPS])
    assert next(iter(stopper.stdout)) == b"up\n"
    for number in range(10):
        sandbox.write_file("file", str(number))
        assert sandbox.read_file("file") == str(number).encode()
    with pytest.raises(SandboxFileError, match="ermission"):
        sandbox.write_file("/etc/passwd", b"")
    stopper.kill()
    (row,) = [one for one in sandbox.list_dir() if one.name == "file"]
    assert sandbox.exec(["stat", "-c", "%u", "file"]).stdout == f"{row.uid}\n" == sandbox.exec(["id", "-u"]).stdout


def stop_all_inside(over: threading.Event) -> None:
    """Stop whatever is in a sandbox of ours but its pid 1, again and again, as root may from outside."""
    while not over.is_set():
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = status.partition("\nNSpid:")[2].split("\n", 1)[0].split()
                if len(numbers) > 1 and numbers[-1] != "1":
                    os.kill(pid, signal.SIGSTOP)


@pytest.mark.root
def test_what_is_stopped_all_the_same_ends_with_the_time_of_the_sandbox() -> None:
    """A file call, one that is streamed, and the start of a session take no longer than a run may; others go on."""

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async def main() -> None:
        over = threading.Event()
        async with LocalBackend().open_live(Policy(), Limits(timeout_s=3.0)) as sandbox:
            await sandbox.write_path("file", b"content")
            stopping = threading.Thread(target=stop_all_inside, args=(over,))
            stopping.start()
            try:
                with pytest.raises(SandboxFileError, match="not finished within 3 s"):
                    await sandbox.write_path("file", bytes(48 << 20))
                with pytest.raises(SandboxFileError, match="not finished within 3 s"):
                    await sandbox.write_path("file", pieces())
            finally:
                over.set()
                stopping.join()
            await sandbox.write_path("stops", b"kill -STOP $$")
            with pytest.raises(cloche.StartFailed, match="did not start in 3 s"):
                await sandbox.open_session("bash", {"BASH_ENV": "/workspace/stops"})
            assert await sandbox.read_path("file", max_bytes=100) == b"content"

    asyncio.run(main())


def init_of(sandbox: cloche.Sandbox) -> int:
    """Return the pid, as this host has it, of a sandbox's first process: the parent of what is started."""
    with sandbox.start(["sh", "-c", "echo up; read never", "found-by-this"]) as waiting:
        assert next(iter(waiting.stdout)) == b"up\n"
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if b"found-by-this" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    status = Path(f"/proc/{pid}/status").read_text()
                    return int(status.partition("\nPPid:")[2].split()[0])
    raise LookupError("no such process was started")


SHORT = 0.2
CALLS: dict[str, Callable[[cloche.Sandbox, Path], object]] = {
    "read_file": lambda sandbox, _: sandbox.read_file("file", timeout=SHORT),
    "write_file": lambda sandbox, _: sandbox.write_file("file", "new", timeout=SHORT),
    "append_file": lambda sandbox, _: sandbox.append_file("file", "more", timeout="200ms"),
    "list_files": lambda sandbox, _: sandbox.list_files(timeout=SHORT),
    "list_dir": lambda sandbox, _: sandbox.list_dir(timeout=SHORT),
    "stat": lambda sandbox, _: sandbox.stat("file", timeout=SHORT),
    "exists": lambda sandbox, _: sandbox.exists("file", timeout=SHORT),
    "make_dir": lambda sandbox, _: sandbox.make_dir("folder", timeout=SHORT),
    "move": lambda sandbox, _: sandbox.move("file", "other", timeout=SHORT),
    "remove": lambda sandbox, _: sandbox.remove("file", timeout=SHORT),
    "watch": lambda sandbox, _: sandbox.watch(timeout=SHORT),
    "upload": lambda sandbox, here: sandbox.upload(here, "/tmp/here", timeout=SHORT),
    "download": lambda sandbox, here: sandbox.download("file", here / "file", timeout=SHORT),
}


@pytest.mark.both_users
def test_each_call_ends_at_its_own_timeout(sandbox: cloche.Sandbox, tmp_path: Path) -> None:
    """While init stands still, each file call and the start of a session are given up in time, and leave nothing."""
    methods = {name for name, one in vars(PathOperations).items() if inspect.iscoroutinefunction(one)}
    assert methods == {*CALLS}
    sandbox.write_file("file", "content")
    init = init_of(sandbox)
    os.kill(init, signal.SIGSTOP)
    try:
        for call in CALLS.values():
            with pytest.raises(SandboxFileError, match=r"not done in 0\.2 s") as late:
                call(sandbox, tmp_path)
            assert late.value.kind == "timeout"
        with pytest.raises(cloche.StartFailed, match=r"not done in 0\.2 s"):
            sandbox.session(timeout=SHORT)
    finally:
        os.kill(init, signal.SIGCONT)
    assert sandbox.read_file("file", timeout=60) == b"content"
    assert [one.name for one in sandbox.list_dir()] == ["file"]
    assert sandbox.session(timeout=60).run("1 + 1").value == 2


@pytest.mark.root
def test_what_root_inside_stops_ends_at_its_timeout() -> None:
    """Root may stop file calls and interpreters of all others: they end in time, and all is well without that root."""
    large = bytes(32 << 20)
    with cloche.Sandbox(live=True, users=True, timeout=60) as sandbox:
        sandbox.write_file("file", b"content")
        stopper = sandbox.start(["python3", "-c", STOPS], user="root")
        assert next(iter(stopper.stdout)) == b"up\n"
        with pytest.raises(SandboxFileError, match="not done in 1 s"):
            sandbox.write_file("large", large, timeout=1)
        with pytest.raises(cloche.StartFailed, match="not done in 1 s"):
            sandbox.session("bash", timeout=1)
        stopper.kill()
        assert sandbox.read_file("file", timeout=60) == b"content"
        assert not sandbox.exists("large")
        assert sandbox.session("bash", timeout=60).run("echo again").stdout == "again\n"


@pytest.mark.root
def test_init_runs_before_what_it_has_started(sandbox: cloche.Sandbox) -> None:
    """Where a control group bounds both: a guest that is at work everywhere does not slow down what ends it."""
    mine = os.nice(0)
    row = sandbox.read_file("/proc/1/stat").decode().rpartition(")")[2].split()
    assert int(row[16]) == max(-20, mine - 15)
    assert sandbox.exec(["nice"]).stdout == f"{mine}\n" == sandbox.run("import os; print(os.nice(0))").stdout
    with sandbox.session() as session:
        assert session.run("import os; os.nice(0)").value == mine


FILLS = "import os, time\nprint('up', flush=True)\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.1)"


def test_starts_that_are_refused_leave_no_descriptor() -> None:
    """Where a process takes every place, those who wait for one cost pid 1 nothing, however often it tries."""
    with cloche.Sandbox(live=True, timeout=60, pids=40) as sandbox:
        held = f"/proc/{init_of(sandbox)}/fd"
        process = sandbox.start(["python3", "-c", FILLS])
        assert next(iter(process.stdout)) == b"up\n"
        counts: list[int] = []
        while len(counts) < 15:
            try:
                sandbox.exec(["true"], timeout=SHORT)
                counts.clear()  # it was not full yet
            except cloche.StartFailed:
                counts.append(len(os.listdir(held)))
        assert counts[-1] < counts[0] + 8
        process.kill()
