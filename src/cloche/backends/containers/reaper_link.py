"""How the first process of a container speaks with its caller: frames of a tag, a length of four bytes, and a body."""

from __future__ import annotations

import json
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ORDER, DATA, KILL, TOLD, WORD = b"O", b"D", b"K", b"L", b"W"  # heard
SAID = b"l"  # by a session's interpreter, as TOLD is what it is told; the others are ours
READY, STARTED, OUT, ERR, VALUE, ENDED, DONE, FAILED = b"H", b"s", b"o", b"e", b"v", b"r", b"k", b"x"  # said
CHUNK = 65_536


class Caller:
    """Speak frames with whoever started the container."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.later: list[tuple[bytes, bytes]] = []
        self.is_gone = False

    def say(self, tag: bytes, body: bytes = b"") -> None:
        """Send one frame, however long that takes."""
        view = memoryview(tag + len(body).to_bytes(4, "big") + body)
        while view:
            view = view[os.write(1, view) :]

    def say_json(self, tag: bytes, **body: Any) -> None:
        self.say(tag, json.dumps(body).encode())

    def hear(self) -> tuple[bytes, bytes]:
        """Wait for one frame. Ends this process, and with it the container, when nothing more will come."""
        while True:
            frame = self.next()
            if frame is not None:
                return frame
            self.read()
            if self.is_gone:
                os._exit(0)

    def is_spoken_to(self) -> bool:
        """Tell whether there is something to hear."""
        return bool(self.buffer or self.later) or has_come(0)

    def read(self) -> None:
        data = os.read(0, CHUNK)
        self.buffer += data
        self.is_gone = not data

    def hear_piece(self) -> bytes:
        """Wait for a piece of what follows an order; what else comes meanwhile is heard after that."""
        kept, self.later = self.later, []
        while True:
            tag, body = self.hear()
            if tag == DATA:
                self.later = kept
                return body
            kept.append((tag, body))

    def next(self) -> tuple[bytes, bytes] | None:
        """Return a frame that is already here."""
        if self.later:
            return self.later.pop(0)
        if len(self.buffer) < 5:
            return None
        end = 5 + int.from_bytes(self.buffer[1:5], "big")
        if len(self.buffer) < end:
            return None
        frame = bytes(self.buffer[:1]), bytes(self.buffer[5:end])
        del self.buffer[:end]
        return frame


def has_come(fd: int) -> bool:
    """Tell whether there is something to read; not by `select`, which some gVisor refuses."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Incoming:
    """Read the pieces that follow an order like a file; an empty one ends them."""

    def __init__(self, caller: Caller):
        self.caller, self.rest, self.is_over = caller, b"", False

    def read(self, size: int) -> bytes:
        while not self.is_over and len(self.rest) < size:
            piece = self.caller.hear_piece()
            self.rest += piece
            self.is_over = not piece
        found, self.rest = self.rest[:size], self.rest[size:]
        return found

    def drain(self) -> None:
        """Leave out what is left."""
        self.rest = b""
        while not self.is_over:
            self.read(1)
            self.rest = b""


class Outgoing:
    """Write like to a file; it goes out in pieces."""

    def __init__(self, caller: Caller):
        self.caller = caller

    def write(self, data: bytes) -> int:
        for at in range(0, len(data), CHUNK):
            self.caller.say(DATA, data[at : at + CHUNK])
        return len(data)
