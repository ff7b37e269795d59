"""How long a look at a guest's files may take, and what is said when it was not enough.

A guest decides how many files there are, and beside a session it may move them about while they are looked at. The
guest's own time-out has ended by then, so the look has a time of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from .waiting import finish

T = TypeVar("T")

# Why files may be missing from a result, as `meta["files_partial"]` says it; docs/api.md explains each.
REASONS = frozenset({"time", "entries", "files", "bytes", "paths", "depth", "access"})
SHARE, LEAST_S, MOST_S = 0.5, 1.0, 5.0
MOST_AT_ONCE = 3  # each holds two descriptors for every level of folders, and a thread for seconds

_threads: tuple[int, ThreadPoolExecutor] | None = None


def _executor() -> ThreadPoolExecutor:
    """Return this process's threads for looks at files; those of a parent do not live in a forked child."""
    global _threads
    if _threads is None or _threads[0] != os.getpid():
        _threads = (os.getpid(), ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="cloche-files"))
    return _threads[1]


def time_for_files(timeout_s: float) -> float:
    """Return how many seconds may be spent on the files of a run, or a cell, that had so long itself."""
    return min(MOST_S, max(LEAST_S, timeout_s * SHARE))


class Until:
    """Tell a walk in another thread when it shall end: its time is over, or nobody waits for it any more."""

    def __init__(self, seconds: float):
        self._deadline = monotonic() + seconds
        self.has_ended = False  # somebody was told to end

    def cancel(self) -> None:
        """Have it end now."""
        self._deadline = 0.0

    def is_over(self) -> bool:
        """Tell whether it shall end."""
        self.has_ended = self.has_ended or monotonic() >= self._deadline
        return self.has_ended


async def in_thread(until: Until, work: Callable[[], T]) -> T:
    """Do in a thread what heeds `until`; when cancelled, have it end, and wait for that: it holds what is not ours."""
    task = asyncio.get_running_loop().run_in_executor(_executor(), work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        until.cancel()
        await finish(asyncio.wait([task]))
        raise
