"""Reach servers in a live sandbox: by a connection, or through a forwarded port of this machine."""

from __future__ import annotations

import asyncio
import logging
import weakref
from types import TracebackType
from typing import Self

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.processes import ListeningPort
from cloche.core.protocols import OpenConnection, OpenLiveSandbox

from .live import LiveOperations

log = logging.getLogger("cloche.runtime")
LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 256  # concurrent connections of one forwarded port
PIECE_BYTES = 1 << 18


class AsyncConnection:
    """A TCP connection to a server in a sandbox, closed at the end of its block; see `AsyncSandbox.connect`."""

    def __init__(self, connection: OpenConnection) -> None:
        self._connection = connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def read(self, most: int = PIECE_BYTES) -> bytes:
        """Return the next bytes as soon as there are any; empty at the end of the stream."""
        return await self._connection.read(most)

    async def write(self, data: bytes) -> None:
        """Send all of `data`, at the server's speed. Raises BrokenPipeError if the server has closed the connection."""
        if not await self._connection.write(data):
            raise BrokenPipeError("the server in the sandbox has closed the connection")

    async def end(self) -> None:
        """Shut down the sending side; data from the server can still be read."""
        self._connection.end()

    async def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class AsyncForward:
    """A port on this machine's loopback that forwards to a port of a sandbox; made by `AsyncSandbox.forward`.

    Any local process that can connect to loopback may use it. It is closed at the end of its block, and with the
    sandbox.
    """

    def __init__(self, live: OpenLiveSandbox, port: int) -> None:
        self._live, self._port = live, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._host_port = 0

    @property
    def port(self) -> int:
        """Return the sandbox's port."""
        return self._port

    @property
    def host_port(self) -> int:
        """Return the port of 127.0.0.1 on this machine."""
        return self._host_port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def listen(self, host_port: int) -> None:
        """Start listening. Raises InvalidRequest for a port that is not available."""
        try:
            self._server = await asyncio.start_server(self._take, LOOPBACK, host_port)
        except OSError as error:
            raise InvalidRequest(
                f"host_port: cannot listen on {LOOPBACK}:{host_port}: {error.strerror}; give another one, or 0 for any"
            ) from error
        self._host_port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            log.warning("port %d: a connection beyond %d at once was refused", self._port, MOST_CONNECTIONS)
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._splice(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _splice(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy both directions, each at the receiver's speed, until both have ended."""
        try:
            connection = await self._live.connect(self._port)
        except (OSError, ClocheError) as error:
            log.debug("port %d: %s", self._port, error)
            writer.transport.abort()
            return
        inward = asyncio.ensure_future(_pass_in(reader, connection))
        outward = asyncio.ensure_future(_pass_out(connection, writer))
        closed = asyncio.ensure_future(connection.wait_closed())
        closed.add_done_callback(lambda _: inward.cancel())  # the server no longer reads
        try:
            await asyncio.wait([inward, outward], return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (inward, outward, closed):
                task.cancel()
            await asyncio.gather(inward, outward, closed, return_exceptions=True)
            connection.close()
            writer.close()


async def _pass_in(reader: asyncio.StreamReader, connection: OpenConnection) -> None:
    """Forward the client's data and its end of stream. Raises OSError if the client has disconnected."""
    while data := await reader.read(PIECE_BYTES):
        if not await connection.write(data):
            return
    connection.end()


async def _pass_out(connection: OpenConnection, writer: asyncio.StreamWriter) -> None:
    """Forward the server's data and its end of stream. Raises OSError if the client has disconnected."""
    while data := await connection.read(PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


class PortOperations(LiveOperations):
    """Reach servers in a live sandbox."""

    _forwards: set[AsyncForward]
    _connections: weakref.WeakSet[AsyncConnection]

    async def connect(self, port: int) -> AsyncConnection:
        """Return a connection to a server on loopback inside. Raises OSError, as a socket would."""
        live = self._require_live("connect")
        connection = AsyncConnection(await live.connect(_checked_port(port, "port", minimum=1)))
        self._connections.add(connection)
        return connection

    async def forward(self, port: int, host_port: int = 0) -> AsyncForward:
        """Listen on `host_port` of 127.0.0.1 here, or any free port, and forward connections to a server inside.

        The server may start later; a connection that it does not accept is closed. At most 256 connections at once.
        Raises BackendUnavailable at level `confined`, which has no servers.
        """
        live = self._require_live("forward")
        await live.list_ports()  # refused where a sandbox has no servers
        forward = AsyncForward(live, _checked_port(port, "port", minimum=1))
        await forward.listen(_checked_port(host_port, "host_port", minimum=0))
        self._forwards.add(forward)
        return forward

    async def ports(self) -> tuple[ListeningPort, ...]:
        """Return the TCP ports on which programs listen inside. Raises BackendUnavailable at level `confined`."""
        return tuple(await self._require_live("ports").list_ports())

    async def _close_ports(self) -> None:
        for connection in tuple(self._connections):
            await connection.close()
        while self._forwards:
            await self._forwards.pop().close()


def _checked_port(value: object, name: str, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 1 << 16:
        raise InvalidRequest(f"{name}: {value!r} is not a port; give a number from {minimum} to 65535")
    return value
