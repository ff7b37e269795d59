"""What a caller and the driver of a live session say to each other: bytes in, objects out, no I/O.

Theory of operation: both talk over one stream socket. Most drivers speak frames: a length of four bytes, big-endian,
and one JSON object in UTF-8. Bash has neither lengths nor JSON, so its driver speaks lines, and `BashCodec` turns them
into the same objects. A driver runs beside hostile code and counts as hostile itself: whatever does not fit the grammar
or the bounds raises ValueError, after which a reader stays unusable, because a stream has no second beginning. What
the objects hold is still the guest's word, for the caller to check.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .decoding import MAX_BYTES, MAX_PARTS, TooMuch, as_text, decode, json_writer

MAX_FRAME_BYTES = MAX_BYTES
MAX_FRAMES = 1000  # of one cell or run: twice as many as are kept
MAX_CELL_PARTS = 2 * MAX_PARTS  # of all frames of one: of a value, and twice of what our drivers let a cell show
EXIT_INTERRUPTED = 130
_HEADER_BYTES = 4
_MAX_LINE_BYTES = 100
_READY = re.compile(r"ready ([\w.()+-]{1,60})", re.ASCII)
_DONE = re.compile(r"done ([0-9]{1,18}) ([0-9]{1,3})")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one frame. Raises ValueError for what JSON cannot say and for more than 4 GiB."""
    body = _as_json(message).encode("ascii")
    if len(body) >= 1 << (8 * _HEADER_BYTES):
        raise ValueError(f"a message of {len(body)} bytes does not fit a frame")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


_as_json = json_writer()


class FrameReader:
    """Turn bytes, in whatever pieces they come, into the objects of at most `max_bytes` each that they spell.

    How many frames there may be, and of how many parts together, holds until it is renewed.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES):
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._is_broken = False
        self.renew()

    def renew(self) -> None:
        """Count anew."""
        self._frames_left, self._parts_left = MAX_FRAMES, MAX_CELL_PARTS

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return what `data` completes.

        Raises ValueError for what is no frame or no JSON object, TooMuch for more than anybody has to say.
        """
        if self._is_broken:
            raise ValueError("this stream broke its protocol before")
        self._is_broken = True
        if not self._buffer and _HEADER_BYTES < len(data) <= self._max_bytes and _is_one_frame(data):
            found = [self._read(as_text(data[_HEADER_BYTES:]))]  # as nearly all of them come
        else:
            self._buffer += data
            found = self._take_frames()
        self._is_broken = False
        return found

    def _take_frames(self) -> list[dict[str, Any]]:
        found = []
        while len(self._buffer) >= _HEADER_BYTES:
            length = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
            if length > self._max_bytes:
                raise TooMuch(f"a frame of {length} bytes is longer than {self._max_bytes}")
            end = _HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view, view[_HEADER_BYTES:end] as body:
                text = as_text(body)
            del self._buffer[:end]  # before it is parsed: a large one is in memory often enough
            found.append(self._read(text))
        return found

    def _read(self, text: str) -> dict[str, Any]:
        self._frames_left -= 1
        if self._frames_left < 0:
            raise TooMuch(f"there are more than {MAX_FRAMES} frames")
        message, parts = _decode(text, min(MAX_PARTS, self._parts_left))
        self._parts_left -= parts
        return message


def _is_one_frame(data: bytes) -> bool:
    return int.from_bytes(data[:_HEADER_BYTES], "big") == len(data) - _HEADER_BYTES


def _decode(text: str, most_parts: int) -> tuple[dict[str, Any], int]:
    """Return the object that one frame's body spells, and of how many parts it is.

    Half a character would travel through Python and fail wherever it is printed first, so it is replaced.
    """
    message, parts = decode(text, most_parts, mends_text=True)
    if not isinstance(message, dict):
        raise ValueError("a frame is no JSON object")
    return message, parts


class BashCodec:
    """Speak with the driver of Bash: `<id> <bytes>` and the code to it, lines from it.

    It says `ready <version>` once and `done <id> <exit code>` after each run. Exit code 130 is Bash's word for an end
    by SIGINT, of the run itself or of the program it waited for.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._running: set[int] = set()
        self._is_broken = False
        self.renew()

    def renew(self) -> None:
        """Count anew."""
        self._lines_left = MAX_FRAMES

    def encode_run(self, run_id: int, code: str) -> bytes:
        """Return the bytes that ask for a run. Raises ValueError for what no shell script can hold."""
        if not 0 <= run_id < 10**18:
            raise ValueError(f"{run_id} is no number of a run")
        if "\0" in code:
            raise ValueError(f"Bash code cannot hold a NUL character (there is one at index {code.index(chr(0))})")
        body = code.encode("utf-8", "surrogateescape")
        self._running.add(run_id)
        return b"%d %d\n%b" % (run_id, len(body), body)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return what `data` completes, as objects in the words of frames. Raises ValueError for any other line."""
        if self._is_broken:
            raise ValueError("this stream broke its protocol before")
        self._is_broken = True
        *lines, rest = (self._line + data).split(b"\n", self._lines_left + 1)
        self._lines_left -= len(lines)
        if self._lines_left < 0:
            raise TooMuch(f"there are more than {MAX_FRAMES} lines")
        found = [message for line in lines if (message := self._parse(bytes(line))) is not None]
        if len(rest) > _MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {_MAX_LINE_BYTES} bytes")
        self._line = bytearray(rest)
        self._is_broken = False
        return found

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the object of one line; None for the end of a run that had ended, or was never asked for."""
        text = line[: _MAX_LINE_BYTES + 1].decode("ascii", "replace")
        if ready := _READY.fullmatch(text):
            return {"op": "ready", "runtime": f"Bash {ready[1]}"}
        done = _DONE.fullmatch(text)
        if done is None or int(done[2]) > 255:
            raise ValueError(f"{text!r} is no answer of Bash's driver")
        run_id = int(done[1])
        if run_id not in self._running:
            return None
        self._running.remove(run_id)
        message: dict[str, Any] = {"op": "done", "id": run_id, "exit_code": int(done[2])}
        if message["exit_code"] == EXIT_INTERRUPTED:
            message["error"] = {"name": "KeyboardInterrupt", "message": "the run was interrupted", "traceback": ""}
        return message
