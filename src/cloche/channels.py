"""One channel of the wire on an event loop, and frames that are handled in bounded turns.

The protocol is `cloche.init.wire`. `backends.init_link`, which reaches a sandbox, the client (`backends.cloche`) and
the server (`server.wire`) of a service are made of these.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from cloche.init import wire


class Link(Protocol):
    """Send the frames of a connection."""

    @property
    def is_full(self) -> bool:
        """Tell whether the other side has yet to read what was sent."""
        ...

    def send(self, data: bytes, /) -> None:
        """Send frames, soon."""
        ...

    async def drain(self) -> None:
        """Wait until the other side has read most of it."""
        ...


class Streams(ABC):
    """Carry the streams of one channel, whichever end this is. `closed` has the channel's result, or its error."""

    def __init__(self, number: int):
        self.number = number
        self.credit = wire.Credit()
        self._sendable = asyncio.Event()
        self.closed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def transmit(self, frame: bytes) -> None:
        """Send a frame, as fast as the other side reads."""

    @abstractmethod
    def take_data(self, stream: int, data: memoryview) -> None:
        """Take content that came, within the window."""

    @abstractmethod
    def take_end(self, stream: int) -> None:
        """Take note that nothing more comes on a stream."""

    async def send(self, stream: int, data: bytes | memoryview) -> bool:
        """Send all of `data`, as fast as it is granted; False where the channel was closed meanwhile."""
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
        """Wait until something of a stream may be sent, or the channel is closed; return how many bytes."""
        while self.credit.sendable(stream) <= 0 and not self.closed.done():
            self._sendable.clear()
            await self._sendable.wait()
        return self.credit.sendable(stream)

    async def settle(self, stream: int) -> None:
        """Wait until all that was sent has been consumed at the other end, or the channel is closed."""
        while self.credit.sendable(stream) < wire.WINDOW_BYTES and not self.closed.done():
            self._sendable.clear()
            await self._sendable.wait()

    def take(self, kind: int, body: bytes) -> None:
        """Take a frame about a stream. Raises WireError."""
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
        """Take note of the end of the channel."""
        self._sendable.set()
        if self.closed.done():
            return
        if error is None:
            self.closed.set_result(result)
        else:
            self.closed.set_exception(error)
            self.closed.exception()  # retrieved: nobody need wait for it


class Channel(Streams):
    """Be the end that has opened it. `on_data` gets each piece; who has consumed it grants as much again."""

    def __init__(self, link: Link, number: int):
        super().__init__(number)
        self._frames = link
        self.on_data: Callable[[int, Any], None] = lambda stream, data: self.grant(stream, len(data))
        self.on_end: Callable[[int], None] = lambda _: None

    def take_data(self, stream: int, data: memoryview) -> None:
        """Hand it to `on_data`."""
        self.on_data(stream, data)

    def take_end(self, stream: int) -> None:
        """Tell `on_end`."""
        self.on_end(stream)

    def grant(self, stream: int, count: int) -> None:
        """Let the other side send `count` bytes more of a stream, soon."""
        granted = self.credit.note_consumed(stream, count)
        if granted and not self.closed.done():
            self._frames.send(wire.grant_frame(self.number, stream, granted))

    async def transmit(self, frame: bytes) -> None:
        """Send a frame, and wait while the other side does not read."""
        self._frames.send(frame)
        if self._frames.is_full:
            await self._frames.drain()

    def send_at_once(self, stream: int, data: bytes) -> bool:
        """Send all of `data` if nothing that was sent before is still on its way; tell whether that was so."""
        is_free = self.credit.sendable(stream) == wire.WINDOW_BYTES and not self._frames.is_full
        if not is_free or len(data) > wire.MOST_DATA or self.closed.done():
            return False
        self.credit.note_sent(stream, len(data))
        self._frames.send(wire.data_frame(self.number, stream, data))
        return True

    def end(self, stream: int) -> None:
        """Say that nothing more comes on a stream."""
        if not self.closed.done():
            self._frames.send(wire.frame(wire.END, self.number, bytes((stream,))))


class FrameTurns:
    """Cut what comes into frames and hand them to `take`, at most `MOST_AT_ONCE` in one turn of the event loop.

    `pause` is called with whether reading must stop, and `fail` with the ValueError that `take` raised.
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
        """Take what came."""
        if self._is_stopped:
            return
        if self._next_turn is None:
            self._take_turn(data)
        else:
            self._buffer.feed(data, 0)

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` when everything that came is handled."""
        if self._next_turn is None:
            then()
        else:
            self._then = then

    def stop(self) -> None:
        """Drop what is left, and what comes."""
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
