"""Run a coroutine by hand as far as it goes: one that hardly ever has to wait needs no task, and no rounds of its loop.

Theory of operation: a small cell of a session is answered in less time than a task and the five rounds of the loop
that it would take are set up in. So who has a loop's turn takes the first step of such a coroutine itself. Where that
comes to the one thing it has to wait for, it may `wait_briefly`: in the selector, where everything else that the loop
waits for is heard as well. As soon as anybody else has something to do, or the time is up, the coroutine waits as
usual. It then becomes a task, and the loop runs.
"""

from __future__ import annotations

import asyncio
import selectors
from asyncio import events
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class TurnLoop(asyncio.SelectorEventLoop):
    """Be a loop whose owner may take a coroutine's first step by hand. Use from the thread that has the turn."""

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
        """Wait here and now until one of the two is done, for a coroutine that is run by hand; others need not wait.

        Return at once where it is not run by hand, and early when somebody else has something to do in this loop.
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
    """Be the rest of a coroutine that was begun by hand and waits for something, to be made a task of.

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
