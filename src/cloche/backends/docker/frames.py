"""What carries a container's streams: the connection that docker multiplexes them on."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from typing import Any

from ..containers.frames import CHUNK_BYTES, MAX_FRAME_BYTES
from ..noting import noted

log = logging.getLogger("cloche.docker")
STALL_S = 60.0  # for a container to take more of what it is sent


class AttachedWire:
    """Hold the connection to the attached streams of one container; see containers.frames.Wire."""

    def __init__(self, connection: Any, stall_s: float = STALL_S):  # noqa: ANN401 - whatever the SDK opened
        self._connection, self._stall_s = connection, stall_s
        self._socket: Any = getattr(connection, "_sock", connection)
        self._socket.settimeout(None)  # what is read comes when it comes
        if hasattr(self._socket, "setsockopt"):  # over ssh, it is no socket of the kernel's
            seconds, rest = divmod(stall_s, 1)
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1_000_000))
            )

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the container is gone, TimeoutError when it takes nothing for a while."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError(f"it took nothing of what it was sent for {self._stall_s:g} s") from error

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
        with noted(log, "the connection to a container was not closed well", OSError):
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
