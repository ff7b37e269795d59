"""Ending what belongs to processes costs a look for all of them together, and others are served meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.init import tree
from cloche.init.loop import Loop, now

COUNT, AT_ONCE = 20, 4


class Host:
    """Have processes, each with a mark of its own."""

    def __init__(self) -> None:
        self.processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(COUNT)]
        self.looks = self.held = 0

    def look(self) -> Iterator[tuple[int, int]]:
        self.looks += 1
        for mark, process in enumerate(self.processes, 1):
            if process.poll() is None:
                yield process.pid, mark

    def hold_others(self) -> bool:
        self.held += 1
        return True

    def signal_others(self, number: int) -> None:
        assert number == signal.SIGCONT


@pytest.fixture
def host() -> Iterator[Host]:
    """Have processes that are gone in the end."""
    one = Host()
    yield one
    for process in one.processes:
        process.kill()
        process.wait()


def end_all(host: Any, loop: Loop) -> int:
    """End all of them at the same moment; return how many turns of the loop that took."""
    ended, turns = list[int](), 0
    ender = tree.Ender(loop, host)

    def note(mark: int) -> None:
        ended.append(mark)
        if len(ended) == COUNT:
            loop.stop()

    def take_turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_at("other", now(), take_turn)

    take_turn()
    for mark in range(1, COUNT + 1):
        ender.end(mark, lambda mark=mark: note(mark))  # type: ignore[misc]
    loop.serve()
    assert [process.wait() for process in host.processes] == [-signal.SIGKILL] * COUNT
    return turns


def test_what_ends_at_the_same_moment_is_looked_for_together(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look goes on for a few processes in each turn, and serves all that are to be ended."""
    monkeypatch.setattr(tree, "LOOKED_AT", AT_ONCE)
    monkeypatch.setattr(tree, "URGENT_S", 1000.0)
    ours, theirs = socket.socketpair()
    turns = end_all(host, Loop(theirs.fileno(), lambda _: None))
    assert turns >= COUNT // AT_ONCE
    assert host.looks < COUNT
    assert not host.held
    ours.close()
    theirs.close()


def test_what_takes_long_to_end_is_ended_while_all_stand_still(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guest forks faster than that: one look, during which nobody runs, is enough."""
    monkeypatch.setattr(tree, "URGENT_S", 0.0)
    ours, theirs = socket.socketpair()
    for process in host.processes:
        os.kill(process.pid, signal.SIGSTOP)
    end_all(host, Loop(theirs.fileno(), lambda _: None))
    assert host.held
    ours.close()
    theirs.close()
