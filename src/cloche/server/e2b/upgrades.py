"""Requests that ask for another protocol on their connection, such as a web socket: answered, then bytes both ways.

A server inside speaks the other protocol itself, so its frames, sizes, pings and close codes are between it and the
client. Nothing else uses either connection afterwards. For all other answers the request is like any other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Message, Scope
from uvicorn.config import Config
from uvicorn.server import ServerState

from .errors import Dropped
from .guest_http import PIECE_BYTES, GuestExchange, passed_on
from .ports import SEND_S, SWITCH

log = logging.getLogger("cloche.service")
ENDING_S = 60.0  # for the server's last bytes, after the client has shut down its side


class UpgradeProtocol(asyncio.StreamReaderProtocol):
    """Serve one connection that asks for another protocol. The first data are the head of its request."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]):
        del app_state  # there is none
        self._received = asyncio.StreamReader(limit=PIECE_BYTES)
        super().__init__(self._received)
        self._app, self._state = cast("ASGIApp", config.loaded_app), server_state
        self._http = h11.Connection(h11.SERVER)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._has_body_left, self._is_switched = True, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._transport_out = cast("asyncio.Transport", transport)
        self._writer = asyncio.StreamWriter(self._transport_out, self, self._received, asyncio.get_running_loop())
        self._state.connections.add(cast("Any", self))
        if (connected := transport.get_extra_info("socket")) is not None:  # to notice a client that has vanished
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Take the head of the request, then the bytes of the other protocol."""
        if self._task is not None:
            super().data_received(data)
            return
        self._task = asyncio.ensure_future(self._serve(data))
        self._state.tasks.add(self._task)
        self._task.add_done_callback(self._state.tasks.discard)

    def eof_received(self) -> bool | None:
        """Note that the client sends no more; before the other protocol, it has gone."""
        if not self._is_switched:
            self._transport_out.close()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client has gone."""
        super().connection_lost(exc)
        self._state.connections.discard(cast("Any", self))
        if not self._lost.done():
            self._lost.set_result(None)

    def shutdown(self) -> None:
        """Disconnect, as the service ends."""
        self._transport_out.close()

    async def _serve(self, head: bytes) -> None:
        self._http.receive_data(head)
        event = self._http.next_event()
        assert isinstance(event, h11.Request)  # noqa: S101 - uvicorn has read it, and written it anew
        self._has_body_left = isinstance(self._http.next_event(), h11.EndOfMessage)
        try:
            await self._app(self._scope(event), self._receive, self._send)
        except Exception as error:
            if not isinstance(error, Dropped | OSError):
                log.warning("a request for another protocol failed: %s: %s", type(error).__name__, error)
            self._transport_out.abort()
        finally:
            self._transport_out.close()

    def _scope(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        scheme = "https" if self._transport_out.get_extra_info("sslcontext") else "http"
        peer = self._transport_out.get_extra_info("peername")
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": request.method.decode("ascii"), "scheme": scheme, "path": path.decode("ascii"), "root_path": "",
            "raw_path": path, "query_string": query, "headers": list(request.headers), "state": {},
            "client": tuple(peer[:2]) if peer else None, "server": None,
        }  # fmt: skip
        if self._has_body_left:  # a request without a body, which is the only kind that may switch
            scope[SWITCH] = self._switch
        return scope

    async def _receive(self) -> Message:
        if self._has_body_left:
            self._has_body_left = False
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.shield(self._lost)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"connection", b"close")]
            await self._write(h11.Response(status_code=message["status"], headers=headers))
            return
        if message.get("body"):
            await self._write(h11.Data(data=message["body"]))
        if not message.get("more_body", False):
            await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._writer.write(data)
            await self._writer.drain()

    async def _switch(self, head: h11.InformationalResponse, exchange: GuestExchange) -> None:
        """Pass the server's agreement, then bytes both ways until both have ended. Raises Dropped."""
        headers = dict(head.headers)
        agreed = [(b"connection", b"Upgrade"), (b"upgrade", headers.get(b"upgrade", b"websocket"))]
        self._is_switched = True
        await self._write(
            h11.InformationalResponse(
                status_code=head.status_code, headers=[*passed_on(head.headers), *agreed], reason=b"Switching Protocols"
            )
        )
        inward = asyncio.ensure_future(self._inward(exchange))
        outward = asyncio.ensure_future(self._outward(exchange))
        try:
            await asyncio.wait({inward, outward, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if inward.done() and not self._lost.done():
                await asyncio.wait({outward, self._lost}, timeout=ENDING_S, return_when=asyncio.FIRST_COMPLETED)
            if outward.done():
                outward.result()
        finally:
            for task in (inward, outward):
                task.cancel()
            await asyncio.gather(inward, outward, return_exceptions=True)

    async def _inward(self, exchange: GuestExchange) -> None:
        with suppress(OSError):
            while data := await self._received.read(PIECE_BYTES):
                await exchange.connection.write(data)
            await exchange.connection.end()

    async def _outward(self, exchange: GuestExchange) -> None:
        data = exchange.after_head()
        while data or (data := await exchange.connection.read(PIECE_BYTES)):
            self._writer.write(data)
            data = b""
            try:
                async with asyncio.timeout(SEND_S):
                    await self._writer.drain()
            except TimeoutError as error:
                raise Dropped from error
