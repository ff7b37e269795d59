"""Forward requests to the worker that owns their target.

Theory of operation: a running run, and a sandbox with its sessions and commands, belong to one worker, which their row
names. A request for them, to the API or the page, is authenticated as usual, then forwarded unchanged, and the response
is passed back. The owning worker checks it again. Web sockets into a sandbox are forwarded only to other machines:
every worker of a machine can attach to its sandboxes. A header with a key of the database marks a forwarded request and
another gives the client's address; a marked request is never forwarded again. When the client disconnects, the
forwarded request is cancelled, too.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from cloche.core.errors import ClocheError
from cloche.records.workers import WorkerFacts, is_here
from cloche.wire.problems import Refused

from .forwarded_sockets import KEEPALIVE, pass_on_socket
from .html import answer as answer_to
from .peers import MARK, UNIX, Peers, reached, worker_gone

if TYPE_CHECKING:
    import httpx

CLIENT = "x-cloche-client"
CONNECT_S, SEND_S = 5.0, 60.0
_RUNS = re.compile(r"(?:/api)?/runs/(run_[0-9a-z]{20})/(?:events|cancel)")
_SANDBOXES = re.compile(r"(?:/api)?/sandboxes/(sb_[0-9a-z]{20})(?:/.*)?", re.DOTALL)
_OF_ONE_HOP = frozenset((
    "connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "origin", "sec-fetch-site", MARK, CLIENT,
))  # fmt: skip


class Forwarding:
    """Forward requests for targets of other workers; pass all others to the routes."""

    def __init__(
        self, app: ASGIApp, peers: Peers, *, sandbox: Callable[[str], Awaitable[str | None]],
        has_run: Callable[[str], bool], check: Callable[[HTTPConnection], Awaitable[Any]],
    ):  # fmt: skip
        self._app, self._peers, self._sandbox, self._has_run, self._check = app, peers, sandbox, has_run, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_begun, scope["app"] = False, self._app

        async def noting(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            mark = Headers(scope=scope).get(MARK)
            if mark is not None:
                self._peers.check_mark(mark)
                scope["client"] = Headers(scope=scope).get(CLIENT, ""), 0
            worker = await self._elsewhere(scope)
            if worker is not None:
                if mark is not None:
                    raise worker_gone(worker, "another worker has it now")
                await self._check(_connection(scope, receive, send))
                await self._pass_on(worker, scope, receive, noting)
                return
        except (Refused, ClocheError) as error:
            if is_begun:
                raise
            response = await answer_to(cast("Request", _connection(scope, receive, send)), error)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _elsewhere(self, scope: Scope) -> str | None:
        """Return the other worker that owns the request's target, None for this worker."""
        path = scope["path"]
        if (match := _SANDBOXES.fullmatch(path)) is not None:
            worker = await self._sandbox(match[1])
            return None if worker is None or (scope["type"] == "websocket" and is_here(worker)) else worker
        if (match := _RUNS.fullmatch(path)) is not None and not self._has_run(match[1]):
            return await self._peers.has_run(match[1])
        return None

    async def _pass_on(self, worker: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and pass its response back. Raises Refused: 503 without a peer, 502 if it fails."""
        peer = await self._peers.find(worker)
        if peer is None:
            raise worker_gone(worker)
        if scope["type"] == "websocket":
            if peer.address.startswith(UNIX):
                raise worker_gone(worker, "it has no address for other machines")
            context = None if peer.certificate is None else _exactly(peer.certificate)
            await pass_on_socket(_target(peer, scope), peer, context, self._headers(scope), scope, receive, send)
            return
        body = _Incoming(receive, has_body=_has_body(scope))
        exchange = asyncio.ensure_future(self._exchange(peer, scope, body, send))
        leaving = asyncio.ensure_future(body.until_left())
        try:
            await asyncio.wait({exchange, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not exchange.done():
                exchange.cancel()
            await asyncio.wait({exchange, leaving})
        if not exchange.cancelled():
            exchange.result()

    async def _exchange(self, peer: WorkerFacts, scope: Scope, body: _Incoming, send: Send) -> None:
        import httpx

        begun = False
        try:
            async with _client(peer) as client:
                request = client.build_request(
                    scope["method"], _target(peer, scope), headers=self._headers(scope),
                    content=body.pieces() if body.has_body else None,
                )  # fmt: skip
                response = await client.send(request, stream=True)
                begun = True
                headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower().decode() not in _OF_ONE_HOP]
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (httpx.ConnectError, httpx.ConnectTimeout, OSError) as error:
            raise worker_gone(peer.name, str(error)) from error
        except httpx.TransportError as error:
            if begun:
                raise
            raise Refused(
                502,
                "outcome-unknown",
                f"worker {peer.name}, which has this object, ended or was cut off during the request",
            ) from error

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        client = (scope.get("client") or ("", 0))[0]
        passed_headers = [
            (name, value) for name, value in scope["headers"] if name.decode("latin-1") not in _OF_ONE_HOP
        ]
        return [*passed_headers, (MARK.encode(), self._peers.key.encode()), (CLIENT.encode(), client.encode())]


class _Incoming:
    """Receive a request's body for the forwarded request, then watch for the client's disconnect."""

    def __init__(self, receive: Receive, *, has_body: bool):
        self._receive, self.has_body = receive, has_body
        self._is_over = asyncio.Event()  # the body
        self._is_left = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_left = True
                break
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._is_over.set()
        if self._is_left:  # `until_left` returns, and the forwarding is cancelled
            await asyncio.Event().wait()

    async def until_left(self) -> None:
        """Return once the client has disconnected."""
        if self.has_body:
            await self._is_over.wait()
        while not self._is_left:
            message: Message = await self._receive()
            self._is_left = message["type"] == "http.disconnect"


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


@asynccontextmanager
async def _client(peer: WorkerFacts) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client for one request. No connection is reused: the peer may close an idle one as it is used."""
    import httpx

    verify: ssl.SSLContext | bool = False if peer.certificate is None else _exactly(peer.certificate)
    times = httpx.Timeout(None, connect=CONNECT_S, write=SEND_S)
    with ExitStack() as held:
        if peer.address.startswith(UNIX):
            uds = held.enter_context(reached(peer.address.removeprefix(UNIX)))
            transport = httpx.AsyncHTTPTransport(verify=verify, uds=uds, trust_env=False)
        else:
            transport = httpx.AsyncHTTPTransport(verify=verify, socket_options=KEEPALIVE, trust_env=False)
        async with httpx.AsyncClient(transport=transport, timeout=times, trust_env=False) as client:
            yield client


def _exactly(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts this certificate alone.

    The database says which worker it belongs to, so no host name is checked.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def _connection(scope: Scope, receive: Receive, send: Send) -> HTTPConnection:
    return Request(scope) if scope["type"] == "http" else WebSocket(scope, receive, send)


def _target(peer: WorkerFacts, scope: Scope) -> str:
    """Return the URL of a request at a peer."""
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
    scheme = "http" if peer.certificate is None else "https"
    return f"{f'{scheme}://localhost' if peer.address.startswith(UNIX) else peer.address}{path}{query}"
