"""Observability of each request: a log line, metrics, a span, and an id that client and log share.

The outermost middleware. Routes are identified by their templates; path, query and body are not recorded.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.audit.recording import is_traced

from .log import log_access
from .metrics import Metrics

REQUEST_ID = "X-Request-ID"
CALLER = "cloche.caller"  # key in the scope: the caller's name in the access log
NO_ROUTE = "(none)"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SHAPE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ACCEPTED, _REFUSED = 101, 403
Ended = Callable[[str, int | None], None]


class RequestObserver:
    """Log, measure and trace each request."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, status = _request_id(headers), None
        begun = time.monotonic()

        async def note(message: Message) -> None:
            nonlocal status
            status = _status(message, status)
            if message["type"] in ("http.response.start", "websocket.accept"):
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        method = _method(scope)
        with _traced(method, headers) as ended:
            try:
                await self._app(scope, receive, note)
            finally:
                seconds, route = time.monotonic() - begun, _route(scope)
                ended(route, status)
                self._metrics.request_ended(method, route, status, seconds)
                log_access(
                    "request", method=method, route=route, status=status, seconds=round(seconds, 6),
                    key=scope.get(CALLER), requestId=request_id,
                )  # fmt: skip


def _request_id(headers: Headers) -> str:
    """Return the client's own request id if it is well-formed, else a new one."""
    client_id = headers.get(REQUEST_ID, "")
    return client_id if _SHAPE.fullmatch(client_id) else f"req_{secrets.token_hex(8)}"


def _status(message: Message, status: int | None) -> int | None:
    if message["type"] == "http.response.start":
        return int(message["status"])
    if message["type"] == "websocket.accept":
        return _ACCEPTED
    return _REFUSED if message["type"] == "websocket.close" and status is None else status


def _method(scope: Scope) -> str:
    if scope["type"] == "websocket":
        return "WEBSOCKET"
    return scope["method"] if scope["method"] in _METHODS else "OTHER"


def _route(scope: Scope) -> str:
    """Return the template of the matched route, such as `/api/runs/{run_id}`."""
    return str(getattr(scope.get("route"), "path", None) or NO_ROUTE)


@contextmanager
def _traced(method: str, headers: Headers) -> Iterator[Ended]:
    if not is_traced():
        yield lambda *_: None
        return
    from cloche.audit.telemetry import request_span

    with request_span(method, headers) as ended:
        yield ended
