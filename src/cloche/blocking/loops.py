"""Event loops for blocking calls: one that its waiting callers run, and the eager first step of a coroutine.

Theory of operation, `SharedLoop`: an open sandbox or a session outlives a call, so it needs a loop that does. If a
thread ran that loop all the time, each blocking call would wake two threads, which takes longer than a small cell. So
the callers run this loop, one at a time. A caller that finds it free acquires its lock, runs the loop until the
caller's task has ended, along with all other due callbacks, and releases it. While no caller runs it, the idle thread
waits: not in the loop but on a second epoll, which watches the loop's own epoll and is armed by `release` for one
event. So this thread wakes only when something happens while no caller runs the loop. It runs the ready callbacks, does
not wait in the loop, and goes back to sleep, until the next timer at the latest. A caller that leaves an earlier timer
wakes it by an eventfd. Only while calls are queued for it does it stay in the loop: with several callers at once,
changing the owner for each call would cost more.

`EagerLoop`: a small cell of a session is answered faster than a task and its five rounds of the loop can be set up. So
the owner of the loop takes the first step of such a coroutine itself, without a task. If the coroutine waits for a
single future, it may `wait_briefly`: in the selector, which also receives all other events of the loop. As soon as
another callback has to run, or the time is up, the coroutine waits as usual. It then becomes a task
(`StartedCoroutine` is its remainder), and the loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import selectors
import threading
import time
from asyncio import events
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 5.0
LONGEST_SLEEP_S = 24 * 3600.0  # as asyncio has it: the kernel counts milliseconds, and stops at 24 days
CONTENTION_S = 0.005  # seconds for which calls are queued for the idle thread after two calls met

log = logging.getLogger("cloche.loop")


class EagerLoop(asyncio.SelectorEventLoop):
    """Let the loop's owner take a coroutine's first step eagerly. Use only in the thread that owns the loop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._own_selector = selector
        self._is_starting = False
        self._may_have_tasks = False
        self.set_task_factory(self._make_task)

    def has_tasks(self) -> bool:
        """Tell whether this loop has unfinished tasks; a loop that never had a task is not searched."""
        self._may_have_tasks = self._may_have_tasks and bool(asyncio.all_tasks(self))
        return self._may_have_tasks

    def _make_task(
        self,
        _: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **settings: Any,  # noqa: ANN401 - as asyncio hands it on
    ) -> asyncio.Task[Any]:
        self._may_have_tasks = True
        return asyncio.Task(coroutine, loop=self, **settings)

    def start_eagerly(self, coroutine: Coroutine[Any, Any, T]) -> Any:  # noqa: ANN401 - whatever a coroutine yields to its task
        """Run a coroutine until it waits, and return the awaited future. Raises StopIteration with its value if it
        never waits.
        """
        events._set_running_loop(self)
        self._is_starting = True
        try:
            return coroutine.send(None)
        finally:
            self._is_starting = False
            events._set_running_loop(None)

    def wait_briefly(self, seconds: float, first: asyncio.Future[Any], second: asyncio.Future[Any]) -> None:
        """Wait, in a coroutine's eager first step, until one of the two is done or another callback is ready.

        Returns at once outside of an eager first step, and early when another callback of the loop is ready.
        """
        if not self._is_starting:
            return
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        until = self.time() + seconds
        if timers:
            until = min(until, timers[0].when())
        while not (ready or first.done() or second.done()):
            seconds_left = until - self.time()
            if seconds_left <= 0:
                return
            self._process_events(self._own_selector.select(seconds_left))  # type: ignore[attr-defined]
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()


