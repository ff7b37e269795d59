"""Waiting for approvals: one database poller for each worker, for any number of clients.

Theory of operation: each change of a row gets a number (`version`) that rises with every commit. While there are
followers, a task reads rows with higher numbers in a thread and passes them to the followers of that project or row.
Expired requests are reported by their deadline, without a change of the row. The buffer of a follower is bounded. When
it is full, the follower is marked as behind and ends; its client can resume after the last number that it has seen. A
follower reads the state after the poller's first read, so it misses no change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from cloche.agent.queue import QueueEntry
from cloche.core.errors import ClocheError
from cloche.core.record import dataclass
from cloche.records import approvals as records
from cloche.wire.problems import Refused

POLL_S, POLL_AFTER_FAILURE_S = 0.2, 2.0
MOST_FOLLOWERS, MOST_BUFFERED = 1_000, 256
MOST_AT_ONCE = 100  # rows of one read
MOST_OPEN = 10_000  # requests whose expiry is reported
log = logging.getLogger("cloche.service")
T = TypeVar("T")
Read = Callable[[Callable[[Session], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalChange:
    """Hold one change. An expiry has no `version`; `number` identifies the row, `data` is the row as JSON."""

    version: int | None
    number: int
    project: str
    name: str
    data: str


def change_of(entry: QueueEntry) -> ApprovalChange:
    """Return the last change of a row: asked, confirm (a second approval is needed), decided, or expired."""
    name = {"waiting": "asked", "expired": "expired"}.get(entry.state, "decided")
    if name == "asked" and entry.first_decision is not None:
        name = "confirm"
    data = json.dumps(records.as_wire(entry))
    return ApprovalChange(version=entry.version, number=entry.number, project=entry.project, name=name, data=data)


class Follower:
    """Receive the changes of a project, or of one row of it."""

    def __init__(self, project: str, number: int | None):
        self.project, self.number = project, number
        self.is_behind = self.is_over = False
        self._changes: deque[ApprovalChange] = deque()
        self._woken = asyncio.Event()

    def tell(self, change: ApprovalChange) -> None:
        """Add a change if this follower is subscribed to it."""
        if change.project != self.project or self.number not in (None, change.number):
            return
        if len(self._changes) >= MOST_BUFFERED:
            self.is_behind = True
        else:
            self._changes.append(change)
        self._woken.set()

    def end(self) -> None:
        """Mark the end: no further change follows."""
        self.is_over = True
        self._woken.set()

    async def next(self, timeout_s: float) -> ApprovalChange | None:
        """Return the next change; None after `timeout_s`, or when no more follow (`is_behind`, `is_over`)."""
        if self.is_behind:
            return None
        if not self._changes and not self.is_over:
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):  # `wait_for` may drop a cancellation
                    await self._woken.wait()
        return self._changes.popleft() if self._changes else None


class ApprovalWatch:
    """Poll the database for changes while there are followers."""

    def __init__(self, read: Read):
        self._read = read
        self._followers: set[Follower] = set()
        self._polling: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._version = 0
        self._open: dict[int, tuple[float, str]] = {}
        self.is_closed = False
        self.looks = 0

    @asynccontextmanager
    async def follow(self, project: str, number: int | None = None) -> AsyncIterator[Follower]:
        """Yield a follower that receives every change from now on. Raises Refused (503) for too many, RecordsFailed."""
        if len(self._followers) >= MOST_FOLLOWERS:
            raise Refused(
                503,
                "busy",
                f"{MOST_FOLLOWERS} clients are waiting for approvals already, the maximum",
                headers={"Retry-After": "5"},
            )
        follower = Follower(project, number)
        if self.is_closed:
            follower.end()
        self._followers.add(follower)
        try:
            await self._begin()
            yield follower
        finally:
            self._followers.discard(follower)

    def nudge(self) -> None:
        """Poll immediately, since this worker has changed a row."""
        self._nudged.set()

    def close(self) -> None:
        """End all followers, as the service stops."""
        self.is_closed = True
        for follower in self._followers:
            follower.end()
        self._nudged.set()

    async def _begin(self) -> None:
        """Start the poller from the current version, unless it runs."""
        if self._polling is not None and not self._polling.done():
            return
        version, waiting = await self._read(_look_first)
        if self._polling is None or self._polling.done():  # no other follower has started it meanwhile
            self._version = version
            self._open = {entry.number: (entry.expires_at, entry.project) for entry in waiting}
            self._polling = asyncio.ensure_future(self._poll())

    async def _poll(self) -> None:
        pause_s = POLL_S
        while self._followers and not self.is_closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._nudged.wait()
            self._nudged.clear()
            try:
                changes = await self._read(self._look)
            except ClocheError as error:  # followers keep waiting; their own next read fails
                log.warning("changes of approvals cannot be read: %s", error)
                pause_s = POLL_AFTER_FAILURE_S
                continue
            pause_s = POLL_S
            self._tell([*changes, *self._expired()])
            if len(changes) >= MOST_AT_ONCE:
                self._nudged.set()

    def _look(self, session: Session) -> list[ApprovalChange]:
        self.looks += 1
        if records.newest_version(session) == self._version:
            return []
        self._version, entries = records.changed_after(session, self._version, limit=MOST_AT_ONCE)
        return [self._noted(entry) for entry in entries]

    def _noted(self, entry: QueueEntry) -> ApprovalChange:
        self._open.pop(entry.number, None)
        if entry.state == "waiting" and len(self._open) < MOST_OPEN:
            self._open[entry.number] = (entry.expires_at, entry.project)
        return change_of(entry)

    def _expired(self) -> list[ApprovalChange]:
        now = time.time()
        over = [(number, project) for number, (ends, project) in self._open.items() if ends <= now]
        for number, _ in over:
            del self._open[number]
        return [
            ApprovalChange(
                version=None, number=number, project=project, name="expired",
                data=json.dumps({"id": number, "status": "expired"}),
            )
            for number, project in over
        ]  # fmt: skip

    def _tell(self, changes: Sequence[ApprovalChange]) -> None:
        for change in changes:
            for follower in self._followers:
                follower.tell(change)


def _look_first(session: Session) -> tuple[int, Sequence[QueueEntry]]:
    return records.newest_version(session), records.waiting(session, limit=MOST_OPEN)
