"""Connections whose bytes are recorded, in the clear or below TLS."""

from __future__ import annotations

import select
import socket
import ssl
from typing import Protocol

from .record import Arrival

PIECE = 1 << 18
PATIENCE_S = 60.0


class Stream(Protocol):
    """Read and write a connection; an empty answer is its end."""

    arrival: Arrival

    def receive(self) -> bytes: ...
    def send(self, data: bytes) -> None: ...
    def end_sending(self) -> None: ...


class Plain:
    """A connection as it is."""

    def __init__(self, connection: socket.socket, arrival: Arrival) -> None:
        self.connection, self.arrival = connection, arrival

    def first_byte(self) -> bytes:
        """Wait for the first byte and leave it where it is."""
        return self.connection.recv(1, socket.MSG_PEEK)

    def receive(self) -> bytes:
        """Return what came."""
        data = self.connection.recv(PIECE)
        self.arrival.note(data, data)
        return data

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.connection.sendall(data)

    def end_sending(self) -> None:
        """Say that nothing more comes."""
        self.connection.shutdown(socket.SHUT_WR)


class Tls:
    """A connection with TLS, of which the bytes below are recorded too."""

    def __init__(self, connection: socket.socket, arrival: Arrival, context: ssl.SSLContext) -> None:
        self.connection, self.arrival = connection, arrival
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._tls.arrival = arrival  # type: ignore[attr-defined]  # for `note_name`
        while not self._shakes_hands():
            self._feed()
        if certificate := self._tls.getpeercert():
            arrival.note(said=f"{certificate}\n".encode())

    @property
    def protocol(self) -> str | None:
        """Return what was agreed on by ALPN."""
        return self._tls.selected_alpn_protocol()

    def _shakes_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()
        return True

    def _feed(self) -> None:
        data = self.connection.recv(PIECE)
        self.arrival.note(data)
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    def _flush(self) -> None:
        if self._out.pending:
            self.connection.sendall(self._out.read())

    def receive(self) -> bytes:
        """Return what came."""
        while True:
            try:
                data = self._tls.read(PIECE)
            except ssl.SSLWantReadError:
                self._feed()
                continue
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                if error.reason == "UNEXPECTED_EOF_WHILE_READING":
                    return b""
                raise
            self.arrival.note(said=data)
            return data

    def send(self, data: bytes) -> None:
        """Send all of it."""
        view = memoryview(data)
        for at in range(0, len(view), PIECE):
            self._tls.write(view[at : at + PIECE])
            self._flush()

    def end_sending(self) -> None:
        """Say that nothing more comes."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:  # the other side goes on, which TLS 1.3 allows
            pass
        self._flush()
        self.connection.shutdown(socket.SHUT_WR)


def note_name(tls: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
    """Record the server name of a ClientHello."""
    tls.arrival.server_name = name or ""  # type: ignore[attr-defined]


def relay(one: socket.socket, other: socket.socket, note: Arrival) -> None:
    """Pass bytes on in both directions until both have ended; what comes from the first is recorded."""
    ways = {one: other, other: one}
    while ways:
        ready, _, _ = select.select(list(ways), [], [], PATIENCE_S)
        if not ready:
            return
        for end in ready:
            data = end.recv(PIECE)
            if end is one:
                note.note(data, data)
            if data:
                ways[end].sendall(data)
            else:
                ways.pop(end).shutdown(socket.SHUT_WR)
