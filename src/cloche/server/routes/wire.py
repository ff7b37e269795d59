"""`GET /api/wire`: the web socket of Cloche's own client; see `docs/service/wire.md`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastapi import APIRouter, WebSocket

from cloche import __version__
from cloche.audit.log import Audit
from cloche.core.policy import Policy
from cloche.wire.callers import Caller
from cloche.wire.connection import SILENCE_HEADER, Wire
from cloche.wire.host import CallTask, SandboxStore
from cloche.wire.load import WireLoad
from cloche.wire.queue import RunQueue
from cloche.wire.sandboxes import NewSandbox
from cloche.wire.sockets import Disconnected
from cloche.wire.work import Listing

from ..auth import find_caller, service_of
from ..log import log_access
from ..service import Service
from ..sockets import close, watch_key
from . import sandboxes

router = APIRouter(prefix="/api")


@router.websocket("/wire")
async def wire(websocket: WebSocket) -> None:
    """Carry many concurrent calls, each checked like a request."""
    caller = await find_caller(websocket)
    service = service_of(websocket)

    async def find(_: dict[str, Any]) -> Caller:
        return await find_caller(websocket)

    with service.wire.connection(caller.key_id):
        await websocket.accept()
        silence = websocket.headers.get(SILENCE_HEADER)
        connection = Wire(_Messages(websocket), ServiceHost(service), find, version=__version__, silence=silence)
        await close(websocket, await connection.serve(watch_key(websocket, None)))


class _Messages:
    """The messages of a web socket of the framework."""

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket

    async def receive(self) -> bytes | str:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Disconnected
        data = message.get("bytes")
        return str(message.get("text")) if data is None else bytes(data)

    async def send(self, message: bytes | str, /) -> None:
        if isinstance(message, bytes):
            await self._websocket.send_bytes(message)
        else:
            await self._websocket.send_text(message)


class ServiceHost:
    """Serve the wire with the service's sandboxes and records."""

    def __init__(self, service: Service):
        self._service = service

    @property
    def keeps_runs(self) -> bool:
        """Tell that each run has a row."""
        return self._service.keeps_runs

    @property
    def sandboxes(self) -> SandboxStore:
        """Return the live sandboxes."""
        return self._service.sandboxes

    @property
    def wire(self) -> WireLoad:
        """Return the bounds of all connections."""
        return self._service.wire

    @property
    def runs(self) -> RunQueue:
        """Return the queue of runs."""
        return self._service.runs

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options, checked against the key's permissions."""
        return await self._service.allowed_options(caller, own)

    async def audit(self) -> Audit | None:
        """Return the audit log, None if it is off."""
        return await self._service.audit()

    async def record(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Write an event to the audit log, if it is on."""
        await self._service.record(kind, **fields)

    async def note_refusal(self, error: BaseException, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Record that a caller was refused."""
        await self._service.note_refusal(error, **fields)

    async def open_sandbox(self, fields: NewSandbox, caller: Caller) -> Mapping[str, Any]:
        """Open a sandbox, as `POST /api/sandboxes` does."""
        return (await sandboxes.open_sandbox(fields, caller, self._service)).as_dict()

    async def list_sandboxes(self, listing: Listing, caller: Caller) -> Mapping[str, Any]:
        """List the sandboxes of the key's project."""
        return await sandboxes.sandboxes(
            caller=caller, service=self._service, label=listing.label, state=listing.state, name=listing.name,
            limit=listing.limit, cursor=listing.cursor,
        )  # fmt: skip

    async def end_sandbox(self, sandbox_id: str, caller: Caller) -> Mapping[str, Any]:
        """End a sandbox."""
        return await sandboxes.end(sandbox_id, caller, self._service)

    def check_workspace(self, _policy: Policy) -> None:
        """Do nothing: a service changes no rules of open workspaces."""

    def calling(self, _caller: Caller, _call: CallTask) -> AbstractContextManager[None]:
        """Count nothing: only connections bound the calls of a key."""
        return nullcontext()

    def explain(self, error: Exception, _project: str | None) -> Exception:
        """Return the error."""
        return error

    def note_call(self, verb: str, status: int, seconds: float, caller: str | None) -> None:
        """Count a call, and log it."""
        self._service.metrics.request_ended("WIRE", verb, status, seconds)
        log_access("call", verb=verb, status=status, seconds=round(seconds, 6), key=caller)
