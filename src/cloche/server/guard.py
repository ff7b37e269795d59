"""What stands before every route: hosts by name, bodies of bounded size, headers for browsers, readers that read.

A plain ASGI layer: it sees each message, and costs little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Refused, answer

MOST_BODY = 32 << 20
MOST_UPLOAD = 1 << 30  # of one file into a sandbox
UPLOADS = ("/api/sandboxes/",)
SEND_S = 30.0  # a client that reads nothing for so long is dropped
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuse what no route should see, and add the headers that browsers obey."""

    def __init__(self, app: ASGIApp, *, names: Sequence[str], is_any_host: bool = False):
        self._app, self._names, self._is_any_host = app, frozenset(names), is_any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._is_any_host and not self._knows(headers.get("host", "")):
            await self._refuse(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        await self._pass(scope, receive, send, headers)

    def _knows(self, host: str) -> bool:
        """Tell whether a request is for one of our names: a page that rebinds its own name to us has another one."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.lower() in self._names or host.lower() in self._names

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        response = answer(
            421, "unknown-host", "this service is not known by the name that the request is for",
            remedy="let the operator name it: cloche serve --allow-host NAME",
        )  # fmt: skip
        await response(scope, receive, _with_headers(send))

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        most = MOST_UPLOAD if scope["path"].startswith(UPLOADS) else MOST_BODY
        length = headers.get("content-length", "")
        sent = _with_headers(_bounded(send))
        if length.isdigit() and int(length) > most:
            await _too_large(most).as_response()(scope, receive, sent)
            return
        await self._app(scope, _counted(receive, most), sent)


def _too_large(most: int) -> Refused:
    return Refused(413, "body-too-large", f"the body has more than {most} bytes", remedy="send less at once")


def _counted(receive: Receive, most: int) -> Receive:
    """Return a receiver that raises Refused where a body goes on beyond its bound."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > most:
                raise _too_large(most)
        return message

    return counted


def _bounded(send: Send) -> Send:
    """Return a sender that gives up on a client that does not read."""

    async def bounded(message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    return bounded


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return with_headers
