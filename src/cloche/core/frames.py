"""What a caller and the driver of a live session say to each other: bytes in, objects out, no I/O.

Theory of operation: both talk over one stream socket. Most drivers speak frames: a length of four bytes, big-endian,
and one JSON object in UTF-8. Bash has neither lengths nor JSON, so its driver speaks lines, and `BashCodec` turns them
into the same objects. A driver runs beside hostile code and counts as hostile itself: whatever does not fit the grammar
or the bounds raises ValueError, after which a reader stays unusable, because a stream has no second beginning. What
the objects hold is still the guest's word, for the caller to check.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .units import MIB

MAX_FRAME_BYTES = 16 * MIB
MAX_CONTAINERS = 1_000_000  # in one frame: a megabyte of nothing but brackets would become a hundred of objects
EXIT_INTERRUPTED = 130
_HEADER_BYTES = 4
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LINE_BYTES = 100
_READY = re.compile(r"ready ([\w.()+-]{1,60})", re.ASCII)
_DONE = re.compile(r"done ([0-9]{1,18}) ([0-9]{1,3})")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one frame. Raises ValueError for what JSON cannot say and for more than 4 GiB."""
    body = _as_json(message).encode("ascii")
    if len(body) >= 1 << (8 * _HEADER_BYTES):
        raise ValueError(f"a message of {len(body)} bytes does not fit a frame")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class FrameReader:
    """Turn bytes, in whatever pieces they come, into the objects of at most `max_bytes` each that they spell."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES):
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._is_broken = False

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return what `data` completes. Raises ValueError for a frame that is too long or is no JSON object."""
        if self._is_broken:
            raise ValueError("this stream broke its protocol before")
        self._is_broken = True
        if not self._buffer and _HEADER_BYTES < len(data) <= self._max_bytes and _is_one_frame(data):
            found = [_decode(data[_HEADER_BYTES:])]  # as nearly all of them come
        else:
            self._buffer += data
            found = self._take_frames()
        self._is_broken = False
        return found

    def _take_frames(self) -> list[dict[str, Any]]:
        found, at = [], 0
        while len(self._buffer) - at >= _HEADER_BYTES:
            begin = at + _HEADER_BYTES
            length = int.from_bytes(self._buffer[at:begin], "big")
            if length > self._max_bytes:
                raise ValueError(f"a frame of {length} bytes is longer than {self._max_bytes}")
            if len(self._buffer) < begin + length:
                break
            at = begin + length
            found.append(_decode(bytes(self._buffer[begin:at])))
        del self._buffer[:at]
        return found


def _is_one_frame(data: bytes) -> bool:
    return int.from_bytes(data[:_HEADER_BYTES], "big") == len(data) - _HEADER_BYTES


def _decode(body: bytes) -> dict[str, Any]:
    """Return the object that one frame's body spells."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"a frame has more than {MAX_CONTAINERS} lists and objects")
    try:
        message = _from_json(body.decode("utf-8"))
    except RecursionError:
        raise ValueError("a frame is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a frame is no JSON object")
    # Half a character would travel through Python and fail wherever it is printed first.
    whole: dict[str, Any] = _without_surrogates(message) if _SURROGATE_ESCAPE.search(body) else message
    return whole


def _refuse(word: str) -> Any:  # noqa: ANN401 - the shape of json's hook
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is no number a float can hold")
    return number


# `json.dumps` and `json.loads` would make them, or parts of them, anew for every frame.
_WRITER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_READER: Any = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _json_writer() -> Callable[[Mapping[str, Any]], str]:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _WRITER.encode
    in_pieces = make(None, _WRITER.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)

    def write(message: Mapping[str, Any]) -> str:
        try:
            return "".join(in_pieces(message, 0))
        except RecursionError:
            return _WRITER.encode(message)  # which looks for what holds itself, and says so

    return write


_as_json = _json_writer()


def _from_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Return what a text spells. Raises ValueError."""
    try:
        value, end = _READER.scan_once(text, 0)
    except StopIteration:
        value, end = None, -1
    return value if end == len(text) else _READER.decode(text)  # with blanks around it, or with what is wrong


def _without_surrogates(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Replace lone surrogates, which no encoding can carry, by U+FFFD."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(one) for name, one in value.items()}
    return value


class BashCodec:
    """Speak with the driver of Bash: `<id> <bytes>` and the code to it, lines from it.

    It says `ready <version>` once and `done <id> <exit code>` after each run. Exit code 130 is Bash's word for an end
    by SIGINT, of the run itself or of the program it waited for.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._running: set[int] = set()
        self._is_broken = False

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
        *lines, rest = (self._line + data).split(b"\n")
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
