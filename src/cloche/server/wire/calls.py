"""One call of the wire: what it was asked, its channels, and how its work tells events and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from cloche.records.results import as_json

from ...core.record import dataclass, field
from ..bodies import JsonBounds, parse_apart
from ..exec_options import WireModel
from ..guard import MOST_UPLOAD
from ..identities import Caller
from ..problems import Refused
from ..sandbox_use import Use
from ..service import Service
from .frames import FROM_CLIENT, FROM_SERVICE, IN, JSON, MOST_FIELDS, MOST_INLINE, Incoming, Outgoing, Send

SendText = Callable[[str], Awaitable[None]]


class Nothing(WireModel):
    """No fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Hold what a call is for: who asks, the ids that it names, its fields, and the sandbox where it is in one."""

    caller: Caller
    service: Service
    ids: Mapping[str, str]
    fields: Any
    use: Use | None = None


@dataclass(eq=False, slots=True)
class Call:
    """Hold one call. Its number may be used again once its last frame, a result or an error, is on its way."""

    number: int
    verb: str
    _send: Send
    _send_text: SendText
    held: int = 0  # bytes of fields that came in pieces, and of files
    whose: str | None = None  # the key that they count for
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False
    incoming: dict[int, Incoming] = field(default_factory=dict)
    outgoing: dict[int, Outgoing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.incoming = {channel: Incoming(self.number, channel, self._send) for channel in FROM_CLIENT}
        self.outgoing = {channel: Outgoing(self.number, channel, self._send) for channel in FROM_SERVICE}

    def hold(self, service: Service, size: int) -> None:
        """Count bytes until it ends. Raises Refused (503) where too many are held."""
        service.wire.hold(self.whose, size)
        self.held += size

    def cancel(self) -> None:
        """End it; a second time changes nothing, so that what it clears up is not cut short."""
        if self.task is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()

    async def event(self, name: str, data: Mapping[str, Any] | str) -> None:
        """Tell an event, once there is credit for it."""
        text = data if isinstance(data, str) else as_json(data)
        channel = self.outgoing[JSON]
        if len(text) > MOST_INLINE:
            await self._in_pieces(text)
            text = f'{{"call": {self.number}, "event": {json.dumps(name)}, "dataOn": {JSON}}}'
        else:
            text = f'{{"call": {self.number}, "event": {json.dumps(name)}, "data": {text}}}'
        await channel.room()
        channel.note_sent(len(text.encode()))
        await self._send_text(text)

    async def prepared(self, result: object) -> str:
        """Return the last frame of a call that succeeded; a long result is sent in pieces before."""
        text = result if isinstance(result, str) else await asyncio.to_thread(json.dumps, result)
        if len(text) <= MOST_INLINE:
            return f'{{"call": {self.number}, "result": {text}}}'
        await self._in_pieces(text)
        return f'{{"call": {self.number}, "resultOn": {JSON}}}'

    async def _in_pieces(self, text: str) -> None:
        await self.outgoing[JSON].send(await asyncio.to_thread(text.encode))
        await self.outgoing[JSON].end()

    async def send_all(self, channel: int, pieces: AsyncIterator[bytes]) -> int:
        """Send what comes piece by piece, then the channel's end; return how much it was."""
        size = 0
        async for piece in pieces:
            size += len(piece)
            await self.outgoing[channel].send(piece)
        await self.outgoing[channel].end()
        return size

    async def content(self) -> AsyncIterator[bytes]:
        """Yield what the client sends, up to the bound of an upload. Raises Refused (413)."""
        size = 0
        async for piece in self.incoming[IN].pieces():
            size += len(piece)
            if size > MOST_UPLOAD:
                raise Refused(413, "body-too-large", f"more than {MOST_UPLOAD} bytes in one call")
            yield piece

    async def read_fields(self, service: Service) -> dict[str, Any]:
        """Return the fields that come in pieces, counted until the call ends. Raises Refused."""
        found, bounds = list[bytes](), JsonBounds()
        async for piece in self.incoming[JSON].pieces():
            if bounds.seen + len(piece) > MOST_FIELDS:
                raise Refused(413, "body-too-large", f"the fields of this call have more than {MOST_FIELDS} bytes")
            self.hold(service, len(piece))
            bounds.feed(piece)
            found.append(piece)
        text = b"".join(found)
        found.clear()
        fields = await parse_apart(text)
        if not isinstance(fields, dict):
            raise Refused(400, "bad-request", f"what came on channel {JSON} is no JSON object")
        return fields
