"""Processes of a sandbox, found from its helper, which somebody outside ends or holds up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that this one has started; none of one that is gone."""
    assert pid > 1
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Tell whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def guests(helper: int) -> list[int]:
    """Return the guests of a helper, each the child of a pid 1 of its own."""
    return [guest for first in children(helper) for guest in children(first)]


def tell(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes of a sandbox; one that is gone need not hear it."""
    for pid in pids:
        assert pid > 1
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def held_up(pids: Iterable[int], *, for_s: float) -> Iterator[None]:
    """Stop processes, at most for so long: what waits for them goes on then."""
    held = list(pids)
    tell(held, signal.SIGSTOP)
    timer = threading.Timer(for_s, tell, (held, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        tell(held, signal.SIGCONT)
