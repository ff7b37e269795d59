"""Connections to servers inside, and the list of listening processes."""

from __future__ import annotations

import errno
import os
import select

from . import wire
from .loop import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from .loop import Host, Loop

    class PortOwner(Protocol):
        """Hold the channels."""

        loop: Loop
        host: Host

        def close(self, channel: int, **error: Any) -> None: ...


_socket: Any = __import__("_socket")  # `socket` would load as much as all the rest of us
LISTENING = "0A"
MOST_PORTS = 1000
TURN_S, PIECE_BYTES, MOST_TABLE_BYTES = 0.005, 4096, 1 << 20
POLLIN, POLLOUT = select.POLLIN, select.POLLOUT


class Listing:
    """Tell port and address of each TCP server of this network namespace, `MOST_PORTS` at most.

    The table is read for a moment in each turn of the loop: for every few rows the kernel goes through all servers that
    it keeps together, and a guest may have tens of thousands.
    """

    def __init__(self, owner: PortOwner, channel: int):
        self.owner, self.channel = owner, channel
        self.tables = [("tcp6", _socket.AF_INET6), ("tcp", _socket.AF_INET)]  # that are left
        self.family, self.fd = _socket.AF_INET, -1
        self.rest, self.left = b"", 0
        self.found: dict[tuple[int, str], dict[str, Any]] = {}
        self._go_on()

    def _go_on(self) -> None:
        until = now() + TURN_S
        while self.fd >= 0 or self._open_next():
            self._read()
            if now() > until:
                self.owner.loop.call_at((self, "ports"), now(), self._go_on)
                return
        ports = [self.found[key] for key in sorted(self.found)]
        self.owner.loop.send(wire.json_frame(wire.EVENT, self.channel, event="ports", ports=ports))
        self.owner.close(self.channel)

    def _open_next(self) -> bool:
        while self.tables:
            name, self.family = self.tables.pop()
            try:
                self.fd = os.open(f"/proc/net/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            self.rest, self.left = b"", MOST_TABLE_BYTES
            return True
        return False

    def _read(self) -> None:
        data = os.read(self.fd, PIECE_BYTES)
        self.left -= len(data)
        *rows, self.rest = (self.rest + data).split(b"\n")
        for row in rows:
            fields = row.decode("ascii", "replace").split()
            if len(fields) > 9 and fields[3] == LISTENING:
                address, _, port = fields[1].partition(":")
                text = _address(address, self.family)
                self.found[int(port, 16), text] = {"port": int(port, 16), "address": text}
                if len(self.found) >= MOST_PORTS:
                    self.tables.clear()
                    break
        if not data or self.left <= 0 or len(self.found) >= MOST_PORTS:
            self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # The client's requests.

    def ask(self, body: dict[str, Any]) -> None: ...
    def take(self, stream: int, data: memoryview) -> None: ...
    def take_end(self, stream: int) -> None: ...
    def grant(self, stream: int, count: int) -> None: ...

    def leave(self) -> None:
        self.tables.clear()
        self._close()
        self.owner.loop.cancel((self, "ports"))


def _address(text: str, family: int) -> str:
    data = b"".join(bytes.fromhex(text[offset : offset + 8])[::-1] for offset in range(0, len(text), 8))
    return str(_socket.inet_ntop(family, data))


def connect(owner: PortOwner, channel: int, port: int, *, hands_out: bool) -> PortConnection:
    """Begin to connect to a server on loopback. Raises OSError, ValueError."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}")
    return PortConnection(owner, channel, port, hands_out=hands_out)


class PortConnection:
    """Pass bytes between the client and a server inside, or hand the socket out, where the host can."""

    def __init__(self, owner: PortOwner, channel: int, port: int, *, hands_out: bool):
        self.hands_out = hands_out
        self.owner, self.loop, self.channel, self.port = owner, owner.loop, channel, port
        self.family = _socket.AF_INET
        self.window, self.held = wire.WINDOW_BYTES, 0
        self.pieces: list[bytes] = []
        self.is_connected = self.is_ending = self.is_over = False
        self.events = self.refused = 0  # and with what the first address refused
        try:
            self._begin()
        except OSError as error:
            self._begin_again(error.errno or 0)

    def _begin(self) -> None:
        self.socket = _socket.socket(self.family, _socket.SOCK_STREAM)
        self.socket.setblocking(False)
        host = "127.0.0.1" if self.family == _socket.AF_INET else "::1"
        code = self.socket.connect_ex((host, self.port))
        if code not in (0, errno.EINPROGRESS):  # which nobody is told again
            self.socket.close()
            raise OSError(code, os.strerror(code))
        self._watch(POLLOUT)

    def _begin_again(self, code: int) -> None:
        """Try the other loopback address: a server may listen there alone. Raises OSError, for the first one."""
        self.family, self.refused = _socket.AF_INET6, code
        try:
            self._begin()
        except OSError:
            raise OSError(code, os.strerror(code)) from None

    def _watch(self, events: int) -> None:
        if events == self.events:
            return
        self.events = events
        if events:
            self.loop.watch(self.socket.fileno(), events, self._ready)
        else:
            self.loop.ignore(self.socket.fileno())

    def _settle(self) -> None:
        """Watch for the events that are possible now."""
        if self.socket.fileno() < 0:
            return
        may_read = not self.is_over and self.window > 0 and not self.loop.is_full
        if not may_read and self.window > 0 and not self.is_over and self.loop.is_full:
            self.loop.go_on_later(self._settle)
        self._watch((POLLIN if may_read else 0) | (POLLOUT if self.pieces else 0))

    def _ready(self, events: int) -> None:
        if not self.is_connected:
            self._connected()
            return
        if events & POLLOUT and self.pieces:
            self._write()
        if self.socket.fileno() >= 0 and events & ~POLLOUT and not self.is_over and self.window > 0:
            self._read()
        self._settle()

    def _connected(self) -> None:
        code = self.socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if code and self.family == _socket.AF_INET:
            self._close()
            try:
                self._begin_again(code)
            except OSError:
                self._end(code)
            return
        if code:
            self._end(self.refused)
            return
        self.socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self.is_connected = True
        if self.hands_out and self.owner.host.hand_out(self.channel, self.socket.fileno()):
            self._end(0)
            return
        self.loop.send(wire.json_frame(wire.EVENT, self.channel, event="connected"))
        self._write()
        self._settle()

    def _read(self) -> None:
        try:
            data = self.socket.recv(min(wire.MOST_DATA, self.window))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.errno or 0)
            return
        if data:
            self.window -= len(data)
            self.loop.send(wire.data_frame(self.channel, 1, data))
            return
        self.is_over = True
        self.loop.send(wire.frame(wire.END, self.channel, bytes((1,))))
        self._end_if_done()

    def _write(self) -> None:
        passed = 0
        while self.pieces:
            try:
                sent = self.socket.send(self.pieces[0])
            except BlockingIOError:
                break
            except OSError as error:
                self._end(error.errno or 0)
                return
            passed += sent
            if sent < len(self.pieces[0]):
                self.pieces[0] = self.pieces[0][sent:]
            else:
                self.pieces.pop(0)
        self.held -= passed
        if passed:
            self.loop.send(wire.grant_frame(self.channel, 0, passed))
        if self.is_ending and not self.pieces:
            try:
                self.socket.shutdown(_socket.SHUT_WR)
            except OSError:
                pass  # the server has closed it
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self.is_over and self.is_ending and not self.pieces:
            self._end(0)

    def _end(self, code: int) -> None:
        self._close()
        error = {"kind": "os", "message": os.strerror(code), "errno": code} if code else {}
        self.owner.close(self.channel, **error)

    def _close(self) -> None:
        self._watch(0)
        self.socket.close()

    # The client's requests.

    def ask(self, body: dict[str, Any]) -> None: ...

    def take(self, stream: int, data: memoryview) -> None:
        self.held += len(data)
        if self.held > wire.WINDOW_BYTES:
            raise wire.WireError("data exceeds the window")
        if self.socket.fileno() < 0:
            return
        self.pieces.append(bytes(data))
        if self.is_connected and len(self.pieces) == 1:
            self._write()
            self._settle()

    def take_end(self, stream: int) -> None:
        self.is_ending = True
        if self.is_connected and self.socket.fileno() >= 0:
            self._write()
            self._settle()

    def grant(self, stream: int, count: int) -> None:
        self.window += count
        self._settle()

    def leave(self) -> None:
        if self.socket.fileno() >= 0:
            self._close()
