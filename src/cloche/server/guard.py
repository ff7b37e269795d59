"""What stands before every route: hosts by name, bodies of bounded size, headers for browsers, readers that read.

A plain ASGI layer: it sees each message, and costs little.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Refused, answer

MOST_BODY = 32 << 20
MOST_HELD = 256 << 20  # of all bodies together
MOST_UPLOAD = 1 << 30  # of one file into a sandbox
UPLOADS = re.compile(r"/api/sandboxes/[^/]+/files/(content|archive)")
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
        self._held = 0  # bytes of bodies that are being received or worked on

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
        most = MOST_UPLOAD if UPLOADS.fullmatch(scope["path"]) else MOST_BODY
        length = headers.get("content-length", "")
        sent = _with_headers(_bounded(send))
        if length.isdigit() and int(length) > most:
            await _too_large(most).as_response()(scope, receive, sent)
            return
        is_held = most == MOST_BODY  # an upload is passed on piece by piece
        body = _Body(self, receive, most, is_held=is_held)
        try:
            await self._app(scope, body.receive, sent)
        finally:
            self._held -= body.held

    def hold(self, size: int) -> None:
        """Count bytes that a request holds. Raises Refused (503) where all requests together hold too many."""
        if self._held + size > MOST_HELD:
            raise Refused(
                503, "busy", "other requests hold all memory there is for bodies", headers={"Retry-After": "2"}
            )
        self._held += size


def _too_large(most: int) -> Refused:
    return Refused(413, "body-too-large", f"the body has more than {most} bytes", remedy="send less at once")


class _Body:
    """Receive a body that may not go on beyond its bound, counted among those of all requests."""

    def __init__(self, guard: Guard, receive: Receive, most: int, *, is_held: bool):
        self._guard, self._receive, self._most, self._is_held = guard, receive, most, is_held
        self.held = self._seen = 0

    async def receive(self) -> Message:
        """Return the next message. Raises Refused."""
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._seen += size
            if self._seen > self._most:
                raise _too_large(self._most)
            if self._is_held:
                self._guard.hold(size)
                self.held += size
        return message


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
