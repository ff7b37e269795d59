"""The codec of messages from a guest: frames and lines of a session, value and figures of a one-shot run. No I/O.

Theory of operation, sessions: caller and driver talk over one stream socket. Most drivers speak frames: a length of
four bytes, big-endian, and one JSON object in UTF-8. Bash has neither lengths nor JSON, so its driver speaks lines, and
`BashCodec` turns them into the same objects. A driver runs beside hostile code and counts as hostile itself: input
outside of the grammar or the bounds raises ValueError, after which a reader stays unusable, because the stream cannot
be resynchronised. The content of the objects is untrusted, and the caller's to check.

One-shot runs: the guest writes its value to a pipe; where it displayed something, frames follow the letter F instead.
`GuestReportReader` reads them as they come, bounded and checked for their shape; a malformed report is dropped whole.
"""

from __future__ import annotations

import binascii
import contextlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from .guest_json import MAX_BYTES, MAX_PARTS, TooLarge, as_text, decode, json_writer
from .limits import KIB, MIB
from .record import dataclass
from .request import PLAIN_CELL, CellOptions
from .result import Output

MAX_FRAME_BYTES = MAX_BYTES
MAX_FRAMES = 1000  # of one cell or run: twice as many as are kept
MAX_CELL_PARTS = 2 * MAX_PARTS  # of all frames of one: of a value, and twice of what our drivers let a cell show
MAX_OUTPUTS = 500  # outputs of one run or cell
MAX_MIMES = 100  # of one output
MAX_METADATA_BYTES = 64 * KIB  # of one output, roughly as JSON
MAX_VALUE_BYTES = 65_536
MAX_REPORT_BYTES = 32 * MIB  # value and figures together
EXIT_INTERRUPTED = 130
_HEADER_BYTES = 4
_MAX_LINE_BYTES = 100
_READY = re.compile(r"ready ([\w.()+-]{1,60})", re.ASCII)
_DONE = re.compile(r"done ([0-9]{1,18}) ([0-9]{1,3})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_as_json = json_writer()


def encode(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one frame. Raises ValueError for what JSON cannot say and for more than 4 GiB."""
    body = _as_json(message).encode("ascii")
    if len(body) >= 1 << (8 * _HEADER_BYTES):
        raise ValueError(f"a message of {len(body)} bytes does not fit a frame")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class FrameReader:
    """Turn bytes, in pieces of any size, into objects of at most `max_bytes` each.

    The bounds on the number of frames and of their parts hold until it is renewed.
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
        """Return the objects that `data` completes.

        Raises ValueError for an invalid frame or JSON object, TooLarge above the bounds.
        """
        if self._is_broken:
            raise ValueError("this stream broke its protocol before")
        self._is_broken = True
        if not self._buffer and _HEADER_BYTES < len(data) <= self._max_bytes and _is_one_frame(data):
            messages = [self._read(as_text(data[_HEADER_BYTES:]))]  # as nearly all of them come
        else:
            self._buffer += data
            messages = self._take_frames()
        self._is_broken = False
        return messages

    def _take_frames(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._buffer) >= _HEADER_BYTES:
            length = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
            if length > self._max_bytes:
                raise TooLarge(f"a frame of {length} bytes is longer than {self._max_bytes}")
            end = _HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view, view[_HEADER_BYTES:end] as body:
                text = as_text(body)
            del self._buffer[:end]  # before it is parsed: a large one is in memory often enough
            messages.append(self._read(text))
        return messages

    def _read(self, text: str) -> dict[str, Any]:
        self._frames_left -= 1
        if self._frames_left < 0:
            raise TooLarge(f"there are more than {MAX_FRAMES} frames")
        message, part_count = _decode(text, min(MAX_PARTS, self._parts_left))
        self._parts_left -= part_count
        return message


def _is_one_frame(data: bytes) -> bool:
    return int.from_bytes(data[:_HEADER_BYTES], "big") == len(data) - _HEADER_BYTES


def _decode(text: str, most_parts: int) -> tuple[dict[str, Any], int]:
    """Return the object that one frame's body spells, and of how many parts it is.

    Half a character would travel through Python and fail wherever it is printed first, so it is replaced.
    """
    message, part_count = decode(text, most_parts, mends_text=True)
    if not isinstance(message, dict):
        raise ValueError("a frame is not a JSON object")
    return message, part_count


class BashCodec:
    """Speak with the driver of Bash: `<id> <bytes>` and the code to it, lines from it.

    It says `ready <version>` once and `done <id> <exit code>` after each run. Exit code 130 is Bash's word for an end
    by SIGINT, of the run itself or of the program it waited for.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._running: set[int] = set()
        self._changed: list[str] = []  # variables of the last run
        self._is_broken = False
        self.renew()

    def renew(self) -> None:
        """Count anew."""
        self._lines_left = MAX_FRAMES

    def encode_run(self, run_id: int, code: str, options: CellOptions = PLAIN_CELL) -> bytes:
        """Return the bytes that ask for a run. Raises ValueError for text that a shell script cannot hold."""
        code = self._prologue(options) + code
        if not 0 <= run_id < 10**18:
            raise ValueError(f"{run_id} is not a number of a run")
        if "\0" in code:
            raise ValueError(f"Bash code cannot hold a NUL character (there is one at index {code.index(chr(0))})")
        body = code.encode("utf-8", "surrogateescape")
        self._running.add(run_id)
        return b"%d %d\n%b" % (run_id, len(body), body)

    def _prologue(self, options: CellOptions) -> str:
        """Return the commands before a run, on its first line: they restore the variables of the last one, too."""
        words = [f"__cloche_restore {name};" for name in self._changed]
        words += [f"cd -- {shlex.quote(options.cwd)} || {{ (exit 1); return; }};"] if options.cwd is not None else []
        words += [f"__cloche_assign {name} {shlex.quote(value)};" for name, value in options.env.items()]
        self._changed = [name for name in options.env if _NAME.fullmatch(name)]
        if len(self._changed) < len(options.env):
            raise ValueError("env: the name of a variable has letters, digits and _ alone")
        return "".join(words)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return what `data` completes, as objects in the words of frames. Raises ValueError for any other line."""
        if self._is_broken:
            raise ValueError("this stream broke its protocol before")
        self._is_broken = True
        *lines, incomplete = (self._line + data).split(b"\n", self._lines_left + 1)
        self._lines_left -= len(lines)
        if self._lines_left < 0:
            raise TooLarge(f"there are more than {MAX_FRAMES} lines")
        messages = [message for line in lines if (message := self._parse(bytes(line))) is not None]
        if len(incomplete) > _MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {_MAX_LINE_BYTES} bytes")
        self._line = bytearray(incomplete)
        self._is_broken = False
        return messages

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the object of one line; None for the end of a run that had ended, or was never asked for."""
        text = line[: _MAX_LINE_BYTES + 1].decode("ascii", "replace")
        if ready := _READY.fullmatch(text):
            return {"op": "ready", "runtime": f"Bash {ready[1]}"}
        ended = _DONE.fullmatch(text)
        if ended is None or int(ended[2]) > 255:
            raise ValueError(f"{text!r} is not an answer of Bash's driver")
        run_id = int(ended[1])
        if run_id not in self._running:
            return None
        self._running.remove(run_id)
        message: dict[str, Any] = {"op": "done", "id": run_id, "exit_code": int(ended[2])}
        if message["exit_code"] == EXIT_INTERRUPTED:
            message["error"] = {"name": "KeyboardInterrupt", "message": "the run was interrupted", "traceback": ""}
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestReport:
    """Hold the report of a one-shot guest: its value and its displayed outputs.

    `is_cut` says that further outputs were dropped; `refused` is the reason why a report that was too large was
    dropped.
    """

    value: Any = None
    is_repr: bool = False
    outputs: tuple[Output, ...] = ()
    is_cut: bool = False
    refused: str = ""

    def notes(self) -> dict[str, Any]:
        """Return the entries for the result's `meta`."""
        cut = {"outputs_cut": True} if self.is_cut else {}
        return {**cut, "refused": self.refused} if self.refused else cut


class GuestReportReader:
    """Read the report of a one-shot guest piece by piece; one that is too large or malformed is dropped whole."""

    def __init__(self) -> None:
        self._frames: FrameReader | None = None
        self._value = bytearray()
        self._outputs: list[Output] = []
        self._size = 0
        self._is_cut = self._is_broken = False
        self.refused = ""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._is_broken:
            return
        try:
            self._take(data)
        except ValueError as error:
            self.refused = str(error) if isinstance(error, TooLarge) else ""
            self._is_broken = True
            self._value.clear()
            self._outputs.clear()
            self._frames = None

    def _take(self, data: bytes) -> None:
        if not self._size and data[:1] == b"F":
            self._frames, self._size, data = FrameReader(), 1, data[1:]
        self._size += len(data)
        if self._size > MAX_REPORT_BYTES:
            raise TooLarge(f"value and figures have more than {MAX_REPORT_BYTES} bytes")
        if self._frames is None:
            self._value += data
        for frame in self._frames.feed(data) if self._frames is not None else ():
            self._take_frame(frame)
        if len(self._value) > MAX_VALUE_BYTES:
            raise TooLarge(f"the value has more than {MAX_VALUE_BYTES} bytes")

    def _take_frame(self, frame: dict[str, Any]) -> None:
        text = frame.get("text")
        self._value = bytearray(text.encode() if isinstance(text, str) else b"")  # it stands in the last one
        self._is_cut = self._is_cut or frame.get("is_cut") is True
        output = read_output(frame)
        if output is not None and len(self._outputs) < MAX_OUTPUTS:
            self._outputs.append(output)
        elif output is not None:
            self._is_cut = True

    def report(self) -> GuestReport:
        """Return the whole report; an empty one if it was malformed."""
        if self._is_broken:
            return GuestReport(refused=self.refused)
        value, is_repr = _value(bytes(self._value))
        return GuestReport(value=value, is_repr=is_repr, outputs=tuple(self._outputs), is_cut=self._is_cut)


def _value(data: bytes) -> tuple[Any, bool]:
    """Return a value, and whether it is a repr: invalid JSON is taken as a repr."""
    kind, text = data[:1], data[1:]
    if kind == b"J":
        with contextlib.suppress(ValueError):
            return decode(as_text(text))[0], False
    return (text.decode("utf-8", "replace"), True) if kind in (b"R", b"J") else (None, False)


def read_output(frame: Mapping[str, Any]) -> Output | None:
    """Read a MIME bundle: texts, with binary content as base64. Returns None if it is invalid."""
    data, metadata = frame.get("data"), frame.get("metadata")
    if not isinstance(data, dict) or len(data) > MAX_MIMES:
        return None
    content = {mime: _decoded(mime, value) for mime, value in data.items() if isinstance(value, str)}
    return Output(data=content, metadata=_bounded(metadata)) if content else None


def _bounded(metadata: object) -> dict[str, Any]:
    """Return an output's metadata, or nothing if it is invalid or exceeds the bounds."""
    if not isinstance(metadata, dict) or not metadata:
        return {}
    return metadata if is_small(metadata, MAX_METADATA_BYTES) else {}


def is_small(value: object, max_size: int) -> bool:
    """Tell whether a value has at most about so many bytes as JSON, without writing it."""
    pending: list[object] = [value]
    while pending and max_size >= 0:
        item = pending.pop()
        max_size -= len(item) if isinstance(item, str) else 2
        if isinstance(item, dict):
            pending += item
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return max_size >= 0


def _decoded(mime: str, value: str) -> str | bytes:
    if mime.startswith("text/") or mime.endswith(("xml", "json", "javascript")):
        return value
    with contextlib.suppress(ValueError):
        return binascii.a2b_base64(value, strict_mode=True)  # of the text itself, not of a copy in bytes
    return value
