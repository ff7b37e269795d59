"""Requests to ports of a sandbox on which its own programs listen: checked, passed on, and the answers passed back.

Theory of operation: each request has a connection of its own to the server inside, so that no answer can be taken for
another request's. Both heads are read and written anew (`guest_http.py`), and bodies stream both ways at the reader's
speed. A request that asks for another protocol, such as a web socket, becomes a stream of bytes (`upgrades.py`). All
of it ends with the client, and when the sandbox is paused or ends.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cloche.core.errors import ClocheError
from cloche.execution.sandbox import AsyncSandbox
from cloche.records.keys import E2B_PREFIX, PREFIX
from cloche.records.tables import DEFAULT_PROJECT
from cloche.serving.http import SLOW_BODY, most_connections

from . import states
from .calls import E2B, KEY_HEADER, TOKEN_HEADER, TRAFFIC_HEADER, Call
from .errors import NO_LISTENER, NOT_RUNNING, Dropped, E2BError, PortError
from .guest_http import BadAnswer, GuestConnection, GuestExchange, passed_on
from .guest_tls import TlsConnection
from .proxy_errors import refusal
from .target import Target

ANSWER_S = 600.0  # for the head of an answer, since the last byte of the request
SEND_S = 300.0  # for a client to read a piece of it
MOST_KNOWN = 10_000  # public sandboxes
LIVES_S = 10.0  # for a sandbox to say that it does
CONNECT_PAUSES_S = (0.1, 0.2, 0.3, 0.4)  # as E2B's proxy: a server that was just started listens a moment later
SWITCH = "cloche.e2b.switch"  # in the scope: begins the other protocol, if the client's connection can
MASK_PORT = "${PORT}"
NO_TOKEN = f"Sandbox is secured with traffic access token. Token header '{TRAFFIC_HEADER}' is missing"
WRONG_TOKEN = f"Sandbox is secured with traffic access token. Provided token in header '{TRAFFIC_HEADER}' is invalid"
Switch = Callable[[h11.InformationalResponse, GuestExchange], Awaitable[None]]
# Said by a client, and only a proxy knows it; or for us alone.
_NOT_FOR_GUESTS = (
    b"expect", b"content-length", b"forwarded", b"host", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto",
    TRAFFIC_HEADER.encode(),
)  # fmt: skip


_KEYS = (E2B_PREFIX.encode(), PREFIX.encode())


async def pass_on(e2b: E2B, target: Target | None, scope: Scope, receive: Receive, send: Send) -> None:
    """Pass a request on to the program that listens, and its answer back."""
    assert target is not None  # noqa: S101 - of the control plane is none
    call, answering = Call(e2b=e2b, request=Request(scope), target=target), _Answering(send)
    try:
        network = await check_traffic(call)
        request = guest_request(call, network.get("maskRequestHost"))
        scope[SLOW_BODY] = True
        with _room(e2b, target.sandbox_id), e2b.readers(target.sandbox_id).reading() as cut:
            is_https = target.port in (network.get("httpsPorts") or ())
            async with call.use() as use, _connected(use.sandbox, target.port, is_https=is_https) as connection:
                exchange = _Exchange(connection, answering, scope, receive, partial(_lives, use.sandbox))
                if not await exchange.carry(request, cut):
                    raise PortError(target.sandbox_id, NOT_RUNNING)
    except Dropped:
        raise
    except Exception as error:
        if answering.has_begun:
            raise Dropped from error
        no_server = isinstance(error, BadAnswer | OSError)
        known = PortError(target.sandbox_id, NO_LISTENER, target.port) if no_server else error
        await refusal(known, scope["method"], Headers(scope=scope))(scope, receive, send)


async def check_traffic(call: Call) -> dict[str, Any]:
    """Return what the sandbox's creator asked of its network. Raises PortError, E2BError (403) without the token."""
    assert call.target is not None  # noqa: S101 - as above
    sandbox_id = call.target.sandbox_id
    try:
        facts = await call.facts(sandbox_id, DEFAULT_PROJECT)
    except E2BError as error:
        raise PortError(sandbox_id, NOT_RUNNING) from error
    if states.state_of(facts) in (states.EXPIRED, states.DEAD):
        raise PortError(sandbox_id, NOT_RUNNING)
    network: dict[str, Any] = facts.document["e2b"]["network"] or {}
    if network.get("allowPublicTraffic") is False:
        sent, token = call.request.headers.get(TRAFFIC_HEADER, ""), call.e2b.traffic_token(sandbox_id)
        if not hmac.compare_digest(sent.encode(), token.encode()):
            raise PortError(sandbox_id, WRONG_TOKEN if sent else NO_TOKEN, status=403)
    return network


