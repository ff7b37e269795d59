"""One channel of the wire on an event loop, and frames handled in bounded turns.

The protocol is `cloche.init.wire`. It is used by `backends.init_link`, which connects to a sandbox, and by the client
(`backends.cloche`) and the server (`wire`) of a service.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cloche.init import wire

SMALL_PIECE = 4 << 10  # bytes


class FrameLink(Protocol):
    """Send the frames of a connection."""

    @property
    def is_full(self) -> bool:
        """Tell whether the peer has yet to read the data that was sent."""
        ...

    def send(self, data: bytes, /) -> None:
        """Queue frames for sending."""
        ...

    async def drain(self) -> None:
        """Wait until the peer has read most of the queued data."""
        ...


class Streams(ABC):
    """Carry the streams of one channel, at either end. `closed` holds the channel's result or error."""

    def __init__(self, number: int):
        self.number = number
        self.credit = wire.Credit()
        self._sendable = asyncio.Event()
        self.closed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def transmit(self, frame: bytes) -> None:
        """Send a frame at the peer's pace."""

    @abstractmethod
    def take_data(self, stream: int, data: memoryview) -> None:
        """Receive content, which stays within the window."""

    @abstractmethod
    def take_end(self, stream: int) -> None:
        """Receive the end of a stream."""

    async def send(self, stream: int, data: bytes | memoryview) -> bool:
        """Send all of `data` as the peer grants it; return False if the channel is closed meanwhile."""
        unsent = memoryview(data)
        while unsent:
            piece = unsent[: min(await self.sendable(stream), wire.MOST_DATA)]
            if self.closed.done():
                return False
            self.credit.note_sent(stream, len(piece))
            await self.transmit(wire.data_frame(self.number, stream, piece))
            unsent = unsent[len(piece) :]
        return not self.closed.done()

    async def sendable(self, stream: int) -> int:
        """Wait until a stream may send or the channel is closed; return the number of bytes that may be sent."""
        while self.credit.sendable(stream) <= 0 and not self.closed.done():
            self._sendable.clear()
            await self._sendable.wait()
        return self.credit.sendable(stream)

    async def settle(self, stream: int) -> None:
        """Wait until the peer has consumed all sent data, or the channel is closed."""
        while self.credit.sendable(stream) < wire.WINDOW_BYTES and not self.closed.done():
            self._sendable.clear()
            await self._sendable.wait()

    def take(self, kind: int, body: bytes) -> None:
        """Handle a frame about a stream. Raises WireError."""
        if kind == wire.DATA:
            stream, data = wire.read_data(body)
            self.credit.note_received(stream, len(data))
            self.take_data(stream, data)
        elif kind == wire.WINDOW:
            self.credit.note_granted(*wire.read_grant(body))
            self._sendable.set()
        elif kind == wire.END and len(body) == 1:
            self.take_end(body[0])
        else:
            raise wire.WireError(f"a frame of kind {kind} with {len(body)} bytes")

    def conclude(self, error: Exception | None, result: object = None) -> None:
        self._sendable.set()
        if self.closed.done():
            return
        if error is None:
            self.closed.set_result(result)
        else:
            self.closed.set_exception(error)
            self.closed.exception()  # retrieved, so that asyncio does not log it


class Channel(Streams):
    """Be the end that opened the channel. `on_data` gets each piece; its consumer grants as many bytes again."""

    def __init__(self, link: FrameLink, number: int):
        super().__init__(number)
        self._frames = link
        self.on_data: Callable[[int, Any], None] = lambda stream, data: self.grant(stream, len(data))
        self.on_end: Callable[[int], None] = lambda _: None

    def take_data(self, stream: int, data: memoryview) -> None:
        self.on_data(stream, data)

    def take_end(self, stream: int) -> None:
        self.on_end(stream)

    def grant(self, stream: int, count: int) -> None:
        """Let the peer send `count` more bytes of a stream; grants are batched."""
        granted = self.credit.note_consumed(stream, count)
        if granted and not self.closed.done():
            self._frames.send(wire.grant_frame(self.number, stream, granted))

    async def transmit(self, frame: bytes) -> None:
        """Send a frame; wait while the peer does not read."""
        self._frames.send(frame)
        if self._frames.is_full:
            await self._frames.drain()

    def send_at_once(self, stream: int, data: bytes) -> bool:
        """Send all of `data` if no earlier data is unread; tell whether it was sent."""
        is_free = self.credit.sendable(stream) == wire.WINDOW_BYTES and not self._frames.is_full
        if not is_free or len(data) > wire.MOST_DATA or self.closed.done():
            return False
        self.credit.note_sent(stream, len(data))
        self._frames.send(wire.data_frame(self.number, stream, data))
        return True

    def end(self, stream: int) -> None:
        """Send the end of a stream."""
        if not self.closed.done():
            self._frames.send(wire.frame(wire.END, self.number, bytes((stream,))))


def add_piece(pieces: deque[bytes | bytearray], data: bytes | memoryview) -> None:
    """Add received bytes to those that wait. Small pieces are put together, as each would take 50 bytes more."""
    is_small = len(data) < SMALL_PIECE
    last = pieces[-1] if pieces and is_small else b""
    if isinstance(last, bytearray) and len(last) < SMALL_PIECE:
        last += data
    else:
        pieces.append(bytearray(data) if is_small else bytes(data))


class FrameTurns:
    """Split received bytes into frames and pass them to `take`, at most `MOST_AT_ONCE` per turn of the event loop.

    `pause` is called with True to stop reading and False to resume; `fail` gets the ValueError that `take` raised.
    """

    def __init__(
        self,
        take: Callable[[int, int, bytes], None],
        fail: Callable[[ValueError], None],
        pause: Callable[[bool], None],
        buffer: wire.FrameBuffer | None = None,
    ):
        self._take, self._fail, self._pause = take, fail, pause
        self._buffer = buffer or wire.FrameBuffer()
        self._next_turn: asyncio.Handle | None = None
        self._is_stopped = False
        self._then: Callable[[], None] | None = None

    def feed(self, data: bytes) -> None:
        if self._is_stopped:
            return
        if self._next_turn is None:
            self._take_turn(data)
        else:
            self._buffer.feed(data, 0)

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` when all received frames are handled."""
        if self._next_turn is None:
            then()
        else:
            self._then = then

    def stop(self) -> None:
        """Drop all further frames, received or not."""
        self._is_stopped = True
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def _take_turn(self, data: bytes = b"") -> None:
        was_paused, self._next_turn = self._next_turn is not None, None
        try:
            frames = self._buffer.feed(data, wire.MOST_AT_ONCE)
            for kind, channel, body in frames:
                self._take(kind, channel, body)
                if self._is_stopped:
                    return
        except ValueError as error:
            self.stop()
            self._fail(error)
            return
        if len(frames) == wire.MOST_AT_ONCE:
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
            if not was_paused:
                self._pause(True)
        elif was_paused:
            self._pause(False)
            if self._then is not None:
                self._then()
