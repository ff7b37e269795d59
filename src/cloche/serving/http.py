"""HTTP for all servers: bounds on connections and on the time of a request, and a listening socket.

Anyone who reaches the port can connect without a token. Therefore connections are bounded in number and time, and
descriptors are left for the sandboxes. Needs uvicorn, which the extras `mcp` and `server` install.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cloche.core.errors import BackendUnavailable, InvalidRequest

MOST_CONNECTIONS = 512
MOST_BACKLOG = 128
HEAD_S = 15.0  # time for the head of a request
TAKEN_BYTES = 256 << 10  # of a finished response: a client that reads less within `HEAD_S` is disconnected
BODY_S, BODY_BYTES = 60.0, 4 << 20  # at least so many bytes of a body in so many seconds: 70 kB a second
SLOW_BODY = "cloche.slow_body"  # in the scope, set for an authenticated request whose body may take any time
MOST_PORT = 65_535
MOST_TOGETHER = 16 << 10  # bytes of a head that wait for the body


def most_connections() -> int:
    """Return the bound of open connections: a quarter of this process's descriptors."""
    return _share(4, MOST_CONNECTIONS)


def backlog() -> int:
    """Return the backlog of the socket. asyncio accepts that many connections at once, before any is counted."""
    return _share(8, MOST_BACKLOG)


