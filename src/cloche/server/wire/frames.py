"""Frames and windows of the wire: what a binary frame says, and how much may be under way. No sockets here.

Each channel of a call, each way, begins with a window of `WINDOW` bytes. Who has sent so much waits for CREDIT, which
the receiver sends as it passes the content on. So what nobody takes stops its own call alone, and neither side holds
more than a window of it.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from ..problems import Refused
from ..sockets import BadMessage

VERSION = 1
HEADER = struct.Struct(">IBB")  # call, channel, kind
GRANT = struct.Struct(">I")
DATA, END, CREDIT = range(3)
IN, OUT, ERR, JSON = range(4)  # channels; IN is the client's, OUT and ERR are the service's, JSON is both ways
FROM_CLIENT, FROM_SERVICE = (IN, JSON), (OUT, ERR, JSON)
MOST_NUMBER = (1 << 32) - 1  # of a call
MOST_DATA = 1 << 16  # content of one binary frame
MOST_INLINE = 1 << 18  # JSON in a text frame of ours; more goes in pieces
WINDOW = 1 << 18
CREDIT_AT_ONCE = WINDOW // 4
MOST_CALLS = 64  # of one connection, at once
MOST_FIELDS = 32 << 20  # of a call, in pieces
STALL_S = 300.0  # a call whose client takes nothing for so long is ended

Send = Callable[[bytes], Awaitable[None]]


class Incoming:
    """Take one channel of the client's, and give credit as it is used."""

    def __init__(self, call: int, channel: int, send: Send):
        self._call, self._channel, self._send = call, channel, send
        self._pieces: deque[bytes] = deque()
        self._window, self._owed = WINDOW, 0
        self._changed = asyncio.Event()
        self._has_ended = False

    def take(self, data: bytes) -> None:
        """Take a piece. Raises BadMessage for more than the window, and after the end."""
        self._window -= len(data)
        if self._has_ended or self._window < 0:
            raise BadMessage(f"call {self._call}, channel {self._channel}: more than its window, or after its end")
        self._pieces.append(data)
        self._changed.set()

    def end(self) -> None:
        """Take note that nothing more comes."""
        self._has_ended = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what comes, until its end; a piece counts as used when the next one is asked for."""
        while True:
            while not self._pieces:
                if self._has_ended:
                    return
                self._changed.clear()
                await self._changed.wait()
            piece = self._pieces.popleft()
            yield piece
            await self._use(len(piece))

    async def _use(self, count: int) -> None:
        self._owed += count
        if self._owed >= CREDIT_AT_ONCE and not self._has_ended:
            owed, self._owed = self._owed, 0
            self._window += owed
            await self._send(HEADER.pack(self._call, self._channel, CREDIT) + GRANT.pack(owed))


class Outgoing:
    """Send one channel to the client, as far as it gives credit."""

    def __init__(self, call: int, channel: int, send: Send):
        self._call, self._channel, self._send = call, channel, send
        self._window = WINDOW
        self._room = asyncio.Event()

    def credit(self, count: int) -> None:
        """Take credit. Raises BadMessage for more than what was sent."""
        self._window += count
        if not count or self._window > WINDOW:
            raise BadMessage(f"call {self._call}, channel {self._channel}: credit for what was not sent")
        self._room.set()

    async def room(self) -> int:
        """Wait for credit and return how much there is. Raises Refused (409) where none comes for minutes."""
        try:
            async with asyncio.timeout(STALL_S):
                while self._window <= 0:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise Refused(409, "not-read", f"nothing of this call was read for {STALL_S:g} s") from None
        return self._window

    def note_sent(self, count: int) -> None:
        """Count what is sent otherwise; one such piece may be more than the window has left."""
        self._window -= count

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`, as fast as it is taken."""
        left = memoryview(data)
        while left:
            piece = left[: min(await self.room(), MOST_DATA)]
            self._window -= len(piece)
            await self._send(HEADER.pack(self._call, self._channel, DATA) + piece)
            left = left[len(piece) :]

    async def end(self) -> None:
        """Say that nothing more comes."""
        await self._send(HEADER.pack(self._call, self._channel, END))


def read_frame(frame: bytes) -> tuple[int, int, int, bytes]:
    """Return call, channel, kind and content of a binary frame of the client's. Raises BadMessage."""
    if len(frame) < HEADER.size:
        raise BadMessage(f"a binary frame of {len(frame)} bytes; its header has {HEADER.size}")
    call, channel, kind = HEADER.unpack_from(frame)
    data = frame[HEADER.size :]
    if kind > CREDIT or channel not in (FROM_SERVICE if kind == CREDIT else FROM_CLIENT):
        raise BadMessage(f"call {call}: there is no kind {kind} on channel {channel}")
    if len(data) > MOST_DATA or (kind == CREDIT and len(data) != GRANT.size) or (kind == END and data):
        raise BadMessage(f"call {call}: a frame of kind {kind} with {len(data)} bytes")
    return call, channel, kind, data
