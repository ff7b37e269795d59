"""Streams of a live sandbox, as the caller reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cloche.channels import add_piece
from cloche.core.errors import InvalidRequest


class Granting(Protocol):
    """Be a channel that receives content under flow control."""

    def grant(self, stream: int, count: int, /) -> None:
        """Let the sender send `count` more bytes on a stream."""
        ...


class ByteStream:
    """Read one stream piece by piece; unread data makes the sender wait."""

    def __init__(self, channel: Granting, number: int):
        self._channel, self._number = channel, number
        self._pieces: deque[bytes | bytearray] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._taker: Callable[[bytes], None] | None = None
        self._has_ended = False
        self.is_read = False  # a reader has begun

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def put(self, data: bytes) -> None:
        """Add a piece; the sender never exceeds the granted window."""
        if self._taker is not None:
            self._channel.grant(self._number, len(data))
            self._taker(data)
            return
        add_piece(self._pieces, data)
        self._wake()

    def divert(self, take: Callable[[bytes], None]) -> None:
        """Pass unread data, and all further data, to `take` in place of a reader."""
        self._taker = take
        pieces, self._pieces = self._pieces, deque()
        for piece in pieces:
            self.put(bytes(piece))
        self._wake()

    def put_end(self) -> None:
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes, at most `most`; empty at the end."""
        if self._taker is not None:
            raise InvalidRequest("this stream is read by a call of wait; its result has the output")
        self.is_read = True
        while not self._pieces:
            if self._has_ended:
                return b""
            if self._waiting is not None and not self._waiting.done():
                raise InvalidRequest("this stream is already being read")
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        piece = self._pieces.popleft()
        if len(piece) > most:
            self._pieces.appendleft(piece[most:])
            piece = piece[:most]
        self._channel.grant(self._number, len(piece))
        return bytes(piece)

    async def read_all(self, max_bytes: int) -> bytes:
        """Return all content until the end, or until it exceeds `max_bytes`."""
        content = bytearray()
        while len(content) <= max_bytes and (piece := await self.read()):
            content += piece
        return bytes(content)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[bytes]:
        while piece := await self.read():
            yield piece


class EmptyStream:
    """Be a stream without content, whose output another client reads."""

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return nothing."""
        del most
        return b""

    async def read_all(self, max_bytes: int) -> bytes:
        """Return nothing."""
        del max_bytes
        return b""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[bytes]:
        if piece := await self.read():
            yield piece
