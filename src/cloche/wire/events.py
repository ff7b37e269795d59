"""Events of a run or call: kept up to a bound, and read by any number of readers.

A slow reader, or a client that waits for the end, never delays the work.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from typing import Any

from cloche.core.record import dataclass, field
from cloche.records.results import as_json

MOST_EVENT_BYTES = 1 << 20  # of one run, for late or returning readers
EVENT_BYTES = 256  # overhead of one event
MOST_AT_ONCE = 16  # events that a reader holds
HEARTBEAT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEvent:
    """Hold one event of a run: its number, its name, and its data as JSON."""

    number: int
    name: str
    data: str


class EventLog:
    """Keep the last events of a run up to a bound, and let readers wait for the next."""

    def __init__(self) -> None:
        self._events: deque[SentEvent] = deque()
        self._bytes, self._next = 0, 1
        self._changed = asyncio.Event()
        self.is_over = False

    def add(self, name: str, data: Mapping[str, Any] | str) -> None:
        """Add an event, and drop the oldest ones beyond the bound."""
        text = data if isinstance(data, str) else as_json(data)
        self._events.append(SentEvent(number=self._next, name=name, data=text))
        self._next += 1
        self._bytes += len(text) + EVENT_BYTES
        while self._bytes > MOST_EVENT_BYTES and len(self._events) > 1:
            self._bytes -= len(self._events.popleft().data) + EVENT_BYTES
        self._wake()

    @property
    def size(self) -> int:
        """Return the number of bytes that it keeps."""
        return self._bytes

    def end(self) -> None:
        """Mark the end: no further event follows."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _following(self, after: int) -> list[SentEvent]:
        """Return up to `MOST_AT_ONCE` events after a number.

        A slow reader holds no more than that, and a reader that keeps up costs no search. Numbers have no gaps, so an
        event's position follows from its number.
        """
        count = max(0, min(self._next - 1 - after, len(self._events)))  # a client may give any number
        if count <= MOST_AT_ONCE:
            return list(islice(reversed(self._events), count))[::-1]
        first = len(self._events) - count
        return list(islice(self._events, first, first + MOST_AT_ONCE))

    async def read(self, after: int, *, heartbeat_s: float) -> AsyncIterator[SentEvent | None]:
        """Yield the events after a number until the end; None when none came for `heartbeat_s`."""
        while True:
            first = self._events[0].number if self._events else self._next
            if first > after + 1:
                yield SentEvent(number=first - 1, name="missed", data=json.dumps({"events": first - 1 - after}))
                after = first - 1
            for event in self._following(after):
                yield event
                after = event.number
            if self.is_over and after >= self._next - 1:
                return
            changed = self._changed
            if after >= self._next - 1:
                try:
                    # Until Python 3.12, `wait_for` drops a cancellation that comes in the turn in which its task ends.
                    async with asyncio.timeout(heartbeat_s):
                        await changed.wait()
                except TimeoutError:
                    yield None


@dataclass(eq=False, slots=True, kw_only=True)
class ActiveRun:
    """Hold a run of this worker: its events, and the task that returns its document as JSON text."""

    id: str
    project: str
    size: int
    events: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[str] | None = None
    is_begun: bool = False  # it has left the queue
    has_started: bool = False  # its code has started, as far as events show
    is_cancelled: bool = False
    has_row: bool = False
    row: asyncio.TimerHandle | None = None  # writes the row later
    noting: asyncio.TimerHandle | None = None  # writes that it is running
    plain: Mapping[str, Any] | None = None  # its result in the wire's format, if it is small

    async def wait(self) -> str:
        """Return the document. Cancelling the wait does not cancel the run. Raises the error that prevented the run."""
        assert self.task is not None  # noqa: S101 - set by the code that creates it
        return await asyncio.shield(self.task)

    def cancel(self) -> None:
        """Kill the run."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()


async def wait_a_moment(task: asyncio.Task[Any], seconds: float) -> None:
    """Wait at most `seconds` for a task to end. Cheaper than `asyncio.wait`."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = loop.call_later(seconds, end)
    task.add_done_callback(end)
    try:
        await over
    finally:
        timer.cancel()
        task.remove_done_callback(end)