class StartedCoroutine(Coroutine[Any, Any, T]):
    """Wrap a coroutine that was started eagerly and waits for a future, so that it can become a task.

    If the task is cancelled before its first step, the future is cancelled first, as for any task that waits.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:  # noqa: ANN401 - as in `begin`
        self._coroutine, self._awaited = coroutine, waits_for
        self._has_yielded_first = False  # whether the task was given the future
        self.__qualname__ = getattr(coroutine, "__qualname__", type(self).__qualname__)

    def send(self, value: Any, /) -> Any:  # noqa: ANN401 - as a coroutine's own
        if self._has_yielded_first:
            return self._coroutine.send(value)
        self._has_yielded_first = True
        return self._awaited

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as a coroutine's own
        had_yielded_first, self._has_yielded_first = self._has_yielded_first, True
        is_cancelled = isinstance(error[0], asyncio.CancelledError)
        if is_cancelled and not had_yielded_first and self._awaited is not None and self._awaited.cancel():
            return self._awaited
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        raise TypeError("this is for a task to run")


class SharedLoop:
    """Hold the loop and its idle thread: the daemon thread that runs it while no caller does."""

    def __init__(self) -> None:
        """Create loop and thread. Raises OSError without free descriptors, RuntimeError without free threads;
        cleans up on failure.
        """
        self._owner_lock = threading.RLock()  # never acquired twice; an RLock, because it knows its owner
        self._wakes_at = math.inf  # when the idle thread wakes by itself, on the loop's clock
        self._is_closed = False
        self._contended_until = 0.0
        self._queued_calls = 0  # calls that run here while their threads wait; changed only by the loop's owner
        self._idle_thread = threading.Thread(target=self._run_while_idle, name="cloche-loop", daemon=True)
        with contextlib.ExitStack() as on_failure:
            selector = on_failure.enter_context(selectors.EpollSelector())
            self._loop_epoll_fd = selector.fileno()
            self.loop = EagerLoop(selector)
            on_failure.callback(self.loop.close)
            self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            on_failure.callback(os.close, self._wakeup_fd)
            self._idle_epoll = on_failure.enter_context(select.epoll())
            self._idle_epoll.register(self._wakeup_fd, select.EPOLLIN)
            self._idle_epoll.register(self._loop_epoll_fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._idle_thread.start()
            on_failure.pop_all()

    def try_acquire(self) -> EagerLoop | None:
        """Return the loop, for this thread to run until it releases it; None if another thread has it, or had it
        just now.
        """
        if time.monotonic() < self._contended_until:
            return None
        if not self._owner_lock.acquire(blocking=False):
            self._contended_until = time.monotonic() + CONTENTION_S
            return None
        if self._is_closed:
            self._owner_lock.release()
            return None
        self._idle_epoll.modify(self._loop_epoll_fd, 0)
        return self.loop

    def release(self, _: asyncio.AbstractEventLoop | None = None) -> None:
        """Release the loop; the idle thread handles pending events."""
        try:
            if self._is_ready() or self._next_due() < self._wakes_at:
                os.eventfd_write(self._wakeup_fd, 1)
            self._idle_epoll.modify(self._loop_epoll_fd, select.EPOLLIN | select.EPOLLONESHOT)
        finally:
            self._owner_lock.release()

    def count_queued_call(self) -> None:
        """Count a call whose own thread does not run the loop; runs in the loop."""
        self._queued_calls += 1

    def uncount_queued_call(self) -> None:
        """Stop counting that call; runs in the loop."""
        self._queued_calls -= 1
        if not self._queued_calls and threading.current_thread() is self._idle_thread:
            self.loop.stop()

    def is_running_here(self) -> bool:
        """Tell whether this thread owns the loop: it runs further down the stack, or is about to run."""
        return bool(self._owner_lock._is_owned())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Cancel the remaining tasks, wait a bounded time for them, and end the idle thread."""
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        try:
            cancelled.result(SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            log.debug("tasks of the shared loop have not ended within %g s, and are left", SHUTDOWN_TIMEOUT_S)
        self._is_closed = True
        os.eventfd_write(self._wakeup_fd, 1)
        self._idle_thread.join(SHUTDOWN_TIMEOUT_S)
        if not self._idle_thread.is_alive() and self._owner_lock.acquire(blocking=False):  # a daemon thread may hold it
            self.loop.close()
            self._idle_epoll.close()
            os.close(self._wakeup_fd)
            self._owner_lock.release()

    def _run_while_idle(self) -> None:
        wait_s: float | None = None
        while True:
            self._idle_epoll.poll(wait_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup_fd)
            with self._owner_lock:
                if self._is_closed:
                    return
                self._run_what_is_ready()
                while self._queued_calls and not self._is_closed:
                    self._run()
                    self._run_what_is_ready()  # events that arrived with the last call's end have used up their wake-up
                self._wakes_at = self._next_due()
                wait_s = min(max(0.0, self._wakes_at - self.loop.time()), LONGEST_SLEEP_S)
                self._idle_epoll.modify(self._loop_epoll_fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _run_what_is_ready(self) -> None:
        while True:
            self.loop.call_soon(self.loop.stop)  # one round of the loop, without waiting
            self._run()
            if not self._is_ready():
                return

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # asyncio re-raises these from a task's step; other tasks still wait
            log.exception("a task broke out of the shared loop")

    def _is_ready(self) -> bool:
        return bool(self.loop._ready)  # type: ignore[attr-defined]

    def _next_due(self) -> float:
        """Return when the next timer is due, on the loop's clock; cancelled timers may precede it for a while."""
        timers: list[asyncio.TimerHandle] = self.loop._scheduled  # type: ignore[attr-defined]
        if not timers:
            return math.inf
        if not timers[0].cancelled():
            return timers[0].when()
        return min((timer.when() for timer in timers if not timer.cancelled()), default=math.inf)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ThreadedLoop(SharedLoop):
    """Be the shared loop on systems without epoll: one thread runs it all the time, and no caller does."""

    def __init__(self) -> None:
        """Create loop and thread. Raises OSError without free descriptors, RuntimeError without free threads."""
        self.loop = EagerLoop(selectors.DefaultSelector())
        self._idle_thread = threading.Thread(target=self.loop.run_forever, name="cloche-loop", daemon=True)
        self._idle_thread.start()

    def try_acquire(self) -> None:
        """Return None: only the loop's thread runs it."""

    def release(self, _: asyncio.AbstractEventLoop | None = None) -> None:
        """Do nothing: only the loop's thread ever holds it."""

    def count_queued_call(self) -> None:
        """Do nothing: all calls are queued."""

    def uncount_queued_call(self) -> None:
        """Do nothing, as `count_queued_call`."""

    def is_running_here(self) -> bool:
        """Tell whether this is the thread that runs the loop."""
        return threading.current_thread() is self._idle_thread

    def close(self) -> None:
        """Cancel the remaining tasks, wait a bounded time for them, and end the thread."""
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        with contextlib.suppress(TimeoutError):
            cancelled.result(SHUTDOWN_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._idle_thread.join(SHUTDOWN_TIMEOUT_S)
        if not self._idle_thread.is_alive():
            self.loop.close()
