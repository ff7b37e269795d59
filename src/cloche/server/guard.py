"""Checks before every route: host names, body sizes, response headers for browsers, a time-out for slow readers.

A plain ASGI middleware: it sees each message, and costs little.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.core.errors import ClocheError
from cloche.wire.bodies import BodyBounds
from cloche.wire.callers import Caller
from cloche.wire.problems import Refused
from cloche.wire.shares import Shares

from .bodies import MOST_JSON
from .html import answer as answer_to
from .observe import CALLER
from .problems import answer

MOST_BODY = 32 << 20  # of a request with files
MOST_BODY_OF_NOBODY = 4 << 10  # before authentication
MOST_PAIRS = 1_000  # of a URL-encoded form
PIECE = 16 << 10  # of a form, parsed in one turn of the event loop
MOST_HELD = 256 << 20  # of all bodies together
MOST_UPLOAD = 1 << 30  # of one file into a sandbox
UPLOADS = re.compile(r"/api/sandboxes/[^/]+/files/(content|archive)")
_WITH_FILES = re.compile(
    r"/run(_code|_jupyter)?|/api/code/exec|/api/sandboxes(/[^/]+/(exec|processes/[^/]+/stdin|files/changes(/archive)?))?"
)
SEND_S = 30.0  # a client that does not read for so long is disconnected
LOOK_EVERY_S = 5.0  # checks the key of a long response
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii"})
Identify = Callable[[HTTPConnection], Awaitable[Caller]]
_HEADERS = tuple(
    (name.lower().encode(), value.encode())
    for name, value in {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "font-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }.items()
)


class Guard:
    """Refuse invalid requests before routing, and add security headers.

    `identify` raises Refused (401) for a request without valid credentials.
    """

    def __init__(self, app: ASGIApp, *, names: Sequence[str], identify: Identify, is_any_host: bool = False):
        self._app, self._names, self._is_any_host = app, frozenset(names), is_any_host
        self._identify = identify
        self._held = Shares(MOST_HELD)  # bytes of bodies being received or processed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
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
        """Tell whether the Host header has an accepted name. DNS rebinding from another site's page fails here."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.lower() in self._names or host.lower() in self._names

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        response = answer(
            421, "unknown-host", "this service does not answer for the host name of the request",
            remedy="the operator can allow it: cloche serve --allow-host NAME",
        )  # fmt: skip
        await response(scope, receive, _with_headers(send))

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        sent = _with_headers(_bounded(self._while_known(HTTPConnection(scope), send)))
        try:
            max_bytes, whose = await self._bound_and_owner(scope, headers)
        except (Refused, ClocheError) as error:
            await (await answer_to(Request(scope), error))(scope, receive, sent)
            return
        is_held = max_bytes < MOST_UPLOAD  # an upload is streamed
        kind = "bytes" if UPLOADS.fullmatch(scope["path"]) else _kind(headers)
        body = _Body(self._held, whose, receive, max_bytes, is_held=is_held, kind=kind)
        try:
            await self._app(scope, body.receive, sent)
        finally:
            self._held.give_back(whose, body.held)

    async def _bound_and_owner(self, scope: Scope, headers: Headers) -> tuple[int, str | None]:
        """Return the bound of the body in bytes, and the caller that a large body is accounted to.

        Raises Refused for a body whose declared size exceeds the bound, and for a large one without valid credentials.
        """
        _check_charset(headers.get("content-type", ""))
        _check_query(scope.get("query_string", b""))
        length = headers.get("content-length", "")
        size = int(length) if length.isdigit() else 0
        if size <= MOST_BODY_OF_NOBODY and "transfer-encoding" not in headers:
            return MOST_BODY_OF_NOBODY, None
        if scope["path"] == "/login":
            raise _too_large(MOST_BODY_OF_NOBODY)
        # FastAPI receives and parses a body before a route authenticates the caller.
        caller = await self._identify(HTTPConnection(scope))
        max_bytes = _most_at(scope["path"])
        if size > max_bytes:
            raise _too_large(max_bytes)
        return max_bytes, caller.key_id

    def _while_known(self, connection: HTTPConnection, send: Send) -> Send:
        """Return a sender that ends a long response once the caller's key is no longer valid."""
        looked_at = time.monotonic()

        async def while_known(message: Message) -> None:
            nonlocal looked_at
            if time.monotonic() - looked_at > LOOK_EVERY_S and message["type"] == "http.response.body":
                looked_at = time.monotonic()
                if CALLER in connection.scope:
                    with suppress(ClocheError):  # if the database fails, the next check may succeed
                        await self._identify(connection)
            await send(message)

        return while_known


