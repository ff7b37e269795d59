"""Running a coroutine for a blocking caller: in the caller's thread where that is possible, else in the shared loop.

Theory of operation: handing a coroutine to another thread and its outcome back wakes two threads, which takes longer
than a small program. So `run` borrows a loop from those that lie ready and runs it in the calling thread. What needs a
loop that lives on goes to the shared loop by `call`; that is made by the first call and replaced after a fork. The
caller runs it itself when nobody else does (see `loops.SharedLoop`). Otherwise, and where there are callbacks
(`call_delivering`), the caller waits on a queue of its own that carries chunks of output and, last, the outcome; so
callbacks run in the caller's thread, and a slow one delays nobody else.

Each way, whatever interrupts the caller (Ctrl-C, a callback that raises) cancels the task, is held back until the task
has ended, that is until everything it started is killed, and is raised. A handler of the caller's own for a signal may
raise anywhere in the main thread, also in the middle of this code; where there is one, the main thread runs no loop and
waits on the queue.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from cloche.core.errors import InternalError
from cloche.core.loops import keep_for_one_call

from .loops import Begun, SharedLoop, TurnLoop

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
Deliver = Callable[[Callable[[], None]], None]

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
_lock = threading.Lock()  # of these two
_shared: SharedLoop | None = None
_shared_lock = threading.Lock()
# After a fork: kept, because finalising the parent's loops would touch the parent's.
_abandoned: list[TurnLoop | SharedLoop] = []

# True in a blocking call from a thread whose own event loop runs, and so stands still meanwhile: the runs that hold
# the slots may be that loop's, and would then never give one back. Such a call waits for nobody.
blocks_a_loop: ContextVar[bool] = ContextVar("blocks_a_loop", default=False)


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


def call(make: Callable[[], Coroutine[Any, Any, T]], *, is_eager: bool = False) -> T:
    """Run a coroutine in the shared loop and block until it ends: in this thread, if it can take the turn.

    One that `is_eager` hardly ever waits and, until it does, does not ask for its task.
    """
    shared = _shared_loop()
    if may_run_a_loop():
        try:
            return run_on(shared.take, shared.leave, make, is_eager=is_eager)
        except Busy:
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
        with _shared_lock:
            shared = _shared = _shared or SharedLoop()
    if shared.is_running_here():
        raise InternalError("a blocking Cloche call was made from Cloche's own event loop; use the async API there")
    return shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget_after_fork() -> None:
    global _lock, _made, _shared, _shared_lock
    _lock, _made = threading.Lock(), 0
    _abandoned.extend(_kept)
    _kept.clear()
    if _shared is not None:
        _abandoned.append(_shared)
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_kept)
atexit.register(_close_shared)  # before the one above


async def in_own_thread(function: Callable[[A], T], argument: A) -> T:
    """Return what a function says in a thread that nobody waits for: neither the loop's own threads nor its end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def answer_with(said: T) -> None:
        if not answer.done():
            answer.set_result(said)

    def fail_with(why: str) -> None:  # raised as it is, SystemExit would end the loop, StopIteration be lost
        if not answer.done():
            answer.set_exception(RuntimeError(why))

    def work() -> None:
        try:
            settled = partial(answer_with, function(argument))
        except BaseException as error:
            settled = partial(fail_with, f"it raised {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settled)

    threading.Thread(target=work, name="cloche-approval", daemon=True).start()
    return await answer
