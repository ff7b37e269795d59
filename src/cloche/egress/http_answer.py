"""The answer to a request: where it ends, and its text for the guest where it is edited. No I/O.

Theory of operation: answers come from an allowed host. `AnswerReader` follows one to find its end: only then is the
next request decided, and only the answer to an upgrade to WebSocket can end HTTP on a connection. It passes everything
on as it came. `EditedAnswer` writes the head anew from its parts, and so the framing of the body, since what an edit
replaces may lie across chunks.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal, Protocol

import h11

from cloche.core.record import dataclass

from .http_request import Headers, HttpRequest

MOST_ANSWER_HEAD_BYTES = 256 << 10
MOST_ANSWER_LINES = 1000  # of a head, which is parsed at once: that takes time with their number
_WITHOUT_BODY = (204, 304)
_FRAMING = (b"content-length", b"transfer-encoding")


class AnswerRefused(OSError):
    """Report an answer that cannot be searched for values, with a sentence in `strerror`."""

    def __init__(self, sentence: str):
        super().__init__(0, sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """Hold an answer, in JSON, that is given here in place of the host."""

    status: int
    body: bytes
    content_type: str = "application/json"


# How far the answer to a request is: it goes on; it is complete; it is complete, and nothing may follow on this
# connection; what follows is no HTTP; it ends with the connection, as far as we can tell.
Progress = Literal["open", "complete", "last", "switched", "unknown"]


class AnswerReader:
    """Follow the bytes of an answer, which others pass on as they are, to know how far it is."""

    def __init__(self, request: HttpRequest):
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_ANSWER_HEAD_BYTES)
        upgrade = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")] if request.is_upgrade else []
        # What was sent matters to h11 only as far as the form of the answer depends on it.
        self._connection.send(h11.Request(method=request.method, target="/", headers=[(b"Host", b"-"), *upgrade]))
        self._connection.send(h11.EndOfMessage())
        self.progress: Progress = "open"
        self.has_begun = self.is_chunked = self._can_follow = False
        self._left = 0  # of a body whose length is known
        self._lines = 0  # of a head that goes on

    @property
    def is_counted(self) -> bool:
        """Tell whether the next bytes belong to a body and only their number matters."""
        return self._left > 0

    @property
    def is_switched(self) -> bool:
        """Tell whether what follows is no HTTP."""
        return self.progress == "switched"

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, at least one, and return those to pass on."""
        self.has_begun = True
        if self.is_counted:
            self._count(data)
        elif self.progress == "open":
            try:
                self._receive(data)
            except h11.RemoteProtocolError:
                self.progress, self._left = "unknown", 0
        elif self.progress != "switched":
            self.progress = "unknown"  # nobody asked for more
        return data

    def end(self) -> bytes:
        """Take note of the end of the connection, and return what remains to be passed on."""
        return b""

    def _take(self, event: h11.Event) -> None:
        """Take an event; for those who write the answer anew."""

    def _count(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left <= 0:
            self.progress = "complete" if self._left == 0 and self._can_follow else "last"

    def _receive(self, data: bytes) -> None:
        if self._connection.their_state is h11.SEND_RESPONSE:
            self._lines += data.count(b"\n")
        self._connection.receive_data(data)
        self._follow()
        if self._lines > MOST_ANSWER_LINES:
            raise h11.RemoteProtocolError("the header has too many lines")

    def _follow(self) -> None:
        while (event := self._connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            self._lines = 0
            self._take(event)  # type: ignore[arg-type]  # the two markers are no events
            if isinstance(event, h11.Response):
                self._take_head(event)
            if isinstance(event, h11.Data):
                self._left = max(0, self._left - len(event.data))
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                self.progress = "switched"
                return
            if isinstance(event, h11.EndOfMessage):
                can_follow = self._connection.their_state is h11.DONE and not self._connection.trailing_data[0]
                self.progress, self._left = "complete" if can_follow else "last", 0
                return

    def _take_head(self, event: h11.Response) -> None:
        """Note how the body comes. Of several equal lengths h11 has left one; where there is no body, it ends next."""
        headers = dict(event.headers)
        self.is_chunked = b"transfer-encoding" in headers
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in event.headers)
        self._can_follow = event.http_version == b"1.1" and not closes
        self._left = 0 if self.is_chunked else int(headers.get(b"content-length", b"0"))


class AnswerEdit(Protocol):
    """Change an answer, of any version of HTTP. Where it `keeps_length`, its body is as long as before."""

    @property
    def keeps_length(self) -> bool: ...

    def head(self, status: int, headers: Headers, /) -> Headers:
        """Return the headers, also of an informational answer and of trailers. Raises AnswerRefused."""
        ...

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of the body so far. Raises AnswerRefused."""
        ...

    def end(self) -> bytes:
        """Return the rest of the body. Raises AnswerRefused."""
        ...


class EditedAnswer(AnswerReader):
    """Follow an answer, and write it anew as it is edited."""

    def __init__(self, request: HttpRequest, edit: AnswerEdit):
        super().__init__(request)
        self.edit, self._has_body, self._is_upgrade = edit, request.method != b"HEAD", request.is_upgrade
        self._is_framed = False
        self._written: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, and return those to pass on. Raises AnswerRefused."""
        if self.is_switched:
            return self.edit.feed(data)
        if self.progress != "open":
            self.progress = "last"  # nobody asked for more
            return b""
        if self.is_counted and data:
            self._take_counted(data)
        else:
            self._read(data)
        written, self._written = b"".join(self._written), []
        self.has_begun = self.has_begun or bool(written)
        return written

    def end(self) -> bytes:
        """Take note of the end of the connection, which ends some answers. Raises AnswerRefused for half an answer."""
        if self.is_counted:
            raise AnswerRefused("the host's answer ends before its body does")
        return self.feed(b"") if self.progress == "open" and self.has_begun else b""

    def _read(self, data: bytes) -> None:
        try:
            self._receive(data)
        except h11.RemoteProtocolError:  # whose words may be the answer's own
            raise AnswerRefused("the host's answer is malformed") from None
        if self.is_switched:  # what came behind the head is of the other protocol
            self._written.append(self.edit.feed(self._connection.trailing_data[0]))

    def _take_counted(self, data: bytes) -> None:
        """Take bytes of a body whose length is known, of which nothing need be parsed: that costs a fifth of all."""
        content = data[: self._left]
        self._count(data)
        self._write_data(self.edit.feed(content))
        if not self.is_counted:
            self._end_body()

    def _take(self, event: h11.Event) -> None:
        """Write what an event stands for."""
        if isinstance(event, h11.InformationalResponse | h11.Response):
            self._write_head(event)
        elif isinstance(event, h11.Data):
            self._write_data(self.edit.feed(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._end_body()

    def _end_body(self) -> None:
        self._write_data(self.edit.end())
        if self._is_framed:
            self._written.append(b"0\r\n\r\n")

    def _write_data(self, content: bytes) -> None:
        if content:
            self._written.append(b"%x\r\n%b\r\n" % (len(content), content) if self._is_framed else content)

    def _write_head(self, event: h11.InformationalResponse | h11.Response) -> None:
        if event.status_code == 101 and not self._is_upgrade:
            raise AnswerRefused("the host changes to another protocol, which nobody asked for")
        has_body = self._has_body and event.status_code >= 200 and event.status_code not in _WITHOUT_BODY
        headers = self.edit.head(event.status_code, event.headers.raw_items())
        if has_body and not self.edit.keeps_length:
            headers = [header for header in headers if header[0].lower() not in _FRAMING]
            headers.append((b"Transfer-Encoding", b"chunked"))
        self._is_framed = has_body and any(name.lower() == b"transfer-encoding" for name, _ in headers)
        head = f"HTTP/1.1 {event.status_code} {reason_of(event.status_code)}\r\n".encode()
        self._written.append(head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n")


def reason_of(status: int) -> str:
    """Return the usual words of a status: those of the host may be anything."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
