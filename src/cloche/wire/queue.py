"""The queue of runs, bounded in number, bytes and time. Each run is a task with an event log.

Theory of operation: `submit` refuses a run before anything of it is stored, if the queue is full. Otherwise its row is
begun (`RunRows`; a node has none), and a task waits for one of the places, whose number is the library's limit of
concurrent runs. Keys take turns. Neither a client that waits for the result nor a reader of events delays a run: events
are kept up to a bound, and a reader that falls behind gets the number of those missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, cast

from cloche.audit.log import act_for
from cloche.audit.recording import is_traced
from cloche.core.errors import (
    BackendUnavailable,
    ClocheError,
    InvalidRequest,
    PolicyDenied,
    RecordsFailed,
    StartFailed,
)  # fmt: skip
from cloche.core.events import Event, Sink
from cloche.core.record import dataclass, field
from cloche.core.result import Result
from cloche.execution.concurrency import default_count
from cloche.records.ids import new_id

from .events import ActiveRun
from .places import Places
from .problems import Refused
from .results import event_as_wire
from .shares import Shares

MOST_QUEUED_BYTES = 256 << 20  # of all waiting requests
KEPT_S = 60.0  # how long the events of a run that ended can be read
MOST_KEPT_BYTES = 64 << 20  # of their results and events; beyond it, the oldest are dropped earlier
SERVICE_STOPPED = "the service was stopped during this run"
_NOTHING_RAN = (Refused, StartFailed, BackendUnavailable, InvalidRequest, PolicyDenied)
log, _jail_log = logging.getLogger("cloche.service"), logging.getLogger("cloche.jail")

Start = Callable[[Sink | None], Awaitable[Result]]
Encode = Callable[[str, Result], Awaitable[tuple[str, str]]]  # takes the run's id
NoteRefusal = Callable[..., Awaitable[None]]  # takes an error, and fields of its event


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """Describe a run and its owner.

    `start` runs it, with a sink for events; `amounts` are options of its sandbox. `summary` and `asked`, the stored
    part of the request, are written to its row. `ends_waiting`, a time of the event loop, replaces the queue's
    deadline. `encode` returns the run's document and the one of its row, where they are not the usual ones.
    """

    project: str
    api_key: str | None
    session_id: str | None
    start: Start
    summary: Mapping[str, Any]
    size: int
    amounts: Mapping[str, Any] = field(default_factory=dict)
    returns_files: bool = False
    has_events: bool = True
    noted_beside: bool = False
    asked: Mapping[str, Any] | None = None
    idempotency_key: str | None = None
    request_sha256: bytes | None = None
    ends_waiting: float | None = None
    encode: Encode | None = None


class RunRows(Protocol):
    """Keep the rows of runs."""

    async def begin(self, live: ActiveRun, order: RunOrder, /) -> None:
        """Begin the row of a run before it is queued. Raises RecordsFailed."""

    def note_running(self, live: ActiveRun, /) -> None:
        """Note that a run has left the queue."""

    def note_over(self, live: ActiveRun, /) -> None:
        """Note that a run runs no more."""

    async def encode(self, live: ActiveRun, order: RunOrder, run_id: str, result: Result, /) -> tuple[str, str]:
        """Return the document of a run, and that of its row."""
        ...

    async def finish(self, live: ActiveRun, order: RunOrder, status: str, document: str, /) -> None:
        """Write the end of a run."""

    async def fail(
        self, live: ActiveRun, order: RunOrder, status: str, document: Mapping[str, Any], /, *, gives_key_back: bool
    ) -> None:  # fmt: skip
        """Write the end of a run that failed. With `gives_key_back` its idempotency key becomes free."""

    async def drain(self) -> None:
        """Wait a moment for what is being written."""


class NoRows:
    """Keep no rows."""

    async def begin(self, _live: ActiveRun, _order: RunOrder) -> None:
        pass

    def note_running(self, _live: ActiveRun) -> None:
        pass

    def note_over(self, _live: ActiveRun) -> None:
        pass

    async def encode(self, _live: ActiveRun, _order: RunOrder, _id: str, _result: Result) -> tuple[str, str]:
        return "", ""  # the work of the call encodes it

    async def finish(self, _live: ActiveRun, _order: RunOrder, _status: str, _document: str) -> None:
        pass

    async def fail(
        self, _live: ActiveRun, _order: RunOrder, _status: str, _document: Mapping[str, Any], *, gives_key_back: bool
    ) -> None:  # fmt: skip
        pass

    async def drain(self) -> None:
        pass


class RunObserver(Protocol):
    """Receive counts of runs."""

    def run_ended(self, status: str, seconds: float | None) -> None:
        """Count a run that ended. `seconds` is its duration, None unless it ran to its end."""

    def run_refused(self) -> None:
        """Count a run that was refused because the queue was full."""


class Unobserved:
    """An observer that does nothing."""

    def run_ended(self, status: str, seconds: float | None) -> None:
        pass

    def run_refused(self) -> None:
        pass


class RunQueue:
    """Run submitted orders, with the library's limit of concurrent runs."""

    def __init__(
        self, rows: RunRows, *, queue_limit: int, deadline_s: float, observer: RunObserver | None = None,
        note_refusal: NoteRefusal | None = None, places: Places | None = None, most_of_one: int | None = None,
    ):  # fmt: skip
        self._note_refusal: NoteRefusal = note_refusal or _note_nothing
        self._rows = rows
        self._observer: RunObserver = observer or Unobserved()
        self._deadline_s = deadline_s
        self._places = places or Places(default_count())
        self._waiting, self._bytes = Shares(queue_limit, most_of_one=most_of_one), Shares(MOST_QUEUED_BYTES)
        self._live: dict[str, ActiveRun] = {}
        self._kept: dict[str, int] = {}  # bytes of those that ended, the oldest first
        self.running = self._kept_bytes = 0
        self.is_closed = False
        self.stopped_by_us = False

    @property
    def waiting(self) -> int:
        """Return the number of waiting runs."""
        return self._waiting.held

    def find(self, run_id: str, project: str) -> ActiveRun | None:
        """Return a run of this worker that is unfinished or ended within `KEPT_S`."""
        live = self._live.get(run_id)
        return live if live is not None and live.project == project else None

    def has(self, run_id: str) -> bool:
        """Tell whether `find` knows a run, in any project."""
        return run_id in self._live

    def begun(self) -> list[ActiveRun]:
        """Return the runs of this worker that have left the queue and are unfinished."""
        return [live for live in self._live.values() if live.is_begun and not live.events.is_over]

    def has_room(self, order: RunOrder) -> bool:
        """Tell whether `submit` would queue a run now."""
        return self._waiting.has_room(order.api_key) and self._bytes.has_room(order.api_key, order.size)

    async def submit(self, order: RunOrder) -> ActiveRun:
        """Queue a run once its row is committed. Raises Refused (503) if the queue is full, IntegrityError."""
        live = await self._enter(order)
        live.task = asyncio.ensure_future(self._run(live, order))
        live.task.add_done_callback(lambda _: self._ended(live, has_events=order.has_events))
        return live

    async def run_here(self, order: RunOrder) -> ActiveRun:
        """Run an order without events in the caller's task, and return its ended run. Cancelling it kills the run."""
        live = await self._enter(order)
        live.task = cast("asyncio.Task[str]", asyncio.current_task())
        try:
            await self._run(live, order)
        finally:
            live.events.end()
            self._live.pop(live.id, None)
        return live

    async def _enter(self, order: RunOrder) -> ActiveRun:
        try:
            return await self._take_turn(order)
        except (Refused, RecordsFailed) as error:
            await self._note_refusal(error, **_described(order))
            raise

    async def _take_turn(self, order: RunOrder) -> ActiveRun:
        if self.is_closed:
            raise self._no_room("the service is being stopped", 5)
        if not self.has_room(order):
            raise self._no_room(f"{self.waiting} runs are waiting already, the maximum", 2)
        live = ActiveRun(id=new_id("run"), project=order.project, size=order.size)
        self._waiting.take(order.api_key)
        self._bytes.take(order.api_key, order.size)
        try:
            await self._rows.begin(live, order)
        except BaseException:
            self._leave_queue(order)
            raise
        self._live[live.id] = live
        return live

    @asynccontextmanager
    async def hold(self, api_key: str | None) -> AsyncIterator[None]:
        """Hold a place for other work of a caller that runs code. Raises Refused (503) if none comes free."""
        if self.is_closed or not self._waiting.has_room(api_key):
            why = (
                "the service is being stopped"
                if self.is_closed
                else f"{self.waiting} runs are waiting already, the maximum"
            )
            raise self._no_room(why, 5)
        self._waiting.take(api_key)
        try:
            await self._acquire_place(api_key)
        finally:
            self._waiting.give_back(api_key)
        try:
            yield
        finally:
            self._places.release(api_key)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new runs, wait up to `timeout_s` for the running ones, then cancel them."""
        self.is_closed = True
        tasks = [live.task for live in self._live.values() if live.task is not None and not live.task.done()]
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=timeout_s)
            self.stopped_by_us = bool(unfinished)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished)
        await self._rows.drain()

    def _leave_queue(self, order: RunOrder) -> None:
        self._waiting.give_back(order.api_key)
        self._bytes.give_back(order.api_key, order.size)

    async def _run(self, live: ActiveRun, order: RunOrder) -> str:
        try:
            with _queue_span(live.id):
                await self._take_place(order)
        except BaseException as error:
            await self._note_failure(live, order, error)
            raise
        self.running, live.is_begun = self.running + 1, True
        self._rows.note_running(live)
        begun = time.monotonic()
        log.debug("%s begins, %d wait", live.id, self.waiting)
        try:
            is_told = order.has_events or order.idempotency_key is not None or _is_watched()
            act_for(api_run=live.id)
            result = await order.start(partial(self._tell, live) if is_told else None)
            encode = order.encode or partial(self._rows.encode, live, order)
            document, stored = await encode(live.id, result)
        except BaseException as error:
            await self._note_failure(live, order, error)
            raise
        finally:
            self._rows.note_over(live)
            self.running -= 1
            self._give_place_back(order)
        await self._rows.finish(live, order, str(result.status), stored)
        self._note_end(live, str(result.status), time.monotonic() - begun)
        if order.has_events:
            live.events.add("result", document)
        return document

    async def _take_place(self, order: RunOrder) -> None:
        try:
            await self._acquire_place(order.api_key, order.ends_waiting)
        finally:
            self._leave_queue(order)

    def _give_place_back(self, order: RunOrder) -> None:
        self._places.release(order.api_key)

    async def _acquire_place(self, api_key: str | None, ends: float | None = None) -> None:
        """Take a place. Raises Refused (503) if none comes free within the deadline, or until `ends`."""
        if self._places.take_free(api_key):
            return
        begun = asyncio.get_running_loop().time()
        ends = begun + self._deadline_s if ends is None else ends
        try:
            async with asyncio.timeout_at(ends):
                await self._places.take(api_key)
        except TimeoutError:
            raise self._no_room(f"no place became free within {max(0.0, ends - begun):.3g} s", 5) from None

    async def _note_failure(self, live: ActiveRun, order: RunOrder, error: BaseException) -> None:
        """Record why a run failed. The row of a cancelled run is written, too."""
        if not isinstance(error, asyncio.CancelledError):
            await self._note_refusal(error, api_run=live.id, **_described(order))
        if isinstance(error, asyncio.CancelledError):
            why = "it was cancelled" if not self.stopped_by_us else SERVICE_STOPPED
        else:
            reason = error.detail if isinstance(error, Refused) else error
            why = str(reason) if isinstance(error, ClocheError | Refused) else "Cloche failed"
        document = {**order.summary, "error": why}
        status = "cancelled" if isinstance(error, asyncio.CancelledError) and not self.stopped_by_us else "error"
        self._note_end(live, status, None)
        live.events.add("error", {"id": live.id, "status": status, "error": why})
        await self._rows.fail(live, order, status, document, gives_key_back=_never_ran(live, error))

    def _note_end(self, live: ActiveRun, status: str, seconds: float | None) -> None:
        log.debug("%s ended: %s", live.id, status)
        self._observer.run_ended(status, seconds)

    def _no_room(self, why: str, seconds: int) -> Refused:
        self._observer.run_refused()
        return _no_room(why, seconds)

    def _tell(self, live: ActiveRun, event: Event) -> None:
        live.has_started = True  # as the first event shows
        if (wire_event := event_as_wire(event)) is not None:
            live.events.add(*wire_event)

    def _ended(self, live: ActiveRun, *, has_events: bool) -> None:
        live.events.end()
        if live.task is not None and not live.task.cancelled():
            live.task.exception()  # marks it as retrieved: not every run has a waiter
        if not has_events:
            self._live.pop(live.id, None)
            return
        self._kept[live.id] = live.events.size
        self._kept_bytes += live.events.size
        while self._kept_bytes > MOST_KEPT_BYTES:
            self._forget(next(iter(self._kept)))
        asyncio.get_running_loop().call_later(KEPT_S, self._forget, live.id)

    def _forget(self, run_id: str) -> None:
        self._live.pop(run_id, None)
        self._kept_bytes -= self._kept.pop(run_id, 0)


def _never_ran(live: ActiveRun, error: BaseException) -> bool:
    """Tell whether it is certain that none of a run's code ran."""
    return not live.is_begun or (isinstance(error, _NOTHING_RAN) and not live.has_started)


async def _note_nothing(error: BaseException, **fields: Any) -> None:  # noqa: ANN401 - JSON
    pass


def _described(order: RunOrder) -> dict[str, Any]:
    return {"what": "run", "language": order.summary.get("language"), "code": (order.asked or {}).get("code")}


def _is_watched() -> bool:
    """Tell whether the phases of a run are traced or debugged, which needs its events."""
    return is_traced() or _jail_log.isEnabledFor(logging.DEBUG)


def _queue_span(run_id: str) -> AbstractContextManager[None]:
    if not is_traced():
        return nullcontext()
    from cloche.audit.telemetry import queue_span

    return queue_span(run_id)


def _no_room(why: str, seconds: int) -> Refused:
    return Refused(
        503, "busy", f"{why}; nothing was run", remedy=f"try again in {seconds} s",
        headers={"Retry-After": str(seconds)},
    )  # fmt: skip
