"""Blocking callers hand coroutines to the loop that all of them share.

Theory of operation: the loop is made by the first call and replaced after a fork. A plain call runs it itself when
nobody else does (see `shared_loop`). Otherwise, and where there are callbacks, the caller waits on a queue of its own
that carries chunks of output and, last, the outcome; so callbacks run in the caller's thread, and a slow one delays
nobody else. Either way, whatever interrupts the caller (Ctrl-C, a callback that raises) cancels the task, is held back
until the task has ended, that is until everything it started is killed, and is raised.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from cloche.core.errors import InternalError

from . import here
from .shared_loop import SharedLoop
from .slots import blocks_a_loop

T = TypeVar("T")
Deliver = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None = None
    error: BaseException | None = None


class _Call(Generic[T]):
    """Carry one coroutine from a blocked caller to the loop, and its outcome back."""

    def __init__(self, make: Callable[[Deliver], Coroutine[Any, Any, T]], shared: SharedLoop) -> None:
        self._make = make
        self._shared, self._loop = shared, shared.loop
        self._inbox: SimpleQueue[Callable[[], None] | _Outcome[T]] = SimpleQueue()
        self._context = contextvars.copy_context()
        self._context.run(blocks_a_loop.set, _is_loop_running_here())
        self._task: asyncio.Task[None] | None = None

    def wait(self) -> T:
        """Start the coroutine and return its result, running delivered callbacks in this thread."""
        try:
            self._loop.call_soon_threadsafe(self._start)
            outcome = self._next_outcome(run_callbacks=True)
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            self._next_outcome(run_callbacks=False)
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]  # no error means a value of type T

    def _next_outcome(self, *, run_callbacks: bool) -> _Outcome[T]:
        while True:
            item = self._inbox.get()
            if isinstance(item, _Outcome):
                return item
            if run_callbacks:
                item()

    def _start(self) -> None:
        self._shared.begin_call()
        self._task = self._loop.create_task(self._supervise(), context=self._context)
        self._task.add_done_callback(self._ended)

    async def _supervise(self) -> None:
        self._inbox.put(_Outcome(value=await self._make(self._inbox.put)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report failure; success was reported by the task itself."""
        self._shared.end_call()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._inbox.put(_Outcome(error=error))

    def _cancel(self) -> None:
        """Cancel the task; if it never began or already ended, say so: the first word may have been lost."""
        if self._task is None or not self._task.cancel():
            self._inbox.put(_Outcome(error=asyncio.CancelledError()))


def _is_loop_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_shared: SharedLoop | None = None
_lock = threading.Lock()
_abandoned: list[SharedLoop] = []  # after a fork: kept, because finalising the parent's loop would touch the parent's


def call(make: Callable[[], Coroutine[Any, Any, T]], *, is_eager: bool = False) -> T:
    """Run a coroutine in the shared loop and block until it ends: in this thread, if it can take the turn.

    One that `is_eager` hardly ever waits and, until it does, does not ask for its task.
    """
    shared = _shared_loop()
    if here.may_run_a_loop():
        try:
            return here.run_on(shared.take, shared.leave, make, is_eager=is_eager)
        except here.Busy:
            pass  # others have the turn
        finally:
            if shared.is_running_here():  # another thread raised something in this one, on its way in or out
                shared.leave()
    return _Call(lambda _: make(), shared).wait()


def call_delivering(make: Callable[[Deliver], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the shared loop, outside of this thread, which waits for it and runs what is delivered."""
    return _Call(make, _shared_loop()).wait()


def _shared_loop() -> SharedLoop:
    """Return the loop. Raises InternalError where waiting for it would be waiting for oneself."""
    global _shared
    shared = _shared
    if shared is None:
        with _lock:
            shared = _shared = _shared or SharedLoop()
    if shared.is_running_here():
        raise InternalError("a blocking Cloche call was made from Cloche's own event loop; use the async API there")
    return shared


def _forget_after_fork() -> None:
    global _shared, _lock
    if _shared is not None:
        _abandoned.append(_shared)
    _shared, _lock = None, threading.Lock()


def _close_at_exit() -> None:
    if _shared is not None:
        _shared.close()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_at_exit)
