"""How many warm runs go on at once in this process: more than there are processors are a crowd."""

from __future__ import annotations

import os

_PROCESSORS = len(os.sched_getaffinity(0))
_under_way: set[int] = set()  # the numbers of runs; changing it by one is a single step for all threads
os.register_at_fork(after_in_child=_under_way.clear)


def enter(number: int) -> None:
    """Count a run whose orders are sent."""
    _under_way.add(number)


def leave(number: int) -> None:
    """Count a run no more that has ended, or whose end is not waited for; any number will do."""
    _under_way.discard(number)


def is_here() -> bool:
    """Tell whether some run has to wait for a processor."""
    return len(_under_way) > _PROCESSORS
