"""TLS and web sockets of a node, and the credentials of its callers."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from cloche import __version__
from cloche.audit.log import act_for
from cloche.core.errors import BackendUnavailable
from cloche.core.remote import MOST_MESSAGE
from cloche.fleets.signing import BadCredential, Claim, Verifier
from cloche.wire.callers import Caller
from cloche.wire.connection import SILENCE_HEADER, Wire
from cloche.wire.problems import Refused
from cloche.wire.sockets import Disconnected, close_of

from .admission import Admission
from .certificate import NodeCertificate
from .host import NodeHost, lease_over
from .leases import ENDED
from .verbs import ALL_VERBS, COORDINATOR

PATH = "/api/wire"
STRANGER_S = 5.0  # for the handshakes, and then for a valid call
MOST_WRONG = 8  # wrong credentials over one connection
SEND_S = 60.0  # a client that reads nothing for so long is disconnected
CLOSE_S = 1.0
MOST_UNREAD = 4  # messages of a connection that wait to be handled
MOST_KNOWN = 4_096  # credentials whose signature was checked
NONE_YET = -1.0  # a time before all ends: the end of a credential is compared apart
log = logging.getLogger("cloche.node")


class Credentials:
    """Check credentials; the signature of each is verified once."""

    def __init__(self, verifier: Verifier):
        self._verifier = verifier
        self._known: OrderedDict[str, Claim] = OrderedDict()

    def check(self, credential: object) -> Claim:
        """Return what a credential says, also of one that is over. Raises BadCredential."""
        claim = self._known.get(credential) if isinstance(credential, str) else None
        if claim is None:
            claim = self._verifier.check(credential, now=NONE_YET)
            if len(self._known) >= MOST_KNOWN:
                self._known.popitem(last=False)
            self._known[str(credential)] = claim
        return claim


class Listener(socket.socket):
    """A listening socket that closes connections beyond the bounds at once, before TLS costs anything."""

    admission: Admission

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError for one that was closed at once."""
        plain, address = super().accept()
        if not self.admission.admits(address[0], time.monotonic()):
            plain.close()
            raise ConnectionAbortedError
        counted = CountedSocket(fileno=plain.detach())
        counted.count(self.admission, address[0])
        return counted, address


class CountedSocket(socket.socket):
    """A connection that is counted from its start to its end."""

    _admission: Admission | None = None
    _address = ""
    is_known = False

    def count(self, admission: Admission, address: str) -> None:
        """Begin to count."""
        self._admission, self._address = admission, address
        admission.opened(address)

    def close(self) -> None:
        """Close the socket, and count it no longer."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.closed(self._address, was_known=self.is_known)
        super().close()

    def note_known(self) -> None:
        """Count it no longer as a stranger's."""
        if self._admission is not None and not self.is_known:
            self.is_known = True
            self._admission.known(self._address)

    def note_wrong(self) -> None:
        """Count a wrong credential."""
        if self._admission is not None:
            self._admission.note_wrong(self._address, time.monotonic())


