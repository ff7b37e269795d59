"""What whoever reaches the port can hold without a token: few connections, and not for long."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any
from unittest.mock import Mock

import pytest
from websockets.frames import Frame, Opcode

from cloche.server.web_frames import BoundedWebSocket
from cloche.serving.http import (
    MOST_BACKLOG,
    MOST_CONNECTIONS,
    MOST_TOGETHER,
    BoundedProtocol,
    Together,
    backlog,
    listen,
    most_connections,
)  # fmt: skip

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Stream]]


async def _answer(_scope: object, _receive: object, send: Callable[[object], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def serve(
    work: Callable[[Connect], Awaitable[None]],
    *,
    most: int,
    head_s: float,
    body_s: float = 60,
    body_bytes: int = 1 << 20,
    app: Any = _answer,
) -> None:
    """Do something with a server of those bounds, to which one may connect."""
    import uvicorn
    from uvicorn.server import ServerState

    async def main() -> None:
        bounds = {"max_connections": most, "head_s": head_s, "body_s": body_s, "body_bytes": body_bytes}
        config = uvicorn.Config(
            app, http=type("Bounded", (BoundedProtocol,), bounds), ws=BoundedWebSocket, lifespan="off",
            log_level="critical",
        )  # fmt: skip
        config.load()
        state = ServerState()
        speak: Any = config.http_protocol_class
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: speak(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with asyncio.timeout(30), server, AsyncExitStack() as stack:
            port = server.sockets[0].getsockname()[1]

            async def connect() -> Stream:
                stream = await asyncio.open_connection("127.0.0.1", port)
                stack.push_async_callback(_leave, stream)
                return stream

            await work(connect)

    asyncio.run(main())


async def _leave(stream: Stream) -> None:
    stream[1].close()
    with suppress(ConnectionError):
        await stream[1].wait_closed()


async def _is_closed(stream: Stream) -> bool:
    try:
        return await stream[0].read() == b""
    except ConnectionError:
        return True


async def _is_answered(stream: Stream) -> bool:
    stream[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return b" 204 " in await stream[0].readline()


def test_one_connection_too_many_takes_the_place_of_an_idle_one() -> None:
    """Whoever connects and asks for nothing keeps nobody out: the oldest that never asked goes first."""

    async def work(connect: Connect) -> None:
        silent, *others = [await connect() for _ in range(3)]
        assert await _is_answered(await connect())
        assert await _is_closed(silent)
        assert all([await _is_answered(stream) for stream in others])

    serve(work, most=3, head_s=60)


def test_one_connection_too_many_is_closed_where_all_ask() -> None:
    """Those that are being served are served all the same, and one that leaves makes room."""
    asking = asyncio.Event()

    async def wait(scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["path"] == "/wait":
            asking.set()
            while (await receive())["type"] != "http.disconnect":
                pass
        await _answer(scope, receive, send)

    async def work(connect: Connect) -> None:
        there = []
        for _ in range(3):
            there.append(await connect())
            asking.clear()
            there[-1][1].write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asking.wait()
        assert await _is_closed(await connect())
        await _leave(there[0])
        while True:  # until the server has heard of it
            stream = await connect()
            try:
                if await _is_answered(stream):
                    break
            except ConnectionError:
                continue

    serve(work, most=3, head_s=60, app=wait)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_connection_that_asks_for_nothing_is_closed(said: bytes) -> None:
    """Whether it says nothing or never comes to an end."""

    async def work(connect: Connect) -> None:
        stream = await connect()
        stream[1].write(said)
        assert await _is_closed(stream)

    serve(work, most=3, head_s=0.1)


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(256, (64, 32)), (1024, (256, 128)), (resource.RLIM_INFINITY, (MOST_CONNECTIONS, MOST_BACKLOG))],
)
def test_descriptors_are_left_for_sandboxes(
    soft: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections, with those that wait, have less than half of what the process may open."""
    monkeypatch.setattr(sys.modules["resource"], "getrlimit", lambda _: (soft, soft))
    assert (most_connections(), backlog()) == expected


def _half_a_body(client: Stream, *, more: bytes = b"") -> None:
    client[1].write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + more)


def test_a_body_that_does_not_come_to_an_end_is_given_up() -> None:
    """Whether it stops or trickles in; on a connection on which others came, too."""

    async def work(connect: Connect) -> None:
        silent, trickling, second = [await connect() for _ in range(3)]
        second[1].write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nok")
        assert b" 204 " in await second[0].readline()
        for client in (silent, trickling, second):
            _half_a_body(client, more=b"x")
        dripping = asyncio.ensure_future(_drip(trickling[1]))
        assert all([await _is_closed(client) for client in (silent, trickling)])
        assert await second[0].read() == b"\r\n"  # what was left of the first answer, and the end
        dripping.cancel()
        await asyncio.wait({dripping})

    serve(work, most=9, head_s=60, body_s=0.3, app=_read_all)


def test_a_body_that_comes_in_time_is_answered_however_long_that_takes() -> None:
    """The bound is on its arrival alone: an answer, and the next request, may take longer."""

    async def work(connect: Connect) -> None:
        client = await connect()
        for body in (b"slow", b"fast"):
            client[1].write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n" + body[:2])
            client[1].write(body[2:])
            assert b" 204 " in await client[0].readline()
            assert await client[0].readline() == b"\r\n"

    serve(work, most=9, head_s=60, body_s=1, app=_read_all)


