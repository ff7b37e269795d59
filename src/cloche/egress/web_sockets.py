"""Web sockets to a host with a secret: values in its messages become placeholders, the guest's are looked at. No I/O.

Theory of operation: a message is one frame or several, and other frames (ping, pong, close) may come between them. A
value may lie across frames, so the last bytes of a frame that goes on may have to wait for the next one. The length of
a frame stands at its beginning: one that ends its message passes with what waits, in one frame, as its bytes come. One
that does not end it passes without its last bytes, which follow in a frame of their own as soon as they are known; the
few that may begin a value wait. So between the frames that pass there may always be others, and the end of a message
brings all of it. A compressed message could not be searched, so no extension is offered. Forms are of RFC 6455.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ..core.record import dataclass, replace
from .http_answer import AnswerEdit, AnswerRefused
from .http_request import Headers, RequestHead
from .redaction import StreamRedactor
from .sockets import Pace

SWITCHED = 101
EXTENSIONS = b"sec-websocket-extensions"
MOST_CONTROL_BYTES = 125
EMPTY_PER_S, EMPTY_AT_ONCE = 500.0, 1000.0  # frames that carry nothing
_CONTINUATION, _MESSAGES, _CONTROLS = 0, (1, 2), (8, 9, 10)
_FINAL, _MASKED = 0x80, 0x80
_MALFORMED = "the frames of a web socket are malformed"


def is_web_socket(head: RequestHead) -> bool:
    """Tell whether a request asks for a web socket."""
    return any(name.lower() == b"upgrade" for name, _ in head.headers)


def without_extensions(head: RequestHead) -> RequestHead:
    """Return a request's head that offers no extensions of web sockets: what they change could not be searched."""
    return replace(head, headers=[header for header in head.headers if header[0].lower() != EXTENSIONS])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Hold a part of a frame: its content, and whether the frame begins and ends with it."""

    opcode: int
    is_final: bool
    length: int
    content: bytes
    begins: bool
    ends: bool


class _FrameReader:
    """Read frames, and check that each may follow the one before; the client's are masked."""

    def __init__(self, *, are_masked: bool, clock: Callable[[], float]):
        self._are_masked, self._clock = are_masked, clock
        self._buffer = bytearray()
        self._opcode = self._left = self._length = 0
        self._is_final = self._is_inside = self._begins = False  # inside of a message; at the beginning of a frame
        self._is_in_frame = False
        self._mask = b""
        self._pace = Pace(EMPTY_PER_S, EMPTY_AT_ONCE)

    def feed(self, data: bytes) -> Iterator[_Piece]:
        """Return what has come of frames; of control frames the whole. Raises AnswerRefused."""
        self._buffer += data
        while self._is_in_frame or self._read_header():
            is_whole = len(self._buffer) >= self._left
            if not is_whole and (self._opcode in _CONTROLS or not self._buffer):
                return
            yield self._take(min(self._left, len(self._buffer)))

    def _take(self, size: int) -> _Piece:
        content = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._are_masked:
            at = (self._length - self._left) % 4
            content = _unmasked(content, self._mask[at:] + self._mask[:at])
        self._left -= size
        begins, self._begins = self._begins, False
        self._is_in_frame = self._left > 0
        return _Piece(
            opcode=self._opcode, is_final=self._is_final, length=self._length, content=content, begins=begins,
            ends=not self._is_in_frame,
        )  # fmt: skip

    def _read_header(self) -> bool:
        """Begin the next frame, if its header is there."""
        if len(self._buffer) < 2:
            return False
        first, second = self._buffer[:2]
        more = {126: 2, 127: 8}.get(second & 0x7F, 0)
        size = 2 + more + 4 * self._are_masked
        if bool(second & _MASKED) != self._are_masked:
            raise AnswerRefused(_MALFORMED)
        if len(self._buffer) < size:
            return False
        length = int.from_bytes(self._buffer[2 : 2 + more], "big") if more else second & 0x7F
        self._mask = bytes(self._buffer[size - 4 : size])
        del self._buffer[:size]
        self._begin(first & 0x7F, length, is_final=bool(first & _FINAL))
        return True

    def _begin(self, opcode: int, length: int, *, is_final: bool) -> None:
        """Note a frame. Its opcode has the bits of extensions, which must not be set."""
        is_control = opcode in _CONTROLS
        is_next = opcode == _CONTINUATION if self._is_inside else opcode in _MESSAGES
        is_too_long = length >> 63 or (is_control and length > MOST_CONTROL_BYTES)
        if is_too_long or not (is_next or (is_control and is_final)):
            raise AnswerRefused(_MALFORMED)
        if (is_control or not length) and self._pace.wait_s(self._clock()) > 0:
            raise AnswerRefused("a web socket has too many frames that carry nothing")
        if not is_control:
            self._is_inside = not is_final
        self._opcode, self._is_final, self._length, self._left = opcode, is_final, length, length
        self._is_in_frame = self._begins = True


