"""The link to a container: frames of our first process in what comes from its standard output.

A thread of its own reads to the end whatever happens: a container whose output nobody takes may not be killed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ..noting import noted

log = logging.getLogger("cloche.containers")
MAX_FRAME_BYTES = 16 << 20
CHUNK_BYTES = 65_536
WORDS_KEPT_BYTES = 4096
OUTPUT = 1
OnFrame = Callable[[bytes, bytes], None]
OnEnd = Callable[[], None]


class Wire(Protocol):
    """Carry a container's three streams."""

    def send(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises OSError when it is gone."""
        ...

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what it writes, with the number of the stream, until it ends. Raises OSError or ValueError."""
        ...

    def hang_up(self) -> None:
        """End its standard input: what listens there goes away."""
        ...

    def close(self) -> None:
        """Let go of everything; called once, by the thread that reads."""
        ...


class Link:
    """Hold the streams of one container; `on_frame` and `on_end` are called in the reading thread."""

    def __init__(self, wire: Wire, on_frame: OnFrame, on_end: OnEnd):
        self._wire = wire
        self._on_frame, self._on_end = on_frame, on_end
        self._frames = Splitter()
        self._turn = threading.Lock()
        self.last_words = b""
        threading.Thread(target=self._read, name="cloche-container", daemon=True).start()

    def send_raw(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the container is gone."""
        with self._turn:
            self._wire.send(data)

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
        with noted(log, "a container had hung up first", OSError):
            self._wire.hang_up()

    def _read(self) -> None:
        try:
            for stream, piece in self._wire.pieces():
                if stream == OUTPUT:
                    for tag, body in self._frames.feed(piece):
                        self._on_frame(tag, body)
                else:
                    self.last_words = (self.last_words + piece)[-WORDS_KEPT_BYTES:]
        except (OSError, ValueError, RecursionError) as error:  # the last from what is nested deeper than it is read
            self.last_words += f"\n{error}".encode()
        finally:
            self._wire.close()
            self._on_end()


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
