"""One event loop that is run by whoever waits for it.

Theory of operation: what outlives a call (an open sandbox, a session) needs a loop that lives on. Where a thread runs
that loop all the time, each blocking call wakes two threads, which takes longer than a small cell. So this loop is run
in turns. A caller who finds it free takes the turn, runs the loop until the task at hand has ended, whatever else
happens there meanwhile, and leaves. In between, a keeper sleeps: not in the loop but on a second epoll, which watches
the loop's own one and is armed by whoever leaves, for one event. So the keeper wakes when something happens while
nobody has the turn, and only then; it runs what is ready, never waits in the loop, and goes back to sleep. For timers
it sleeps no longer than until the next one is due; who leaves an earlier one behind rings a bell. Only while calls are
handed over to it does the keeper stay in the loop: with several callers at once, changing turns would cost more.
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

from .by_hand import TurnLoop

EXIT_PATIENCE_S = 5.0
LONGEST_SLEEP_S = 24 * 3600.0  # as asyncio has it: the kernel counts milliseconds, and stops at 24 days
CROWDED_S = 0.005  # for calls to be handed over, once one came while another was at work

log = logging.getLogger("cloche.loop")


class SharedLoop:
    """Hold the loop and its keeper, a daemon thread."""

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
