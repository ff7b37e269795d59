"""One event is one line, and each line contains the hash of the previous one. Pure; `writer` writes the lines.

A line is a JSON object whose last two members are `prev`, the hash of the previous line, and `hash`, the SHA-256 of all
bytes of this line up to the comma before `hash`. So a line is checked as its exact bytes, without a canonical form of
JSON. An interrupted write leaves the beginning of a line; the next writer terminates that line and adds a `recovery`
event with the length and hash of the remnant.
"""

from __future__ import annotations

from _collections_abc import Mapping

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from hashlib import sha256 as _sha256
    from json.encoder import encode_basestring_ascii as _quoted
    from typing import Any
else:  # a single run writes two lines; the C modules import faster than hashlib and json
    from _json import encode_basestring_ascii as _quoted

    try:
        from _sha2 import sha256 as _sha256
    except ImportError:  # _sha2 exists since Python 3.12; some builds lack both modules
        try:
            from _sha256 import sha256 as _sha256
        except ImportError:
            from hashlib import sha256 as _sha256

VERSION = 1
NOTHING = "0" * 64  # `prev` of the first line
MOST_LINE_BYTES = 64 * 1024
MOST_CHARS, MOST_ITEMS, MOST_DEPTH, MOST_NAME = 2_000, 64, 4, 64
RESERVED = frozenset({"v", "seq", "time", "kind", "prev", "hash"})
RECOVERY, ROTATION, REMOVAL = "recovery", "rotation", "removal"

_ENDING, _PREVIOUS, _END_OF_LINE = b',"hash":"', b',"prev":"', b'"}'
_BEGINNING, _AFTER_SEQ, _MOST_DIGITS = b'{"v":1,"seq":', b',"time":"', 19
_HEX_CHARS, _HEX, _DIGITS = 64, b"0123456789abcdef", b"0123456789"
_MOST_NUMBER = 1 << 63
LISTS = (list, tuple, set, frozenset)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENDING_BYTES = len(_ENDING) + _HEX_CHARS + len(_END_OF_LINE)
_PREVIOUS_BYTES = len(_PREVIOUS) + _HEX_CHARS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """A reference to one line of the chain: its number, counted from 1, and its hash in hex."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line whose own hash is correct; `prev` is the hash that it gives for the previous line."""

    link: ChainLink
    prev: str
    raw: bytes

    def fields(self) -> dict[str, Any]:
        """Return the event with all its members."""
        import json

        read: dict[str, Any] = json.loads(self.raw)
        return read

    def is_event(self) -> bool:
        """Tell whether the line is the JSON of an event. A correct hash does not show that: everyone can compute
        one.
        """
        try:
            read = self.fields()
            return read["seq"] == self.link.seq and all(isinstance(read[name], str) for name in ("time", "kind"))
        except (ValueError, RecursionError, KeyError, TypeError):
            return False


FIRST = ChainLink(seq=0, hash=NOTHING)


def line_after(last: ChainLink, kind: str, time: str, fields: Mapping[str, Any]) -> tuple[bytes, ChainLink]:
    """Return the line of an event, with its newline, and its link. Raises InvalidRequest for an invalid kind or a
    reserved field.
    """
    if not 0 < len(kind) <= MOST_NAME or kind[0] not in _LETTERS or kind.strip(f"{_LETTERS}0123456789_"):
        raise InvalidRequest(f"audit: {kind!r} is not a kind of event; give a word of small letters, digits and _")
    reserved = RESERVED.intersection(fields)
    if reserved:
        raise InvalidRequest(f"audit: an event has no field {min(reserved)!r} of its own; give it another name")
    seq = last.seq + 1
    event = f'{{"v":{VERSION},"seq":{seq},"time":{_quoted(time)},"kind":"{kind}",'
    text = f'{event}{_members_text(fields)}"prev":"{last.hash}"'
    if len(text) > MOST_LINE_BYTES - _ENDING_BYTES:
        text = f'{event}{_clipped_text(fields)}"prev":"{last.hash}"'
    body = text.encode("ascii")
    digest = _sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body, digest.encode("ascii")), ChainLink(seq=seq, hash=digest)


