"""What whoever reaches the port can hold without a token: few connections, and not for long."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from cloche.mcp.connections import MOST_BACKLOG, MOST_CONNECTIONS, BoundedProtocol, backlog, most_connections

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Stream]]


def serve(work: Callable[[Connect], Awaitable[None]], *, most: int, head_s: float) -> None:
    """Do something with a server of those bounds, to which one may connect."""
    import uvicorn
    from uvicorn.server import ServerState

    async def app(scope: object, receive: object, send: Callable[[object], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        bounds = {"most": most, "head_s": head_s}
        config = uvicorn.Config(
            app, http=type("Bounded", (BoundedProtocol,), bounds), lifespan="off", log_level="critical"
        )
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


def test_one_connection_too_many_is_closed() -> None:
    """Those that are there are served all the same, and one that leaves makes room."""

    async def work(connect: Connect) -> None:
        there = [await connect() for _ in range(3)]
        assert await _is_closed(await connect())
        assert all([await _is_answered(stream) for stream in there])
        await _leave(there[0])
        while True:  # until the server has heard of it
            stream = await connect()
            try:
                if await _is_answered(stream):
                    break
            except ConnectionError:
                continue

    serve(work, most=3, head_s=60)


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