class Messages:
    """The messages of a web socket."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection

    async def receive(self) -> bytes | str:
        """Wait for a message. Raises Disconnected."""
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            raise Disconnected from None

    async def send(self, message: bytes | str, /) -> None:
        """Send a message, at the pace of the client. Raises Disconnected, also for one that reads nothing."""
        try:
            if self._connection.transport.get_write_buffer_size():
                async with asyncio.timeout(SEND_S):
                    await self._connection.send(message)
            else:
                await self._connection.send(message)
        except ConnectionClosed:
            raise Disconnected from None
        except TimeoutError:
            self._connection.transport.abort()
            raise Disconnected from None


class NodeServer:
    """Serve the leases of a fleet over web sockets."""

    def __init__(self, host: NodeHost, credentials: Credentials):
        self._host, self._credentials = host, credentials

    async def handle(self, connection: ServerConnection) -> None:
        """Serve one connection until it ends."""
        served = _Served(connection, self._host, self._credentials)
        silence = connection.request.headers.get(SILENCE_HEADER) if connection.request is not None else None
        wire = Wire(
            Messages(connection), self._host, served.find_caller, version=__version__, silence=silence, verbs=ALL_VERBS
        )
        error = await wire.serve(served.watch())
        code, reason = close_of(error)
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await connection.close(code, reason)


class _Served:
    """The credentials that come over one connection."""

    def __init__(self, connection: ServerConnection, host: NodeHost, credentials: Credentials):
        self._host, self._credentials = host, credentials
        self._address = str(connection.remote_address[0]) if connection.remote_address else ""
        self._socket = _counted(connection)
        self._wrong, self._known = 0, asyncio.Event()
        self._too_many = asyncio.Event()

    async def find_caller(self, fields: dict[str, Any]) -> Caller:
        """Return the lease or the coordinator whose credential a call has. Raises Refused."""
        try:
            claim = self._credentials.check(fields.pop("credential", None))
        except BadCredential as error:
            self._note_wrong()
            raise Refused(401, "not-authenticated", str(error), remedy="take a lease of this node's fleet") from None
        if claim.until <= time.time():
            raise lease_over(claim.lease, ENDED)
        if claim.role == COORDINATOR:
            self._note_known()
            return Caller(project="", scopes=(COORDINATOR,), key_id=COORDINATOR, address=self._address)
        self._host.admit(claim.lease, claim.until)
        self._note_known()
        act_for(key=claim.lease, address=self._address)
        return Caller(project=claim.lease, scopes=("read", "run"), key_id=claim.lease, address=self._address)

    def _note_known(self) -> None:
        if not self._known.is_set():
            self._known.set()
            if self._socket is not None:
                self._socket.note_known()

    def _note_wrong(self) -> None:
        self._wrong += 1
        if self._socket is not None:
            self._socket.note_wrong()
        if self._wrong >= MOST_WRONG:
            self._too_many.set()

    async def watch(self) -> None:
        """Raise Refused for a client without a valid call in time, and for one with many wrong credentials."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STRANGER_S):
                await self._first_of(self._known, self._too_many)
        if not self._known.is_set() and not self._too_many.is_set():
            raise Refused(401, "not-authenticated", "no call with a valid credential came in time")
        await self._too_many.wait()
        await asyncio.sleep(0)  # the answer to the last one goes first
        raise Refused(401, "not-authenticated", "too many wrong credentials")

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


def _counted(connection: ServerConnection) -> CountedSocket | None:
    transport_socket = connection.transport.get_extra_info("socket")
    plain = getattr(transport_socket, "_sock", transport_socket)
    return plain if isinstance(plain, CountedSocket) else None


def listen(host: str, port: int, admission: Admission) -> Listener:
    """Return a listening socket. Raises BackendUnavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM)
    listener.admission = admission
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BackendUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror or error}.", remedy="Choose another with --listen."
        ) from error
    listener.setblocking(False)
    return listener


def _check_path(connection: ServerConnection, request: Request) -> Response | None:
    return None if request.path == PATH else connection.respond(http.HTTPStatus.NOT_FOUND, "")


@contextlib.asynccontextmanager
async def serving(
    host: NodeHost, verifier: Verifier, certificate: NodeCertificate, listener: Listener
) -> AsyncIterator[Server]:
    """Serve during the body. At its end no connection is accepted, the host is closed, then all connections are."""
    quiet = logging.Logger("cloche.websocket", logging.CRITICAL)  # noqa: LOG001 - the package logs what clients send
    server = await serve(
        NodeServer(host, Credentials(verifier)).handle, sock=listener, ssl=certificate.context, compression=None,
        process_request=_check_path, server_header=None, max_size=MOST_MESSAGE, max_queue=MOST_UNREAD,
        ping_interval=None, open_timeout=STRANGER_S, close_timeout=CLOSE_S, logger=quiet,
        ssl_handshake_timeout=STRANGER_S, ssl_shutdown_timeout=CLOSE_S,
    )  # fmt: skip
    try:
        yield server
    finally:
        server.close(close_connections=False)
        await host.close()
        for connection in list(server.connections):
            connection.transport.abort()
