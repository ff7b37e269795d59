"""The frames of one side of an HTTP/2 connection, and bounds on what that side may send. No I/O.

Theory of operation: `h2` follows the protocol frame by frame, and trusts that each costs little. So it gets frames that
were read here: of a known kind, of a bounded size, and a block of headers as a whole, without padding and priorities,
which have no meaning any more. What carries nothing and can be sent without end (pings, settings, resets) has a pace.
Of settings, those that are known remain, with a bound for the table of headers that this side is asked to keep. What
ends the connection (GOAWAY) is the reader's own to act on: for `h2` everything would be over. Forms are of RFC 9113.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..core.record import dataclass
from .sockets import Pace

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_FRAME_BYTES = 16_384  # which is what each side may send unasked
MOST_FRAGMENTS = 16  # of a block of headers
CONTROLS_PER_S, CONTROLS_AT_ONCE = 500.0, 1000.0
MOST_TABLE_BYTES = 4096

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER = struct.Struct("!HBBBI")
_SETTING = struct.Struct("!HI")
_TABLE_SIZE, _KNOWN_SETTINGS = 1, {1, 2, 3, 4, 5, 6, 8}
_PASSED = {DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE}
_CONTROLS = {RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION, PRIORITY}


class FrameError(Exception):
    """Report bytes that are not taken as HTTP/2; the connection cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Hold one frame; `HEADERS` with a whole block."""

    kind: int
    flags: int
    stream_id: int
    content: bytes

    def __bytes__(self) -> bytes:
        size = len(self.content)
        return _HEADER.pack(size >> 8, size & 0xFF, self.kind, self.flags, self.stream_id) + self.content


class FrameReader:
    """Read the frames of one side; the side that connects begins with a `preface`."""

    def __init__(self, *, has_preface: bool, most_block_bytes: int):
        self._buffer = bytearray()
        self._preface = PREFACE if has_preface else b""
        self._most_block_bytes = most_block_bytes
        self._block: Frame | None = None  # of headers, which goes on
        self._fragments = 0
        self._pace = Pace(CONTROLS_PER_S, CONTROLS_AT_ONCE)

    def feed(self, data: bytes, now: float) -> Iterator[Frame]:
        """Return the frames that are complete now, one by one. Raises FrameError."""
        self._buffer += data
        self._take_preface()
        while not self._preface and (frame := self._take()) is not None:
            if (taken := self._follow(frame, now)) is not None:
                yield taken

    def _take_preface(self) -> None:
        size = min(len(self._preface), len(self._buffer))
        if self._buffer[:size] != self._preface[:size]:
            raise FrameError("the connection does not begin as HTTP/2 does")
        self._preface = self._preface[size:]
        del self._buffer[:size]

    def _take(self) -> Frame | None:
        if len(self._buffer) < _HEADER.size:
            return None
        high, low, kind, flags, stream_id = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + (high << 8) + low
        if end - _HEADER.size > MOST_FRAME_BYTES:
            raise FrameError(f"a frame has more than {MOST_FRAME_BYTES} bytes")
        if len(self._buffer) < end:
            return None
        content = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return Frame(kind=kind, flags=flags, stream_id=stream_id & 0x7FFFFFFF, content=content)

    def _follow(self, frame: Frame, now: float) -> Frame | None:
        """Return what is to be done with a frame, if anything."""
        carries_nothing = frame.kind == DATA and not frame.content and not frame.flags & END_STREAM
        if (frame.kind in _CONTROLS or frame.kind > CONTINUATION or carries_nothing) and self._pace.wait_s(now) > 0:
            raise FrameError("there are too many frames that carry nothing")
        if self._block is not None or frame.kind == CONTINUATION:
            return self._continue(frame)
        if frame.kind == PUSH_PROMISE:
            raise FrameError("a pushed answer was not asked for")
        if frame.kind == HEADERS:
            return self._begin(frame)
        if frame.kind == SETTINGS and not frame.flags & ACK:
            return _with(frame, flags=0, content=_settings(frame.content))
        return frame if frame.kind in _PASSED else None

    def _begin(self, frame: Frame) -> Frame | None:
        content = _without_padding(frame)
        if frame.flags & PRIORITIZED:
            if len(content) < 5:
                raise FrameError("a frame is too short")
            content = content[5:]
        self._fragments = 1
        return self._grow(frame, content)

    def _continue(self, frame: Frame) -> Frame | None:
        block = self._block
        if block is None or frame.kind != CONTINUATION or frame.stream_id != block.stream_id:
            raise FrameError("a block of headers is broken off")
        self._fragments += 1
        return self._grow(_with(frame, flags=frame.flags & END_HEADERS | block.flags), block.content + frame.content)

    def _grow(self, frame: Frame, content: bytes) -> Frame | None:
        """Return the headers when they are complete, and keep them until then."""
        if len(content) > self._most_block_bytes or self._fragments > MOST_FRAGMENTS:
            raise FrameError(f"headers have more than {self._most_block_bytes} bytes or {MOST_FRAGMENTS} frames")
        flags = frame.flags & (END_STREAM | END_HEADERS)
        whole = Frame(kind=HEADERS, flags=flags, stream_id=frame.stream_id, content=content)
        if not flags & END_HEADERS:
            self._block = whole
            return None
        self._block = None
        _check_table_updates(content)
        return whole


def _with(frame: Frame, *, flags: int, content: bytes | None = None) -> Frame:
    content = frame.content if content is None else content
    return Frame(kind=frame.kind, flags=flags, stream_id=frame.stream_id, content=content)


def _without_padding(frame: Frame) -> bytes:
    if not frame.flags & PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    if padding >= len(frame.content):
        raise FrameError("a frame has more padding than content")
    return frame.content[1 : len(frame.content) - padding]


def _settings(content: bytes) -> bytes:
    """Return the known settings."""
    if len(content) % _SETTING.size:
        raise FrameError("a frame of settings is cut off")
    rows = [row for row in _SETTING.iter_unpack(content) if row[0] in _KNOWN_SETTINGS]
    bounds = {_TABLE_SIZE: MOST_TABLE_BYTES}
    return b"".join(_SETTING.pack(key, min(value, bounds.get(key, value))) for key, value in rows)


def _check_table_updates(block: bytes) -> None:
    """Refuse more than the two changes of the table's size that a block may begin with (RFC 7541 section 4.2)."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        at, count = _end_of_integer(block, at), count + 1
        if count > 2:
            raise FrameError("a block of headers changes the size of its table again and again")


def _end_of_integer(block: bytes, at: int) -> int:
    if block[at] & 0x1F == 0x1F:
        at += 1
        while at < len(block) and block[at] & 0x80:
            at += 1
    return at + 1
