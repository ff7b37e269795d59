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
from cloche.fleets.signing import BadCredential, LeaseClaim, Verifier
from cloche.serving.certificate import OwnCertificate
from cloche.serving.web_frames import MOST_FRAMES, WebFrameTurns
from cloche.wire.callers import Caller
from cloche.wire.connection import SILENCE_HEADER, Wire
from cloche.wire.problems import Refused
from cloche.wire.sockets import Disconnected, close_of

from .admission import COORDINATOR, MOST_OF_HOLDER, Admission
from .host import NodeHost, lease_over
from .leases import ENDED
from .verbs import ALL_VERBS

PATH = "/api/wire"
STRANGER_S = 5.0  # for each of the two handshakes, and then for a valid call
OPENING_S = 10.0  # for all of these
ACCEPTED, ENCRYPTED, OPEN = 0, 1, 2  # stages of a stranger's connection
MOST_WRONG = 8  # wrong credentials over one connection
SEND_S = 60.0  # a client that reads nothing for so long is disconnected
CLOSE_S = 1.0
LOOK_S, UNUSED_S = 5.0, 60.0  # a connection whose leases are all over is closed then; clients close theirs before
MOST_UNSENT = 32 << 20  # bytes to one client: more than a frame of each of its calls
MOST_UNREAD = 4  # messages of a connection that wait to be handled
FEW_FRAMES = 16  # of a stranger's web socket, in one turn of the event loop
MOST_KNOWN = 4_096  # credentials whose signature was checked
NONE_YET = -1.0  # a time before all ends: the end of a credential is compared apart
log = logging.getLogger("cloche.fleet")


class CheckedCredentials:
    """Check credentials; the signature of each is verified once."""

    def __init__(self, verifier: Verifier):
        self._verifier = verifier
        self._known: OrderedDict[str, LeaseClaim] = OrderedDict()

    def check(self, credential: object) -> LeaseClaim:
        """Return what a credential says, also of one that is over. Raises BadCredential."""
        claim = self._known.get(credential) if isinstance(credential, str) else None
        if claim is None:
            claim = self._verifier.check(credential, now=NONE_YET)
            if len(self._known) >= MOST_KNOWN:
                self._known.popitem(last=False)
            self._known[str(credential)] = claim
        return claim


class BoundedListener(socket.socket):
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

    stage = ACCEPTED
    _admission: Admission | None = None
    _address = ""
    _holder: str | None = None
    _late: asyncio.TimerHandle | None = None

    def count(self, admission: Admission, address: str) -> None:
        """Begin to count. A stranger that has come less far may lose its place to it."""
        self._admission, self._address = admission, address
        loser = admission.opened(address, self)
        if isinstance(loser, CountedSocket):
            loser.lose()
        self._late = asyncio.get_running_loop().call_later(OPENING_S, self.lose)

    def lose(self) -> None:
        """End the connection, whose transport then reads its end."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and count it no longer."""
        admission, self._admission = self._admission, None
        if self._late is not None:
            self._late.cancel()
        if admission is not None:
            admission.closed(self._address, self, self._holder)
        super().close()

    @property
    def is_held(self) -> bool:
        """Tell whether it is that of a lease or of the coordinator."""
        return self._holder is not None

    def hold(self, holder: str) -> bool:
        """Count it as the connection of a lease or the coordinator; return whether that may have it."""
        if self._admission is None or holder == self._holder:
            return True
        if not self._admission.has_room(holder):
            return False
        self._admission.held(self._address, self, self._holder, holder, time.monotonic())
        self._holder = holder
        if self._late is not None:
            self._late.cancel()
        return True

    def note_wrong(self) -> None:
        """Count a wrong credential."""
        if self._admission is not None:
            self._admission.note_wrong(self._address, time.monotonic())


