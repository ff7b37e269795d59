"""Plain HTTP is passed on request by request, and never a byte of one that may mean another host.

A guest's side, the relay and a site are connected over loopback. What the site received is compared byte by byte.
"""

import asyncio
import functools
import http.client
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11
import httpx
import pytest

from cloche.egress import stream
from cloche.egress.errors import Refused
from cloche.egress.http import relay
from cloche.egress.http_request import MOST_HEAD_BYTES, MOST_HEADERS
from cloche.egress.stream import SocketStream, Stream
from tests.harness.loops import HastyLoop, in_hasty_loop, in_loop

HOST = "good.example"
LARGE = 3_000_000
OK = b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok"
GET = b"GET /1 HTTP/1.1\r\nHost: good.example\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n"


class Site:
    """A server that keeps what it received, and answers by path as its methods say."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.connections = 0
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.connections += 1
        with suppress(ConnectionError, h11.RemoteProtocolError):
            await self._serve(reader, writer)
        self.has_ended.set()
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 0
        connection = h11.Connection(h11.SERVER)
        request: h11.Request | None = None
        while True:
            match event := connection.next_event():
                case h11.NEED_DATA:
                    data = await reader.read(1 << 16)
                    self.received += data
                    self.has_begun.set()
                    connection.receive_data(data)
                case h11.ConnectionClosed() | h11.PAUSED:
                    return
                case h11.Request():
                    request, size = event, 0
                    if connection.they_are_waiting_for_100_continue:
                        writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])))
                    if request.target == b"/too-large":
                        await self._refuse_early(writer)
                        return
                case h11.Data(data=data):
                    size += len(data)
                case h11.EndOfMessage() if request is not None:
                    if not await self._answer(connection, request, size, reader, writer):
                        return
                    connection.start_next_cycle()

    async def _answer(
        self, connection: h11.Connection, request: h11.Request, size: int, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        path = request.target.partition(b"?")[0]
        if path == b"/websocket":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            writer.write(b"hello" + connection.trailing_data[0])
            while data := await reader.read(100):
                self.received += data
                writer.write(data.upper())
            return False
        if path == b"/until-the-end":
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * LARGE)
            await writer.drain()
            return False
        if path == b"/silent":
            await reader.read()
            return False
        body = {b"/large": b"x" * LARGE, b"/size": str(size).encode()}.get(path, b"ok")
        status = 426 if path == b"/no-websocket" else 200
        headers = (
            [(b"Transfer-Encoding", b"chunked")] if path == b"/chunked" else [(b"Content-Length", b"%d" % len(body))]
        )
        if path == b"/close":
            headers.append((b"Connection", b"close"))
        writer.write(connection.send(h11.Response(status_code=status, headers=headers)))
        for at in range(0, len(body) if request.method != b"HEAD" else 0, 10_000):
            writer.write(connection.send(h11.Data(data=body[at : at + 10_000])))
            await writer.drain()
        writer.write(connection.send(h11.EndOfMessage()))
        if path == b"/more-than-asked":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        return connection.our_state is h11.DONE

    async def _refuse_early(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno\n")
        await writer.drain()


class Relayed:
    """A site behind a relay, at an address; `refused` is what the relay was asked a sentence for."""

    def __init__(self, site: Site, address: tuple[str, int]):
        self.site, self.address = site, address
        self.refused: list[str] = []
        self.relays: list[asyncio.Task[None]] = []

    async def send(self, *pieces: bytes, ends: bool = False) -> bytes:
        """Send to the relay as a guest, and return all that comes until it closes; `ends` closes our side before."""
        reader, writer = await asyncio.open_connection(*self.address)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if ends:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    def refuse(self, what: str) -> str:
        """Make a sentence."""
        self.refused.append(what)
        return f"{what}: refused by a test"


@asynccontextmanager
async def relayed(connect: Callable[[], Awaitable[Stream]] | None = None, **options: Any) -> AsyncIterator[Relayed]:
    """Serve a site, and a relay to it."""
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()

    async def connect_to_site() -> Stream:
        connected = socket.socket()
        connected.setblocking(False)
        await loop.sock_connect(connected, server.sockets[0].getsockname())
        return SocketStream(connected)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    one = Relayed(site, listener.getsockname())

    async def accept() -> None:
        while True:
            guest = SocketStream((await loop.sock_accept(listener))[0])
            work = relay(guest, HOST, options.pop("port", 80), connect or connect_to_site, one.refuse, **options)
            one.relays.append(asyncio.create_task(work))

    accepting = asyncio.create_task(accept())
    try:
        yield one
        await asyncio.gather(*one.relays)
    finally:
        for task in (accepting, *one.relays):
            task.cancel()
        await asyncio.wait([accepting, *one.relays])
        listener.close()
        server.close()


def head(*lines: bytes, host: bytes | None = b"Host: good.example", line: bytes = b"GET / HTTP/1.1") -> bytes:
    """Write a head."""
    return b"\r\n".join([line, *([] if host is None else [host]), *lines]) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (head(b"X: 1", b"Accept:*/*"), head(b"X: 1", b"Accept: */*")),
        (head(b"x-LoW:  a \t b  ", b"Z: \xe9"), head(b"x-LoW: a \t b", b"Z: \xe9")),
        (head(b"A: 1", host=b"hOST:\tGOOD.example:80 "), head(b"A: 1")),
        (head(line=b"GET http://Good.Example/a?b=c HTTP/1.1"), head(line=b"GET /a?b=c HTTP/1.1")),
        (head(line=b"GET HTTP://good.example:80?b HTTP/1.1"), head(line=b"GET /?b HTTP/1.1")),
        (head(line=b"GET http://good.example HTTP/1.1"), head(line=b"GET / HTTP/1.1")),
        (head(host=b"Host: good.example.:80", line=b"GET http://good.example./ HTTP/1.1"), head()),
        (head(line=b"GET //evil.example/ HTTP/1.1"), head(line=b"GET //evil.example/ HTTP/1.1")),
        (head(line=b"OPTIONS * HTTP/1.1"), head(line=b"OPTIONS * HTTP/1.1")),
        (head(line=b"GET / HTTP/1.0", host=None), head(b"Connection: close", line=b"GET / HTTP/1.0")),
        (head(b"Connection: Keep-Alive", line=b"GET / HTTP/1.0"), head(b"Connection: close", line=b"GET / HTTP/1.0")),
        (head(b"Proxy-Authorization: x", b"Proxy-Connection: x", b"TE: trailers", b"Connection: TE"),
         head(b"TE: trailers", b"Connection: TE")),
        (head(b"Content-Length: 5", line=b"POST / HTTP/1.1") + b"GET /",
         head(b"Content-Length: 5", line=b"POST / HTTP/1.1") + b"GET /"),
        (CHUNKED.replace(b"chunked", b"Chunked") + b"3;x=\ry\r\nabc\r\n002 \r\nde\r\n0\r\nHost: evil.example\r\n\r\n",
         CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n"),
        (CHUNKED + b"0\r\n\r\n", CHUNKED + b"0\r\n\r\n"),
    ],
)  # fmt: skip
def test_a_request_is_written_anew(sent: bytes, received: bytes) -> None:
    """The site gets the same request in one form: our Host first, a path as target, a body in chunks of ours."""

    async def claim() -> None:
        async with relayed() as one:
            answer = await one.send(sent, ends=True)
            assert bytes(one.site.received) == received
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert one.refused == []

    in_loop(claim)


REFUSED = [
    # Another host.
    (head(host=b"Host: evil.example"), 403, 'a request for "evil.example"'),
    (head(host=b"Host: good.example.evil.example"), 403, 'a request for "good.example.evil.example"'),
    (head(host=b"Host: good.example.."), 403, 'a request for "good.example.."'),
    (head(host=b"Host: good.example:8080"), 403, 'a request for "good.example:8080"'),
    (head(host=b"Host: good.example:080"), 403, 'a request for "good.example:080"'),
    (head(host=b"Host: good.example:"), 403, 'a request for "good.example:"'),
    (head(host=b"Host: good.example, evil.example"), 403, 'a request for "good.example, evil.example"'),
    (head(host=b"Host: good.example evil.example"), 403, 'a request for "good.example evil.example"'),
    (head(host=b"Host: user@good.example"), 403, 'a request for "user@good.example"'),
    (head(host=b"Host: http://good.example"), 403, 'a request for "http://good.example"'),
    (head(host=b"Host:"), 403, 'a request for ""'),
    (head(host=b"Host: \xc7\xaaood.example"), 403, 'a request for "\\xc7\\xaaood.example"'),
    (head(host=b"Host: 127.0.0.1"), 403, 'a request for "127.0.0.1"'),
    (head(host=b"Host: evil.example", line=b"GET / HTTP/1.0"), 403, 'a request for "evil.example"'),
    (head(line=b"GET http://evil.example/ HTTP/1.1"), 403, 'a request for "http://evil.example/"'),
    (head(line=b"GET http://good.example@evil.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET http://evil.example#@good.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET http://good.example\\@evil.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET http://good.example:81/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET https://good.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET ftp://good.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET http:/evil.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET http:///evil.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET evil.example:80 HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET @evil.example/ HTTP/1.1"), 403, "a request for "),
    (head(line=b"GET * HTTP/1.1"), 403, 'a request for "*"'),
    (head(line=b"GET http://good.example/ HTTP/1.1", host=b"Host: evil.example"), 403, 'a request for "evil.example"'),
    (head(line=b"CONNECT good.example:80 HTTP/1.1"), 403, 'CONNECT to "good.example:80"'),
    (head(line=b"CONNECT / HTTP/1.1"), 403, 'CONNECT to "/"'),
    (head(line=b"connect evil.example:443 HTTP/1.0", host=None), 403, 'CONNECT to "evil.example:443"'),
    # Two hosts, or none.
    (head(b"Host: good.example"), 400, "several headers host"),
    (head(b"host: evil.example"), 400, "several headers host"),
    (head(host=None), 400, "Missing mandatory Host"),
    (head(b"Host : evil.example"), 400, "a line that is not a header"),
    (head(b" Host: evil.example"), 400, "continues on the next line"),
    (head(b"X: 1", b"\tHost: evil.example"), 400, "continues on the next line"),
    (head(b"Host\t: evil.example", host=None), 400, "a line that is not a header"),
    (head(b"H\xf6st: evil.example"), 400, "malformed request"),
    (head(b"no colon"), 400, "a line that is not a header"),
    (head(b": no name"), 400, "malformed request"),
    (head(b"Connection: Host"), 400, 'the Connection "host"'),
    (head(b"Connection: close, Content-Length"), 400, 'the Connection "content-length"'),
    # Two lengths.
    (head(b"Content-Length: 5", b"Content-Length: 5") + b"12345", 400, "several headers content-length"),
    (head(b"Content-Length: 5", b"Content-length: 50") + b"12345", 400, "several headers content-length"),
    (head(b"Content-Length: 5, 5") + b"12345", 400, 'the Content-Length "5, 5"'),
    (head(b"Content-Length: +5") + b"12345", 400, 'the Content-Length "+5"'),
    (head(b"Content-Length: 05") + b"12345", 400, 'the Content-Length "05"'),
    (head(b"Content-Length: 0x5") + b"12345", 400, 'the Content-Length "0x5"'),
    (head(b"Content-Length: -1"), 400, 'the Content-Length "-1"'),
    (head(b"Content-Length:"), 400, 'the Content-Length ""'),
    (head(b"Content-Length: " + b"9" * 19), 400, "the Content-Length"),
    (head(b"Content_Length: 5") + b"12345", 400, "some servers read as content-length"),
    (head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n", 400, "both Content-Length and Transfer"),
    (head(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n", 400, "both Content-Length and Transfer"),
    (head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), 400, "several headers transfer"),
    (head(b"Transfer-Encoding: chunked", b"Transfer-encoding: identity"), 400, "several headers transfer"),
    (head(b"Transfer_Encoding: chunked") + b"0\r\n\r\n", 400, "some servers read as transfer-encoding"),
    (head(b"Transfer-Encoding : chunked") + b"0\r\n\r\n", 400, "a line that is not a header"),
    (head(b"Transfer-Encoding: gzip, chunked"), 400, 'the Transfer-Encoding "gzip, chunked"'),
    (head(b"Transfer-Encoding: chunked, chunked"), 400, 'the Transfer-Encoding "chunked, chunked"'),
    (head(b"Transfer-Encoding: chunked, identity"), 400, 'the Transfer-Encoding "chunked, identity"'),
    (head(b"Transfer-Encoding: identity"), 400, 'the Transfer-Encoding "identity"'),
    (head(b"Transfer-Encoding: xchunked"), 400, 'the Transfer-Encoding "xchunked"'),
    (head(b'Transfer-Encoding: "chunked"'), 400, "the Transfer-Encoding"),
    (head(b"Transfer-Encoding: chunked;q=1"), 400, 'the Transfer-Encoding "chunked;q=1"'),
    (head(b"Transfer-Encoding:"), 400, 'the Transfer-Encoding ""'),
    (head(b"Transfer-Encoding: \x0bchunked"), 400, "a control character"),
    (head(b"Transfer-Encoding:", b" chunked"), 400, "continues on the next line"),
    (
        head(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0") + b"0\r\n\r\n",
        400,
        "HTTP/1.0 with a Transfer-Encoding",
    ),
    # Line ends that are none, and what is no HTTP/1.
    (b"GET / HTTP/1.1\nHost: good.example\n\n", 400, "an LF without CR"),
    (b"GET / HTTP/1.1\r\nHost: good.example\n\r\n", 400, "an LF without CR"),
    (head(b"X: a\nHost: evil.example"), 400, "an LF without CR"),
    (head(b"X: a\rHost: evil.example"), 400, "a CR without LF"),
    (head(b"X: a\r\r\nY: b"), 400, "a CR without LF"),
    (head(b"X: a\0b"), 400, "a NUL"),
    (head(line=b"GET /\0 HTTP/1.1"), 400, "a NUL"),
    (head(b"X: \x1b[2J"), 400, "a control character"),
    (b"\r\n" + head(), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (b" " + head(), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (b"GET /\r\n", 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET  / HTTP/1.1"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / HTTP/1.1 "), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / x HTTP/1.1"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET\t/\tHTTP/1.1"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET /\xe9 HTTP/1.1"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / HTTP/1.2"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / http/1.1"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / HTTP/0.9"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (head(line=b"GET / HTTP/1.10"), 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 'not a request of HTTP/1.0 or HTTP/1.1: "PRI * HTTP/2.0"'),
    (b"\x16\3\1\2\0\1\0", 400, "a control character"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", 400, "not a request of HTTP/1.0 or HTTP/1.1"),
    # Other protocols.
    (
        head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
        403,
        "an upgrade to h2c",
    ),
    (head(b"Connection: Upgrade", b"Upgrade: h2c"), 403, 'an upgrade to "h2c"'),
    (head(b"Connection: Upgrade", b"Upgrade: websocket, h2c"), 403, 'an upgrade to "websocket, h2c"'),
    (head(b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c"), 400, "several headers upgrade"),
    (head(b"Connection: Upgrade", b"Upgrade: TLS/1.3"), 403, 'an upgrade to "tls/1.3"'),
    (head(b"Upgrade: h2c"), 403, 'an upgrade to "h2c"'),
    (head(b"Upgrade: websocket"), 400, "malformed upgrade"),
    (head(b"Upgrade: websocket", b"Connection: Upgrade", line=b"POST / HTTP/1.1"), 400, "malformed upgrade"),
    (head(b"Upgrade: websocket", b"Connection: Upgrade", line=b"GET / HTTP/1.0"), 400, "malformed upgrade"),
    (head(b"Upgrade: websocket", b"Connection: Upgrade", b"Content-Length: 9"), 400, "malformed upgrade"),
    # More than anybody sends.
    (head(*[b"X: 1"] * MOST_HEADERS), 431, "more than 128 headers"),
    (head(b"X: " + b"a" * MOST_HEAD_BYTES), 431, "a header section of more than 65536 bytes"),
    (b"GET /" + b"a" * (MOST_HEAD_BYTES + 1), 431, "a header section of more than 65536 bytes"),
]


@pytest.mark.parametrize(("sent", "status", "what"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_may_mean_another_host_never_leaves(sent: bytes, status: int, what: str) -> None:
    """A first request is refused before anything is connected; a later one after the answer before it; both say why."""

    async def claim() -> None:
        async with relayed() as one:
            first = await one.send(sent)
            assert one.site.connections == 0
            after = await one.send(GET + sent + GET)
            assert bytes(one.site.received) == GET
        assert after == OK + first
        said, _, body = first.partition(b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nConnection: close" in said
        assert b"\r\nContent-Length: %d\r\n" % len(body) in said
        assert one.refused == [body.decode().removesuffix(": refused by a test\n")] * 2
        assert what in one.refused[0]
        assert len(body) < 250

    in_loop(claim)


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"-5\r\n",
        b"0x5\r\n",
        b"5\n12345",
        b"5\r\n12345GET / HTTP/1.1\r\n\r\n",
        b"f" * 21 + b"\r\n",
        b"\r\n\r\n",
        b" 5\r\n",
        b"5 x\r\n",
    ],
)
def test_a_malformed_chunk_ends_the_connection(body: bytes) -> None:
    """Nothing of such a body goes on, and what follows is no request."""

    async def claim() -> None:
        async with relayed() as one:
            answer = await one.send(CHUNKED + body + GET)
            await one.site.has_ended.wait()
            assert bytes(one.site.received) in (CHUNKED, CHUNKED + b"5\r\n12345\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert len(one.refused) == 1
        assert "a malformed body" in one.refused[0]

    in_loop(claim)


def test_http_client_keeps_its_connection() -> None:
    """Requests with and without bodies, HEAD and long answers of each framing, go over one connection."""

    def talk(address: tuple[str, int]) -> list[tuple[int, int]]:
        client = http.client.HTTPConnection(*address)
        answers = []
        for method, path, body in [
            ("GET", "/", None), ("HEAD", "/large", None), ("GET", "/large", None), ("POST", "/size", b"x" * LARGE),
            ("GET", "/chunked", None), ("POST", "/size", iter([b"x" * 100_000, b"y"])), ("GET", "/close", None),
        ]:  # fmt: skip
            client.request(method, path, body, {"Host": HOST}, encode_chunked=True)
            answer = client.getresponse()
            content = answer.read()
            answers.append((answer.status, int(content) if path == "/size" else len(content)))
        client.close()
        return answers

    async def claim() -> None:
        async with relayed() as one:
            answers = await asyncio.to_thread(talk, one.address)
            sizes = [2, 0, LARGE, LARGE, 2, 100_001, 2]
            assert answers == [(200, size) for size in sizes]
            assert one.site.connections == 1

    in_loop(claim)


def test_httpx_has_many_connections_at_once() -> None:
    """Requests side by side do not wait for each other, and a refused one leaves the others alone."""

    async def claim() -> None:
        async with relayed() as one:
            base = f"http://{one.address[0]}:{one.address[1]}"
            async with httpx.AsyncClient(base_url=base, headers={"Host": HOST}, trust_env=False) as client:
                evil = client.get("/", headers={"Host": "evil.example"})
                answers = await asyncio.gather(*[client.get("/large") for _ in range(20)], evil)
        assert [(answer.status_code, len(answer.content)) for answer in answers[:-1]] == [(200, LARGE)] * 20
        assert answers[-1].status_code == 403
        assert answers[-1].text.startswith('a request for "evil.example" is not allowed; open a separate')

    in_loop(claim)


def test_a_client_that_waits_for_100_gets_it() -> None:
    """The site's word reaches the guest before there is a body, which then goes up."""

    async def claim() -> None:
        async with relayed() as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(head(b"Content-Length: 5", b"Expect: 100-continue", line=b"POST /size HTTP/1.1"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
            assert one.site.received.endswith(b"\r\n\r\n")
            writer.write(b"12345")
            assert (await reader.readuntil(b"\r\n\r\n5")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    in_loop(claim)


def test_requests_sent_ahead_are_answered_in_turn() -> None:
    """Each goes up when the one before was answered; the last answer arrives though the guest had ended its side."""

    async def claim() -> None:
        async with relayed() as one:
            sent = GET + head(line=b"GET /chunked HTTP/1.1") + CHUNKED + b"1\r\nx\r\n0\r\n\r\n" + GET
            answer = await one.send(*(sent[at : at + 1] for at in range(len(sent))), ends=True)
            assert bytes(one.site.received) == sent
            assert answer.count(b"HTTP/1.1 200 ") == 4
            assert one.site.connections == 1

    in_loop(claim)


@pytest.mark.parametrize("path", [b"/close", b"/until-the-end", b"/more-than-asked"])
def test_no_request_follows_where_the_site_ends_or_says_more(path: bytes) -> None:
    """After such an answer, which arrives whole, a request that was sent ahead goes nowhere."""

    async def claim() -> None:
        first = head(line=b"GET %b HTTP/1.1" % path)
        async with relayed() as one:
            answer = await one.send(first + GET)
            assert bytes(one.site.received) == first
        assert len(answer.partition(b"\r\n\r\n")[2]) >= (LARGE if path == b"/until-the-end" else 2)
        assert one.refused == []

    in_loop(claim)


@pytest.mark.parametrize("ahead", [b"", b"frame"])
def test_a_websocket_goes_through_in_both_directions(ahead: bytes) -> None:
    """After the site's 101 bytes pass as they are, those that came too early too, and each end by itself."""

    async def claim() -> None:
        upgrade = head(b"Connection: Upgrade", b"Upgrade: WebSocket", line=b"GET /websocket HTTP/1.1")
        async with relayed() as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(GET + upgrade + ahead)
            answer = await reader.readuntil(b"hello" + ahead.upper())
            assert answer.startswith(OK + b"HTTP/1.1 101 ")
            writer.write(b"any\n\0bytes, GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert (await reader.readuntil(b"EVIL.EXAMPLE\r\n\r\n")).startswith(b"ANY\n\0")
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert one.refused == []

    in_loop(claim)


def test_a_refused_websocket_leaves_http_as_it_is() -> None:
    """Any other answer than 101 is one, and what follows is decided as before."""

    async def claim() -> None:
        upgrade = head(b"Connection: Upgrade", b"Upgrade: websocket", line=b"GET /no-websocket HTTP/1.1")
        async with relayed() as one:
            answer = await one.send(upgrade + GET + head(host=b"Host: evil.example"))
            assert bytes(one.site.received) == upgrade + GET
        assert answer.startswith(b"HTTP/1.1 426 ")
        assert OK + b"HTTP/1.1 403 " in answer

    in_loop(claim)


def test_an_early_answer_arrives_though_the_body_goes_on() -> None:
    """A site that refuses an upload and closes is heard, whatever the guest still has to send."""

    async def claim() -> None:
        async with relayed() as one:
            guest = SocketStream(socket.create_connection(one.address))
            await guest.send(head(b"Content-Length: 100000000", line=b"POST /too-large HTTP/1.1"))
            uploading = asyncio.create_task(guest.send(bytes(100_000_000)))
            assert (await guest.receive(100)).startswith(b"HTTP/1.1 413 ")
            await asyncio.wait({uploading})
            assert isinstance(uploading.exception(), ConnectionError)
            guest.close()

    in_loop(claim)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (Refused("good.example resolves to 10.0.0.7, a private address"), 403, "good.example resolves to 10.0.0.7"),
        (ConnectionRefusedError(111, "Refused"), 502, "cannot connect to good.example:80: Refused"),
        (TimeoutError(), 502, "cannot connect to good.example:80: the server did not answer in time"),
    ],
)
def test_a_guest_reads_why_there_is_no_connection(error: Exception, status: int, sentence: str) -> None:
    """What the policy does not permit has status 403 and its own sentence; what failed has status 502."""

    async def connect() -> Stream:
        raise error

    async def claim() -> None:
        async with relayed(connect) as one:
            answer = await one.send(GET)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.partition(b"\r\n\r\n")[2].decode().startswith(sentence)
        assert one.refused == []

    in_loop(claim)


def test_a_proxy_is_asked_with_the_whole_target() -> None:
    """The operator's proxy gets the name, and nothing that the guest had for a proxy."""

    async def claim() -> None:
        async with relayed(proxied=True) as one:
            await one.send(head(b"Proxy-Authorization: x", line=b"GET /a HTTP/1.1"), ends=True)
            assert bytes(one.site.received) == head(line=b"GET http://good.example/a HTTP/1.1")

    in_loop(claim)


def test_another_port_belongs_to_the_host() -> None:
    """On another port than 80 a Host without that port is another one."""

    async def claim() -> None:
        async with relayed(port=8080) as one:
            request = head(host=b"Host: good.example:8080")
            assert (await one.send(request, ends=True)).startswith(b"HTTP/1.1 200 ")
            assert bytes(one.site.received) == request
        for host in (b"Host: good.example", b"Host: good.example:80"):
            async with relayed(port=8080) as one:
                assert (await one.send(head(host=host))).startswith(b"HTTP/1.1 403 ")

    in_loop(claim)


@pytest.mark.parametrize(
    ("sent", "answer"), [(b"", b""), (GET[:-1], b"HTTP/1.1 408 "), (GET + b"GET", b"HTTP/1.1 408 ")]
)
def test_a_head_has_its_time(sent: bytes, answer: bytes) -> None:
    """Who says nothing, or stops in the middle of a head, is let go, and told so where it had begun."""

    async def claim(loop: HastyLoop) -> None:
        async with relayed(idle_s=1e9) as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(sent)
            if sent.startswith(GET):
                await reader.readexactly(len(OK))
            found = await loop.hurry(asyncio.create_task(reader.read()))
            assert found.startswith(b"HTTP/1.1 408 " if sent else b"")
            assert bool(found) == bool(sent)
            assert one.refused == []
            writer.close()

    in_hasty_loop(claim)


@pytest.mark.parametrize(
    "sent",
    [head(line=b"GET /silent HTTP/1.1"), CHUNKED + b"5\r\n123", GET],
    ids=["no answer", "no body", "no request"],
)
def test_a_connection_on_which_nothing_moves_ends(sent: bytes) -> None:
    """Whoever is waited for, the idle limit closes both sides."""

    async def claim(loop: HastyLoop) -> None:
        async with relayed(head_s=1e9) as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(sent)
            await one.site.has_begun.wait()
            assert await loop.hurry(asyncio.create_task(reader.read())) == (OK if sent == GET else b"")
            await one.site.has_ended.wait()
            writer.close()

    in_hasty_loop(claim)


def test_a_guest_that_goes_away_ends_the_site_s_connection() -> None:
    """A request whose guest is gone does not keep a connection that waits for its answer."""

    async def claim() -> None:
        async with relayed() as one:
            assert await one.send(head(line=b"GET /silent HTTP/1.1"), ends=True) == b""
            await one.site.has_ended.wait()

    in_loop(claim)


def test_a_slow_guest_holds_up_the_site() -> None:
    """An answer that nobody reads stays where it comes from, beyond what sockets hold."""

    async def claim() -> None:
        streams: list[SocketStream] = []
        connected = asyncio.Event()

        async def connect() -> Stream:
            near, far = socket.socketpair()
            streams.extend([SocketStream(near), SocketStream(far)])
            connected.set()
            return streams[0]

        async with relayed(connect) as one:
            with socket.create_connection(one.address) as guest:
                guest.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(guest, GET)
                await connected.wait()
                site = streams[1]
                assert await site.receive(1000) == GET
                await site.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
                sending = asyncio.create_task(site.send(bytes(256 << 20)))
                counts = [-1, 0]
                while counts[-1] != counts[-2] or not counts[-1]:
                    await asyncio.wait({sending}, timeout=0.2)
                    counts.append(streams[0].received_bytes)
                assert not sending.done()
                assert counts[-1] < 64 << 20
                sending.cancel()
                await asyncio.wait({sending})
                site.close()

    in_loop(claim)


def test_cancellation_closes_both_sides() -> None:
    """Whoever ends a relay in the middle of an answer needs to close nothing."""

    async def claim() -> None:
        async with relayed() as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(head(line=b"GET /silent HTTP/1.1"))
            await one.site.has_begun.wait()
            (task,) = one.relays
            task.cancel()
            await asyncio.wait({task})
            one.relays.clear()
            assert task.cancelled()
            assert await reader.read() == b""
            await one.site.has_ended.wait()
            writer.close()

    in_loop(claim)


class _Endless:
    """Be a host that answers without end, and note how much is read of it at once."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def receive(self, size: int) -> bytes:
        """Return a head, then as much as may be read."""
        await asyncio.sleep(0)
        self.asked.append(size)
        is_first = len(self.asked) == 1
        return b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" if is_first else bytes(size)

    async def send(self, data: bytes) -> None:
        """Take a request."""

    def end_sending(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_answers_that_nobody_reads_share_what_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other connections do: however many there are, this process holds so many bytes."""
    monkeypatch.setattr(stream, "HELD_BYTES", 4 * stream.LEAST_READ_BYTES)

    async def claim() -> None:
        hosts = [_Endless() for _ in range(4)]
        pairs = [socket.socketpair() for _ in hosts]

        async def connect_to(host: _Endless) -> Stream:
            return host

        relays = [
            asyncio.create_task(
                relay(SocketStream(inner), HOST, 80, functools.partial(connect_to, host), lambda what: what)
            )
            for host, (_, inner) in zip(hosts, pairs, strict=True)
        ]
        for guest, _ in pairs:
            guest.sendall(GET)
        await asyncio.sleep(0.3)
        assert all(len(host.asked) > 3 for host in hosts)
        assert max(host.asked[-1] for host in hosts) <= stream.LEAST_READ_BYTES
        for task in relays:
            task.cancel()
        await asyncio.wait(relays)
        for guest, inner in pairs:
            guest.close()
            inner.close()

    in_loop(claim)


class _Talkative(_Endless):
    """Be a host whose answer has very many parts."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer, self.is_asked = answer, asyncio.Event()

    async def receive(self, size: int) -> bytes:
        """Return as much of it as may be read, then no more."""
        if self.is_asked.is_set():
            await asyncio.Event().wait()
        self.is_asked.set()
        return self.answer[:size]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000,
    ],
    ids=["interim answers", "chunks"],
)
def test_an_answer_of_many_parts_is_followed_in_turns(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sandboxes have many turns before the guest gets 64 KiB that take long to follow."""
    monkeypatch.setattr(stream, "TURN_S", 0.0)

    async def claim() -> None:
        host, rounds = _Talkative(answer), 0

        async def connect_to_it() -> Stream:
            return host

        guest, inner = socket.socketpair()
        guest.setblocking(False)
        relaying = asyncio.create_task(relay(SocketStream(inner), HOST, 80, connect_to_it, lambda what: what))
        guest.sendall(GET)
        await host.is_asked.wait()
        coming = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(guest, 1))
        while not coming.done():
            rounds += 1
            await asyncio.sleep(0)
        assert rounds > 15
        relaying.cancel()
        await asyncio.wait([relaying])
        guest.close()

    in_loop(claim)