def _unmasked(content: bytes, mask: bytes) -> bytes:
    size = len(content)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(content, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")


def _frame(opcode: int, length: int, *, is_final: bool) -> bytes:
    """Return the header of a frame of the server's."""
    first = opcode | (_FINAL if is_final else 0)
    if length <= MOST_CONTROL_BYTES:
        return struct.pack("!BB", first, length)
    return struct.pack("!BBH", first, 126, length) if length < 1 << 16 else struct.pack("!BBQ", first, 127, length)


class MessageRedaction:
    """Replace values in the messages of a host; each gets a redactor, which knows the values that there are by then."""

    def __init__(self, new_redactor: Callable[[], StreamRedactor], clock: Callable[[], float]):
        self._frames = _FrameReader(are_masked=False, clock=clock)
        self._new_redactor = new_redactor
        self._redactor = new_redactor()
        self._opcode = 0  # of the next frame that is written
        self._room = 0  # in the frame that was begun
        self._rest = bytearray()  # that follows it in another one

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on. Raises AnswerRefused for what is no web socket."""
        return b"".join(part for piece in self._frames.feed(data) for part in self._passed(piece))

    def end(self) -> bytes:
        """Return nothing more: what waits belongs to a message that has no end."""
        return b""

    def _passed(self, piece: _Piece) -> Iterator[bytes]:
        if piece.opcode in _CONTROLS:
            yield _frame(piece.opcode, piece.length, is_final=True)
            yield self._redactor.whole(piece.content)
            return
        if piece.begins:
            yield from self._begin(piece)
        content = self._redactor.feed(piece.content)
        if piece.ends and piece.is_final:
            content += self._redactor.end()
        yield content[: self._room]
        self._rest += content[self._room :]
        self._room = max(0, self._room - len(content))
        if piece.ends and self._rest:
            yield self._header(len(self._rest), is_final=False)
            yield bytes(self._rest)
            self._rest.clear()

    def _begin(self, piece: _Piece) -> Iterator[bytes]:
        """Begin the frame for one that came: all of it, or what surely needs not wait."""
        if piece.opcode in _MESSAGES:
            self._opcode, self._redactor = piece.opcode, self._new_redactor()
        length = self._redactor.held_bytes + piece.length
        self._room = length if piece.is_final else max(0, length - self._redactor.most_held_bytes)
        if self._room or piece.is_final:
            yield self._header(self._room, is_final=piece.is_final)

    def _header(self, length: int, *, is_final: bool) -> bytes:
        opcode, self._opcode = self._opcode, _CONTINUATION
        return _frame(opcode, length, is_final=is_final)


class MessageWatch:
    """Look at the messages of a guest, which pass as they are; `look` gets their text, `tail_bytes` of it twice."""

    def __init__(self, look: Callable[[bytes], None], tail_bytes: int, clock: Callable[[], float]):
        self._frames = _FrameReader(are_masked=True, clock=clock)
        self._look, self._tail_bytes = look, tail_bytes
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return the same bytes. Raises AnswerRefused for what is no web socket."""
        texts = []
        for piece in self._frames.feed(data):
            if piece.opcode not in _CONTROLS:
                texts.append((b"" if piece.begins and piece.opcode in _MESSAGES else self._tail) + piece.content)
                self._tail = texts[-1][-self._tail_bytes :]
            elif piece.content:
                texts.append(piece.content)
        if texts:
            self._look(b"\n".join(texts))
        return data

    def end(self) -> bytes:
        """Return nothing more."""
        return b""


class WebSocketAnswer:
    """Edit the answer to a request for a web socket: its messages, or what the host says instead."""

    def __init__(self, edit: AnswerEdit, messages: MessageRedaction):
        self._edit, self._messages, self._is_switched = edit, messages, False

    @property
    def keeps_length(self) -> bool:
        return self._is_switched or self._edit.keeps_length

    def head(self, status: int, headers: Headers) -> Headers:
        """Return the headers. Raises AnswerRefused for a web socket that cannot be searched."""
        self._is_switched = status == SWITCHED
        if self._is_switched and any(name.lower() == EXTENSIONS for name, _ in headers):
            raise AnswerRefused("the host's web socket has extensions, which nobody asked for")
        return self._edit.head(status, headers)

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on. Raises AnswerRefused."""
        return self._messages.feed(data) if self._is_switched else self._edit.feed(data)

    def end(self) -> bytes:
        """Return the rest. Raises AnswerRefused."""
        return self._messages.end() if self._is_switched else self._edit.end()
