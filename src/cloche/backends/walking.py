"""How long a look at a guest's files may take, and what is said when it was not enough.

A guest decides how many files there are, and beside a session it may move them about while they are looked at. The
guest's own time-out has ended by then, so the look has a time of its own, which begins with its thread. There are as
many of these as runs and cells go on at once, as far as descriptors allow; what had to wait for one for too long looks
no further than it gets at once, and says so.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from .waiting import finish

T = TypeVar("T")

# Why files may be missing from a result, as `meta["files_partial"]` says it; docs/api.md explains each.
REASONS = frozenset({"time", "entries", "files", "bytes", "paths", "depth", "access"})
SHARE, LEAST_S, MOST_S = 0.5, 1.0, 5.0
LONGEST_QUEUE_S = 2 * MOST_S
LOOKS_PER_CORE = 4  # as many as runs, see `runtime.slots`
LEAST_AT_ONCE = 2
DESCRIPTORS_OF_A_LOOK = 128  # two for every level of folders; all looks together leave half of them to the rest

_threads: tuple[int, ThreadPoolExecutor] | None = None


def most_at_once() -> int:
    """Return how many looks go on at once in this process."""
    by_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 // DESCRIPTORS_OF_A_LOOK
    return max(LEAST_AT_ONCE, min(LOOKS_PER_CORE * len(os.sched_getaffinity(0)), by_descriptors))


def _executor() -> ThreadPoolExecutor:
    """Return this process's threads for looks at files; those of a parent do not live in a forked child."""
    global _threads
    if _threads is None or _threads[0] != os.getpid():
        _threads = (os.getpid(), ThreadPoolExecutor(most_at_once(), thread_name_prefix="cloche-files"))
    return _threads[1]


def time_for_files(timeout_s: float) -> float:
    """Return how many seconds may be spent on the files of a run, or a cell, that had so long itself."""
    return min(MOST_S, max(LEAST_S, timeout_s * SHARE))


class Until:
    """Tell a walk in another thread when it shall end: its time is over, or nobody waits for it any more."""

    def __init__(self, seconds: float):
        self._seconds, self._is_cancelled = seconds, False
        self._deadline = monotonic() + seconds
        self.has_ended = False  # somebody was told to end

    def begin(self) -> None:
        """Have its time begin now."""
        self._deadline = monotonic() + self._seconds

    def cancel(self) -> None:
        """Have it end now."""
        self._is_cancelled = True

    def is_over(self) -> bool:
        """Tell whether it shall end."""
        self.has_ended = self.has_ended or self._is_cancelled or monotonic() >= self._deadline
        return self.has_ended


async def in_thread(until: Until, work: Callable[[], T]) -> T:
    """Do in a thread what heeds `until`, whose time begins there.

    When cancelled, it never begins, or is told to end and waited for: it holds what is not ours. Where no thread is
    free for too long, it is done here, and told at once that its time is over.
    """

    def begin() -> T:
        until.begin()
        return work()

    job = _executor().submit(begin)
    task = asyncio.wrap_future(job)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody else asks for it
    try:
        await asyncio.wait([task], timeout=LONGEST_QUEUE_S)
        if job.cancel():
            until.cancel()
            return work()
        await asyncio.wait([task])
    except asyncio.CancelledError:
        until.cancel()
        if not job.cancel():
            await finish(asyncio.wait([task]))
        raise
    return task.result()
