"""Event loops for blocking calls: one that is run by whoever waits for it, and the eager first step of a coroutine.

Theory of operation, `SharedLoop`: what outlives a call (an open sandbox, a session) needs a loop that lives on. Where a
thread runs that loop all the time, each blocking call wakes two threads, which takes longer than a small cell. So this
loop is run in turns. A caller who finds it free takes the turn, runs the loop until the task at hand has ended,
whatever else happens there meanwhile, and leaves. In between, a thread sleeps (the keeper): not in the loop but on a
second epoll, which watches the loop's own one and is armed by whoever leaves, for one event. So it wakes when something
happens while nobody has the turn, and only then; it runs what is ready, never waits in the loop, and goes back to
sleep. For timers it sleeps no longer than until the next one is due; who leaves an earlier one behind wakes it by an
eventfd (the bell). Only while calls are handed over to it does it stay in the loop: with several callers at once,
changing turns would cost more.

`TurnLoop`: a small cell of a session is answered in less time than a task and the five rounds of the loop that it would
take are set up in. So who has a loop's turn takes the first step of such a coroutine itself, without a task. Where that
comes to the one thing it has to wait for, it may `wait_briefly`: in the selector, where everything else that the loop
waits for is received as well. As soon as anybody else has something to do, or the time is up, the coroutine waits as
usual. It then becomes a task (`Begun` is its rest), and the loop runs.
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

EXIT_PATIENCE_S = 5.0
LONGEST_SLEEP_S = 24 * 3600.0  # as asyncio has it: the kernel counts milliseconds, and stops at 24 days
CROWDED_S = 0.005  # for calls to be handed over, once one came while another was at work

log = logging.getLogger("cloche.loop")


class TurnLoop(asyncio.SelectorEventLoop):
    """Be a loop whose owner may take a coroutine's first step eagerly. Use from the thread that has the turn."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._heard_by = selector
        self._is_by_hand = False
        self._may_have_tasks = False
        self.set_task_factory(self._make_task)

    def has_tasks(self) -> bool:
        """Tell whether tasks of this loop have yet to end; one that never had any is not looked through."""
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

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Any:  # noqa: ANN401 - whatever a coroutine yields to its task
        """Run a coroutine until it waits, and return what for. Raises StopIteration with its value if it never does."""
        events._set_running_loop(self)
        self._is_by_hand = True
        try:
            return coroutine.send(None)
        finally:
            self._is_by_hand = False
            events._set_running_loop(None)

    def wait_briefly(self, seconds: float, one: asyncio.Future[Any], other: asyncio.Future[Any]) -> None:
        """Wait in this call until one of the two is done, for a coroutine's eager first step; others need not wait.

        Return at once where that is not what runs, and early when somebody else has something to do in this loop.
        """
        if not self._is_by_hand:
            return
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        until = self.time() + seconds
        if timers:
            until = min(until, timers[0].when())
        while not (ready or one.done() or other.done()):
            left = until - self.time()
            if left <= 0:
                return
            self._process_events(self._heard_by.select(left))  # type: ignore[attr-defined]
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()