def test_a_body_that_goes_on_is_waited_for() -> None:
    """A large one on a slow line takes several times the bound, in each of which enough of it comes."""

    async def work(connect: Connect) -> None:
        client = await connect()
        client[1].write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n")
        for _ in range(30):
            client[1].write(b"x")
            await asyncio.sleep(0.03)
        assert b" 204 " in await client[0].readline()

    serve(work, most=9, head_s=60, body_s=0.3, body_bytes=3, app=_read_all)


def test_a_web_socket_is_no_idle_connection() -> None:
    """Its handshake is the last request of its connection, which goes on for longer than any bound of requests."""

    async def app(_: object, receive: Callable[[], Awaitable[Any]], send: Callable[[object], Awaitable[None]]) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.sleep(0.5)
        await send({"type": "websocket.send", "bytes": b"late"})

    async def work(connect: Connect) -> None:
        client = await connect()
        client[1].write(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await client[0].readuntil(b"late")

    serve(work, most=9, head_s=0.1, body_s=0.1, app=app)


async def _drip(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)


async def _read_all(
    scope: object, receive: Callable[[], Awaitable[Any]], send: Callable[[object], Awaitable[None]]
) -> None:
    """Answer when all of a request is there; one whose body is `slow` late."""
    body, is_more = b"", True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, is_more = body + message["body"], message.get("more_body", False)
    await asyncio.sleep(1.5 if body == b"slow" else 0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_an_answer_in_two_pieces_is_sent_at_once() -> None:
    """A connection does not wait for the client to acknowledge the head, as one of a plain listener does."""
    with socket.create_server(("127.0.0.1", 0)) as plain, listen("127.0.0.1", 0) as ours:
        for listener, expected in ((plain, 0), (ours, 1)):
            with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == expected


def test_an_answer_that_nobody_takes_is_dropped() -> None:
    """What is still to be sent to a client that does not read is memory: its connection ends, and not the others."""
    over = asyncio.Event()

    async def large(_scope: object, _receive: object, send: Callable[[object], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (32 << 20))]})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})
        over.set()

    async def work(connect: Connect) -> None:
        reader, writer = await connect()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await over.wait()
        for _ in range(4):  # each takes as long as a look at a connection does
            assert await _is_closed(await connect())
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        with suppress(ConnectionError):
            assert len(await reader.read()) < 32 << 20

    serve(work, most=3, head_s=0.4, app=large)


class _Reading(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


def test_a_broken_answer_of_a_client_that_has_gone_is_closed_without_an_error() -> None:
    """Its socket is closed by then, and can have no more options."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        plain, reading = await asyncio.get_running_loop().create_connection(_Reading, sock=ours)
        theirs.close()
        await reading.lost.wait()
        assert ours.fileno() == -1
        Together(plain, asyncio.get_running_loop(), lambda: True).close()

    asyncio.run(main())


def test_a_head_is_sent_with_its_body() -> None:
    """By one system call; alone at the end of the turn, and before the end; much of it at once."""
    sent: list[bytes] = []

    async def main() -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        plain, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        write = plain.write
        plain.write = lambda data: (sent.append(bytes(data)), write(data))  # type: ignore[method-assign, assignment, return-value]
        transport = Together(plain, loop)
        transport.write(b"head")
        assert (sent, transport.get_write_buffer_size()) == ([], 4)
        transport.write(b"body")
        assert (sent, transport.get_write_buffer_size()) == ([b"headbody"], 0)
        transport.write(b"alone")
        await asyncio.sleep(0)
        assert sent[1:] == [b"alone"]
        transport.write(b"x" * (MOST_TOGETHER + 1))
        assert len(sent) == 3
        transport.write(b"last")
        transport.close()
        assert sent[3:] == [b"last"]
        theirs.close()

    asyncio.run(main())


def test_a_broken_response_over_tls_may_end_after_its_client_has_left() -> None:
    """The transport of such a connection has no socket any more, which could be told to reset."""
    plain = Mock(spec=asyncio.Transport, get_extra_info=Mock(return_value=None))
    Together(plain, Mock(spec=asyncio.AbstractEventLoop), is_broken=lambda: True).close()
    plain.abort.assert_called_once_with()


def test_frames_of_a_web_socket_do_not_hold_the_loop() -> None:
    """Forty thousand empty pings are a quarter of a megabyte; other requests have their turns."""
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\n{upgrade}Sec-WebSocket-Version: 13\r\n\r\n"
    has_ended = asyncio.Event()

    async def accept(
        _: object, receive: Callable[[], Awaitable[Any]], send: Callable[[object], Awaitable[None]]
    ) -> None:
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        has_ended.set()

    async def work(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(head.encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            Frame(Opcode.PING, b"").serialize(mask=True) * 40_000 + Frame(Opcode.CLOSE, b"").serialize(mask=True)
        )
        longest, at = 0.0, time.thread_time()
        while not has_ended.is_set():
            await asyncio.sleep(0)
            longest, at = max(longest, time.thread_time() - at), time.thread_time()
        assert longest < 0.05

    serve(work, most=3, head_s=60, app=accept)
