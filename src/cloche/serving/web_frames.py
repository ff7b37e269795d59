"""The frames of a web socket in turns: a package parses all that it gets at once, so it gets a few frames at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cloche.core.web_frames import FrameEnds

MOST_FRAMES = 512  # of one connection, in one turn of the event loop
MOST_UNREAD_BYTES = 1 << 16  # that were not passed on; nothing more is read then
HEAD_END = b"\r\n\r\n"  # of the request


class WebFrameTurns:
    """Pass what a server receives to `take`: the head of the request, then `most` frames in a turn of the event loop.

    The transport is read again unless `is_paused`, which tells whether the package has paused it.
    """

    def __init__(
        self, transport: asyncio.Transport, take: Callable[[bytes], None], *, is_paused: Callable[[], bool],
        most: Callable[[], int] = lambda: MOST_FRAMES,
    ):  # fmt: skip
        self._transport, self._take, self._is_paused, self._most = transport, take, is_paused, most
        self._unread, self._ends, self._has_head = bytearray(), FrameEnds(), False
        self._next_turn: asyncio.Handle | None = None

    def feed(self, data: bytes) -> None:
        """Take data that was received."""
        self._unread += data
        if len(self._unread) > MOST_UNREAD_BYTES:
            self._transport.pause_reading()
        if self._next_turn is None:
            self._take_turn()

    def stop(self) -> None:
        """Drop what was not passed on."""
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _take_turn(self) -> None:
        self._next_turn = None
        if end := self._end_of_turn():
            data = bytes(self._unread[:end])
            del self._unread[:end]
            self._take(data)
        if end and self._unread:
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
        elif not self._is_paused():
            self._transport.resume_reading()

    def _end_of_turn(self) -> int:
        if self._has_head:
            return self._ends.after(self._unread, self._most())
        head = self._unread.find(HEAD_END) + len(HEAD_END)
        self._has_head = head >= len(HEAD_END)
        if not self._has_head and len(self._unread) > MOST_UNREAD_BYTES:
            self._transport.abort()
        return head if self._has_head else 0
