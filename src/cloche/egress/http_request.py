"""The valid forms of an HTTP/1 request, and its new text. No I/O.

Theory of operation: rules are about a host, so the server must read the same host as this parser. Attacks make both
read differently: two lengths, two hosts, unusual line ends. So a head is refused for any form on which programs differ,
is parsed by h11, checked, and written anew from its parts: no byte of it goes upstream as it came, nor does the framing
of a body in chunks. The Host header is written from the decided host. Forms are those of RFC 9112.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import h11

from ..core.record import dataclass

MOST_HEAD_BYTES = 64 << 10
MOST_HEADERS = 128
PORT, TLS_PORT = 80, 443  # that a Host without a port means
MOST_SHOWN = 100  # characters of a guest's in a sentence
ANOTHER_HOST = "open a separate connection for each name"

_END = b"\r\n\r\n"
# Control characters, of which HT alone may stand in a head, CR without LF, and LF without CR.
_ILLEGAL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?=[^\n])")
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.[01]")
_ABSOLUTE = re.compile(r"(http|https)://([^/?#]*)([/?].*)?", re.IGNORECASE)
LENGTH = re.compile(rb"0|[1-9][0-9]{0,17}")
# Headers of which there is one at most. With an underscore for the hyphen they are the same ones to some servers.
_SINGLE = (b"host", b"content-length", b"transfer-encoding", b"upgrade")
_CONNECTION_OPTIONS = {b"close", b"keep-alive", b"upgrade", b"te"}
# Host is written anew; the others are for a proxy between the guest and us, which there is not.
_OF_THE_BODY = (b"content-length", b"transfer-encoding", b"expect")
_NOT_PASSED = (b"host", b"proxy-connection", b"proxy-authorization")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Hold what edits see of a request: its method, its target (a path with its query, or `*`), and its headers.

    With `signing` the whole body is read, and headers that depend on it are added.
    """

    method: bytes
    target: str
    headers: Headers
    signing: Signing | None = None

    @property
    def text(self) -> bytes:
        """Return target and headers, to be searched."""
        return b"\n".join((self.target.encode("ascii", "replace"), *(b": ".join(header) for header in self.headers)))


class Signing(Protocol):
    """Return the headers of a request that depend on its whole body, which has `most_bytes` at most."""

    most_bytes: int

    def headers(self, body: bytes) -> Headers:
        """Return the headers to add, for the body that goes upstream. Raises Rejected."""
        ...


EditHead = Callable[[RequestHead], RequestHead]


