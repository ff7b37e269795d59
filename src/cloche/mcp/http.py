"""The HTTP application of the MCP server: allowed names, counted bodies, shares of sessions, start and end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventStore, StreamableHTTPServerTransport
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.core.errors import InvalidRequest
from cloche.serving.http import Unsignalled, backlog, bounded, bracketed, is_loopback, is_wildcard, listen, serve
from cloche.serving.json_bounds import JsonBounds, TooMuch

from .server import StaticTokens
from .sessions import IDLE_S, MOST_SESSIONS, quota

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SHUTDOWN_TIMEOUT_S = 1
HEALTH = "/healthz"
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + HOST.pattern)


class CountedBodies:
    """Let no more JSON of a request come than may be parsed: the packages below receive all of it before they do."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. What receives its body raises HTTPException (413) at the first byte too much."""
        bounds = JsonBounds()

        async def counted() -> Message:
            message = await receive()
            try:
                bounds.feed(message.get("body", b""))
            except TooMuch as error:
                raise HTTPException(413, str(error)) from None
            return message

        await self._app(scope, counted, send)


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
    """Return an ASGI application that serves a server at `path`, and `/healthz` without a token.

    A request is refused if its Host is no loopback name, `host`, or one of `allowed_hosts`, or if it comes from a web
    page of an origin outside of those and `allowed_origins`. A body with more JSON than the bound is 413. With an
    `event_store` a client of 2025-11-25 whose connection broke gets the events it missed; it comes back after
    `retry_interval_ms` milliseconds. Raises InvalidRequest for an invalid path, and for names and origins that no
    request could have.
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
    app.add_middleware(CountedBodies)
    if allowed_origins:  # else no page of another origin gets so far
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["Mcp-Session-Id"],
        )  # fmt: skip
    return app


def share_sessions(server: MCPServer[Any], max_sessions: int) -> None:
    """Let each of several tokens open as many of the old revisions' sessions as is its share, and no more.

    The manager of the protocol package counts them all together, and has no other place to ask.
    """
    verifier = server._token_verifier
    if not isinstance(verifier, StaticTokens) or verifier.count < 2:
        return
    manager, most_each = server.session_manager, quota(max_sessions, verifier.count)
    admit = manager._admit_session

    def admit_within_share(requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        has = sum(owner == requestor for owner in manager._session_owners.values())
        return admit(requestor) if has < most_each else None

    manager._admit_session = admit_within_share  # type: ignore[method-assign]


def _check_names(hosts: Sequence[str], origins: Sequence[str]) -> None:
    """Raise InvalidRequest for a name that could never match: its author expects a match."""
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
    """Serve an application until it is cancelled or the process gets a signal to end. Port 0 takes a free one.

    Raises InvalidRequest when other machines could reach it and no token is needed, BackendUnavailable.
    """
    if not has_tokens and not is_loopback(host):
        raise InvalidRequest(
            f"--host {host}: any client that reaches this machine could run code on it; name a file with a bearer "
            "token (--token-file), or listen on 127.0.0.1"
        )
    listener = listen(host, port)
    try:
        where = f"http://{bracketed(host)}:{listener.getsockname()[1]}{path}"
        print(f"cloche: serving MCP at {where}", file=sys.stderr, flush=True)  # noqa: T201
        config = uvicorn.Config(
            app, proxy_headers=False, log_level="critical", access_log=False, ws="none", server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S, http=bounded(), backlog=backlog(),
        )  # fmt: skip
        await serve(Unsignalled(config), listener)
    finally:
        listener.close()
