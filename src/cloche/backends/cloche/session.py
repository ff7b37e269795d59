"""Sessions of a sandbox at a service: an interpreter there, each cell one call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, NodeLost
from cloche.core.events import Sink, discard
from cloche.core.functions import OfferedFunctions
from cloche.core.loops import finish
from cloche.core.remote import RemoteAccount
from cloche.core.request import PLAIN_CELL, CellOptions, Request
from cloche.core.result import Result

from ..live_calls import CallChannel
from ..remote.failures import Failure, remote_error, scrub
from .calls import SandboxCalls
from .connections import begin
from .sandbox import GRACE_S, RunEvents, read_whole, run_outcome, write_whole
from .wire import Call, TakeEvent

OPEN_S = 120.0
log = logging.getLogger("cloche.live")
ReadResult = Callable[[Mapping[str, Any]], Awaitable[Result]]


class RemoteSession:
    """Run cells; see core.protocols.OpenSession, SupportsCollecting and SupportsFork."""

    def __init__(self, sandbox: SandboxCalls, facts: Mapping[str, Any], read_result: ReadResult, *, is_apart: bool):
        self._opened_in, self._read_result, self._is_apart = sandbox, read_result, is_apart
        self.id = facts.get("id")
        if not isinstance(self.id, str) or not 0 < len(self.id) <= 256:
            raise remote_error(
                sandbox.account.provider, Failure.BAD_ANSWER, detail="this is not a session", account=sandbox.account
            )
        self._runtime, self._why = "", ""
        self._is_alive = True
        self._functions: CallChannel | None = None  # that its cells may call
        self._offered: OfferedFunctions | None = None
        self._serving: asyncio.Task[None] | None = None
        self._note(facts)

    def _note(self, facts: Mapping[str, Any]) -> None:
        self._is_alive = facts.get("isAlive") is True
        self._runtime = scrub(str(facts.get("runtime") or ""))
        self._why = scrub(str(facts.get("whyEnded") or ""))

    @property
    def runtime(self) -> str:
        """Return the engine with its version."""
        return self._runtime

    @property
    def is_alive(self) -> bool:
        """Return whether the session was alive at the last check."""
        return self._is_alive

    @property
    def why_ended(self) -> str:
        """Return how the session ended; "" while it lives."""
        return self._why

    @property
    def sandbox(self) -> Any:  # noqa: ANN401 - one of two kinds
        """Return the sandbox whose workspace the session uses."""
        return _WorkspaceApart(self) if self._is_apart else self._opened_in

    @property
    def account(self) -> RemoteAccount:
        """Return the account."""
        return self._opened_in.account

    async def begin(self, verb: str, fields: Mapping[str, Any], *, on_event: TakeEvent | None = None) -> Call:
        """Begin a call about the session."""
        ids = {"sandbox": self._opened_in.id, "session": self.id}
        return await begin(self.account, verb, {**ids, **fields}, on_event=on_event)

    async def serve(self, functions: OfferedFunctions) -> None:
        """Serve its calls of the caller's functions, until it ends or the connection does."""
        self._offered = functions
        call = await self._begin_calls(functions)
        self._serving = asyncio.ensure_future(self._serve(call, functions))

    async def _begin_calls(self, functions: OfferedFunctions) -> Call:
        call = await self.begin("session.calls", {})
        earlier, channel = self._functions, CallChannel(call, functions)
        self._functions = call.functions = channel
        if earlier is not None:
            channel.calls.follow(earlier.calls)
        return call

    async def _serve(self, call: Call, functions: OfferedFunctions) -> None:
        """Serve one guest after the other: a fork and a rollback bring new ones."""
        while True:
            try:
                await asyncio.wait([call.closed])
            except asyncio.CancelledError:
                call.cancel()
                raise
            if call.functions is not None:
                await call.functions.wait_closed()
            if call.closed.exception() is not None or not self._is_alive:
                return
            try:
                call = await self._begin_calls(functions)
            except ClocheError as error:
                log.debug("the calls of session %s are served no more: %s", self.id, error)
                return

    async def _ask(self, verb: str, **fields: object) -> Mapping[str, Any]:
        return await self._opened_in.ask_inside(verb, {"session": self.id, **fields})

    async def run(self, code: str, *, timeout_s: float, sink: Sink, options: CellOptions = PLAIN_CELL) -> Result:
        """Run one cell."""
        return await self.run_collecting(code, timeout_s=timeout_s, sink=sink, collect=(), options=options)

    async def run_collecting(
        self, code: str, *, timeout_s: float, sink: Sink, collect: tuple[str, ...], options: CellOptions = PLAIN_CELL
    ) -> Result:
        """Run one cell; the result's files are those that match `collect`."""
        sandbox = self._opened_in
        if not self._is_alive:
            raise InvalidRequest(f"this session has ended ({self._why or 'its interpreter is gone'}); restart it")
        events = RunEvents(None if sink is discard else sink)
        if self._functions is not None:
            self._functions.calls.renew()
        fields = {"code": code, "timeout": timeout_s, "collect": list(collect), **_as_wire(options)}
        call = await self.begin("session.run", fields, on_event=events.take)
        answer = await run_outcome(
            call, sandbox.account, "a cell ran", timeout_s=timeout_s + GRACE_S, where=sandbox.where,
            is_held=sandbox.is_paused,
        )  # fmt: skip
        notes = {} if self._functions is None else self._functions.calls.notes()
        result = events.note(await self._read_result(answer), notes)
        if result.meta.get("state") == "lost":
            self._is_alive = False
            with contextlib.suppress(ClocheError):
                self._note(await self._ask("session.look"))
        return result

    async def interrupt(self) -> None:
        """Interrupt the running cell."""
        await self._ask("session.interrupt")

    async def close(self) -> None:
        """End the session, for good."""
        self._is_alive = False
        if self._serving is not None and self._functions is not None:
            self._serving.cancel()
            await finish(self._functions.wait_closed())
        with contextlib.suppress(BackendUnavailable, NodeLost):  # the session, its sandbox or its node has ended
            await self._ask("session.close")

    async def checkpoint(self, name: str) -> None:
        """Save the session's state under `name`; see core.protocols.SupportsFork."""
        await self._ask("session.checkpoint", name=name)

    async def rollback(self, name: str) -> None:
        """Return to a checkpoint."""
        self._note(await self._ask("session.rollback", name=name))

    async def fork(self, count: int) -> Sequence[RemoteSession]:
        """Return sessions that start with this one's state."""
        answer = await self._ask("session.fork", count=count)
        rows = answer.get("items")
        forks = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        if len(forks) != count:
            raise remote_error(
                self._opened_in.account.provider,
                Failure.BAD_ANSWER,
                detail=f"{len(forks)} forks of {count}",
                account=self._opened_in.account,
            )
        sessions = [RemoteSession(self._opened_in, row, self._read_result, is_apart=True) for row in forks]
        if self._offered is not None:
            for session in sessions:
                await session.serve(self._offered)
        return sessions


def _as_wire(options: CellOptions) -> dict[str, Any]:
    fields = {"env": dict(options.env), "cwd": options.cwd, "notebook": options.is_notebook}
    return {name: value for name, value in fields.items() if value}


class _WorkspaceApart:
    """The workspace of a session with checkpoints. Only files can be used, because only its cells run there."""

    def __init__(self, session: RemoteSession):
        self._session = session

    async def run(self, _: Request) -> Result:
        """Raise BackendUnavailable."""
        raise BackendUnavailable(
            "run: in the workspace of a session with checkpoints nothing else runs at a service.",
            remedy="Run a cell of the session.",
        )

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content."""
        return await read_whole(self._session.begin, self._session.account, "session.readFile", path, max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file."""
        await write_whole(self._session.begin, self._session.account, "session.writeFile", path, data)
