"""Values of a graded program as typed literals: the strict reader of what the guest sent, and the writer of arguments.

Theory of operation: `interpreter/graded_call` writes one line for each part of a value: a letter for its type, then a
number or a length (the bytes of a text follow on the next line), or how many items follow. The reader keeps a stack of
its own, so that no depth of the guest's costs ours; it bounds the parts, the depth, the digits of integers, and the
items of one set or dictionary that have the same hash, since each of these is compared with all others. It accepts no
class but Python's plain ones, so that comparing a value calls no code of the guest's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import InvalidRequest

MAX_PARTS = 1_000_000
MAX_DEPTH = 64
MAX_BITS = 131_072  # of an integer: about 39,000 decimal digits
MAX_COMPARED = 10_000_000  # parts, where items of one set have the same hash
MAX_SHOWN_CHARS = 4096
_MAX_DIGITS = MAX_BITS // 4
_LINE = re.compile(rb"([=NTFifsbltezd])([-+.0-9a-zA-Z]{0,%d})\n" % (_MAX_DIGITS + 1))
_COUNT = re.compile(rb"0|[1-9][0-9]{0,8}")
_HEX = re.compile(rb"-?(?:0|[1-9a-f][0-9a-f]*)")
_FLOAT = re.compile(rb"-?(?:0x[01]\.[0-9a-f]{1,13}p[-+][0-9]{1,4}|0x0\.0p\+0|inf)|nan")
_CONSTANTS: Mapping[bytes, Any] = {b"N": None, b"T": True, b"F": False}
_PLAIN_TYPES = (int, float, str, bytes, bool, type(None))


class NotLiteral(ValueError):
    """Report bytes that are no typed literal, or one that is too large."""


class _Open:
    """Hold a container whose items are still being read."""

    __slots__ = ("first_part", "items", "letter", "missing")

    def __init__(self, letter: bytes, missing: int, first_part: int) -> None:
        self.letter, self.missing, self.first_part = letter, missing, first_part
        self.items: list[Any] = []


def read_values(data: bytes) -> tuple[Any, ...]:
    """Return the values that a guest sent. Raises NotLiteral."""
    if not data.startswith(b"="):
        raise NotLiteral("it sent no result")
    return tuple(_Reader(data).read())


class _Reader:
    """Read one message: `=`, the number of values, and the values."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position, self._parts = data, 0, 0

    def read(self) -> list[Any]:
        letter, rest = self._line()
        outer = _Open(letter, self._count_items(rest), 0)
        stack = [outer]
        while True:
            while stack[-1].missing == 0:
                done = stack.pop()
                if not stack:
                    if self._position != len(self._data):
                        raise NotLiteral("it sent more than one result")
                    return outer.items
                self._add(stack[-1], _build(done, self._parts - done.first_part))
            letter, rest = self._line()
            if letter in b"ltezd":
                if len(stack) > MAX_DEPTH:
                    raise NotLiteral(f"a result is nested more than {MAX_DEPTH} deep")
                stack.append(_Open(letter, self._count_items(rest) * (2 if letter == b"d" else 1), self._parts))
            else:
                self._add(stack[-1], self._scalar(letter, rest))

    @staticmethod
    def _add(container: _Open, value: object) -> None:
        container.items.append(value)
        container.missing -= 1

    def _line(self) -> tuple[bytes, bytes]:
        match = _LINE.match(self._data, self._position)
        if match is None or (match[1] == b"=") != (self._position == 0):
            raise NotLiteral("its result is no typed literal, or a number in it is too long")
        self._position = match.end()
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise NotLiteral(f"a result has more than {MAX_PARTS} parts")
        return match[1], match[2]

    def _count_items(self, digits: bytes) -> int:
        count = self._count(digits)
        if self._parts + count > MAX_PARTS:
            raise NotLiteral(f"a result has more than {MAX_PARTS} parts")
        return count

    def _count(self, digits: bytes) -> int:
        if not _COUNT.fullmatch(digits):
            raise NotLiteral("its result is no typed literal: a count is no number")
        return int(digits)

    def _scalar(self, letter: bytes, rest: bytes) -> Any:  # noqa: ANN401 - any plain value
        if letter in _CONSTANTS and not rest:
            return _CONSTANTS[letter]
        if letter == b"i" and _HEX.fullmatch(rest):
            return int(rest, 16)
        if letter == b"f" and _FLOAT.fullmatch(rest):
            return _read_float(rest)
        if letter in (b"s", b"b"):
            return self._text(letter, self._count(rest))
        raise NotLiteral("its result is no typed literal")

    def _text(self, letter: bytes, size: int) -> str | bytes:
        end = self._position + size
        if self._data[end : end + 1] != b"\n":
            raise NotLiteral("its result is no typed literal: a text is cut")
        data = self._data[self._position : end]
        self._position = end + 1
        if letter == b"b":
            return data
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise NotLiteral("its result is no typed literal: a text is no UTF-8") from None