class Begun(Coroutine[Any, Any, T]):
    """Be the rest of a coroutine that was begun eagerly and waits for something, to be made a task of.

    Also who cancels that before its first step is heard in the coroutine, which does not begin there: what it waits
    for is cancelled first, as it is for any task.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:  # noqa: ANN401 - as in `begin`
        self._coroutine, self._waits_for = coroutine, waits_for
        self._is_told = False  # what it waits for
        self.__qualname__ = getattr(coroutine, "__qualname__", type(self).__qualname__)

    def send(self, value: Any, /) -> Any:  # noqa: ANN401 - as a coroutine's own
        if self._is_told:
            return self._coroutine.send(value)
        self._is_told = True
        return self._waits_for

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as a coroutine's own
        was_told, self._is_told = self._is_told, True
        is_cancelled = isinstance(error[0], asyncio.CancelledError)
        if is_cancelled and not was_told and self._waits_for is not None and self._waits_for.cancel():
            return self._waits_for
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        raise TypeError("this is for a task to run")


class SharedLoop:
    """Hold the loop and its keeper: the daemon thread that runs it while no caller does."""

    def __init__(self) -> None:
        """Make it. Raises OSError where descriptors have run out, RuntimeError where threads have; nothing is left."""
        self._turn = threading.RLock()  # never taken twice: it is one that knows its owner, from the first moment on
        self._wakes_at = math.inf  # when the keeper wakes by itself, on the loop's clock
        self._is_closed = False
        self._crowded_until = 0.0
        self._handed_over = 0  # calls that are run here while their threads wait; changed by who runs the loop
        self._keeper = threading.Thread(target=self._keep, name="cloche-loop", daemon=True)
        with contextlib.ExitStack() as on_failure:
            selector = on_failure.enter_context(selectors.EpollSelector())
            self._inner = selector.fileno()
            self.loop = TurnLoop(selector)
            on_failure.callback(self.loop.close)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            on_failure.callback(os.close, self._bell)
            self._watch = on_failure.enter_context(select.epoll())
            self._watch.register(self._bell, select.EPOLLIN)
            self._watch.register(self._inner, select.EPOLLIN | select.EPOLLONESHOT)
            self._keeper.start()
            on_failure.pop_all()

    def take(self) -> TurnLoop | None:
        """Take the turn and return the loop, for this thread to run until it leaves; None if others have it, or had."""
        if time.monotonic() < self._crowded_until:
            return None
        if not self._turn.acquire(blocking=False):
            self._crowded_until = time.monotonic() + CROWDED_S
            return None
        if self._is_closed:
            self._turn.release()
            return None
        self._watch.modify(self._inner, 0)
        return self.loop

    def leave(self, _: asyncio.AbstractEventLoop | None = None) -> None:
        """Give the turn back; the keeper goes on with what is left to do."""
        try:
            if self._is_ready() or self._next_due() < self._wakes_at:
                os.eventfd_write(self._bell, 1)
            self._watch.modify(self._inner, select.EPOLLIN | select.EPOLLONESHOT)
        finally:
            self._turn.release()

    def begin_call(self) -> None:
        """Count a call whose own thread does not run the loop; in the loop."""
        self._handed_over += 1

    def end_call(self) -> None:
        """Count it no more; in the loop."""
        self._handed_over -= 1
        if not self._handed_over and threading.current_thread() is self._keeper:
            self.loop.stop()

    def is_running_here(self) -> bool:
        """Tell whether this thread has the turn: the loop may run below, or is about to, and waits for its return."""
        return bool(self._turn._is_owned())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Cancel what is left, wait a bounded time for it, and end the keeper."""
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        try:
            cancelled.result(EXIT_PATIENCE_S)
        except TimeoutError:
            log.debug("tasks of the shared loop have not ended within %g s, and are left", EXIT_PATIENCE_S)
        self._is_closed = True
        os.eventfd_write(self._bell, 1)
        self._keeper.join(EXIT_PATIENCE_S)
        if not self._keeper.is_alive() and self._turn.acquire(blocking=False):  # a daemon thread may have it
            self.loop.close()
            self._watch.close()
            os.close(self._bell)
            self._turn.release()

    def _keep(self) -> None:
        wait_s: float | None = None
        while True:
            self._watch.poll(wait_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            with self._turn:
                if self._is_closed:
                    return
                self._run_what_is_ready()
                while self._handed_over and not self._is_closed:
                    self._run()
                    self._run_what_is_ready()  # what came with the last call's end has had its wake-up
                self._wakes_at = self._next_due()
                wait_s = min(max(0.0, self._wakes_at - self.loop.time()), LONGEST_SLEEP_S)
                self._watch.modify(self._inner, select.EPOLLIN | select.EPOLLONESHOT)

    def _run_what_is_ready(self) -> None:
        while True:
            self.loop.call_soon(self.loop.stop)  # one round of the loop, without waiting
            self._run()
            if not self._is_ready():
                return

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # asyncio lets them out of a task; others are still waiting
            log.exception("a task broke out of the shared loop")

    def _is_ready(self) -> bool:
        return bool(self.loop._ready)  # type: ignore[attr-defined]

    def _next_due(self) -> float:
        """Return when the next timer is due, on the loop's clock; cancelled ones may lie before it for a while."""
        timers: list[asyncio.TimerHandle] = self.loop._scheduled  # type: ignore[attr-defined]
        if not timers:
            return math.inf
        if not timers[0].cancelled():
            return timers[0].when()
        return min((timer.when() for timer in timers if not timer.cancelled()), default=math.inf)


async def _cancel_others() -> None:
    """Cancel every other task of this loop and wait for all of them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
