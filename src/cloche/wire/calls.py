"""One call of the wire: its request, its streams, and how its work sends events and its end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from cloche.channels import Streams, add_piece
from cloche.core.record import dataclass
from cloche.core.remote import MOST_FIELDS, MOST_INLINE
from cloche.init import wire
from cloche.records.results import as_json

from .bodies import MOST_UPLOAD, BodyBounds, parse_apart
from .callers import Caller
from .exec_options import WireModel
from .host import WireHost
from .problems import Refused
from .uses import Use

IN, OUT, ERR, JSON = wire.STDIN, wire.STDOUT, wire.STDERR, wire.REPORT  # the last one in both directions
FROM_CLIENT = (IN, JSON, wire.HOST_ANSWERS)
NO_VERB = "(none)"
FEW_RESULT = 1 << 20  # bytes of a result that are not accounted
STALL_S = 300.0  # a call whose client does not read for so long is ended


class FrameSender(Protocol):
    """Send frames to a client."""

    async def send_frame(self, frame: bytes, /) -> None:
        """Send a frame, at the pace of the client."""
        ...


class Nothing(WireModel):
    """No fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Hold a call's caller, the ids that it names, its fields, and its sandbox if it is in one."""

    caller: Caller
    service: WireHost
    ids: Mapping[str, str]
    fields: Any
    use: Use | None = None


class Call(Streams):
    """One call. Its number may be reused once its last frame, a result or an error, is being sent."""

    def __init__(self, connection: FrameSender, number: int):
        super().__init__(number)
        self._connection = connection
        self.verb = NO_VERB
        self.held = 0  # bytes of fields sent in pieces, and of files
        self.result_size = 0  # accounted bytes of a large result
        self.whose: str | None = None  # the key that they are accounted to
        self.caller: str | None = None  # its name in the log
        self.project: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self._pieces: dict[int, deque[bytes | bytearray]] = {stream: deque() for stream in FROM_CLIENT}
        self._ended: set[int] = set()
        self._arrived = asyncio.Event()

    def hold(self, service: WireHost, size: int) -> None:
        """Account bytes until the call ends. Raises Refused (503) beyond the bound."""
        service.wire.hold(self.whose, size)
        self.held += size

    async def hold_result(self, service: WireHost, size: int) -> None:
        """Account a large result until it is sent, once there is room. Raises OutcomeUnknown without room in time."""
        if size > FEW_RESULT:
            await service.wire.hold_result(self.whose, size)
            self.result_size += size

    def cancel(self) -> None:
        """Cancel the call. A second time has no effect, so that its clean-up is not interrupted."""
        if self.task is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()

    # From the client.

    def take_data(self, stream: int, data: memoryview) -> None:
        """Buffer a piece until it is read. Raises WireError for a piece that clients may not send."""
        if stream not in FROM_CLIENT or stream in self._ended or not data:
            raise wire.WireError(f"stream {stream}: a client sends nothing there, or after its end, and no empty piece")
        add_piece(self._pieces[stream], data)
        self._arrived.set()

    def take_end(self, stream: int) -> None:
        """Mark the end of a stream."""
        self._ended.add(stream)
        self._arrived.set()

    async def pieces(self, stream: int) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream until its end. A piece counts as consumed when the next one is requested."""
        pieces = self._pieces[stream]
        while True:
            while not pieces:
                if stream in self._ended:
                    return
                self._arrived.clear()
                await self._arrived.wait()
            piece = bytes(pieces.popleft())
            yield piece
            granted = self.credit.note_consumed(stream, len(piece))
            if granted and stream not in self._ended:
                await self.transmit(wire.grant_frame(self.number, stream, granted))

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the client's data, up to the bound of an upload. Raises Refused (413)."""
        size = 0
        async for piece in self.pieces(IN):
            size += len(piece)
            if size > MOST_UPLOAD:
                raise Refused(413, "body-too-large", f"more than {MOST_UPLOAD} bytes in one call")
            yield piece

    async def read_fields(self, service: WireHost) -> dict[str, Any]:
        """Return fields that are sent in pieces, accounted until the call ends. Raises Refused."""
        pieces, bounds = list[bytes](), BodyBounds()
        async for piece in self.pieces(JSON):
            if bounds.seen + len(piece) > MOST_FIELDS:
                raise Refused(413, "body-too-large", f"the fields of this call have more than {MOST_FIELDS} bytes")
            self.hold(service, len(piece))
            bounds.feed(piece)
            pieces.append(piece)
        text = b"".join(pieces)
        pieces.clear()
        fields = await parse_apart(text)
        if not isinstance(fields, dict):
            raise Refused(400, "bad-request", f"what came on stream {JSON} is not a JSON object")
        return fields

    # To the client.

    async def transmit(self, frame: bytes) -> None:
        """Send a frame, at the pace of the client."""
        await self._connection.send_frame(frame)

    async def sendable(self, stream: int) -> int:
        """Wait for a grant and return how many bytes may be sent. Raises Refused (409) after `STALL_S`."""
        if (count := self.credit.sendable(stream)) > 0:
            return count
        try:
            async with asyncio.timeout(STALL_S):
                return await super().sendable(stream)
        except TimeoutError:
            raise Refused(409, "not-read", f"nothing of this call was read for {STALL_S:g} s") from None

    async def end_stream(self, stream: int) -> None:
        """Send the end of a stream."""
        await self.transmit(wire.frame(wire.END, self.number, bytes((stream,))))

    async def send_all(self, stream: int, pieces: AsyncIterator[bytes]) -> int:
        """Send the pieces, then the stream's end; return the number of bytes."""
        size = 0
        async for piece in pieces:
            size += len(piece)
            await self.send(stream, piece)
        await self.end_stream(stream)
        return size

    async def event(self, name: str, data: Mapping[str, Any] | str) -> None:
        """Send an event, once the window of stream JSON has room."""
        text = data if isinstance(data, str) else as_json(data)
        if len(text) > MOST_INLINE:
            await self._send_json(text)
            body = f'{{"event": {json.dumps(name)}, "dataOn": {JSON}}}'.encode()
        else:
            body = f'{{"event": {json.dumps(name)}, "data": {text}}}'.encode()
        await self.sendable(JSON)
        self.credit.note_sent(JSON, len(body))
        await self.transmit(wire.frame(wire.EVENT, self.number, body))

    async def prepared(self, result: object) -> bytes:
        """Return the last frame of a successful call. A long result is sent in pieces before it."""
        text = result if isinstance(result, str) else await asyncio.to_thread(json.dumps, result)
        if len(text) > MOST_INLINE:
            await self._send_json(text)
            return wire.json_frame(wire.CLOSE, self.number, resultOn=JSON)
        return wire.frame(wire.CLOSE, self.number, f'{{"result": {text}}}'.encode())

    async def _send_json(self, text: str) -> None:
        await self.send(JSON, await asyncio.to_thread(text.encode))
        await self.end_stream(JSON)
