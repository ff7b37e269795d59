"""A guest that holds what its sandbox is made of: its owner can look and end things all the same."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import pytest

import cloche
from cloche.backends.local import live

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
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
    """Open a sandbox that lives."""
    with cloche.Sandbox(live=True, timeout=60) as found:
        yield found


def test_a_guest_that_keeps_the_namespaces_of_commands_hides_no_file(
    monkeypatch: pytest.MonkeyPatch, sandbox: cloche.Sandbox
) -> None:
    """When no command can be started any more, that is said; files are read and written, and the keeper is ended."""
    monkeypatch.setattr(live, "MOST_MARKS", MARKS)
    keeper = sandbox.start(["python3", "-c", KEEPS])
    assert next(iter(keeper.stdout)) == b"up\n"
    with pytest.raises(cloche.StartFailed, match="keeps the namespaces of others"):
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


@pytest.mark.parametrize("options", [{"warm": False}, {"warm": True}, {"live": True}], ids=["cold", "warm", "live"])
def test_the_command_line_of_pid_1_says_nothing_of_the_host(options: dict[str, bool]) -> None:
    """Neither a control group's path nor who the caller is: that travels as a message."""
    with cloche.Sandbox(**options) as sandbox:  # type: ignore[arg-type]
        shown = sandbox.run(SHOWS).stdout
    assert "make_modules" in shown
    assert "cgroup/" not in shown
    assert f"cloche-{os.getpid()}" not in shown
