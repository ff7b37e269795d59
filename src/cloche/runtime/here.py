"""Run a coroutine to its end in the calling thread, on an event loop that is borrowed for it.

Theory of operation: handing a coroutine to another thread and its outcome back wakes two threads, which takes longer
than a small program. So a plain call borrows a loop from those that lie ready and runs it itself. What `bridge`
promises is kept: Ctrl-C cancels the run, waits until everything that it started is killed, and is then raised. A
handler of the caller's own for a signal may raise anywhere in the main thread, in the middle of our work too; where
there is one, the other way is taken.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_signal: Any = __import__("_signal")  # `signal` makes an enumeration of whatever it returns, which takes its time

MOST_KEPT = 2  # each has three descriptors; a third caller at once goes the other way
_SIGINT = int(signal.SIGINT)
# What people let a handler raise at, SIGINT aside.
_SIGNALS = tuple(
    int(number)
    for name in ("SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None
)

_made = 0  # loops that there are, kept or in use
_kept: list[asyncio.AbstractEventLoop] = []
_lock = threading.Lock()
_abandoned: list[asyncio.AbstractEventLoop] = []  # after a fork: finalising the parent's loops would touch the parent's


def is_possible() -> bool:
    """Tell whether a coroutine can run in this thread: no loop runs here, and no handler may raise in between."""
    if asyncio._get_running_loop() is not None or (_made >= MOST_KEPT and not _kept):
        return False
    if threading.current_thread() is not threading.main_thread():
        return True
    handler = _signal.getsignal(_SIGINT)
    return (handler is signal.default_int_handler or not callable(handler)) and not any(
        callable(_signal.getsignal(number)) for number in _SIGNALS
    )


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return what it returns."""
    loop = _borrow()
    try:
        interrupt = _Interrupt(loop)
        try:
            task: asyncio.Task[T] = loop.create_task(coroutine)
            interrupt.task = task
            return _run_to_end(loop, task)
        finally:
            interrupt.stop()
    finally:
        _give_back(loop)


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Run a task; whatever comes up in the loop itself ends the task first."""
    try:
        return loop.run_until_complete(task)
    except BaseException:
        while not task.done():
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        raise


class _Interrupt:
    """Turn Ctrl-C in the main thread into the end of a task, to be raised once it has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.task: asyncio.Task[Any] | None = None
        self._came = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if before is signal.default_int_handler:
                self._before = before
                _signal.signal(_SIGINT, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self._came:
            self._came = True
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def stop(self) -> None:
        """Put the handler back. Raises KeyboardInterrupt if the signal came."""
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
        if self._came:
            raise KeyboardInterrupt


def _borrow() -> asyncio.AbstractEventLoop:
    global _made
    with _lock:
        if _kept:
            return _kept.pop()
        _made += 1
    return asyncio.new_event_loop()


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    global _made
    with _lock:
        if len(_kept) < MOST_KEPT and not asyncio.all_tasks(loop):  # what is left over must not run with the next
            _kept.append(loop)
            return
        _made -= 1
    loop.close()


def _close_kept() -> None:
    global _made
    with _lock:
        while _kept:
            _kept.pop().close()
            _made -= 1


def _forget_after_fork() -> None:
    global _lock, _made
    _lock, _made = threading.Lock(), 0
    _abandoned.extend(_kept)
    _kept.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_kept)
