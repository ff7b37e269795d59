"""What a nursery does for its guests, with processes of the test's own: in a fork, for it waits for all its children.

How it ends everybody is for the attempts to escape: outside of a process namespace that would be everybody.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from cloche.jail import wire
from cloche.jail.spec import Spec
from cloche.jail.ward import Ward


def in_fork(work: Callable[[Ward], str]) -> str:
    """Return what `work` says in a process that has a ward and no children."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            os.write(writing, work(Ward(Spec(level="jail"))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def guest(work: Callable[[], int]) -> int:
    """Fork a process that exits with what `work` returns."""
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return pid


def test_a_guest_that_dies_before_it_is_made_hands_nothing_over() -> None:
    """Nobody waits for it."""
    assert in_fork(lambda ward: str(ward.receive_made(guest(lambda: 1)))) == "[]"


def test_each_guest_hands_over_what_it_has_made() -> None:
    """By the same link; the end of the one before, of which a byte may be left, is not taken for that of the next."""

    def work(ward: Ward) -> str:
        said = []
        for turn in range(3):
            ward.begin()
            reading, writing = os.pipe()

            def make(code: int = turn, kept: int = reading, ours: int = writing) -> int:
                os.close(kept)
                wire.send(ward.theirs, "made", fds=[ours])
                return code

            pid = guest(make)
            (given,) = ward.receive_made(pid)
            os.close(given)
            os.close(writing)
            status = ward.see_to_end(pid, reading, lambda: None)
            said.append(f"{os.waitstatus_to_exitcode(status)} {ward.most_kib > 0}")
        return ", ".join(said)

    assert in_fork(work) == "0 True, 1 True, 2 True"
