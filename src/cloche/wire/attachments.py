"""A worker's attachment to one sandbox: its users, running commands and cells, processes, sessions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

from cloche.core.enforcement import Enforcement
from cloche.core.errors import ClocheError, NotFound
from cloche.core.escape import escape_name
from cloche.core.events import Event, Sink
from cloche.core.file_protocols import SupportsFileStreams
from cloche.core.protocols import OpenLiveSandbox
from cloche.core.record import dataclass, field
from cloche.core.result import Result
from cloche.execution.processes import AsyncProcess
from cloche.execution.sandbox import AsyncSandbox, AsyncSession
from cloche.keeper.life import Life
from cloche.records.ids import new_id, now
from cloche.records.results import result_as_wire

from .events import ActiveRun
from .outputs import SharedOutputs
from .problems import Refused
from .results import event_as_wire

MOST_CALLS = 64  # concurrent commands and cells of one sandbox
MOST_SESSIONS = 16  # of one sandbox, including forks


class OpenedSandbox(OpenLiveSandbox, SupportsFileStreams, Protocol):
    """The interface of an open sandbox that the service needs."""


class KeptSandbox(OpenedSandbox, Protocol):
    """What a sandbox with a keeper has beside."""

    def life_events(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield what the keeper says of its time and pauses, now and at each change, until the connection ends."""
        ...


class AskedHost:
    """Hold a question about a host and port until its answer: None is no answer."""

    def __init__(self, host: str, port: int):
        self.host, self.port, self.is_taken = host, port, False
        self.answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()


class HoldsQuestions(Protocol):
    """Hold a sandbox's questions about hosts, which wait for an answer."""

    def take(self, number: int, *, key_id: str | None) -> AskedHost | None:
        """Return a question for its first answer; None if it does not wait for one, or not of this key."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class HeldSession:
    """Hold a session: its id, when it was opened, and its parent if it is a fork."""

    id: str
    session: AsyncSession
    has_checkpoints: bool
    parent: str | None = None
    relay: Any = None  # of its calls of a client's functions
    opened_at: str = field(default_factory=now)

    def hold_output(self, *, is_held: bool) -> None:
        """Have a cell wait while nobody takes its output, or go on, where the backend can."""
        hold = getattr(self.session._interpreter.opened, "hold_output", None)
        if hold is not None:
            hold(is_held=is_held)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data in the wire's format."""
        session = self.session
        return {
            "id": self.id, "language": session.language, "runtime": session.runtime, "isAlive": session.is_alive,
            "whyEnded": session.why_ended or None, "checkpoints": self.has_checkpoints, "parent": self.parent,
            "openedAt": self.opened_at, "cells": len(session.history),
        }  # fmt: skip


