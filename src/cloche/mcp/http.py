"""The HTTP application: allowed hosts and origins, start and end, limits on connections and on the time of a request.

Whoever reaches the port needs no token to connect. So connections are bounded in number and time, and descriptors are
left for the sandboxes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import resource
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import h11
import uvicorn
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventStore, StreamableHTTPServerTransport
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from cloche.core.errors import BackendUnavailable, InvalidRequest

from .server import StaticTokens
from .sessions import IDLE_S, MOST_SESSIONS, quota

MOST_CONNECTIONS = 512
MOST_BACKLOG = 128
HEAD_S = 15.0  # a client that has not sent the head of a request by then will not
BODY_S = 60.0  # nor the rest of it by then: 4 MiB at most, which is 70 kB a second
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SHUTDOWN_TIMEOUT_S = 1
MOST_PORT = 65_535
HEALTH = "/healthz"
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + HOST.pattern)


def most_connections() -> int:
    """Return how many connections may be open at once: a quarter of the descriptors that this process may have."""
    return _share(4, MOST_CONNECTIONS)


def backlog() -> int:
    """Return how many connections may wait: as many are accepted in one go, before any is counted."""
    return _share(8, MOST_BACKLOG)


def _share(part: int, most: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // part))


class BoundedProtocol(H11Protocol):
    """Speak HTTP on one connection of not too many; one that stays without a request, or within one, is closed."""

    most: int = MOST_CONNECTIONS
    head_s: float = HEAD_S
    body_s: float = BODY_S
    _looking: asyncio.TimerHandle | None = None
    _receiving: asyncio.TimerHandle | None = None  # while a body comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_one_too_many = len(self.connections) >= self.most
        super().connection_made(cast("asyncio.Transport", transport))
        if is_one_too_many:
            cast("asyncio.Transport", transport).abort()
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._looking, self._receiving):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take what came, and bound the time between the head of a request and its end, however it trickles in."""
        before: Any = self.cycle
        super().handle_events()
        is_receiving = self.conn.their_state is h11.SEND_BODY
        if self._receiving is not None and (not is_receiving or self.cycle is not before):
            self._receiving.cancel()
            self._receiving = None
        if is_receiving and self._receiving is None:
            self._receiving = self.loop.call_later(self.body_s, self.transport.close)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self.head_s, self._look, self._idle_after())

    def _idle_after(self) -> object:
        """Return what was answered last, None before the first request; something new while one is being answered."""
        cycle: Any = self.cycle
        return cycle if cycle is None or cycle.response_complete else object()

    def _look(self, before: object) -> None:
        """Close the connection, after what is still to be sent, when it was idle at the last look and ever since."""
        if self._idle_after() is before:
            self.transport.close()
        else:
            self._look_later()


def bounded() -> type[BoundedProtocol]:
    """Return the protocol with the bounds of this process."""
    return type("Bounded", (BoundedProtocol,), {"most": most_connections()})


def create_app(
    server: MCPServer[Any],
    *,
    host: str = "127.0.0.1",
    path: str = "/mcp",
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    idle_s: float = IDLE_S,
    most_sessions: int = MOST_SESSIONS,
    event_store: EventStore | None = None,
    retry_interval_ms: int | None = None,
) -> Starlette:
    """Return an ASGI application that serves a server at `path`, and `/healthz` to whoever asks.

    A request whose Host is none of loopback's names, `host` and `allowed_hosts` is refused, as is one that comes from a
    web page of any other origin than those and `allowed_origins`. With an `event_store` a client of 2025-11-25 whose
    connection broke gets what it missed; it comes back after `retry_interval_ms` milliseconds. Raises InvalidRequest
    for a path that is none, and for names and origins that no request could have.
    """
    if not path.startswith("/"):
        raise InvalidRequest(f"path: {path!r} does not begin with a slash, as in /mcp")
    if path == HEALTH or any(char in path for char in "{}?#"):
        raise InvalidRequest(f"path: {path!r} cannot be the endpoint; use one such as /mcp")
    _check_names(allowed_hosts, allowed_origins)
    names = [*LOOPBACK, *([] if is_wildcard(host) else [bracketed(host)]), *allowed_hosts]
    security = TransportSecuritySettings(
        allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
        allowed_origins=[
            *(f"{scheme}://{form}" for name in names for form in (name, f"{name}:*") for scheme in ("http", "https")),
            *allowed_origins,
        ],
    )
    server.custom_route(HEALTH, methods=["GET"], include_in_schema=False)(_healthy)
    app = server.streamable_http_app(
        streamable_http_path=path, transport_security=security, session_idle_timeout=idle_s, max_sessions=most_sessions,
        host=host, event_store=event_store, retry_interval=retry_interval_ms,
    )  # fmt: skip
    share_sessions(server, most_sessions)
    if allowed_origins:  # else no page of another origin gets so far
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["Mcp-Session-Id"],
        )  # fmt: skip
    return app