async def check_code_traffic(call: Call) -> None:
    """Check a request to the code interpreter as `check_traffic` does, for a public sandbox once."""
    assert call.target is not None  # noqa: S101 - as above
    known: set[str] = call.e2b.parts.setdefault(f"{__name__}.public", set())
    if call.target.sandbox_id in known:  # that is decided at its creation
        return
    network = await check_traffic(call)
    if network.get("allowPublicTraffic") is not False:
        known.difference_update(list(known) if len(known) >= MOST_KNOWN else ())
        known.add(call.target.sandbox_id)


def guest_request(call: Call, mask: str | None) -> h11.Request:
    """Return the head for the server inside. Raises E2BError (400) for one that could be read in two ways."""
    assert call.target is not None  # noqa: S101 - as above
    scope, headers = call.request.scope, call.request.headers
    path = scope["raw_path"]
    if not (path.startswith(b"/") or (path == b"*" and scope["method"] == "OPTIONS")):
        raise E2BError(400, "the target of the request must be a path")
    if "transfer-encoding" in headers and "content-length" in headers:
        raise E2BError(400, "the request has both Transfer-Encoding and Content-Length")
    length = [(name.encode(), headers[name].encode()) for name in _FRAMING if name in headers]
    host = headers.get("host", "").encode("latin-1")
    masked = [] if mask is None else [(b"X-Forwarded-Host", host)]
    host = host if mask is None else mask.replace(MASK_PORT, str(call.target.port)).encode("latin-1")
    kept = [pair for pair in passed_on(scope["headers"], *_NOT_FOR_GUESTS) if not _is_ours(call, *pair)]
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    protocol = headers.get("upgrade") if SWITCH in scope else None
    ends = [(b"Connection", b"close")] if protocol is None else _upgrade(protocol.encode("latin-1"))
    return h11.Request(
        method=scope["method"], target=path + query,
        headers=[(b"Host", host), *masked, *((_titled(name), value) for name, value in (*kept, *length)), *ends],
    )  # fmt: skip


_FRAMING = ("transfer-encoding", "content-length")


def _upgrade(protocol: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"Connection", b"Upgrade"), (b"Upgrade", protocol)]


def _titled(name: bytes) -> bytes:
    return b"-".join(part.capitalize() for part in name.split(b"-"))  # some servers compare the usual spelling


def _is_ours(call: Call, name: bytes, value: bytes) -> bool:
    """Tell whether a header has a credential of this server, which a guest must not read."""
    assert call.target is not None  # noqa: S101 - as above
    if name == TOKEN_HEADER.encode():
        return hmac.compare_digest(value, call.e2b.access_token(call.target.sandbox_id).encode())
    if name == b"authorization":
        return value.partition(b" ")[2].strip().startswith(_KEYS)
    return name == KEY_HEADER.encode() and value.startswith(_KEYS)