@dataclass(eq=False, slots=True, kw_only=True)
class SharedProcess:
    """Hold a process that several requests use at the same time; a `borrowed` one has readers in `outputs`."""

    process: AsyncProcess
    users: int = 0
    is_followed: bool = False
    is_borrowed: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Attachment:
    """Hold one sandbox that this worker is attached to, or with `is_held` has open itself: then it ends with this."""

    id: str
    sandbox: AsyncSandbox
    is_held: bool = False
    is_closed: bool = False  # by this worker
    is_paused: bool = False  # as its keeper has told, or its worker has done
    life: Life | None = None  # of a held one, by the clock of `time.monotonic`
    idle_s: float | None = None
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)  # its life
    previous_worker: str | None = None  # which has ended
    users: int = 0
    opening: int = 0  # sessions being opened
    opened_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    calls: dict[str, ActiveRun] = field(default_factory=dict)
    sessions: dict[str, HeldSession] = field(default_factory=dict)
    questions: HoldsQuestions | None = None
    parts: dict[str, Any] = field(default_factory=dict)  # state of front ends, by their names
    check_apart: Callable[[int], None] = lambda _: None  # raises Refused for so many further sandboxes of this size
    outputs: SharedOutputs = field(default_factory=SharedOutputs)  # of processes with several readers
    _processes: dict[str, asyncio.Task[SharedProcess]] = field(default_factory=dict)

    @property
    def is_unused(self) -> bool:
        """Tell whether this worker may detach from it: no users, no running calls and no live sessions."""
        is_in_use = self.is_held or self.is_in_use
        return not (is_in_use or any(held.session.is_alive for held in self.sessions.values()))

    @property
    def is_in_use(self) -> bool:
        """Tell whether it has users or running calls."""
        return bool(self.users or self.calls)

    @property
    def live(self) -> OpenedSandbox:
        """Return the open sandbox of the backend, for paths and streams."""
        return cast("OpenedSandbox", self.sandbox._require_live("this"))

    @property
    def kept(self) -> KeptSandbox:
        """Return the open sandbox of a keeper."""
        return cast("KeptSandbox", self.live)

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection to the keeper, or to the sandbox, has ended."""
        link = getattr(self.sandbox._opened, "link", None)
        return link is not None and bool(link.lost.done())

    @property
    def lost(self) -> asyncio.Future[str]:
        """Return the future of the connection's end."""
        lost: asyncio.Future[str] = getattr(self.sandbox._opened, "link").lost  # noqa: B009 - a field of each backend's
        return lost

    @property
    def enforcement(self) -> Enforcement:
        """Return what its backend enforces."""
        return cast("Enforcement", getattr(self.sandbox._opened, "enforcement"))  # noqa: B009 - as above

    async def close(self) -> None:
        """End this worker's calls and sessions, and detach. Raises ClocheError."""
        self.is_closed = True
        tasks = [call.task for call in self.calls.values() if call.task is not None]
        for call in self.calls.values():
            call.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.sessions.clear()
        await self.sandbox.__aexit__(None, None, None)

    # Commands and cells.

    def begin(self, project: str, work: Callable[[Sink], Awaitable[Result]]) -> ActiveRun:
        """Start a command or a cell; its first event has its id. Raises Refused (429) for one too many."""
        if len(self.calls) >= MOST_CALLS:
            raise Refused(
                429, "too-many-calls", f"{MOST_CALLS} commands and cells are running in sandbox {self.id}, the maximum"
            )
        live = ActiveRun(id=new_id("call"), project=project, size=0)
        live.events.add("call", {"id": live.id})
        self.calls[live.id] = live
        live.task = asyncio.ensure_future(_run(live, work))
        live.task.add_done_callback(lambda _: self._ended(live))
        return live

    def _ended(self, live: ActiveRun) -> None:
        self.calls.pop(live.id, None)
        live.events.end()
        self.used_at = time.monotonic()
        if live.task is not None and not live.task.cancelled():
            live.task.exception()  # marks it as retrieved: not every call has a waiter

    def call(self, call_id: str) -> ActiveRun:
        """Return the running command or cell with this id. Raises NotFound."""
        live = self.calls.get(call_id)
        if live is None:
            raise NotFound(f"no command or cell {escape_name(call_id[:64])} is running in this worker")
        return live

    # Processes.

    @asynccontextmanager
    async def process(self, process_id: str) -> AsyncIterator[SharedProcess]:
        """Yield a process, which other requests may share. The last one to leave detaches from it."""
        task = self._processes.get(process_id)
        if task is None:
            task = self._processes[process_id] = asyncio.ensure_future(self._take_over(process_id))
        shared = await asyncio.shield(task)
        shared.users += 1
        try:
            yield shared
        finally:
            shared.users -= 1
            if not shared.users and self._processes.get(process_id) is task:
                del self._processes[process_id]
                if not shared.is_borrowed:
                    await shared.process.detach()

    async def _take_over(self, process_id: str) -> SharedProcess:
        try:
            if (process := self.outputs.process(process_id)) is not None:
                return SharedProcess(process=process, is_followed=True, is_borrowed=True)
            return SharedProcess(process=await self.sandbox.process(process_id))
        except BaseException:
            self._processes.pop(process_id, None)
            raise

    @asynccontextmanager
    async def shared(self, process: AsyncProcess) -> AsyncIterator[SharedProcess]:
        """Yield a new process, which other requests may share. On exit it is ended, or kept as it was started."""
        shared = SharedProcess(process=process, users=1, is_followed=True)
        task = self._processes[process.id] = asyncio.ensure_future(_ready(shared))
        try:
            async with process:
                yield shared
        finally:
            if self._processes.get(process.id) is task:
                del self._processes[process.id]

    async def let_go(self, process_id: str) -> None:
        """Detach from a process, even if other requests of this worker use it."""
        task = self._processes.pop(process_id, None)
        if task is not None:
            await (await asyncio.shield(task)).process.detach()

    # Sessions.

    def add_session(self, session: AsyncSession, *, has_checkpoints: bool, parent: str | None = None) -> HeldSession:
        """Register an open session."""
        held = HeldSession(id=new_id("ses"), session=session, has_checkpoints=has_checkpoints, parent=parent)
        self.sessions[held.id] = held
        return held

    @property
    def apart(self) -> int:
        """Return the number of sandboxes of the same size that its sessions have, or may soon have."""
        return self.opening + sum(held.has_checkpoints for held in self.sessions.values())

    @contextlib.contextmanager
    def room(self, count: int = 1, *, is_apart: bool = False) -> Iterator[None]:
        """Reserve room for `count` more sessions. Raises Refused (429) if there is not enough.

        With `is_apart` each has a sandbox of its own.
        """
        if len(self.sessions) + self.opening + count > MOST_SESSIONS:
            for unused in [
                held for held in self.sessions.values() if not (held.session.is_alive or held.has_checkpoints)
            ]:
                del self.sessions[unused.id]
        if len(self.sessions) + self.opening + count > MOST_SESSIONS:
            raise Refused(
                429, "too-many-sessions", f"sandbox {self.id} has {len(self.sessions)} sessions; the maximum is "
                f"{MOST_SESSIONS}",
                remedy="close one: DELETE /api/sandboxes/{id}/sessions/{id}",
            )  # fmt: skip
        if is_apart:
            self.check_apart(count)
        self.opening += count
        try:
            yield
        finally:
            self.opening -= count

    def session(self, session_id: str) -> HeldSession:
        """Return a session. Raises NotFound."""
        held = self.sessions.get(session_id)
        if held is None:
            why = "a session ends with the worker that opened it"
            if self.previous_worker is not None:
                why = f"worker {self.previous_worker}, which had this sandbox, is gone, and its sessions with it"
            raise NotFound(f"sandbox {self.id} has no session {escape_name(session_id[:64])} in this worker; {why}")
        return held