def _most_at(path: str) -> int:
    if UPLOADS.fullmatch(path):
        return MOST_UPLOAD
    return MOST_BODY if _WITH_FILES.fullmatch(path) else MOST_JSON


def _kind(headers: Headers) -> str:
    """Return how the body will be parsed: as a form, as URL-encoded pairs, or as JSON for any other content type."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type.startswith("multipart/"):
        return "form"
    return "pairs" if media_type == "application/x-www-form-urlencoded" else "JSON"


def _check_query(query: bytes) -> None:
    """Raise Refused (422) for text with a NUL, which not every database can store."""
    if b"%00" in query:
        named = next((name for name, value in parse_qsl(query.decode("latin-1")) if "\0" in value), None)
        raise Refused(422, "invalid-request", f"{named or 'query'}: this has a NUL character", field=named)


def _check_charset(content_type: str) -> None:
    """Raise Refused (415) for a form in another encoding: some of Python's decoders take quadratic time."""
    if ";" not in content_type:
        return
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in _CHARSETS:
        raise Refused(415, "unsupported-media-type", "charset: send UTF-8")


def _too_large(max_bytes: int) -> Refused:
    return Refused(413, "body-too-large", f"the body has more than {max_bytes} bytes", remedy="send less at once")


class _Body:
    """Receive a body within its bound, and account its bytes among those of all requests.

    The bodies of one caller may take a share of the total. A form is passed on in pieces, since its parser yields to
    the event loop after each.
    """

    def __init__(
        self, all_held: Shares, whose: str | None, receive: Receive, max_bytes: int, *, is_held: bool, kind: str
    ):  # fmt: skip
        self._all_held, self._whose, self._receive, self._most = all_held, whose, receive, max_bytes
        self._is_held, self._kind = is_held, kind
        self._bounds = BodyBounds()
        self.held = self._seen = self._pairs = 0
        self._left, self._is_last = memoryview(b""), True  # the remainder of a form's message

    async def receive(self) -> Message:
        """Return the next message. Raises Refused."""
        if self._left:
            await asyncio.sleep(0)
            return self._next_piece()
        message = await self._receive()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            self._count(body)
            if self._kind in ("form", "pairs") and len(body) > PIECE:
                self._left, self._is_last = memoryview(body), not message.get("more_body", False)
                return self._next_piece()
        return message

    def _count(self, body: bytes) -> None:
        self._seen += len(body)
        if self._seen > self._most:
            raise _too_large(self._most)
        if self._kind == "JSON":
            self._bounds.feed(body)
        elif self._kind == "pairs":
            self._pairs += body.count(b"&")
            if self._pairs > MOST_PAIRS:
                raise Refused(413, "body-too-large", f"the form has more than {MOST_PAIRS} fields")
        if self._is_held:
            if not self._all_held.has_room(self._whose, len(body)):
                raise Refused(503, "busy", "other requests use all the memory for bodies", headers={"Retry-After": "2"})
            self._all_held.take(self._whose, len(body))
            self.held += len(body)

    def _next_piece(self) -> Message:
        piece, self._left = bytes(self._left[:PIECE]), self._left[PIECE:]
        return {"type": "http.request", "body": piece, "more_body": bool(self._left) or not self._is_last}


def _bounded(send: Send) -> Send:
    """Return a sender that times out on a client that does not read."""

    async def bounded(message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    return bounded


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = list(message.get("headers", ()))
            named = {name.lower() for name, _ in own}
            message["headers"] = own + [(name, value) for name, value in _HEADERS if name not in named]
        await send(message)

    return with_headers