class Rejected(Exception):
    """Report a request that is not passed on; `status` is that of the answer.

    `what` is the clause for the guest and the table: the request in a few words, that it is not allowed, and `why`.
    """

    def __init__(self, status: int, what: str, why: str = ""):
        self.status, self.what = status, f"{what} is not allowed" + (f"; {why}" if why else "")
        super().__init__(self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget:
    """Say whom requests of a connection are for, and whether they go there by a proxy of the operator's.

    `is_tls`: they came in TLS. `edit` gets the head of each, and returns the one for upstream, of the same method; it
    raises Rejected.
    """

    host: str
    port: int
    is_proxied: bool = False
    is_tls: bool = False
    edit: EditHead | None = None

    @property
    def authority(self) -> str:
        """Return host and port as a client writes them."""
        return self.host if self.port == (TLS_PORT if self.is_tls else PORT) else f"{self.host}:{self.port}"

    def is_meant_by(self, authority: str) -> bool:
        """Say whether a Host, or the authority of a target, is this place."""
        host, colon, port = authority.lower().partition(":")
        return host.removesuffix(".") + colon + port in (self.authority, f"{self.host}:{self.port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """Hold one request: its head as it goes upstream, and what its answer and its connection depend on.

    `edited` is the same head for the edits of its body and its answer. `awaits_continue`: its body comes after a 100.
    """

    method: bytes
    head: bytes
    is_upgrade: bool
    is_last: bool
    edited: RequestHead
    awaits_continue: bool = False

    def head_for(self, length: int, added: Headers = ()) -> bytes:
        """Return the head for a body of this many bytes that is there already, with these headers added."""
        line, *headers = self.head[: -len(_END)].split(b"\r\n")
        kept = [header for header in headers if header.partition(b":")[0].lower() not in _OF_THE_BODY]
        if not length and not added and len(kept) == len(headers):  # a request without any body
            return self.head
        kept += [b"%b: %b" % header for header in added]
        return b"\r\n".join((line, *kept, b"Content-Length: %d" % length)) + _END


class HeadFinder:
    """Find the end of the head at the beginning of a growing buffer, looking at each byte once.

    An invalid head is reported at its first invalid byte, without waiting for its end.
    """

    def __init__(self) -> None:
        self._searched = 0
        self._has_line = False

    def find(self, data: bytearray) -> int:
        """Return where the head ends, 0 while it does not. Raises Rejected."""
        # What marks a place may have begun in the bytes before.
        end = data.find(_END, max(0, self._searched - len(_END) + 1))
        end = end + len(_END) if end >= 0 else 0
        stop, start = end or len(data), max(0, self._searched - 1)
        self._searched = len(data)
        if illegal := _ILLEGAL.search(data, start, stop):
            raise Rejected(400, f"a request with {_named(illegal[0])} in its header")
        if stop > MOST_HEAD_BYTES:
            raise Rejected(431, f"a request with a header section of more than {MOST_HEAD_BYTES} bytes")
        if not self._has_line and (line_end := data.find(b"\r\n", start, stop)) >= 0:
            self._has_line = True
            if not _REQUEST_LINE.fullmatch(data, 0, line_end):
                raise Rejected(400, f"data that is not a request of HTTP/1.0 or HTTP/1.1: {shown(data[:line_end])}")
        return end


def _named(character: bytes) -> str:
    names = {b"\r": "a CR without LF", b"\n": "an LF without CR", b"\0": "a NUL"}
    return names.get(character, "a control character")


def shown(data: bytes | bytearray) -> str:
    """Return a guest's bytes as text that may stand anywhere."""
    text = bytes(data[:MOST_SHOWN]).decode("latin-1")
    return (
        '"'
        + "".join(
            character if " " <= character <= "~" and character not in '"\\' else f"\\x{ord(character):02x}"
            for character in text
        )
        + '"'
    )


def read_request(head: bytes, target: RequestTarget) -> tuple[HttpRequest, Body]:
    """Return a request that may go upstream, and the reader of its body. Raises Rejected for any other.

    `head` is what `HeadFinder` found, with its end.
    """
    single = _read_lines(head[: -len(_END)].split(b"\r\n")[1:])
    is_chunked = _is_chunked(single)
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
    connection.receive_data(head)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise Rejected(400, f"a malformed request: {shown(str(error).encode())}") from None
    assert isinstance(event, h11.Request)  # noqa: S101 - a whole head is one, or the error above
    if is_chunked and event.http_version == b"1.0":
        raise Rejected(400, "a request of HTTP/1.0 with a Transfer-Encoding")
    return _decide(event, single, target), Body(connection, is_chunked=is_chunked)


def _read_lines(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    """Check the form of a head's lines; return, as they were written, the headers that there may be one of."""
    if len(lines) > MOST_HEADERS:
        raise Rejected(431, f"a request with more than {MOST_HEADERS} headers")
    single: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if line[:1] in (b" ", b"\t"):
            raise Rejected(400, "a request with a header that continues on the next line")
        if not colon or name != name.strip():
            raise Rejected(400, f"a request with a line that is not a header: {shown(line)}")
        key = name.lower().replace(b"_", b"-")
        if key not in _SINGLE:
            continue
        if b"_" in name:
            raise Rejected(400, f"a request with the header {shown(name)}, which some servers read as {key.decode()}")
        if key in single:
            raise Rejected(400, f"a request with several headers {key.decode()}")
        single[key] = value.strip(b" \t")
    return single


def _is_chunked(single: Mapping[bytes, bytes]) -> bool:
    """Tell whether the body is in chunks; refuse every framing that programs read in two ways."""
    length, coding = single.get(b"content-length"), single.get(b"transfer-encoding")
    if length is not None and coding is not None:
        raise Rejected(400, "a request with both Content-Length and Transfer-Encoding")
    if length is not None and not LENGTH.fullmatch(length):
        raise Rejected(400, f"a request with the Content-Length {shown(length)}")
    if coding is not None and coding.lower() != b"chunked":
        raise Rejected(400, f"a request with the Transfer-Encoding {shown(coding)}")
    return coding is not None


def _decide(event: h11.Request, single: Mapping[bytes, bytes], place: RequestTarget) -> HttpRequest:
    """Check a request's target, and write the request anew."""
    if event.method.upper() == b"CONNECT":
        raise Rejected(403, f"CONNECT to {shown(event.target)}")
    path = _path(event, place)
    host = single.get(b"host")
    if host is not None and not place.is_meant_by(host.decode("latin-1")):
        raise Rejected(403, f"a request for {shown(host)}", ANOTHER_HOST)
    options = _options(event)
    is_upgrade = b"upgrade" in single and _is_upgrade(event, single, options)
    is_old = event.http_version == b"1.0"
    edited = RequestHead(method=event.method, target=path, headers=event.headers.raw_items())
    if place.edit is not None:
        edited = place.edit(edited)
    headers = [header for header in edited.headers if header[0].lower() not in _NOT_PASSED]
    if is_old:  # what keeps a connection open was never one thing before HTTP/1.1
        headers = [*(header for header in headers if header[0].lower() != b"connection"), (b"Connection", b"close")]
    return HttpRequest(
        method=event.method,
        head=_write(event, _target(edited.target, place), [(b"Host", place.authority.encode()), *headers]),
        is_upgrade=is_upgrade,
        is_last=is_old or b"close" in options,
        edited=edited,
        awaits_continue=not is_old and (b"expect", b"100-continue") in [(n, v.lower()) for n, v in event.headers],
    )


def _path(event: h11.Request, place: RequestTarget) -> str:
    """Return the path of a target with its query, or `*`. Raises Rejected for another host."""
    target = event.target.decode("ascii")
    if absolute := _ABSOLUTE.fullmatch(target):
        if not place.is_meant_by(absolute[2]) or (absolute[1].lower() == "https") != place.is_tls:
            raise Rejected(403, f"a request for {shown(event.target)}", ANOTHER_HOST)
        path = absolute[3] or ""
        return path if path.startswith("/") else f"/{path}"
    if not (target.startswith("/") or (target == "*" and event.method == b"OPTIONS")):
        raise Rejected(403, f"a request for {shown(event.target)}", ANOTHER_HOST)
    return target


def _target(path: str, place: RequestTarget) -> str:
    """Return the target for upstream: a path, or all of it for a proxy."""
    return f"http://{place.authority}{path.removeprefix('*')}" if place.is_proxied else path


def _options(event: h11.Request) -> set[bytes]:
    """Return what Connection says; refuse names of headers, which the next program would take out of the request."""
    values = b",".join(value for name, value in event.headers if name == b"connection")
    options = {option.strip(b" \t").lower() for option in values.split(b",")} - {b""}
    if b"http2-settings" in options:
        raise Rejected(403, "an upgrade to h2c")
    if unknown := options - _CONNECTION_OPTIONS:
        raise Rejected(400, f"a request with the Connection {shown(min(unknown))}")
    return options


def _is_upgrade(event: h11.Request, single: Mapping[bytes, bytes], options: set[bytes]) -> bool:
    """Say that a request asks for a WebSocket as RFC 6455 does; refuse every other protocol and form."""
    has_body = single.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in single
    protocol = single[b"upgrade"].lower()
    if protocol != b"websocket":
        raise Rejected(403, f"an upgrade to {shown(protocol)}")
    if event.method != b"GET" or event.http_version != b"1.1" or has_body or b"upgrade" not in options:
        raise Rejected(400, "a malformed upgrade to a WebSocket")
    return True


def _write(event: h11.Request, target: str, headers: Headers) -> bytes:
    line = b"%b %b HTTP/%b\r\n" % (event.method, target.encode("ascii"), event.http_version)
    return line + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"


class Body:
    """Turn the bytes of a request's body into those to send; the bytes after it are `rest`, once it `has_ended`."""

    def __init__(self, connection: h11.Connection, *, is_chunked: bool):
        self._connection, self.is_chunked = connection, is_chunked
        self.has_ended = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send, without extensions of chunks and trailers. Raises Rejected."""
        content = self.read(data)
        return self._in_chunks(content) if self.is_chunked else content

    def read(self, data: bytes) -> bytes:
        """Return the content alone. Raises Rejected."""
        if data:  # h11 takes nothing for the end of the connection
            self._connection.receive_data(data)
        pieces = []
        try:
            while isinstance(event := self._connection.next_event(), h11.Data):
                pieces.append(event.data)
        except h11.RemoteProtocolError as error:
            raise Rejected(400, f"a request with a malformed body: {shown(str(error).encode())}") from None
        if isinstance(event, h11.EndOfMessage):
            self.has_ended, self.rest = True, self._connection.trailing_data[0]
        return b"".join(pieces)

    def _in_chunks(self, content: bytes) -> bytes:
        chunk = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
        return chunk + b"0\r\n\r\n" if self.has_ended else chunk
