"""HTTP/1.1 that takes almost anything, as some servers do, so that what a proxy lets through is acted on.

A line may end with a bare line feed, a name may have a space behind it, of two lengths the last one counts, and
`Transfer-Encoding` wins when it says "chunked" anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from .streams import Stream

HEAD_BYTES = 1 << 17
BODY_BYTES = 1 << 26


@dataclass(slots=True)
class Request:
    """A request as it was read; `host` is without the port, `path` without the query."""

    method: str
    target: str
    version: str
    headers: dict[str, str]
    body: bytes
    address: str
    port: int

    @property
    def host(self) -> str:
        return self.headers.get("host", "").partition(":")[0].lower()

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(slots=True)
class Response:
    """An answer; a body that is no bytes is sent piece by piece, and the connection then closed."""

    body: bytes | Iterator[bytes] = b""
    status: str = "200 OK"
    headers: Mapping[str, str] = field(default_factory=dict)


Site = Callable[[Request, "Reader"], Response | None]


class Reader:
    """Read lines and counted bytes of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._held = stream, b""

    def more(self) -> bool:
        """Read more; tell whether there was any."""
        data = self.stream.receive()
        self._held += data
        return bool(data)

    def line(self) -> bytes | None:
        """Return a line without its end; nothing at the end of the stream."""
        while b"\n" not in self._held:
            if len(self._held) > HEAD_BYTES:
                raise ValueError("a line that does not end")
            if not self.more():
                return None
        line, _, self._held = self._held.partition(b"\n")
        return line.removesuffix(b"\r")

    def exactly(self, size: int) -> bytes:
        """Return so many bytes, or fewer at the end of the stream."""
        while len(self._held) < size and self.more():
            pass
        data, self._held = self._held[:size], self._held[size:]
        return data

    def rest(self) -> bytes:
        """Return what was read and not used."""
        data, self._held = self._held, b""
        return data


def serve(stream: Stream, site: Site) -> None:
    """Answer requests until the connection is closed, or was another protocol's: then there is no response."""
    reader = Reader(stream)
    while (request := read_request(reader)) is not None:
        response = site(request, reader)
        if response is None or not _answer(stream, request, response):
            return


def read_request(reader: Reader) -> Request | None:
    """Read one, with its body, and record it."""
    first = reader.line()
    while first == b"":
        first = reader.line()
    if first is None:
        return None
    method, _, rest = first.decode("latin-1").partition(" ")
    target, _, version = rest.rpartition(" ") if " " in rest else (rest, "", "HTTP/0.9")
    arrival = reader.stream.arrival
    request = Request(method, target, version, {}, b"", arrival.address, arrival.port)
    if version != "HTTP/0.9":
        request.headers = dict(_headers(reader))
    host = request.headers.get("host", "")
    arrival.requests.append({"method": method, "target": target, "host": host, "version": version})
    if request.headers.get("expect", "").lower() == "100-continue":
        reader.stream.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.body = _body(reader, request.headers)
    return request


def _headers(reader: Reader) -> Iterator[tuple[str, str]]:
    while line := reader.line():
        name, _, value = line.decode("latin-1").partition(":")
        yield name.strip().lower(), value.strip()


def _body(reader: Reader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return b"".join(_chunks(reader))
    size = headers.get("content-length", "0").strip() or "0"
    if not size.isdigit() or int(size) > BODY_BYTES:
        raise ValueError(f"a body of {size!r} bytes")
    return reader.exactly(int(size))


def _chunks(reader: Reader) -> Iterator[bytes]:
    while (line := reader.line()) is not None:
        size = int(line.partition(b";")[0].strip() or b"0", 16)
        if size == 0:
            while reader.line():
                pass
            return
        yield reader.exactly(size)
        reader.line()


def _answer(stream: Stream, request: Request, response: Response) -> bool:
    """Send an answer; tell whether the connection goes on."""
    is_whole = isinstance(response.body, bytes)
    headers = {"Content-Type": "text/plain", **response.headers}
    goes_on = is_whole and request.version == "HTTP/1.1" and request.headers.get("connection", "").lower() != "close"
    if is_whole and "Content-Length" not in headers:
        headers["Content-Length"] = str(len(response.body))  # type: ignore[arg-type]
    if not goes_on:
        headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {response.status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    head = "\r\n".join(lines).encode("latin-1")
    if isinstance(response.body, bytes):
        stream.send(head if request.method == "HEAD" else head + response.body)
    else:
        stream.send(head)
        for piece in response.body:
            stream.send(piece)
    if not goes_on:
        stream.end_sending()
    return goes_on
