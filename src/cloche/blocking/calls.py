"""Running a coroutine for a blocking caller: in the caller's thread where possible, otherwise in the shared loop.

Theory of operation: handing a coroutine to another thread and its outcome back wakes two threads, which takes longer
than a small program. So `run` borrows an idle loop and runs it in the calling thread. A coroutine that needs a loop
which outlives the call goes to the shared loop by `call`; the first call makes that loop, and a forked child makes its
own. The caller runs the shared loop itself when no other thread does (see `loops.SharedLoop`). Otherwise, and where
there are callbacks (`call_delivering`), the caller waits on a separate queue, which carries chunks of output and
finally the outcome. So callbacks run in the caller's thread, and a slow callback delays no other call.

In all cases, an exception that interrupts the caller (Ctrl-C, a callback that raises) cancels the task. It is raised
once the task has ended, that is once everything it started is killed. A signal handler installed by the caller may
raise anywhere in the main thread, also within this code; with such a handler the main thread runs no loop and waits on
the queue.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import select
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from cloche.core.errors import InternalError
from cloche.core.loops import mark_single_call_loop
from cloche.core.record import dataclass

from .loops import EagerLoop, SharedLoop, StartedCoroutine, ThreadedLoop

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
Deliver = Callable[[Callable[[], None]], None]

_signal: Any = __import__("_signal")  # `signal` converts each return value to an enum, which takes time

NEEDED_CALLS = 300  # frames left below the recursion limit for a loop, its callbacks and their imports
MOST_LOOPS = 8  # each has three descriptors; a call that finds none free uses the shared loop
_SIGINT = int(signal.SIGINT)
# Signals for which programs commonly install a handler that raises, besides SIGINT.
_SIGNALS = tuple(
    int(number)
    for name in ("SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None
)

_loop_count = 0  # idle or in use
_idle_loops: list[EagerLoop] = []
_lock = threading.Lock()  # of these two
_shared: SharedLoop | None = None
_shared_lock = threading.Lock()
# After a fork the parent's loops are kept from finalisation: closing them would change epoll sets shared with the
# parent (epoll(7)).
_abandoned: list[EagerLoop | SharedLoop] = []

# True in a blocking call from a thread whose own event loop is running, and is blocked meanwhile. The runs that hold
# the slots may belong to that loop and could never release them. So such a call does not wait for a slot.
blocks_a_loop: ContextVar[bool] = ContextVar("blocks_a_loop", default=False)


class Busy(Exception):
    """Report that no loop is free."""


def can_run_inline() -> bool:
    """Tell whether a loop is free and this thread can run it."""
    return (_loop_count < MOST_LOOPS or bool(_idle_loops)) and can_run_a_loop()


def can_run_a_loop() -> bool:
    """Tell whether this thread can run a loop: none runs yet, the stack has room, and no signal handler may raise
    in it.
    """
    if asyncio._get_running_loop() is not None or _is_deep():
        return False
    if threading.current_thread() is not threading.main_thread():
        return True
    handler = _signal.getsignal(_SIGINT)
    if handler is not signal.default_int_handler and callable(handler):
        return False
    return not any([callable(_signal.getsignal(number)) for number in _SIGNALS])  # noqa: C419 - takes half the time


def _is_deep() -> bool:
    """Tell whether the stack is so deep that the loop, which also runs other callers' tasks, may hit the recursion
    limit.
    """
    try:
        sys._getframe(sys.getrecursionlimit() - NEEDED_CALLS)
    except ValueError:
        return False
    return True


def run(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the coroutine that `function` returns to its end, and return its result."""
    return run_on_loop(_borrow_loop, _return_loop, lambda: function(*args, **kwargs), is_eager=True)