def _as_json(value: object) -> str:
    import json

    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _members_text(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON of bounded size, each followed by a comma."""
    if not all(type(name) is str and len(name) <= MOST_NAME for name in fields):  # clipping may make two names equal
        return "".join(f"{_quoted(name)}:{_as_json(value)}," for name, value in bounded(fields).items())
    return "".join([f"{_quoted(name)}:{_text(value, 1)}," for name, value in fields.items() if value is not None])


def _clipped_text(fields: Mapping[str, Any]) -> str:
    short = {
        name: value for name, value in bounded(fields, max_chars=64).items() if not isinstance(value, (list, dict))
    }
    clipped = {**dict(list(short.items())[:MOST_ITEMS]), "is_clipped": True}
    return "".join(f"{_quoted(name)}:{_as_json(value)}," for name, value in clipped.items())


def _text(value: object, depth: int) -> str:
    """Return the JSON of `_plain(value)`, with a fast path for common types."""
    kind = type(value)
    if kind is str and len(value) <= MOST_CHARS:  # type: ignore[arg-type]
        return _quoted(value)  # type: ignore[arg-type]
    if kind is int and -_MOST_NUMBER < value < _MOST_NUMBER:  # type: ignore[operator]
        return repr(value)
    if kind is float and _is_finite(value):  # type: ignore[arg-type]
        return repr(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is dict and depth < MOST_DEPTH and len(value) <= MOST_ITEMS:  # type: ignore[arg-type]
        items: Iterable[tuple[object, object]] = value.items()  # type: ignore[attr-defined]
        texts = [
            f"{_quoted(name)}:{_text(item, depth + 1)}"
            for name, item in items
            if type(name) is str and len(name) <= MOST_NAME
        ]
        if len(texts) == len(value):  # type: ignore[arg-type]
            return "{" + ",".join(texts) + "}"
    return _as_json(_plain(value, depth, MOST_CHARS))


def bounded(fields: Mapping[str, Any], *, max_chars: int = MOST_CHARS) -> dict[str, Any]:
    """Return fields as plain data of bounded size, without those that are None."""
    return {str(name)[:MOST_NAME]: _plain(value, 1, max_chars) for name, value in fields.items() if value is not None}


def _plain(value: object, depth: int, max_chars: int) -> Any:  # noqa: ANN401 - JSON
    if value is None or isinstance(value, bool) or (type(value) is float and _is_finite(value)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _MOST_NUMBER else str(value)[:max_chars]
    if depth < MOST_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MOST_ITEMS]
        return {str(name)[:MOST_NAME]: _plain(item, depth + 1, max_chars) for name, item in items}
    if depth < MOST_DEPTH and isinstance(value, LISTS):
        return [_plain(item, depth + 1, max_chars) for item in list(value)[:MOST_ITEMS]]
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def sha256_of(text: str | bytes) -> str:
    """Return the SHA-256 of code in hex, equal to that of the file from which the code was read."""
    if isinstance(text, bytes):
        return _sha256(text).hexdigest()
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 file contains
        data = text.encode("utf-8", "surrogatepass")
    return _sha256(data).hexdigest()


def _is_finite(value: float) -> bool:
    return value - value == 0


def read_line(raw: bytes) -> Line | None:
    """Return the line in `raw` (without its newline); None if it is incomplete or was changed."""
    body, line_hash = raw[:-_ENDING_BYTES], _hash_in(raw[-_ENDING_BYTES:], _ENDING, _END_OF_LINE)
    previous = _hash_in(body[-_PREVIOUS_BYTES:], _PREVIOUS, b'"')
    digits, comma, _ = body[len(_BEGINNING) : len(_BEGINNING) + _MOST_DIGITS + len(_AFTER_SEQ)].partition(_AFTER_SEQ)
    is_number = 0 < len(digits) <= _MOST_DIGITS and not digits.strip(_DIGITS) and digits[:1] != b"0"
    if not line_hash or not previous or not body.startswith(_BEGINNING) or not comma or not is_number:
        return None
    if _sha256(body).hexdigest() != line_hash:
        return None
    return Line(link=ChainLink(seq=int(digits), hash=line_hash), prev=previous, raw=raw)


def _hash_in(piece: bytes, before: bytes, after: bytes) -> str:
    """Return the hash between two texts that make up the whole piece; empty otherwise."""
    digits = piece[len(before) : len(piece) - len(after)]
    is_so = len(digits) == _HEX_CHARS and piece.startswith(before) and piece.endswith(after) and not digits.strip(_HEX)
    return digits.decode() if is_so else ""


def is_beginning(raw: bytes, last: ChainLink) -> bool:
    """Tell whether `raw`, which has no newline, can be the remnant of an interrupted write of the next line.

    After a power failure, the remnant may end with zero bytes.
    """
    text = raw.rstrip(b"\0")
    expected = b'{"v":1,"seq":%d,"time":"' % (last.seq + 1)
    is_like = text.startswith(expected) or expected.startswith(text)
    return is_like and len(raw) < MOST_LINE_BYTES and b"\n" not in raw and not _has_ending(text)


def _has_ending(text: bytes) -> bool:
    position = text.find(_ENDING)
    while position >= 0:
        if _hash_in(text[position : position + _ENDING_BYTES], _ENDING, _END_OF_LINE):
            return True
        position = text.find(_ENDING, position + 1)
    return False
