"""The loop of a keeper: frames between one init and any number of clients.

A client numbers its channels with 16 bits. On the way to init, the client's number is added as the upper bits. Data is
passed on unparsed. Output for a slow client is buffered up to the windows of its streams and `MOST_UNSENT` bytes in
total; beyond that the client is disconnected, so that it cannot block the others. While init does not read, no client
is read.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class RelayOwner(Protocol):
        """The owner of a relay, which decides about the sandbox."""

        def answer(self, client: Client, channel: int, op: str, body: bytes) -> None:
            """Answer one of the keeper's operations."""
            ...

        def note_clients(self) -> None:
            """Handle that clients have come or gone."""
            ...

        def note_deadline(self) -> None:
            """Handle that the deadline is over, and set another one or `ended`."""
            ...

        def greeting(self) -> dict[str, Any]:
            """Return the keeper's part of the greeting to a client."""
            ...


POLLIN, POLLOUT, GONE = select.POLLIN, select.POLLOUT, select.POLLHUP | select.POLLERR
SOL_SOCKET, SO_PEERCRED, CREDENTIALS_BYTES = 1, 17, 12
CHUNK = 1 << 18
MOST_CLIENTS = 64
MOST_UNSENT = 32 << 20  # bytes that wait for one client
MOST_FOR_INIT = 1 << 20  # bytes that wait for init, beyond which no client is read
MOST_NUMBER = (1 << 16) - 1
MOST_OWN_BODY = 4096  # of an operation of the keeper's own
GREETING_S = 10.0  # for a client to send HELLO
LONGEST_WAIT_S = 60.0  # in one call: poll's clock stands still while the machine sleeps, and `now` does not
OWN = ("info", "keep", "own", "pause", "resume", "lifetime", "watch", "end", "network", "linger", "adopt")
OP = b'{"op":"'


def now() -> float:
    """Return the seconds of a clock that includes suspend (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def awake() -> float:
    """Return the seconds of a clock that excludes suspend (CLOCK_MONOTONIC)."""
    return time.monotonic()


def peer_uid(link: _socket.socket) -> int:
    """Return the user id of a Unix socket's peer (SO_PEERCRED)."""
    return int.from_bytes(link.getsockopt(SOL_SOCKET, SO_PEERCRED, CREDENTIALS_BYTES)[4:8], "little")


