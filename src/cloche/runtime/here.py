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
import contextvars
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from cloche.core.loops import keep_for_one_call

from .by_hand import Begun, TurnLoop

P = ParamSpec("P")
T = TypeVar("T")

_signal: Any = __import__("_signal")  # `signal` makes an enumeration of whatever it returns, which takes its time

NEEDED_CALLS = 300  # below the recursion limit: by a loop, what runs in it, and what that imports
MOST_KEPT = 8  # each has three descriptors; who finds none free goes the other way
_SIGINT = int(signal.SIGINT)
# What people let a handler raise at, SIGINT aside.
_SIGNALS = tuple(
    int(number)
    for name in ("SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None
)

_made = 0  # loops that there are, kept or in use
_kept: list[TurnLoop] = []
_lock = threading.Lock()
_abandoned: list[asyncio.AbstractEventLoop] = []  # after a fork: finalising the parent's loops would touch the parent's


class Busy(Exception):
    """Report that there is no loop to run on now."""


def is_possible() -> bool:
    """Tell whether there is a loop to borrow, and whether this thread may run it."""
    return (_made < MOST_KEPT or bool(_kept)) and may_run_a_loop()


def may_run_a_loop() -> bool:
    """Tell whether a loop can run in this thread: none does by now, there is room, and no handler may raise in it."""
    if asyncio._get_running_loop() is not None or _is_deep():
        return False
    if threading.current_thread() is not threading.main_thread():
        return True
    handler = _signal.getsignal(_SIGINT)
    if handler is not signal.default_int_handler and callable(handler):
        return False
    return not any([callable(_signal.getsignal(number)) for number in _SIGNALS])  # noqa: C419 - takes half the time


def _is_deep() -> bool:
    """Tell whether so many calls are open that the loop, which runs others' tasks too, might meet the limit."""
    try:
        sys._getframe(sys.getrecursionlimit() - NEEDED_CALLS)
    except ValueError:
        return False
    return True


def run(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, run the coroutine that it returns to its end, and return what that returns."""
    return run_on(_borrow, _give_back, lambda: function(*args, **kwargs), is_eager=True)


def run_on(
    take: Callable[[], TurnLoop | None],
    give_back: Callable[[TurnLoop], None],
    make: Callable[[], Coroutine[Any, Any, T]],
    *,
    is_eager: bool,
) -> T:
    """Do what `run` does, on the loop that `take` returns. Raises Busy when it returns none.

    A coroutine that `is_eager` becomes a task only when it waits, which it hardly ever does.
    """
    interrupt = _Interrupt()  # first, and undone last: whatever lies between is never cut short
    try:
        loop = take()
        if loop is None:
            raise Busy
        try:
            coroutine, context = make(), None
            if is_eager:
                context = contextvars.copy_context()
                try:
                    coroutine = Begun(coroutine, context.run(loop.begin, coroutine))
                except StopIteration as done:
                    found: T = done.value
                    return found
            task = loop.create_task(coroutine, context=context)
            interrupt.end(task, loop)
            return _run_to_end(loop, task)
        finally:
            interrupt.let_go()
            give_back(loop)
    finally:
        interrupt.stop()


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

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came = False
        self._before: Any = None
        self._is_waking = False
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if before is signal.default_int_handler:
                self._before = before
                _signal.signal(_SIGINT, self._note)

    def end(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Cancel this task of this loop when the signal comes, or now if it came before there was a task.

        A signal that comes when the loop is about to wait, or to another thread, ends no waiting by itself. So the
        kernel's word of it goes to the descriptor by which other threads wake the loop, unless a caller has one.
        """
        self._task, self._loop = task, loop
        waker = getattr(loop, "_csock", None)  # as asyncio's own loops have it
        if self._before is not None and waker is not None:
            before = _signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            self._is_waking = before == -1
            if not self._is_waking:
                _signal.set_wakeup_fd(before)
        if self._came:
            self._cancel()

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._came = not self._came, True
        if is_first and self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Cancel the task, once: the signal may come while `end` is at work, which then sees it, too."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def let_go(self) -> None:
        """Leave the loop alone: it is another's from now on, or closed."""
        self._task = None
        if self._is_waking:
            _signal.set_wakeup_fd(-1)

    def stop(self) -> None:
        """Put the handler back. Raises KeyboardInterrupt if the signal came."""
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
        if self._came:
            raise KeyboardInterrupt


def _borrow() -> TurnLoop:
    global _made
    with _lock:
        if _kept:
            return _kept.pop()
    loop = TurnLoop(selectors.DefaultSelector())  # which may fail, for want of descriptors
    keep_for_one_call(loop)
    with _lock:
        _made += 1
    return loop


def _give_back(loop: TurnLoop) -> None:
    global _made
    with _lock:
        if len(_kept) < MOST_KEPT and not loop.has_tasks():  # what is left over must not run with the next
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
