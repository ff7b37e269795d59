"""One web socket over TLS, on the sans-I/O protocol of the package `websockets`.

Received data is passed on in the event loop without a task, because a connection is kept between blocking calls, whose
loop does not run in between and has no tasks then. The size of messages is bounded. Nothing is read from the
environment: no proxy, no certificates except the system's or those of `ca_file`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass
from cloche.core.remote import MOST_MESSAGE, RemoteAccount
from cloche.core.web_frames import size_of_frame
from cloche.init.wire import MOST_AT_ONCE

from ..remote.failures import Failure, by_status, remote_error

if TYPE_CHECKING:
    from websockets.frames import Frame
    from websockets.http11 import Response

MOST_FRAGMENTS = 1024  # maximum frames of one message
MOST_UNSENT = 64 << 20  # bytes, above the sum of a connection's windows


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a service."""

    host: str
    port: int
    path: str
    is_secure: bool

    @property
    def uri(self) -> str:
        """Return the URI of the wire."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'wss' if self.is_secure else 'ws'}://{host}:{self.port}{self.path}/api/wire"


def read_address(account: RemoteAccount) -> Address:
    """Return the address of an account's service. The account's URL was validated before."""
    split_url = urlsplit(account.url)
    is_secure = split_url.scheme == "https"
    return Address(
        split_url.hostname or "", split_url.port or (443 if is_secure else 80), split_url.path.rstrip("/"), is_secure
    )


def _context(account: RemoteAccount) -> ssl.SSLContext:
    """Return a new TLS context. `ssl.create_default_context` would write session keys to SSLKEYLOGFILE."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if account.certificate:  # compared after the handshake, before anything is sent
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if not account.ca_file:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(cafile=account.ca_file)
    except OSError as error:  # also ssl.SSLError
        raise BackendUnavailable(
            f"backend {account.provider!r}: ca_file {account.ca_file!r} cannot be used: {error.strerror or error}.",
            remedy="Name a file with certificates in PEM.",
        ) from error
    return context