def run_on_loop(
    acquire: Callable[[], EagerLoop | None],
    release: Callable[[EagerLoop], None],
    make_coroutine: Callable[[], Coroutine[Any, Any, T]],
    *,
    is_eager: bool,
) -> T:
    """Do the same as `run`, on the loop that `acquire` returns. Raises Busy if it returns None.

    A coroutine that `is_eager` becomes a task only when it waits, which is rare.
    """
    interrupt = _Interrupt()  # first, and undone last: the code between is never interrupted
    try:
        loop = acquire()
        if loop is None:
            raise Busy
        try:
            coroutine, context = make_coroutine(), None
            if is_eager:
                context = contextvars.copy_context()
                try:
                    coroutine = StartedCoroutine(coroutine, context.run(loop.start_eagerly, coroutine))
                except StopIteration as done:
                    value: T = done.value
                    return value
            task = loop.create_task(coroutine, context=context)
            interrupt.cancel_on_signal(task, loop)
            return _run_to_end(loop, task)
        finally:
            interrupt.release_loop()
            release(loop)
    finally:
        interrupt.restore()


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Run a task to its end; an exception of the loop itself first cancels the task."""
    try:
        return loop.run_until_complete(task)
    except BaseException:
        while not task.done():
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        raise


class _Interrupt:
    """Let Ctrl-C in the main thread cancel a task, and raise KeyboardInterrupt once the task has ended."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_signaled = False
        self._previous_handler: Any = None
        self._sets_wakeup_fd = False
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if before is signal.default_int_handler:
                self._previous_handler = before
                _signal.signal(_SIGINT, self._on_signal)

    def cancel_on_signal(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Cancel this task of this loop when the signal comes, or now if it came before the task existed.

        A signal that arrives just before the loop waits, or in another thread, does not end the wait. So Python's
        wake-up descriptor (signal.set_wakeup_fd) is set to the loop's self-pipe, unless the caller has set one.
        """
        self._task, self._loop = task, loop
        waker = getattr(loop, "_csock", None)  # as asyncio's own loops have it
        if self._previous_handler is not None and waker is not None:
            before = _signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            self._sets_wakeup_fd = before == -1
            if not self._sets_wakeup_fd:
                _signal.set_wakeup_fd(before)
        if self._was_signaled:
            self._cancel()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._was_signaled = not self._was_signaled, True
        if is_first and self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Cancel the task, once: the signal may come while `cancel_on_signal` runs, which then sees it, too."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def release_loop(self) -> None:
        """Forget the borrowed loop: another call uses it, or it is closed."""
        self._task = None
        if self._sets_wakeup_fd:
            _signal.set_wakeup_fd(-1)

    def restore(self) -> None:
        """Restore the handler. Raises KeyboardInterrupt if the signal came."""
        if self._previous_handler is not None:
            _signal.signal(_SIGINT, self._previous_handler)
        if self._was_signaled:
            raise KeyboardInterrupt


def _borrow_loop() -> EagerLoop:
    global _loop_count
    with _lock:
        if _idle_loops:
            return _idle_loops.pop()
    loop = EagerLoop(selectors.DefaultSelector())  # may fail without free descriptors
    mark_single_call_loop(loop)
    with _lock:
        _loop_count += 1
    return loop


def _return_loop(loop: EagerLoop) -> None:
    global _loop_count
    with _lock:
        if len(_idle_loops) < MOST_LOOPS and not loop.has_tasks():  # leftover tasks must not run with the next call
            _idle_loops.append(loop)
            return
        _loop_count -= 1
    loop.close()


def _close_idle_loops() -> None:
    global _loop_count
    with _lock:
        while _idle_loops:
            _idle_loops.pop().close()
            _loop_count -= 1


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
        self._shared.count_queued_call()
        self._task = self._loop.create_task(self._supervise(), context=self._context)
        self._task.add_done_callback(self._ended)

    async def _supervise(self) -> None:
        self._inbox.put(_Outcome(value=await self._make(self._inbox.put)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report failure; success was reported by the task itself."""
        self._shared.uncount_queued_call()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._inbox.put(_Outcome(error=error))

    def _cancel(self) -> None:
        """Cancel the task; if it never began or already ended, say so: the first word may have been lost."""
        if self._task is None or not self._task.cancel():
            self._inbox.put(_Outcome(error=asyncio.CancelledError()))


class _AwaitedCall(Generic[T]):
    """Carry one coroutine from an event loop to the shared one, and its outcome back."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], shared: SharedLoop) -> None:
        self._make, self._shared = make, shared
        self._here = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._here.create_future()
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None

    async def wait(self) -> T:
        """Start the coroutine and return its result. Cancelled, end it first."""
        cancelled: asyncio.CancelledError | None = None
        self._shared.loop.call_soon_threadsafe(self._start)
        while not self._ended.done():
            try:
                await asyncio.wait([self._ended])
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self._shared.loop.call_soon_threadsafe(self._cancel)
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self._task is None:
            raise InternalError("a coroutine ended that was not started")
        return self._task.result()

    def _start(self) -> None:
        self._shared.count_queued_call()
        self._task = self._shared.loop.create_task(self._make(), context=self._context)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        self._shared.uncount_queued_call()
        if not task.cancelled():
            task.exception()  # a cancelled caller does not retrieve it
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed meanwhile
            self._here.call_soon_threadsafe(self._ended.set_result, None)


def _is_loop_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call(make: Callable[[], Coroutine[Any, Any, T]], *, is_eager: bool = False) -> T:
    """Run a coroutine in the shared loop and block until it ends: in this thread, if no other thread runs the loop.

    A coroutine that `is_eager` rarely waits, and does not use its task before it does.
    """
    shared = _shared_loop()
    if can_run_a_loop():
        try:
            return run_on_loop(shared.try_acquire, shared.release, make, is_eager=is_eager)
        except Busy:
            pass  # another thread runs the loop
        finally:
            if shared.is_running_here():  # another thread raised something in this one, on its way in or out
                shared.release()
    return _Call(lambda _: make(), shared).wait()


def call_delivering(make: Callable[[Deliver], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the shared loop, in another thread; this thread waits and runs the delivered callbacks."""
    return _Call(make, _shared_loop()).wait()


async def call_from_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the shared loop for a caller with another event loop, which continues meanwhile.

    Cancelling the caller cancels the coroutine; CancelledError is raised once the coroutine has ended.
    """
    return await _AwaitedCall(make, _shared_loop()).wait()


def _shared_loop() -> SharedLoop:
    """Return the loop. Raises InternalError if this thread runs the loop and would wait for itself."""
    global _shared
    shared = _shared
    if shared is None:
        with _shared_lock:
            shared = _shared = _shared or (SharedLoop() if hasattr(select, "epoll") else ThreadedLoop())
    if shared.is_running_here():
        raise InternalError("a blocking Cloche call was made from Cloche's own event loop; use the async API there")
    return shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget_after_fork() -> None:
    global _lock, _loop_count, _shared, _shared_lock
    _lock, _loop_count = threading.Lock(), 0
    _abandoned.extend(_idle_loops)
    _idle_loops.clear()
    if _shared is not None:
        _abandoned.append(_shared)
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_idle_loops)
atexit.register(_close_shared)  # before the one above


async def in_own_thread(function: Callable[[A], T], argument: A) -> T:
    """Call a function in a daemon thread and return its value; neither the loop's executor nor its end waits for it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def answer_with(value: T) -> None:
        if not answer.done():
            answer.set_result(value)

    def fail_with(why: str) -> None:  # raised unchanged, SystemExit would end the loop, and StopIteration would be lost
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