def sandbox_name(sandbox_id: str) -> str:
    """Return the keeper's name for a sandbox."""
    return sandbox_id.replace("_", "-")


async def _ready(shared: SharedProcess) -> SharedProcess:
    return shared


async def _run(live: ActiveRun, work: Callable[[Sink], Awaitable[Result]]) -> str:
    def tell(event: Event) -> None:
        if (wire_event := event_as_wire(event)) is not None:
            live.events.add(*wire_event)

    try:
        result = await work(tell)
        document = await asyncio.to_thread(encode_result, live.id, result)
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        why = "it was cancelled" if is_cancelled else str(error) if isinstance(error, ClocheError) else "Cloche failed"
        status = "cancelled" if is_cancelled else "error"
        shown = why.encode("utf-8", "backslashreplace").decode()
        live.events.add("error", {"id": live.id, "status": status, "error": shown})
        raise
    live.events.add("result", document)
    return document


def encode_result(number: str, result: Result, plain: Mapping[str, Any] | None = None) -> str:
    """Return a result as JSON with `number`, the id of its run or call. Blocks: large results belong in a thread.

    Output that is not UTF-8 is also given in base64. `plain` is the value of `result_as_wire`, if it is already known.
    """
    document = result_as_wire(result) if plain is None else plain
    return json.dumps({"id": number, **document, **_undecoded(result)}, ensure_ascii=False)


def _undecoded(result: Result) -> dict[str, str]:
    rows = (("stdout", result.stdout, result.stdout_bytes), ("stderr", result.stderr, result.stderr_bytes))
    return {
        f"{name}Base64": base64.b64encode(data).decode()
        for name, text, data in rows
        if "\ufffd" in text and text.encode(errors="replace") != data
    }
