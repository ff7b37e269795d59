"""The caller's side of a shim in which gVisor runs."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from cloche.backends.gvisor import container
from cloche.jail import messages


class _Ended:
    returncode = 0

    def wait(self, _: float) -> int:
        return 0


class _Link:
    """A socket that tells when it is closed."""

    def __init__(self, link: socket.socket):
        self._link, self.is_closed = link, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def close(self) -> None:
        self._link.close()
        self.is_closed.set()


def test_a_link_is_not_closed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number could be another file's by then, from which the reader would wait with the interpreter's lock."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, is_reading, may_read = _Link(ours), threading.Event(), threading.Event()
    receive = messages.receive

    def receive_late(fd: int) -> tuple[str, dict[str, Any], list[int]]:
        is_reading.set()
        assert may_read.wait(60)
        return receive(fd)

    monkeypatch.setattr(messages, "receive", receive_late)
    shim = container.ShimClient.__new__(container.ShimClient)
    vars(shim).update(_link=link, _process=_Ended(), _waiting={}, _answers={}, _turn=threading.Lock(), is_lost=False)
    shim._reader = threading.Thread(target=shim._read)
    shim._reader.start()
    with theirs:
        shim.close()
        assert is_reading.wait(60)
        assert not link.is_closed.wait(0.2)
        may_read.set()
        assert link.is_closed.wait(60)
    shim._reader.join(60)
    assert shim.is_lost
