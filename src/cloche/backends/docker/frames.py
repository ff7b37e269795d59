"""The link to a container: docker's multiplexed streams, and in its standard output the reaper's frames.

A thread of its own reads to the end whatever happens: docker does not kill a container whose output nobody takes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

MAX_FRAME_BYTES = 16 << 20
CHUNK_BYTES = 65_536
WORDS_KEPT_BYTES = 4096
OnFrame = Callable[[bytes, bytes], None]
OnEnd = Callable[[], None]


class Link:
    """Hold the attached streams of one container; `on_frame` and `on_end` are called in the reading thread."""

    def __init__(self, connection: Any, on_frame: OnFrame, on_end: OnEnd):  # noqa: ANN401 - whatever the SDK opened
        self._connection = connection
        self._socket: Any = getattr(connection, "_sock", connection)
        self._socket.settimeout(None)
        self._on_frame, self._on_end = on_frame, on_end
        self._frames = Splitter()
        self._turn = threading.Lock()
        self.last_words = b""
        threading.Thread(target=self._read, name="cloche-docker", daemon=True).start()

    def send_raw(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the container is gone."""
        with self._turn:
            self._socket.sendall(data)

    def send(self, tag: bytes, body: bytes = b"") -> None:
        """Send one frame. Raises OSError when the container is gone."""
        self.send_raw(tag + len(body).to_bytes(4, "big") + body)

    def send_data(self, data: bytes | memoryview) -> None:
        """Send data in pieces, and an empty one that ends them."""
        view = memoryview(data)
        for at in range(0, len(view), CHUNK_BYTES):
            self.send(b"D", bytes(view[at : at + CHUNK_BYTES]))
        self.send(b"D")

    def close(self) -> None:
        """Hang up: what listens at the other end goes away."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        streams = Demultiplexer()
        try:
            while data := self._socket.recv(CHUNK_BYTES):
                for stream, piece in streams.feed(data):
                    if stream == 1:
                        for tag, body in self._frames.feed(piece):
                            self._on_frame(tag, body)
                    else:
                        self.last_words = (self.last_words + piece)[-WORDS_KEPT_BYTES:]
        except (OSError, ValueError) as error:
            self.last_words += f"\n{error}".encode()
        finally:
            with contextlib.suppress(OSError):
                self._connection.close()
                self._socket.close()
            self._on_end()


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


class Splitter:
    """Cut bytes into frames: a tag, a length of four bytes, a body."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that `data` completes. Raises ValueError for one that is too long."""
        self._buffer += data
        found = []
        at = 0
        while len(self._buffer) - at >= 5:
            end = at + 5 + int.from_bytes(self._buffer[at + 1 : at + 5], "big")
            if end - at > MAX_FRAME_BYTES:
                raise ValueError("the container sent a frame that is too long")
            if len(self._buffer) < end:
                break
            found.append((bytes(self._buffer[at : at + 1]), bytes(self._buffer[at + 5 : end])))
            at = end
        del self._buffer[:at]
        return found