class BoundedConnection(ServerConnection):
    """A connection whose frames are handled a bounded number at once, fewer of a stranger.

    It ends when its client makes the node answer, as by pings, and reads no answers.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that TLS is there."""
        super().connection_made(transport)
        self._turns = WebFrameTurns(
            self.transport, self._take, most=self._most_at_once, is_paused=lambda: self.recv_messages.paused
        )
        if (counted := _counted(self)) is not None:
            counted.stage = ENCRYPTED

    def data_received(self, data: bytes) -> None:
        """Take data in turns."""
        self._turns.feed(data)

    def _take(self, data: bytes) -> None:
        """Pass frames to the package, which may answer by itself."""
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MOST_UNSENT:
            self.transport.abort()

    def _most_at_once(self) -> int:
        counted = _counted(self)
        return MOST_FRAMES if counted is None or counted.is_held else FEW_FRAMES

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what was not handled."""
        self._turns.stop()
        super().connection_lost(exc)


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

    def __init__(self, host: NodeHost, credentials: CheckedCredentials):
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

    def __init__(self, connection: ServerConnection, host: NodeHost, credentials: CheckedCredentials):
        self._host, self._credentials = host, credentials
        self._address = str(connection.remote_address[0]) if connection.remote_address else ""
        self._socket = _counted(connection)
        if self._socket is not None:
            self._socket.stage = OPEN
        self._wrong, self._known = 0, asyncio.Event()
        self._holder, self._users = "", dict[str, float]()  # whose it is, and all whose calls came, with their ends
        self._has_ended, self._why = asyncio.Event(), ""

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
            self._note_known(COORDINATOR, claim.until)
            return Caller(project="", scopes=(COORDINATOR,), key_id=COORDINATOR, address=self._address)
        self._host.admit(claim.lease, claim.until)
        self._note_known(claim.lease, claim.until)
        act_for(key=claim.lease, address=self._address)
        return Caller(project=claim.lease, scopes=("read", "run"), key_id=claim.lease, address=self._address)

    def _note_known(self, user: str, until: float) -> None:
        """Note a valid call of a lease or the coordinator. Raises Refused (429) where it has too many connections."""
        if not self._is_live(self._holder) and not self._give_to(user):
            self._end("too many connections of one lease")
            raise Refused(
                429, "too-many-connections", f"{MOST_OF_HOLDER} connections of this lease are open, the most there may "
                "be; one carries many calls at once",
            )  # fmt: skip
        self._users[user] = until
        self._known.set()

    def _give_to(self, user: str) -> bool:
        if self._socket is not None and not self._socket.hold(user):
            return False
        self._holder = user
        return True

    def _is_live(self, user: str) -> bool:
        return self._users.get(user, 0.0) > time.time() if user == COORDINATOR else self._host.leases.has(user)

    def _is_used(self) -> bool:
        """Tell whether a lease of the connection lives, or the coordinator; it is the holder from now on."""
        self._users = {user: until for user, until in self._users.items() if self._is_live(user)}
        return self._holder in self._users or any(map(self._give_to, self._users))

    def _note_wrong(self) -> None:
        self._wrong += 1
        if self._socket is not None:
            self._socket.note_wrong()
        if self._wrong >= MOST_WRONG:
            self._end("too many wrong credentials")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._has_ended.set()

    async def watch(self) -> None:
        """Raise Refused for a client without a valid call in time, and for one that has no right to it any longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STRANGER_S):
                await self._first_of(self._known, self._has_ended)
        if not self._known.is_set() and not self._has_ended.is_set():
            raise Refused(401, "not-authenticated", "no call with a valid credential came in time")
        await self._until_end()
        await asyncio.sleep(0)  # the answer to the last one goes first
        raise Refused(401, "not-authenticated", self._why)

    async def _until_end(self) -> None:
        """Wait until the connection is to end, also since all its leases have been over for a while."""
        used_at = time.monotonic()
        while not self._has_ended.is_set():
            if self._is_used():
                used_at = time.monotonic()
            elif time.monotonic() - used_at > UNUSED_S:
                self._end("all leases of this connection are over")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._has_ended.wait()

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


def listen(host: str, port: int, admission: Admission) -> BoundedListener:
    """Return a listening socket. Raises BackendUnavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = BoundedListener(family, socket.SOCK_STREAM)
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
    host: NodeHost, verifier: Verifier, certificate: OwnCertificate, listener: BoundedListener
) -> AsyncIterator[Server]:
    """Serve during the body. At its end no connection is accepted, the host is closed, then all connections are."""
    quiet = logging.Logger("cloche.websocket", logging.CRITICAL)  # noqa: LOG001 - the package logs what clients send
    server = await serve(
        NodeServer(host, CheckedCredentials(verifier)).handle, sock=listener, ssl=certificate.context, compression=None,
        process_request=_check_path, server_header=None, max_size=MOST_MESSAGE, max_queue=MOST_UNREAD,
        ping_interval=None, open_timeout=STRANGER_S, close_timeout=CLOSE_S, logger=quiet,
        ssl_handshake_timeout=STRANGER_S, ssl_shutdown_timeout=CLOSE_S, create_connection=BoundedConnection,
    )  # fmt: skip
    try:
        yield server
    finally:
        server.close(close_connections=False)
        await host.close()
        for connection in list(server.connections):
            connection.transport.abort()