class WebSocket(asyncio.Protocol):
    """One connection. Each message is passed to `on_message`, and its end, once, to `on_end`."""

    def __init__(self, account: RemoteAccount, address: Address, on_message: Callable[[bytes, bool], None]):
        from websockets.client import ClientProtocol
        from websockets.protocol import State
        from websockets.uri import parse_uri

        self._account, self._on_message = account, on_message
        # A private logger without handlers: the package logs headers, and so the key, at level debug.
        logger = logging.Logger("cloche.websocket", logging.CRITICAL)  # noqa: LOG001
        self._ws = ClientProtocol(parse_uri(address.uri), max_size=MOST_MESSAGE, logger=logger)
        self._is_secure, self._open = address.is_secure, State.OPEN
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []  # frames of an incomplete message
        self._is_text = False
        self._unparsed, self._frame_left = bytearray(), 0
        self._is_parsing = self._is_paused = self._has_ended = False
        self._why_lost: tuple[Failure, str] | None = None
        self.on_end: Callable[[Failure, str], None] = lambda *_: None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_open = False

    # As the event loop calls it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - it is TCP
        self._transport = transport
        if not self._is_secure and not ipaddress.ip_address(transport.get_extra_info("peername")[0]).is_loopback:
            self._end(Failure.TLS, "the name does not resolve to a loopback address")
            return
        if self._account.certificate and _certificate_of(transport) != self._account.certificate:
            self._end(Failure.TLS, "its SHA-256 is another one")
            return
        request = self._ws.connect()
        if key := self._account.api_key.reveal():
            request.headers["Authorization"] = f"Bearer {key}"
        request.headers["Cloche-Silence"] = (
            f"{self._account.silence_s:g}"  # the service treats this client as dead after this silence
        )
        self._ws.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._is_parsing or self._unparsed:
            self._unparsed += data
            if not self._is_parsing:
                self._parse_rest()
        else:
            self._parse(data)

    def _parse_rest(self) -> None:
        data, self._unparsed = bytes(self._unparsed), bytearray()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Handle received data frame by frame, at most `MOST_AT_ONCE` frames in one turn of the event loop."""
        start = count = 0
        while count < MOST_AT_ONCE and not self._has_ended and self._ws.parser_exc is None:
            size = self._size_of_next(data, start)
            if not size:
                break
            self._ws.receive_data(data[start : start + size])
            start, count = start + size, count + 1
            for event in self._ws.events_received():
                if self.opened.done():
                    self._take(cast("Frame", event))
                else:
                    self._take_answer(cast("Response", event))
        self._unparsed += data[start:]
        self._check()
        was_parsing, self._is_parsing = self._is_parsing, count == MOST_AT_ONCE and not self._has_ended
        if self._is_parsing:
            asyncio.get_running_loop().call_soon(self._parse_rest)
        elif self._why_lost is not None:
            self._end(*self._why_lost)
        if was_parsing is not self._is_parsing:
            self._set_reading()

    def _size_of_next(self, data: bytes, start: int) -> int:
        """Return the size of the received part of the next header line or frame; 0 if a frame's header is incomplete.

        The package parses all data it gets in one call.
        """
        available = len(data) - start
        if not self.opened.done():
            return (data.find(b"\n", start) + 1 or len(data)) - start
        size = self._frame_left or size_of_frame(data, start)
        self._frame_left = max(0, size - available)
        return min(size, available)

    def _check(self) -> None:
        if self._has_ended:
            return
        if self._ws.parser_exc is not None:
            self._end(Failure.BAD_ANSWER, "a frame is invalid")
        elif self._ws.handshake_exc is not None:
            self._end(Failure.BAD_ANSWER, "the answer is not a web socket")
        else:
            self._flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        why = Failure.TLS if isinstance(exc, ssl.SSLError) else Failure.NO_NETWORK, "the connection was closed"
        if self._is_parsing:
            self._why_lost = why
        else:
            self._end(*why)

    def _take_answer(self, response: Response) -> None:
        if self._ws.handshake_exc is None:
            self.is_open = True
            self.opened.set_result(None)
            return
        if response.status_code < 400:
            self._end(Failure.BAD_ANSWER, "the answer is not a web socket")
            return
        error = remote_error(
            self._account.provider, by_status(response.status_code), status=response.status_code,
            detail=_detail(response), retry_after_s=_retry_after(response), account=self._account,
        )  # fmt: skip
        self.opened.set_exception(error)
        self._end(error.failure, "")

    def _take(self, frame: Frame) -> None:
        from websockets.frames import Opcode

        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if frame.fin and not self._parts:
                self._on_message(bytes(frame.data), frame.opcode is Opcode.TEXT)
                return
            self._is_text = frame.opcode is Opcode.TEXT if not self._parts else self._is_text
            self._parts.append(bytes(frame.data))
            if len(self._parts) > MOST_FRAGMENTS:
                self._end(Failure.BAD_ANSWER, "a message in too many frames")
                return
            if frame.fin:
                message, self._parts = b"".join(self._parts), []
                self._on_message(message, self._is_text)
        elif frame.opcode is Opcode.CLOSE:
            close = self._ws.close_rcvd
            code, reason = (1005, "") if close is None else (close.code, close.reason)
            failure = Failure.UNAUTHORIZED if code == 1008 else Failure.SERVER
            self._end(failure, f"it closed the connection with {code} {reason}".strip())

    # What is done with it.

    def pause_reading(self, *, is_paused: bool) -> None:
        """Pause or resume reading."""
        self._is_paused = is_paused
        self._set_reading()

    def _set_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            is_paused = self._is_paused or self._is_parsing
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    @property
    def _takes_frames(self) -> bool:
        return self.is_open and self._ws.state is self._open  # otherwise a close frame is being exchanged

    def send_bytes(self, data: bytes) -> None:
        """Send a binary frame. Does nothing if the connection has ended."""
        if self._takes_frames:
            self._ws.send_binary(data)
            self._flush()

    def close(self) -> None:
        """Send a close frame, and close the connection."""
        self.on_end = lambda *_: None
        if self._takes_frames:
            self._ws.send_close(1000)
            self._flush()
        self._end(Failure.NO_NETWORK, "it was closed here")

    def _flush(self) -> None:
        assert self._transport is not None  # noqa: S101 - set with the connection
        if not self._transport.is_closing():
            self._transport.writelines([data for data in self._ws.data_to_send() if data])
            if self._transport.get_write_buffer_size() > MOST_UNSENT:
                self._end(Failure.TIMEOUT, "it does not read its input")

    def _end(self, failure: Failure, why: str) -> None:
        self.is_open, self._has_ended = False, True
        if not self.opened.done():
            self.opened.set_exception(remote_error(self._account.provider, failure, detail=why, account=self._account))
        self.opened.exception()  # mark as retrieved, in case it is not awaited
        if self._transport is not None:
            self._transport.abort()  # close() would need another iteration of the loop, which may have ended
        on_end, self.on_end = self.on_end, lambda *_: None
        on_end(failure, why)


def _certificate_of(transport: asyncio.Transport) -> str:
    """Return the SHA-256 of the other side's certificate, in hex; empty without TLS."""
    tls = transport.get_extra_info("ssl_object")
    certificate = None if tls is None else tls.getpeercert(binary_form=True)
    return hashlib.sha256(certificate).hexdigest() if certificate else ""


def _detail(response: Response) -> str:
    """Return the detail of the service's problem; "" for any other body, such as a proxy's page."""
    try:
        problem = json.loads(response.body or b"")
    except (ValueError, RecursionError):
        return ""
    detail = problem.get("detail") if isinstance(problem, dict) else None
    return detail if isinstance(detail, str) else ""


def _retry_after(response: Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if len(text) <= 5 and text.isdecimal() else None


async def connect(account: RemoteAccount, on_message: Callable[[bytes, bool], None], *, timeout_s: float) -> WebSocket:
    """Return an open web socket. Raises BackendUnavailable, with a sentence for each cause."""
    address = read_address(account)
    loop = asyncio.get_running_loop()
    context = _context(account) if address.is_secure else None
    socket: WebSocket | None = None

    def make() -> WebSocket:
        nonlocal socket
        socket = WebSocket(account, address, on_message)
        return socket

    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(
                make, address.host, address.port, ssl=context, server_hostname=address.host if context else None
            )
            assert socket is not None  # noqa: S101 - it was made
            await socket.opened
            return socket
    except BackendUnavailable:
        raise
    except BaseException as error:
        if socket is not None:
            socket.close()
        failure, detail = _failure_of(error)
        if failure is None:
            raise
        raise remote_error(account.provider, failure, detail=detail, account=account) from error


def _failure_of(error: BaseException) -> tuple[Failure | None, str]:
    if isinstance(error, TimeoutError):
        return Failure.TIMEOUT, ""
    if isinstance(error, ssl.SSLError):
        return Failure.TLS, str(getattr(error, "verify_message", "") or error.reason or "")
    return (Failure.NO_NETWORK, error.strerror or str(error)) if isinstance(error, OSError) else (None, "")