def _share(share: int, maximum: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return maximum if soft == resource.RLIM_INFINITY else max(1, min(maximum, soft // share))


class Together:
    """A transport that sends the head of a response together with its body, in one system call.

    A write is delayed until the next one in the same turn of the event loop.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, is_broken: Callable[[], bool] = bool
    ):
        self.plain, self._loop, self._is_broken = transport, loop, is_broken
        self._first = b""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a transport has
        return getattr(self.plain, name)

    def write(self, data: bytes) -> None:
        """Send some bytes: those of a head with the next ones, or at the end of this turn."""
        if self._first or len(data) > MOST_TOGETHER:  # so that flow control (pause_writing) works at once
            first, self._first = self._first, b""
            self.plain.write(first + data)
        else:
            self._first = data
            self._loop.call_soon(self.pass_on)

    def close(self) -> None:
        """Close the connection once everything is sent; a broken one at once, so that its client reads an error."""
        self.pass_on()
        if self._is_broken():
            self._reset()
        else:
            self.plain.close()

    def _reset(self) -> None:
        connection = self.plain.get_extra_info("socket")
        if connection is not None and not self.plain.is_closing():  # its client has left
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.plain.abort()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes still to be sent."""
        return len(self._first) + self.plain.get_write_buffer_size()

    def pass_on(self) -> None:
        """Send the delayed bytes."""
        first, self._first = self._first, b""
        if first and not self.plain.is_closing():
            self.plain.write(first)


class BoundedProtocol(H11Protocol):
    """HTTP on one connection, with bounds. It is closed when it stays idle, or when a request takes too long.

    A connection beyond the bound takes the place of an idle one, so that clients without requests cannot exclude
    others.
    """

    max_connections: int = MOST_CONNECTIONS
    resets_broken: bool = False  # a response that ends before its time is a reset of the connection, not its end
    head_s: float = HEAD_S
    body_s: float = BODY_S
    body_bytes: int = BODY_BYTES
    _looking: asyncio.TimerHandle | None = None
    _receiving: asyncio.TimerHandle | None = None  # while a body is received
    _received: int = 0  # bytes of all requests
    _begun_at: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_one_too_many = len(self.connections) >= self.max_connections and not self._drop_idle()
        together = Together(cast("asyncio.Transport", transport), self.loop, self._is_broken)
        super().connection_made(cast("Any", together))
        self._begun_at = self.loop.time()
        if is_one_too_many:
            cast("asyncio.Transport", transport).abort()
        else:
            self._look_later()

    def _drop_idle(self) -> bool:
        """Close an idle connection, first one without any request, then the oldest; return whether there was one."""
        idle = [
            connection
            for connection in self.connections
            if isinstance(connection, BoundedProtocol) and connection._is_idle()
        ]
        if idle:
            min(idle, key=lambda connection: (connection.cycle is not None, connection._begun_at)).transport.abort()
        return bool(idle)

    def _is_broken(self) -> bool:
        cycle: Any = self.cycle
        return self.resets_broken and cycle is not None and cycle.response_started and not cycle.response_complete

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return (cycle is None or cycle.response_complete) and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the web socket protocol, and stop its time-outs."""
        self._end_timers()
        together = cast("Any", self.transport)
        together.pass_on()
        self.transport = together.plain  # each frame is sent at once
        super().handle_websocket_upgrade(event)

    def _end_timers(self) -> None:
        for timer in (self._looking, self._receiving):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        """Handle received data, and bound the time from the head of a request to its end, however slow its data."""
        before: Any = self.cycle
        super().handle_events()
        is_ours = self.transport.get_protocol() is self  # not a web socket by now, whose handshake never ends
        is_receiving = is_ours and self.conn.their_state is h11.SEND_BODY
        if self._receiving is not None and (not is_receiving or self.cycle is not before):
            self._receiving.cancel()
            self._receiving = None
        if is_receiving and self._receiving is None:
            self._receive_until(self._received)

    def data_received(self, data: bytes) -> None:
        """Count and handle received bytes."""
        self._received += len(data)
        super().data_received(data)

    def _receive_until(self, before: int) -> None:
        self._receiving = self.loop.call_later(self.body_s, self._look_at_body, before)

    def _look_at_body(self, before: int) -> None:
        """Close the connection unless the body arrives at the rate of a slow line, at least."""
        may_be_slow = bool(self.cycle.scope.get(SLOW_BODY))
        if not may_be_slow and self._received - before < self.body_bytes:
            self.transport.close()
        else:
            self._receive_until(self._received)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self.head_s, self._look, self._idle_after())

    def _idle_after(self) -> object:
        """Return the last completed cycle, None before the first request; a new object during a request."""
        cycle: Any = self.cycle
        return cycle if cycle is None or cycle.response_complete else object()

    def _look(self, before: object) -> None:
        """Close the connection, after its remaining output, if it has been idle since the last check."""
        if self._idle_after() is not before:
            self._look_later()
            return
        self.transport.close()
        self._end_later()

    def _end_later(self) -> None:
        """Check later whether the client reads the remaining output, which takes memory."""
        bytes_left = self.transport.get_write_buffer_size()
        if bytes_left:
            self._looking = self.loop.call_later(self.head_s, self._end, bytes_left)

    def _end(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < min(before, TAKEN_BYTES):
            self.transport.abort()
        else:
            self._end_later()


def bounded(*, resets_broken: bool = False) -> type[BoundedProtocol]:
    """Return the protocol with the bounds of this process."""
    own = {"max_connections": most_connections(), "resets_broken": resets_broken}
    return type("Bounded", (BoundedProtocol,), own)


class Unsignalled(uvicorn.Server):
    """A server without signal handlers: the process that starts it has its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(server: uvicorn.Server, *listeners: socket.socket, on_stop: Callable[[], None] = lambda: None) -> None:
    """Serve until cancelled, then shut down orderly. `on_stop` is called first, to end endless responses."""
    serving = asyncio.ensure_future(server.serve(sockets=list(listeners)))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        on_stop()
        server.should_exit = True
        await asyncio.wait({serving})
        raise


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a host's addresses. For a name, all its addresses must be loopback."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError for an invalid name
        return False
    return bool(addresses) and all(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses
    )


def is_wildcard(host: str) -> bool:
    """Tell whether a host means all addresses."""
    return host in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def bracketed(host: str) -> str:
    """Return a host in the form of URLs."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidRequest for an invalid port, BackendUnavailable with a remedy."""
    if not 0 <= port <= MOST_PORT:
        raise InvalidRequest(f"--port {port}: there is no such port; use 0 (a free one) to {MOST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=backlog())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BackendUnavailable(
            f"cannot listen on {host} port {port}: {reason}.", remedy="Choose another with --host and --port."
        ) from error
    # Accepted connections inherit it. asyncio sets it only if the socket's protocol is IPPROTO_TCP. Without it, a
    # response in two pieces, head and body, waits 40 ms for the client's acknowledgement of the first (Nagle, tcp(7)).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
