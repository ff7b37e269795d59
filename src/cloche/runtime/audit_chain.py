"""One event is one line, and every line names the one before by its hash. Pure; what is written is in `audit_file`.

A line is a JSON object whose last two members are `prev`, the hash of the line before, and `hash`, the SHA-256 of all
bytes of this line up to the comma before `hash`. So a line is checked as the bytes that it is, without a second way to
write the same JSON. A write that was interrupted leaves the beginning of a line; the next writer ends that line and
adds a `recovery` event, which has length and hash of what was left.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloche.core.errors import InvalidRequest

VERSION = 1
NOTHING = "0" * 64  # what the first line of all names as the one before
MOST_LINE_BYTES = 64 * 1024
MOST_CHARS, MOST_ITEMS, MOST_DEPTH = 2_000, 64, 4
RESERVED = ("v", "seq", "time", "kind", "prev", "hash")
RECOVERY, ROTATION = "recovery", "rotation"

_ENDING = re.compile(rb',"hash":"([0-9a-f]{64})"\}')
_BEGINNING = re.compile(rb'\{"v":1,"seq":([1-9][0-9]{0,18}),"time":"')
_PREVIOUS = re.compile(rb',"prev":"([0-9a-f]{64})"\Z')
_MOST_NUMBER = 1 << 63
LISTS = (list, tuple, set, frozenset)
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ENDING_BYTES = len(b',"hash":"' + NOTHING.encode() + b'"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Name one line of the chain: its number, counted from 1, and its hash in hex."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Hold one line whose own hash is right; `prev` is the hash that it gives for the line before."""

    link: Link
    prev: str
    raw: bytes

    def fields(self) -> dict[str, Any]:
        """Return the event with all its members."""
        read: dict[str, Any] = json.loads(self.raw)
        return read

    def is_event(self) -> bool:
        """Tell whether the line is an event's JSON: who can compute a hash can write anything else."""
        try:
            read = self.fields()
            return read["seq"] == self.link.seq and all(isinstance(read[name], str) for name in ("time", "kind"))
        except (ValueError, RecursionError, KeyError, TypeError):
            return False


FIRST = Link(seq=0, hash=NOTHING)


def line_after(last: Link, kind: str, time: str, fields: Mapping[str, Any]) -> tuple[bytes, Link]:
    """Return the line of an event, with its newline, and its link. Raises InvalidRequest for a name that is taken."""
    if not _KIND.fullmatch(kind):
        raise InvalidRequest(f"audit: {kind!r} is no kind of event; give a word of small letters, digits and _")
    taken = [name for name in fields if name in RESERVED]
    if taken:
        raise InvalidRequest(f"audit: an event has no field {taken[0]!r} of its own; give it another name")
    event = {"v": VERSION, "seq": last.seq + 1, "time": time, "kind": kind}
    text = _as_json({**event, **bounded(fields), "prev": last.hash})
    if len(text) > MOST_LINE_BYTES - _ENDING_BYTES:
        short = {name: value for name, value in bounded(fields, most=64).items() if not isinstance(value, (list, dict))}
        text = _as_json({**event, **dict(list(short.items())[:MOST_ITEMS]), "is_clipped": True, "prev": last.hash})
    body = text[:-1].encode("ascii")
    digest = hashlib.sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body, digest.encode("ascii")), Link(seq=last.seq + 1, hash=digest)


_as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def bounded(fields: Mapping[str, Any], *, most: int = MOST_CHARS) -> dict[str, Any]:
    """Return fields as plain data of bounded size; those that are None are left out."""
    return {str(name)[:64]: _plain(value, 1, most) for name, value in fields.items() if value is not None}


def _plain(value: object, depth: int, most: int) -> Any:  # noqa: ANN401 - JSON
    kind = type(value)
    if kind is str and len(value) <= most:  # type: ignore[arg-type]  # what comes most often, first
        return value
    if value is None or kind is bool or (kind is float and math.isfinite(value)):  # type: ignore[arg-type]
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _MOST_NUMBER else str(value)[:most]
    if depth < MOST_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MOST_ITEMS]
        return {str(name)[:64]: _plain(item, depth + 1, most) for name, item in items}
    if depth < MOST_DEPTH and isinstance(value, LISTS):
        return [_plain(item, depth + 1, most) for item in list(value)[:MOST_ITEMS]]
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def read_line(raw: bytes) -> Line | None:
    """Return the line that `raw` (without its newline) is; None when it is not whole, or not what was written."""
    ending = _ENDING.fullmatch(raw, len(raw) - _ENDING_BYTES) if len(raw) > _ENDING_BYTES else None
    beginning = _BEGINNING.match(raw)
    if ending is None or beginning is None:
        return None
    body = raw[: ending.start()]
    previous = _PREVIOUS.search(body, len(body) - 80)
    found = ending[1].decode()
    if previous is None or hashlib.sha256(body).hexdigest() != found:
        return None
    return Line(link=Link(seq=int(beginning[1]), hash=found), prev=previous[1].decode(), raw=raw)


def is_beginning(raw: bytes, last: Link) -> bool:
    """Tell whether `raw`, which no newline ends, can be what an interrupted write of the next line left.

    After a failure of power there may be zeros instead of what was written.
    """
    text = raw.rstrip(b"\0")
    expected = b'{"v":1,"seq":%d,"time":"' % (last.seq + 1)
    is_like = text.startswith(expected) or expected.startswith(text)
    return is_like and len(raw) < MOST_LINE_BYTES and b"\n" not in raw and not _ENDING.search(text)
