"""How many runs go on at once in this process: more than there are processors are a crowd."""

from __future__ import annotations

import os

_PROCESSORS = len(os.sched_getaffinity(0))
_running: set[object] = set()  # changing it by one is a single step for all threads
os.register_at_fork(after_in_child=_running.clear)


def enter(sandbox: object) -> None:
    """Count a sandbox that begins a run."""
    _running.add(sandbox)


def leave(sandbox: object) -> None:
    """Count a sandbox no more whose run is over."""
    _running.discard(sandbox)


def is_here() -> bool:
    """Tell whether some run has to wait for a processor."""
    return len(_running) > _PROCESSORS