@contextmanager
def _room(e2b: E2B, sandbox_id: str) -> Iterator[None]:
    """Count a request while it is passed on, so that no sandbox takes all connections. Raises E2BError (429)."""
    counts: Counter[str] = e2b.parts.setdefault(__name__, Counter())
    most = max(1, most_connections() // 4)
    if counts[sandbox_id] >= most or counts.total() >= 3 * most:
        message = f"The sandbox has too many concurrent incoming connections (limit: {most})"
        raise PortError(sandbox_id, message, status=429)
    counts[sandbox_id] += 1
    try:
        yield
    finally:
        counts[sandbox_id] -= 1
        if not counts[sandbox_id]:
            del counts[sandbox_id]


@asynccontextmanager
async def _connected(sandbox: AsyncSandbox, port: int, *, is_https: bool) -> AsyncIterator[GuestConnection]:
    """Connect to the server inside, which may be about to listen. Raises OSError."""
    for pause_s in CONNECT_PAUSES_S:
        with suppress(OSError):
            connection = await sandbox.connect(port)
            break
        await asyncio.sleep(pause_s)
    else:
        connection = await sandbox.connect(port)
    async with connection:
        if is_https:
            opened = TlsConnection(connection)
            await opened.begin()
            yield opened
        else:
            yield connection


async def _lives(sandbox: AsyncSandbox) -> bool:
    try:
        async with asyncio.timeout(LIVES_S):
            await sandbox.ports()
    except (ClocheError, OSError):
        return False
    return True


class _Answering:
    """Send an answer to the client, and know whether it has begun."""

    def __init__(self, send: Send):
        self._send, self.has_begun = send, False

    async def send(self, message: Message) -> None:
        """Send a part. Raises Dropped for a client that does not read."""
        self.has_begun = True
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError as error:
            raise Dropped from error


class _Exchange:
    """Pass one request on, and its answer back."""

    def __init__(
        self, connection: GuestConnection, answering: _Answering, scope: Scope, receive: Receive,
        lives: Callable[[], Awaitable[bool]],
    ):  # fmt: skip
        self._guest, self._answering, self._lives = GuestExchange(connection), answering, lives
        self._switch: Switch | None = scope.get(SWITCH)
        self._receive = receive
        self._deadline: asyncio.Timeout | None = None

    async def carry(self, request: h11.Request, cut: asyncio.Future[str]) -> bool:
        """Return True once the answer or the client has ended, False when the sandbox has. Raises what either does."""
        await self._guest.send(request)
        answer, body = asyncio.ensure_future(self._pass_answer()), asyncio.ensure_future(self._pass_body())
        waited: set[asyncio.Future[Any]] = {answer, body, cut}
        try:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {cut}:
                task.result()
            return cut not in done
        finally:
            for task in (answer, body):
                task.cancel()
            await asyncio.gather(answer, body, return_exceptions=True)

    async def _pass_body(self) -> None:
        """Pass the request's body on, and wait until the client disconnects."""
        is_read = True
        while (message := await self._receive())["type"] != "http.disconnect":
            try:
                if is_read and message.get("body"):
                    await self._guest.send(h11.Data(data=message["body"]))
                if is_read and not message.get("more_body", False):
                    await self._guest.send(h11.EndOfMessage())
            except OSError:
                is_read = False  # its answer may still arrive
            if self._deadline is not None:
                self._deadline.reschedule(asyncio.get_running_loop().time() + ANSWER_S)

    async def _head(self) -> h11.Response | h11.InformationalResponse:
        try:
            async with asyncio.timeout(ANSWER_S) as self._deadline:
                return await self._guest.head()
        except TimeoutError as error:
            raise E2BError(504, f"the server in the sandbox did not answer within {ANSWER_S:.0f} s") from error
        finally:
            self._deadline = None

    async def _pass_answer(self) -> None:
        """Pass the answer back. Raises BadAnswer, E2BError (504), Dropped."""
        head, send = await self._head(), self._answering.send
        if isinstance(head, h11.InformationalResponse):
            if self._switch is None:
                raise BadAnswer
            self._answering.has_begun = True
            await self._switch(head, self._guest)
            return
        headers = passed_on(head.headers, b"date")  # ours is sent
        await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
        async for data in self._guest.body():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        has_length = any(name in (b"content-length", b"transfer-encoding") for name, _ in head.headers)
        if not has_length and not await self._lives():  # its end is that of the connection, which may be the sandbox's
            raise Dropped
        await send({"type": "http.response.body", "body": b"", "more_body": False})
