"""Limit the number of concurrent runs, first in, first out, across threads and event loops.

Theory of operation: a lock guards a counter and a queue of waiters; it is never held while waiting. A released slot
goes straight to the oldest waiter, so no caller can overtake. A waiter belongs to its event loop and is woken there; if
it was cancelled, or its loop is closed, its slot goes to the next one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from contextvars import ContextVar
from types import TracebackType

from cloche.blocking.calls import blocks_a_loop

from ..core.record import dataclass

RUNS_PER_CORE = 4


@dataclass(eq=False, slots=True)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    ready: asyncio.Future[None]
    is_granted: bool = False


class Slots:
    """A semaphore with `count` slots. Time-outs of runs do not include the time in its queue."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._queue: deque[_Waiter] = deque()

    def hold(self) -> _Hold:
        """Return a context manager that waits for a slot and releases it at the end."""
        return _Hold(self)

    @property
    def waiting(self) -> int:
        """Return the number of waiters."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Wait for a slot. The caller must release it."""
        with self._lock:
            if self._free > 0:  # implies an empty queue: a released slot goes to a waiter before it becomes free
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            waiter = _Waiter(loop, loop.create_future())
            self._queue.append(waiter)
        try:
            await waiter.ready
        except BaseException:
            self._abandon(waiter)
            raise

    def _abandon(self, waiter: _Waiter) -> None:
        with self._lock:
            if not waiter.is_granted:
                self._queue.remove(waiter)
                return
        self.release()

    def release(self) -> None:
        """Give a slot to the oldest waiter."""
        while True:
            with self._lock:
                if not self._queue:
                    self._free += 1
                    return
                waiter = self._queue.popleft()
                waiter.is_granted = True
            if _wake(waiter):
                return


class _Hold:
    """Hold a slot during a block. A class, since a generator-based context manager would slow down every run."""

    __slots__ = ("_is_held", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots, self._is_held = slots, False

    async def __aenter__(self) -> None:
        if not blocks_a_loop.get():
            await self._slots.acquire()
            self._is_held = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_held:
            self._slots.release()


def _wake(waiter: _Waiter) -> bool:
    """Wake a waiter in its event loop; tell whether that loop is still open."""
    try:
        waiter.loop.call_soon_threadsafe(_set_ready, waiter.ready)
    except RuntimeError:
        return False
    return True


def _set_ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def default_count() -> int:
    """Return RUNS_PER_CORE for each CPU that this process may use."""
    return RUNS_PER_CORE * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


_shared: Slots | None = None
_shared_lock = threading.Lock()


# The slots of a batch whose caller wants more runs at once than the default allows; None elsewhere.
batch_slots: ContextVar[Slots | None] = ContextVar("batch_slots", default=None)


def shared_slots() -> Slots:
    """Return the slots of this process, or those of the batch that this context belongs to; a forked child has its
    own.
    """
    global _shared
    own = batch_slots.get()
    if own is not None:
        return own
    with _shared_lock:
        if _shared is None:
            _shared = Slots(default_count())
        return _shared


def _forget_after_fork() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
