"""What carries a container's streams: the connection that docker multiplexes them on."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..containers.frames import CHUNK_BYTES, MAX_FRAME_BYTES

T = TypeVar("T")


def stream_of(connection: Any) -> Any:  # noqa: ANN401 - whatever the SDK opened
    """Return what sends and receives on a connection of the SDK's, from two threads, for as long as that takes."""
    found: Any = getattr(connection, "_sock", connection)
    if isinstance(found, ssl.SSLSocket):
        return Encrypted(found)
    found.settimeout(None)
    return found


class Encrypted:
    """Send and receive over TLS from two threads.

    OpenSSL takes one call at a time, and a call that receives may wait for hours: so none waits, and whoever has to
    does so for the socket alone. There is no way to end one direction only.
    """

    def __init__(self, wrapped: ssl.SSLSocket):
        self._socket = wrapped
        self._turn = threading.Lock()
        wrapped.setblocking(False)

    def attempt(self, call: Callable[..., T], *args: object) -> T:
        """Make a call that uses the socket, again and again until it need not wait. Raises OSError."""
        while True:
            try:
                with self._turn:
                    return call(*args)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def sendall(self, data: bytes) -> None:
        """Send all of it. Raises OSError when nobody listens."""
        view = memoryview(data)
        while view:
            view = view[self.attempt(self._socket.send, view) :]

    def recv(self, most: int) -> bytes:
        """Return what has come, at most so many bytes; empty at the end."""
        return self.attempt(self._socket.recv, most)

    def shutdown(self, how: int) -> None:
        """End the connection below TLS, whoever waits for it: the wrapper would go on without encryption."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close it, and the answer that it came with, which would keep it open."""
        response = getattr(self._socket, "_response", None)
        if response is not None:
            response.close()
        self._socket.close()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), event)
        except ValueError as error:
            raise OSError("the connection was closed") from error
        poll.poll()


class AttachedWire:
    """Hold the connection to the attached streams of one container; see containers.frames.Wire."""

    def __init__(self, connection: Any):  # noqa: ANN401 - whatever the SDK opened
        self._connection = connection
        self._socket: Any = stream_of(connection)

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the container is gone."""
        self._socket.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what the container writes."""
        streams = Demultiplexer()
        while data := self._socket.recv(CHUNK_BYTES):
            yield from streams.feed(data)

    def hang_up(self) -> None:
        """End the connection, in both directions."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._connection.close()
            self._socket.close()


class Demultiplexer:
    """Take apart what docker sends: pieces of standard output (1) and standard error (2)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the pieces that `data` completes."""
        self._buffer += data
        found = []
        while len(self._buffer) >= 8:
            end = 8 + int.from_bytes(self._buffer[4:8], "big")
            if end > MAX_FRAME_BYTES:
                raise ValueError("docker sent what is no stream of frames")
            if len(self._buffer) < end:
                break
            found.append((self._buffer[0], bytes(self._buffer[8:end])))
            del self._buffer[:end]
        return found
