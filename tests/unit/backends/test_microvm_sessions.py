"""Containers in a virtual machine, and sessions there, decided and carried without one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.backends.containers.program import ANSWERS, LINK, session_in
from cloche.backends.layout import SYSTEM_PATH
from cloche.backends.microvm.machine import Beyond, PortWire
from cloche.backends.microvm.plan import MachineImage
from cloche.core.errors import BackendUnavailable, InvalidRequest

MARK = b"0123456789abcdef"


def image(*programs: str) -> MachineImage:
    """Return an image whose disk holds these programs."""
    paths = {name: f"/usr/bin/{name}" for name in programs}
    return MachineImage(folder=Path("/nowhere"), id="ab" * 32, python="3.11", programs=paths, versions={})


@pytest.mark.parametrize("size", [1, 3, 16, 1000])
def test_nothing_counts_before_the_mark(size: int) -> None:
    """What the container before left in a port is left out, however it is cut; a mark that comes again is data."""
    beyond, said = Beyond(MARK), b"stale 0123456" + MARK + b"new" + MARK + b"data"
    pieces = [beyond.feed(said[at : at + size]) for at in range(0, len(said), size)]
    assert b"".join(pieces) == b"new" + MARK + b"data"


@pytest.fixture
def port() -> Iterator[tuple[PortWire, socket.socket]]:
    """Give the wire of a container, and the other end of its port."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        wire = PortWire(ours, MARK)
        yield wire, theirs
        wire.close()


def test_what_was_said_before_the_end_is_heard(port: tuple[PortWire, socket.socket]) -> None:
    """The end of a container is told elsewhere, and may overtake its last output."""
    wire, theirs = port
    theirs.sendall(b"stale" + MARK + b"last" * 50_000)
    wire.shutdown()
    assert b"".join(data for _, data in wire.pieces()) == b"last" * 50_000
    with pytest.raises(ConnectionError):
        wire.send(b"to nobody")


def test_a_port_that_is_dead_ends_nothing_by_itself(port: tuple[PortWire, socket.socket]) -> None:
    """Whoever knows why says so."""
    wire, theirs = port
    theirs.sendall(MARK + b"x")
    theirs.close()
    heard: list[bytes] = []
    reading = threading.Thread(target=lambda: heard.extend(data for _, data in wire.pieces()))
    reading.start()
    deadline = time.monotonic() + 30
    while not heard:
        assert time.monotonic() < deadline, "nothing is heard"
        time.sleep(0.01)
    reading.join(0.2)
    assert (reading.is_alive(), heard) == (True, [b"x"])
    wire.shutdown()
    reading.join(30)
    assert not reading.is_alive()


def test_python_is_forked_and_others_are_driven() -> None:
    """A container's first process becomes Python's interpreter; an engine of the disk's is started with its driver."""
    disk = image("python3", "bash", "node")
    python = session_in("python", {"A": "b"}, disk, SYSTEM_PATH)
    assert (python.commands, python.generated, python.env["A"], python.env["HOME"]) == ((), {}, "b", "/workspace")
    for language, program in (("javascript", "node"), ("bash", "bash")):
        session = session_in(language, {}, disk, SYSTEM_PATH)
        (command,), (path,) = session.commands, session.generated
        assert (command[0], command[-3:]) == (f"/usr/bin/{program}", (path, str(LINK), str(ANSWERS)))
        assert session.python is None
        assert [path_of_file for path_of_file, *_ in session.order({})["files"]] == [path]


def test_what_the_disk_lacks_has_its_remedy() -> None:
    """So has a language without sessions; and variables that come too late are refused."""
    disk = image("python3", "bash")
    with pytest.raises(BackendUnavailable, match="images build --package nodejs"):
        session_in("javascript", {}, disk, SYSTEM_PATH)
    with pytest.raises(BackendUnavailable, match="no sessions of go"):
        session_in("go", {}, disk, SYSTEM_PATH)
    with pytest.raises(InvalidRequest, match="PYTHON"):
        session_in("python", {"PYTHONPATH": "/x"}, disk, SYSTEM_PATH)
