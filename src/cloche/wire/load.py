"""The bounds of all wires of a worker together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cloche.core.errors import NotFound, OutcomeUnknown
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field
from cloche.execution.sandbox import AsyncSandbox
from cloche.records.ids import new_id

from .callers import Caller
from .problems import Refused
from .shares import Shares

MOST_CONNECTIONS = 32  # each with a window for every stream of its calls
MOST_HELD = 128 << 20  # bytes of buffered fields and files
MOST_SPOOLED = 8 << 30  # bytes of files on this machine's disk
MOST_WORKSPACES = 64
MOST_RESULTS = 256 << 20  # bytes of large results that are being sent, as JSON
ROOM_S, LOOK_S = 60.0, 0.1  # wait for room on disk; between two looks


@dataclass(slots=True)
class WireLoad:
    """Account for the resources of all wires of a worker: connections, workspaces, and buffered bytes."""

    connections: Shares = field(default_factory=lambda: Shares(MOST_CONNECTIONS))
    held: Shares = field(default_factory=lambda: Shares(MOST_HELD))
    spooled: Shares = field(default_factory=lambda: Shares(MOST_SPOOLED))
    results: Shares = field(default_factory=lambda: Shares(MOST_RESULTS))
    workspaces: Shares = field(default_factory=lambda: Shares(MOST_WORKSPACES))
    _workspaces: dict[str, tuple[str, AsyncSandbox]] = field(default_factory=dict)  # by id, with the project

    @contextmanager
    def connection(self, whose: str | None) -> Iterator[None]:
        """Count a connection of a key for the body. Raises Refused (503) for one too many."""
        if not self.connections.has_room(whose):
            raise Refused(
                503, "busy",
                f"{self.connections.held} wires are open already, of {self.connections.most}, and of "
                f"{self.connections.most_of_one} of one key; one carries many calls at once",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        self.connections.take(whose)
        try:
            yield
        finally:
            self.connections.give_back(whose)

    def hold(self, whose: str | None, size: int) -> None:
        """Account bytes for a key. Raises Refused (503) beyond the bound."""
        if not self.held.has_room(whose, size):
            raise Refused(503, "busy", "other calls hold all memory there is for them", headers={"Retry-After": "2"})
        self.held.take(whose, size)

    def spool(self, whose: str | None, size: int) -> None:
        """Account bytes on disk for a key. Raises Refused (503) beyond the bound."""
        if not self.spooled.has_room(whose, size):
            raise Refused(503, "busy", "other calls hold all disk there is for them", headers={"Retry-After": "5"})
        self.spooled.take(whose, size)

    async def spool_later(self, whose: str | None, size: int) -> bool:
        """Account bytes on disk for a key once there is room; return False if there is none within `ROOM_S`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + ROOM_S
        while not self.spooled.has_room(whose, size):
            if size > self.spooled.most_of_one or loop.time() > ends:
                return False
            await asyncio.sleep(LOOK_S)
        self.spooled.take(whose, size)
        return True

    async def hold_result(self, whose: str | None, size: int) -> None:
        """Account a large result for a key once there is room. Raises OutcomeUnknown if there is none within `ROOM_S`.

        A result that is larger than a share is taken alone.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + ROOM_S
        while not self.results.has_room(whose, min(size, self.results.most_of_one)):
            if loop.time() > ends:
                raise OutcomeUnknown("this ran, but earlier results of this caller are not read, so it is dropped")
            await asyncio.sleep(LOOK_S)
        self.results.take(whose, size)

    @contextmanager
    def workspace(self, caller: Caller, sandbox: AsyncSandbox) -> Iterator[str]:
        """Register a workspace for the body; yield the id for calls of its project. Raises Refused (429)."""
        if not self.workspaces.has_room(caller.key_id):
            raise Refused(
                429, "too-many-workspaces",
                f"{self.workspaces.held} workspaces are open (at most {self.workspaces.most}, and "
                f"{self.workspaces.most_of_one} of one key); close one before another",
            )  # fmt: skip
        number = new_id("ws")
        self._workspaces[number] = caller.project, sandbox
        self.workspaces.take(caller.key_id)
        try:
            yield number
        finally:
            del self._workspaces[number]
            self.workspaces.give_back(caller.key_id)

    def find_workspace(self, number: str, project: str) -> AsyncSandbox:
        """Return a workspace. Raises NotFound."""
        entry = self._workspaces.get(number)
        if entry is None or entry[0] != project:
            raise NotFound(f"there is no workspace {escape_name(number[:64])} in this worker, or none any more")
        return entry[1]