class Peer:
    """One connection with a buffer of unsent data."""

    def __init__(self, relay: FrameRelay, fd: int):
        self.relay, self.fd = relay, fd
        self.frames = relay.wire.FrameBuffer()
        self.unsent: list[bytes] = []
        self.unsent_bytes = 0
        self.events = POLLIN
        os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        """Send now, or once the peer reads."""
        if self.fd < 0:
            return
        if not self.unsent:
            try:
                sent = os.write(self.fd, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it is gone, as the loop will find
            if sent == len(data):
                return
            data = data[sent:]
            self.watch(self.events | POLLOUT)
        self.unsent.append(data)
        self.unsent_bytes += len(data)

    def send_more(self) -> None:
        """Send buffered data, as far as the peer reads it."""
        while self.unsent:
            data = b"".join(self.unsent[:64])
            try:
                sent = os.write(self.fd, data)
            except BlockingIOError:
                return
            except OSError:
                sent = self.unsent_bytes
                self.unsent.clear()
            self.unsent_bytes -= sent
            if self.unsent:
                self.unsent[:64] = [data[sent:]] if sent < len(data) else []
        self.unsent_bytes = 0
        self.watch(self.events & ~POLLOUT)

    def watch(self, events: int) -> None:
        """Poll for these events from now on."""
        self.events = events
        if self.fd >= 0:
            self.relay.poll.register(self.fd, events)

    def read(self) -> bytes | None:
        """Return received data, None once the peer is gone."""
        try:
            return os.read(self.fd, CHUNK) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def close(self) -> None:
        """Close the connection."""
        if self.fd >= 0:
            self.relay.ignore(self.fd)
            os.close(self.fd)
            self.fd = -1
            self.unsent.clear()


class Client(Peer):
    """One client: its number, and the channels that it has opened."""

    def __init__(self, relay: FrameRelay, fd: int, number: int):
        super().__init__(relay, fd)
        self.number = number
        self.channels: dict[int, Any] = {}  # by number, each with the credit that init gives
        self.is_greeted = self.is_visit = False
        self.came_at = now()

    @property
    def counts(self) -> bool:
        """Tell whether the sandbox is kept alive for this client."""
        return self.is_greeted and not self.is_visit


class FrameRelay:
    """Pass frames on. `wire` is the codec, `init` the socket to the sandbox, `listening` the clients' socket."""

    def __init__(self, wire: Any, json: Any, init: int, listening: int, owner: RelayOwner):  # noqa: ANN401 - modules
        self.wire, self.json, self.owner = wire, json, owner
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.clients: dict[int, Client] = {}
        self.numbers = self.own_numbers = 0
        self.waiting: dict[
            int, Callable[[dict[str, Any]], None]
        ] = {}  # callbacks of the keeper's requests to init, by channel
        self.is_full = False  # init does not read
        self.init_greeting: dict[str, Any] | None = None
        self.deadline: float | None = None
        self.deserted_at: float | None = None  # by the clock of `awake`: a machine that sleeps has no services
        self.ended = ""  # why, when it is over
        # Once it shall end, until when it waits for clients, and whether all of them have finished.
        self.linger: tuple[float, Callable[[], bool]] | None = None
        self.init = Peer(self, init)
        self.watch(init, POLLIN, self._serve_init)
        self.listening: Any = _socket.socket(fileno=listening)
        self.watch(listening, POLLIN, self._accept)
        self.init.send(wire.frame(wire.HELLO, 0, json.write({"version": wire.VERSION})))

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events of a descriptor."""
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def ignore(self, fd: int) -> None:
        """Stop polling a descriptor."""
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def serve(self) -> str:
        """Run until the sandbox ends; return the reason."""
        while not self.ended:
            for fd, events in self.poll.poll(self._timeout_ms()):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(events)
            self._check_time()
        return self.ended

    def _timeout_ms(self) -> float:
        moments = [client.came_at + GREETING_S for client in self.clients.values() if not client.is_greeted]
        if self.deadline is not None:
            moments.append(self.deadline)
        if self.deserted_at is not None:
            moments.append(now() + self.deserted_at - awake())
        if self.linger is not None:
            moments.append(self.linger[0])
        return min([LONGEST_WAIT_S, *(max(0.0, moment - now()) for moment in moments)]) * 1000 + 1

    def _check_time(self) -> None:
        moment = now()
        if self.deadline is not None and moment >= self.deadline:
            self.owner.note_deadline()
        if self.deserted_at is not None and awake() >= self.deserted_at:
            self.ended = "its service has not come back"
        if self.linger is not None and (moment >= self.linger[0] or self.linger[1]()):
            self.ended = "it was asked to end"
        for client in list(self.clients.values()):
            if not client.is_greeted and moment > client.came_at + GREETING_S:
                self.drop(client)

    # Clients.

    def _accept(self, _: int) -> None:
        try:
            fd, _ = self.listening._accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EINTR):
                raise
            return
        link = _socket.socket(fileno=fd)
        is_ours = peer_uid(link) == os.geteuid()
        link.detach()
        if not is_ours or len(self.clients) >= MOST_CLIENTS:
            os.close(fd)
            return
        os.set_inheritable(fd, False)
        self.numbers = self.numbers % MOST_NUMBER + 1
        while self.numbers in self.clients:
            self.numbers = self.numbers % MOST_NUMBER + 1
        client = self.clients[self.numbers] = Client(self, fd, self.numbers)
        self.watch(fd, 0 if self.is_full else POLLIN, lambda events: self._serve_client(client, events))
        if self.init_greeting is not None:
            self._greet(client)

    def _greet(self, client: Client) -> None:
        greeting = {**(self.init_greeting or {}), "version": self.wire.VERSION, "keeper": self.owner.greeting()}
        client.send(self.wire.frame(self.wire.HELLO, 0, self.json.write(greeting)))

    def _serve_client(self, client: Client, events: int) -> None:
        if events & POLLOUT:
            client.send_more()
        if not events & (POLLIN | GONE) or (self.is_full and not events & GONE):
            return
        data = client.read()
        try:
            if data is None:
                raise self.wire.WireError("it is gone")
            for kind, channel, body in client.frames.feed(data):
                self._take(client, kind, channel, body)
        except ValueError:  # of the wire, or of JSON that is none
            self.drop(client)

    def _take(self, client: Client, kind: int, channel: int, body: bytes) -> None:
        wire = self.wire
        if kind == wire.HELLO:
            message = self.json.read(body)
            if message.get("version") != wire.VERSION or client.is_greeted:
                raise wire.WireError("another version")
            client.is_greeted, client.is_visit = True, bool(message.get("is_visit"))
            self.owner.note_clients()
            return
        if not client.is_greeted or not 0 < channel <= MOST_NUMBER:
            raise wire.WireError("no greeting, or no number of a channel")
        if kind == wire.OPEN:
            if channel in client.channels:
                raise wire.WireError("the channel is in use already")
            self.json.read(body)
            client.channels[channel] = wire.Credit()
            op = _own_operation(body)
            if op:
                self.owner.answer(client, channel, op, body)
                return
        elif channel not in client.channels:
            return
        elif kind == wire.CLOSE:
            del client.channels[channel]
        else:
            self._check(client, kind, channel, body)
        self.to_init(wire.HEADER.pack(len(body), client.number << 16 | channel, kind) + body)

    def _check(self, client: Client, kind: int, channel: int, body: bytes) -> None:
        """Raise ValueError for a frame that would make init end its connection, and thereby the whole sandbox."""
        wire = self.wire
        if kind == wire.DATA:
            stream, data = wire.read_data(body)
            credit = client.channels[channel]
            if stream >= wire.STREAMS or len(data) > credit.sendable(stream):
                raise wire.WireError("data exceeds the window")
            credit.note_sent(stream, len(data))
        elif kind == wire.WINDOW:
            wire.read_grant(body)
        elif kind == wire.ASK:
            _check_question(self.json.read(body))
        elif kind != wire.END or len(body) != 1:
            raise wire.WireError(f"a frame of kind {kind} that a client may not send")

    def close(self, client: Client, channel: int, **error: Any) -> None:  # noqa: ANN401 - any JSON
        """Close a channel of one of the keeper's operations."""
        if channel in client.channels:
            del client.channels[channel]
            body = self.json.write({"error": error} if error else {})
            self.to_client(client, self.wire.frame(self.wire.CLOSE, channel, body))

    def event(self, client: Client, channel: int, **body: Any) -> None:  # noqa: ANN401 - any JSON
        """Send an event of one of the keeper's operations, unless its channel is closed."""
        if channel in client.channels:
            self.to_client(client, self.wire.frame(self.wire.EVENT, channel, self.json.write(body)))

    def to_client(self, client: Client, data: bytes) -> None:
        """Send to a client; disconnect it if its buffer exceeds the bound."""
        client.send(data)
        if client.unsent_bytes > MOST_UNSENT:
            self.drop(client)

    def drop(self, client: Client) -> None:
        """Disconnect a client, and close its channels."""
        if self.clients.pop(client.number, None) is None:
            return
        client.close()
        wire = self.wire
        for channel in client.channels:
            self.to_init(wire.frame(wire.CLOSE, client.number << 16 | channel))
        client.channels.clear()
        self.owner.note_clients()

    # Init.

    def to_init(self, data: bytes) -> None:
        """Send to init, and stop reading clients while its buffer exceeds the bound."""
        self.init.send(data)
        if self.init.unsent_bytes > MOST_FOR_INIT and not self.is_full:
            self._read_clients(is_full=True)

    def _read_clients(self, *, is_full: bool) -> None:
        self.is_full = is_full
        for client in self.clients.values():
            client.watch(client.events & ~POLLIN if is_full else client.events | POLLIN)

    def ask_init(self, take: Callable[[dict[str, Any]], None], op: str, **arguments: Any) -> None:  # noqa: ANN401
        """Have init perform an operation, and pass the body of its CLOSE to `take`."""
        self.own_numbers = self.own_numbers % MOST_NUMBER + 1
        self.waiting[self.own_numbers] = take
        self.to_init(self.wire.frame(self.wire.OPEN, self.own_numbers, self.json.write({"op": op, **arguments})))

    def _serve_init(self, events: int) -> None:
        if events & POLLOUT:
            self.init.send_more()
            if self.is_full and self.init.unsent_bytes <= MOST_FOR_INIT // 2:
                self._read_clients(is_full=False)
        if not events & (POLLIN | GONE):
            return
        data = self.init.read()
        try:
            if data is None:
                self.ended = "its first process has ended"
                return
            for kind, channel, body in self.init.frames.feed(data):
                self._pass_on(kind, channel, body)
        except ValueError:
            self.ended = "its first process broke the protocol"

    def _pass_on(self, kind: int, channel: int, body: bytes) -> None:
        wire = self.wire
        if kind == wire.HELLO:
            self.init_greeting = self.json.read(body)
            for greeted in list(self.clients.values()):
                self._greet(greeted)
            return
        number, channel = channel >> 16, channel & MOST_NUMBER
        if number == 0:
            if kind == wire.CLOSE and channel in self.waiting:
                self.waiting.pop(channel)(self.json.read(body))
            return
        client = self.clients.get(number)
        if client is None or channel not in client.channels:
            return
        if kind == wire.CLOSE:
            del client.channels[channel]
        elif kind == wire.WINDOW:
            client.channels[channel].note_granted(*wire.read_grant(body))
        self.to_client(client, wire.HEADER.pack(len(body), channel, kind) + body)


def _check_question(message: dict[str, Any]) -> None:
    """Raise ValueError for numbers that init could not parse."""
    names = {"signal": ("number",), "resize": ("rows", "columns")}.get(str(message.get("do")), ())
    if not all(isinstance(message.get(name), int) and 0 <= message[name] <= MOST_NUMBER for name in names):
        raise ValueError("an answer without its numbers")


def _own_operation(body: bytes) -> str:
    """Return the name of the keeper's operation in a body, empty for an operation of init."""
    if len(body) > MOST_OWN_BODY or not body.startswith(OP):
        return ""
    op = body[len(OP) : body.find(b'"', len(OP))].decode("latin-1")
    return op if op in OWN else ""