def share_sessions(server: MCPServer[Any], most: int) -> None:
    """Let each of several tokens open as many of the old revisions' sessions as is its share, and no more.

    The manager of the protocol package counts them all together, and has no other place to ask.
    """
    verifier = server._token_verifier
    if not isinstance(verifier, StaticTokens) or verifier.count < 2:
        return
    manager, most_each = server.session_manager, quota(most, verifier.count)
    admit = manager._admit_session

    def admit_within_share(requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        has = sum(owner == requestor for owner in manager._session_owners.values())
        return admit(requestor) if has < most_each else None

    manager._admit_session = admit_within_share  # type: ignore[method-assign]


def _check_names(hosts: Sequence[str], origins: Sequence[str]) -> None:
    """Raise InvalidRequest for what would never match: its author believes that it does."""
    for host in hosts:
        if HOST.fullmatch(host) is None:
            raise InvalidRequest(f"--allow-host {host}: write a name alone, or with a port, as in proxy.example:8443")
    for origin in origins:
        if ORIGIN.fullmatch(origin) is None:
            raise InvalidRequest(
                f"--allow-origin {origin}: write what browsers send, scheme and name (and port) with no path and no "
                "wildcard, as in https://app.example"
            )


async def _healthy(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def serve_http(app: Starlette, *, host: str, port: int, path: str, has_tokens: bool) -> None:
    """Serve an application until this is cancelled or the process is told to end. Port 0 takes a free one.

    Raises InvalidRequest when others could reach it and no token is needed, BackendUnavailable.
    """
    if not has_tokens and not is_loopback(host):
        raise InvalidRequest(
            f"--host {host}: whoever reaches this machine could run code on it; name a file with a bearer token "
            "(--token-file), or listen on 127.0.0.1"
        )
    listener = _listen(host, port)
    try:
        where = f"http://{bracketed(host)}:{listener.getsockname()[1]}{path}"
        print(f"cloche: serving MCP at {where}", file=sys.stderr, flush=True)  # noqa: T201
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S, ws="none",
            server_header=False, http=bounded(), backlog=backlog(),
        )  # fmt: skip
        await _serve(_Unsignalled(config), listener)
    finally:
        listener.close()


class _Unsignalled(uvicorn.Server):
    """Serve without handlers for signals: whoever started this has them."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve; cancelled, let it end orderly first."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait({serving})
        raise


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a host's address; a name counts when all its addresses do."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # the latter for a name that can be none
        return False
    return bool(found) and all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def is_wildcard(host: str) -> bool:
    """Tell whether a host stands for all addresses."""
    return host in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def bracketed(host: str) -> str:
    """Return a host as URLs have it."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= MOST_PORT:
        raise InvalidRequest(f"--port {port}: there is no such port; use 0 (a free one) to {MOST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BackendUnavailable(
            f"cannot listen on {host} port {port}: {reason}.", remedy="Choose another with --host and --port."
        ) from error
