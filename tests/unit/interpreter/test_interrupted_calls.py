"""Calls of the caller's functions that an interrupt ends, at any instruction: the next one gets its own answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

import pytest

from cloche.init import wire
from cloche.interpreter import host_functions
from cloche.interpreter.host_functions import Link
from tests.harness.processes import interrupted

LONG_S = 20.0
LARGE = "x" * 200_000  # more than a pipe takes at once


class Caller(threading.Thread):
    """Answer each call with its argument; `numbers` are those of the calls that came."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls, calls = os.pipe()
        self.answers, answers = socket.socketpair()
        self.numbers: list[int] = []
        self.link = Link(calls, answers.detach())
        self.start()

    def run(self) -> None:
        """Serve until the end."""
        frames = wire.FrameBuffer(1 << 20)
        while data := os.read(self.calls, 1 << 16):
            for kind, number, body in frames.feed(data):
                if kind == wire.OPEN:
                    assert number not in self.numbers
                    self.numbers.append(number)
                    value = json.dumps({"value": json.loads(body)["data"]}).encode()
                    self.answers.sendall(wire.frame(wire.CLOSE, number, value))

    def call(self, value: str) -> Any:
        """Make a call, as a program does."""
        return self.link.call_and_wait("echo", {"value": value})

    def close(self) -> None:
        """End it."""
        os.close(self.link.calls)
        self.join()
        os.close(self.link.answers)
        os.close(self.calls)
        self.answers.close()


def hangs(*_: object) -> None:
    """Fail."""
    raise AssertionError


@pytest.mark.parametrize("value", ["", LARGE], ids=["small", "large"])
def test_a_call_after_an_interrupted_one_gets_its_answer(value: str) -> None:
    """What was read, written or locked is known at each instruction, so nothing is sent twice, lost or kept."""
    before = signal.signal(signal.SIGALRM, hangs)
    caller = Caller()
    try:
        number, was_raised = 1, True
        while was_raised:
            signal.setitimer(signal.ITIMER_REAL, LONG_S)
            _, was_raised = interrupted(host_functions, number, lambda: caller.call(value))
            assert caller.call(str(number)) == {"value": str(number)}
            number += 7 if value else 1
        assert number > 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        caller.close()
