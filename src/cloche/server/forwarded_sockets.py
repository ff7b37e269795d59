"""Forward one web socket to a worker of another machine, in both directions.

Backpressure passes through: this worker reads from one side only as fast as the other side accepts data. The other
worker enforces the key and the time-outs.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche.core.remote import MOST_MESSAGE
from cloche.records.workers import WorkerFacts
from cloche.wire.sockets import FAILED, GOING_AWAY

from .peers import worker_gone
from .sockets import CLOSE_S

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

OPEN_S, SEND_S = 60.0, 300.0
_NOT_SENT = {1005: 1000, 1006: FAILED}  # reserved codes (RFC 6455, 7.4.1) that must not be sent, and their replacements
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)  # fmt: skip
# An unconfigured logger: the package would write keys into its debug log.
_logger = logging.Logger("cloche.forwarded", logging.CRITICAL)  # noqa: LOG001


async def pass_on_socket(
    target: str, peer: WorkerFacts, context: ssl.SSLContext | None, headers: Sequence[tuple[bytes, bytes]],
    scope: Scope, receive: Receive, send: Send,
) -> None:  # fmt: skip
    """Forward a web socket to the `https:` address of a peer. Raises Refused (503) if the peer cannot be reached."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    await receive()  # the message websocket.connect
    address = target.replace("http", "ws", 1)
    own = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    connecting = connect(
        address, ssl=context, proxy=None, compression=None, max_size=MOST_MESSAGE, ping_interval=None,
        open_timeout=OPEN_S, close_timeout=CLOSE_S, user_agent_header=None, logger=_logger,
        # The page's origin was checked here; the peer expects its own.
        origin=_origin(target),  # type: ignore[arg-type]
        additional_headers=[header for header in own if not header[0].lower().startswith("sec-websocket-")],
    )  # fmt: skip
    try:
        connection = await connecting
    except InvalidStatus as refused:
        response = refused.response
        response_headers = {"content-type": response.headers.get("content-type", "text/plain")}
        await Response(bytes(response.body or b""), response.status_code, response_headers)(scope, receive, send)
        return
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise worker_gone(peer.name, str(error)) from error
    for option in KEEPALIVE:
        connection.transport.get_extra_info("socket").setsockopt(*option)
    async with connection:
        await send({"type": "websocket.accept", "headers": []})
        await _carry(connection, receive, send)


async def _carry(connection: ClientConnection, receive: Receive, send: Send) -> None:
    """Pass messages in both directions until one side ends, then close the other with the same code."""
    works = [asyncio.ensure_future(_inward(connection, receive)), asyncio.ensure_future(_outward(connection, send))]
    try:
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
    if connection.close_code is None:  # the client left, or does not read
        await connection.close(GOING_AWAY)
        return
    code = _NOT_SENT.get(connection.close_code, connection.close_code)
    with suppress(RuntimeError, OSError, TimeoutError):  # it is closed already, or not read
        async with asyncio.timeout(CLOSE_S):
            await send({"type": "websocket.close", "code": code, "reason": connection.close_reason or ""})


async def _inward(connection: ClientConnection, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return
        data = message.get("bytes")
        await connection.send(data if data is not None else message["text"])


async def _outward(connection: ClientConnection, send: Send) -> None:
    async for data in connection:
        kind = "text" if isinstance(data, str) else "bytes"
        async with asyncio.timeout(SEND_S):
            await send({"type": "websocket.send", kind: data})


def _origin(target: str) -> str:
    """Return the origin of a URL, as a browser would send it."""
    scheme, _, authority = target.partition("://")
    host = authority.partition("/")[0]
    return f"{scheme}://{host.removesuffix(':443' if scheme == 'https' else ':80')}"
