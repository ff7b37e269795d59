"""The client's end of the wire to a live sandbox, on an event loop: channels, windows, the end of the link.

See `cloche.init.wire`. A guest may write anything that arrives here. So frames are bounded, objects are parsed by the
codec for guests, and a channel buffers at most one window of unread content.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from cloche.channels import Channel, FrameTurns
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.guest_json import decode
from cloche.init import wire

MOST_OBJECT_BYTES = 1 << 20
MOST_PARTS = 40_000
READ_BYTES = 1 << 18
MOST_NUMBER = (1 << 16) - 1  # of a channel, through a keeper
OPEN_S = 10.0  # for a sandbox to send its protocol version
ANSWER_S = 60.0  # for init to report that an operation has begun, or to answer
MOST_EVENTS = 16  # unread ones; an operation has two
MOST_STRAYS = 1 << 20  # consecutive frames for closed channels: more than a window in the smallest pieces


class OperationFailed(Exception):
    """Hold the reason why the sandbox refused an operation: `kind` is a word of `wire` or `files`, `details` are
    its fields.
    """

    def __init__(self, kind: str, message: str, details: dict[str, Any]):
        super().__init__(message)
        self.kind, self.details = kind, details


class Operation(Channel):
    """Carry one operation on a channel."""

    def __init__(self, link: InitLink, number: int):
        super().__init__(link, number)
        self._link = link
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.keeps_last = False  # of the events that wait, for one whose newest event says all

    def ask(self, **body: Any) -> None:  # noqa: ANN401 - any JSON
        """Send a request about the running operation."""
        if not self.closed.done():
            self._link.send(wire.json_frame(wire.ASK, self.number, **body))

    def end_by_id(self, name: str) -> None:
        """Kill all that is left of a process by its id, without waiting for it."""
        if not self._link.lost.done():
            self._link.open("kill", id=name)

    async def event(self) -> dict[str, Any]:
        """Return the next event. Raises OperationFailed if the operation failed, OutcomeUnknown if the link is lost."""
        event = self.events.get_nowait() if not self.events.empty() else await self.events.get()
        if event is None:
            self.events.put_nowait(None)
            await self.closed
            raise OperationFailed("closed", "the operation has ended", {})
        return event

    def close(self) -> None:
        """Close the channel; the sandbox cancels the operation."""
        if not self.closed.done():
            consumed = [wire.grant_frame(self.number, stream, count) for stream, count in self.credit.ungranted()]
            self._link.send(b"".join((*consumed, wire.frame(wire.CLOSE, self.number))))  # the rest is kept
            self._link.forget(self)
            self.conclude(OperationFailed("closed", "it was cancelled", {}))

    def abandon(self, why: str) -> None:
        """Close the whole sandbox, because its init breaks the protocol."""
        self._link.close(why)

    def take(self, kind: int, body: bytes) -> None:
        if kind == wire.EVENT:
            while self.keeps_last and not self.events.empty():
                self.events.get_nowait()
            if self.events.qsize() >= MOST_EVENTS:
                raise wire.WireError("too many events of one operation")
            self.events.put_nowait(read_guest_object(body))
        elif kind == wire.CLOSE:
            error = read_guest_object(body).get("error")
            self.conclude(failure_of(error) if isinstance(error, dict) else None)
        else:
            super().take(kind, body)

    def conclude(self, error: Exception | None, result: object = None) -> None:
        if not self.closed.done():
            self.events.put_nowait(None)
        super().conclude(error, result)


class InitLink(asyncio.Protocol):
    """Hold the connection to one sandbox. Use from one event loop."""

    def __init__(self) -> None:
        self._turns = FrameTurns(self._take, self._break, self._pause_reading)
        self._transport: asyncio.Transport | None = None
        self.channels: dict[int, Operation] = {}
        self._number = self._strays = 0
        self._resumed: asyncio.Event = asyncio.Event()
        self._resumed.set()
        self.greeting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_full(self) -> bool:
        """Tell whether the sandbox has yet to read data that was sent."""
        return not self._resumed.is_set()

    async def drain(self) -> None:
        """Wait until the sandbox has read enough to send more."""
        await self._resumed.wait()

    def open(self, op: str, **arguments: Any) -> Operation:  # noqa: ANN401 - any JSON
        """Open a channel for an operation. Raises OutcomeUnknown if the sandbox is gone, InvalidRequest."""
        if self.lost.done():
            raise OutcomeUnknown(f"the sandbox has ended: {self.lost.result()}")
        order = {"op": op, **arguments}
        body = json.dumps(order, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(body) > wire.MOST_BODY:
            raise InvalidRequest(f"arguments and environment have {len(body)} bytes, more than {wire.MOST_BODY}")
        self._number = self._number % MOST_NUMBER + 1
        while self._number in self.channels:  # fewer channels are open than there are numbers
            self._number = self._number % MOST_NUMBER + 1
        channel = self.channels[self._number] = Operation(self, self._number)
        self.send(wire.frame(wire.OPEN, self._number, body))
        return channel

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
        """Do an operation that answers with at most one event; return the event."""
        channel = self.open(op, **arguments)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(channel.closed)
        except TimeoutError:
            raise OutcomeUnknown(f"the sandbox has not answered {op} within {ANSWER_S:.0f} s") from None
        finally:
            channel.close()
        return channel.events.get_nowait() or {}

    def forget(self, channel: Operation) -> None:
        """Drop all further frames on a channel."""
        self.channels.pop(channel.number, None)

    def send(self, data: bytes) -> None:
        """Send a frame."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self, why: str = "it was closed") -> None:
        """Close the connection; this closes the sandbox unless a keeper holds it."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.send(wire.json_frame(wire.HELLO, 0, version=wire.VERSION))

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def data_received(self, data: bytes) -> None:
        self._turns.feed(data)

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == wire.HELLO:
            self._greet(read_guest_object(body))
            return
        channel = self.channels.get(number)
        if channel is None:
            self._note_stray()
            return
        self._strays = 0
        channel.take(kind, body)
        if kind == wire.CLOSE:
            self.channels.pop(number, None)

    def _break(self, error: ValueError) -> None:  # a WireError, or invalid JSON
        self.close(f"it broke the protocol: {error}")

    def _pause_reading(self, is_paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def _note_stray(self) -> None:
        self._strays += 1
        if self._strays > MOST_STRAYS:
            raise wire.WireError("too many frames on closed channels")

    def _greet(self, greeting: dict[str, Any]) -> None:
        if greeting.get("version") != wire.VERSION:
            raise wire.WireError(
                f"it speaks version {greeting.get('version')!r}, and this Cloche speaks {wire.VERSION}"
            )
        if self.greeting.done():
            raise wire.WireError("a second greeting")
        self.greeting.set_result(greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the connection is lost: {exc}" if exc else "the connection was closed from inside"
        self._turns.finish(lambda: self._lose(why))

    def _lose(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        self._turns.stop()
        self._resumed.set()
        loss = OutcomeUnknown(f"the sandbox has ended: {why}")
        if not self.greeting.done():
            self.greeting.set_exception(loss)
            self.greeting.exception()
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.conclude(loss)


def read_guest_object(body: bytes) -> dict[str, Any]:
    """Read an object that a guest may have written. Raises ValueError."""
    if len(body) > MOST_OBJECT_BYTES:
        raise wire.WireError(f"an object of {len(body)} bytes")
    message, _ = decode(body.decode("utf-8", "replace"), MOST_PARTS, mends_text=True)
    if not isinstance(message, dict):
        raise wire.WireError("a frame holds no JSON object")
    return message


def failure_of(error: dict[str, Any]) -> OperationFailed:
    """Return the exception for an error of the wire."""
    return OperationFailed(str(error.get("kind", "other"))[:100], str(error.get("message", ""))[:2000], error)