def _read_float(text: bytes) -> float:
    try:
        return float.fromhex(text.decode())
    except OverflowError:
        raise NotLiteral("its result is no typed literal: a float is out of range") from None


def _build(done: _Open, part_count: int) -> Any:  # noqa: ANN401 - any plain container
    items = done.items
    if done.letter == b"l":
        return items
    if done.letter == b"t":
        return tuple(items)
    keys = items[::2] if done.letter == b"d" else items
    as_set = _hashed(keys, part_count)
    if len(as_set) != len(keys):
        raise NotLiteral("its result is no typed literal: a set or a dictionary has an item twice")
    if done.letter == b"d":
        return dict(zip(keys, items[1::2], strict=True))
    return as_set if done.letter == b"e" else frozenset(as_set)


def _hashed(items: Sequence[Any], part_count: int) -> set[Any]:
    """Return items as a set. Those with the same hash are all compared with each other, which a guest may exploit."""
    try:
        equal_hashes = Counter(sorted(map(hash, items))).values()
    except TypeError:
        raise NotLiteral("a set or a dictionary of the result has an item without a hash") from None
    if sum(count * count for count in equal_hashes if count > 1) * part_count > MAX_COMPARED * max(1, len(items)):
        raise NotLiteral("too many items of one set or dictionary have the same hash")
    return set(items)


def expression(value: object, *, what: str) -> str:
    """Return Python source of an argument. Raises InvalidRequest for what is no plain data."""
    return _source(value, what, 0)


def _source(value: object, what: str, depth: int) -> str:
    kind = type(value)
    if kind is float:
        return _float_source(value)  # type: ignore[arg-type]
    if kind in _PLAIN_TYPES:
        return _scalar_source(value, what)
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"{what}: a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict) and kind is dict:
        rows = (f"{_source(key, what, depth + 1)}: {_source(item, what, depth + 1)}" for key, item in value.items())
        return f"{{{', '.join(rows)}}}"
    write = _CONTAINER_SOURCE.get(kind)
    if write is None:
        raise InvalidRequest(
            f"{what}: a value of type {kind.__name__} cannot be sent as data; "
            "give None, numbers, text, bytes, lists, tuples, sets and dictionaries"
        )
    return write([_source(item, what, depth + 1) for item in value])  # type: ignore[attr-defined]


def _scalar_source(value: object, what: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > MAX_BITS:
            raise InvalidRequest(f"{what}: an integer has more than {MAX_BITS} bits")
        return hex(value) if abs(value) >= 1 << 64 else repr(value)
    return repr(value)


def _float_source(value: float) -> str:
    if math.isnan(value):
        return "(1e999-1e999)"
    return repr(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999"


_CONTAINER_SOURCE: Mapping[type, Callable[[Sequence[str]], str]] = {
    list: lambda items: f"[{', '.join(items)}]",
    tuple: lambda items: f"({', '.join(items)}{',' * (len(items) == 1)})",
    set: lambda items: f"{{{', '.join(items) or '*()'}}}",
    frozenset: lambda items: f"frozenset({{{', '.join(items)}}})" if items else "frozenset()",
}


def shown(value: object, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return the text of a value that the reader accepted, cut where it is long; huge integers are hexadecimal."""
    pieces: list[str] = []
    size = 0
    for piece in _pieces(value, max_chars):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            return f"{''.join(pieces)[:max_chars]}..."
    return "".join(pieces)


def _pieces(value: Any, max_chars: int) -> Iterable[str]:  # noqa: ANN401 - any plain value
    if isinstance(value, dict) and value:
        yield from _inner("{", (_pair(key, item, max_chars) for key, item in value.items()), "}")
    elif isinstance(value, list | tuple) or (isinstance(value, set | frozenset) and value):
        opening, closing = _BRACKETS[type(value)]
        yield from _inner(opening, (_pieces(item, max_chars) for item in value), closing)
    elif isinstance(value, int) and value.bit_length() > 1024:
        yield hex(value)
    elif isinstance(value, str | bytes):
        yield repr(value[: max_chars + 1])
    else:
        yield repr(value)


_BRACKETS: Mapping[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("frozenset({", "})"),
}  # fmt: skip


def _inner(opening: str, items: Iterable[Iterable[str]], closing: str) -> Iterable[str]:
    yield opening
    for number, item in enumerate(items):
        if number:
            yield ", "
        yield from item
    yield closing


def _pair(key: object, item: object, max_chars: int) -> Iterable[str]:
    yield from _pieces(key, max_chars)
    yield ": "
    yield from _pieces(item, max_chars)
