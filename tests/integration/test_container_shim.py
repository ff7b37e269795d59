"""The container shim: programs of the host's in namespaces that take everything along, whoever dies first."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.jail import messages
from cloche.jail.setup.launch import start_shim
from cloche.jail.setup.mounts import mount
from cloche.jail.syscalls import MS_PRIVATE, MS_REC
from tests.harness.leaks import Snapshot, wait_for_leftovers

PRIVATE = [mount("none", "/", "", MS_REC | MS_PRIVATE), mount("proc", "/proc", "proc", 0)]
USER = None if os.geteuid() == 0 else 0


class ShimClient:
    """Hold one shim and exchange messages with it."""

    def __init__(self) -> None:
        self.process, self.link = start_shim()
        self.send("open", {"calls": PRIVATE, "inside_id": USER})

    def send(self, tag: str, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        messages.send(self.link.fileno(), tag, body, fds)

    def receive(self) -> tuple[str, dict[str, Any]]:
        tag, body, _ = messages.receive(self.link.fileno())
        return tag, body

    def start(self, number: int, *argv: str) -> int:
        """Start a program; return the end of a pipe with its output."""
        ours, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        body = {"number": number, "calls": [], "folder": "", "argv": list(argv), "env": {}, "cgroup": None}
        self.send("start", {**body, "watched_bytes": 0, "processors": 0}, (nothing, theirs, theirs))
        for fd in (nothing, theirs):
            os.close(fd)
        return ours


@pytest.fixture
def shim() -> Iterator[ShimClient]:
    """Give a shim with open namespaces; afterwards nothing of it may be left."""
    before = Snapshot.take()
    shim = ShimClient()
    assert shim.receive() == ("opened", {"number": 0})
    yield shim
    shim.link.close()
    shim.process.wait(30)
    assert not wait_for_leftovers(before, patience_s=5)


def said(fd: int) -> bytes:
    """Read all there is, and close."""
    with open(fd, "rb") as file:
        return file.read()


def test_programs_come_and_go(shim: ShimClient) -> None:
    """Each is reported to have started and ended, with its wait status; the namespaces stay."""
    for number, code in ((1, 0), (2, 3)):
        output = shim.start(number, "/bin/sh", "-c", f"echo $PPID; exit {code}")
        assert shim.receive() == ("started", {"number": number})
        assert shim.receive() == ("ended", {"number": number, "status": code << 8, "cause": ""})
        assert said(output) == b"1\n"


def test_a_program_is_killed_by_its_number(shim: ShimClient) -> None:
    """The other one lives on."""
    first, second = shim.start(1, "/bin/sleep", "600"), shim.start(2, "/bin/sh", "-c", "sleep 0.5; echo here")
    assert [shim.receive()[0] for _ in range(2)] == ["started", "started"]
    shim.send("kill", {"number": 1})
    ends = sorted((shim.receive() for _ in range(2)), key=lambda end: end[1]["number"])  # either may end first
    assert ends[0] == ("ended", {"number": 1, "status": signal.SIGKILL, "cause": "asked"})
    assert said(first) == b""
    assert (ends[1][0], ends[1][1]["status"]) == ("ended", 0)
    assert said(second) == b"here\n"


def test_a_program_that_is_missing_says_so(shim: ShimClient) -> None:
    """Where its output would be."""
    output = shim.start(1, "/no/such/program")
    assert [shim.receive()[0] for _ in range(2)] == ["started", "ended"]
    assert b"cannot start /no/such/program" in said(output)


def test_a_set_up_that_fails_says_why() -> None:
    """And nothing is left."""
    before = Snapshot.take()
    process, link = start_shim()
    messages.send(link.fileno(), "open", {"calls": [mount("none", "/no/such", "tmpfs", 0)], "inside_id": USER})
    tag, body, _ = messages.receive(link.fileno())
    assert (tag, "mount: No such file" in body["why"]) == ("failed", True)
    assert messages.receive(link.fileno())[0] == ""
    link.close()
    assert process.wait(30) == 0
    assert not wait_for_leftovers(before, patience_s=5)


@pytest.mark.parametrize("end", ["hang up", "kill the shim"])
def test_everything_ends_with_either(end: str) -> None:
    """Also what had gone into the background in a session of its own."""
    before = Snapshot.take()
    shim = ShimClient()
    output = shim.start(1, "/bin/sh", "-c", "setsid sleep 600 & setsid sleep 600 & echo up; wait")
    assert os.read(output, 3) == b"up\n"
    if end == "hang up":
        shim.link.shutdown(socket.SHUT_RDWR)
    else:
        shim.process.kill()
    shim.process.wait(30)
    assert said(output) == b""
    shim.link.close()
    assert not wait_for_leftovers(before, patience_s=5)


def test_a_program_sees_no_other_processes(shim: ShimClient) -> None:
    """Neither those of the host, nor its interfaces."""
    output = shim.start(1, "/bin/sh", "-c", "ls /proc | grep -c '^[0-9]'; cat /proc/net/dev | wc -l")
    assert [shim.receive()[0] for _ in range(2)] == ["started", "ended"]
    processes, lines = map(int, said(output).split())
    assert processes < 8
    assert lines == 3
