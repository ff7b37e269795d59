"""JSON from a guest, read strictly and in bounded time.

Theory of operation: the scanner of `json` holds the interpreter's lock from the first character to the last, so a
thread would not keep its work from the event loop; its input has to be bounded. Long texts (pictures, pages) are cheap,
values cost some hundred nanoseconds each, and more with garbage collection: so the values are counted before they are
parsed, with the brackets and commas inside texts left out; and in large input each long text is read by itself.
Accepted values can be written as JSON again: no NaN or infinity, no lone surrogate, no number too long to print, and no
nesting too deep for a writer.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .limits import KIB, MIB

MAX_BYTES = 9 * MIB  # of one text: a bundle of 8 MiB, as drivers write it, and what comes with it
MAX_WIDE_BYTES = MAX_BYTES // 2  # of one that is not ASCII: in memory it may take four times as much
MAX_PARTS = 40_000  # commas, lists and objects outside of texts; a value of 64 KiB has at most 32,768
FEW_PARTS = 32  # that are not looked at twice, whether they stand in texts or not
MAX_BESIDE_BYTES = 320 * KIB  # of what is parsed at once
MAX_OUTSIDE_CHARS = 128 * KIB  # of it, that stand in no text: a value and metadata of 64 KiB each, mostly numbers, say
MAX_MEMBERS, MAX_PIECES = 1000, 16  # of an object that is larger: its members, and the lists and objects there
MAX_ESCAPES = 1 << 20  # in all texts together
MAX_HALVES = 65_536  # of characters, to be replaced
MAX_DEPTH = 200
MAX_DIGITS = 4300  # of an integer, which is read in time with their square: what CPython reads unless told otherwise
MAX_FLOAT_CHARS = 32  # of any other number, of which the hardest take long to read; a repr has 25 at most
_BLOCK_CHARS = 256 * KIB
_MENDED_CHARS = 64 * KIB  # at a time
_decoder: Any = json.decoder  # whose scanner of texts has no type
_BLANKS = re.compile(r"[ \t\n\r]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TooLarge(ValueError):
    """Report that a guest sent more than any value needs."""


def as_text(body: bytes | bytearray | memoryview) -> str:
    """Decode UTF-8. Raises ValueError for invalid bytes, TooLarge above the bound of a parse."""
    if len(body) > MAX_BYTES:
        raise TooLarge(f"{len(body)} bytes of JSON are more than {MAX_BYTES}")
    try:
        return str(body, "ascii")
    except UnicodeDecodeError:
        if len(body) > MAX_WIDE_BYTES:
            raise TooLarge(f"{len(body)} bytes of JSON that is not ASCII are more than {MAX_WIDE_BYTES}") from None
        return str(body, "utf-8")


def decode(text: str, most_parts: int = MAX_PARTS, *, mends_text: bool = False) -> tuple[Any, int]:
    """Return the value of a JSON text, and the number of its parts.

    Raises TooLarge for more than `most_parts`, else ValueError for a value that cannot be written as JSON again. With
    `mends_text`, lone surrogates become U+FFFD.
    """
    has_escapes = "\\" in text
    if has_escapes and len(text) > MAX_ESCAPES and text.count("\\") > MAX_ESCAPES:
        raise TooLarge(f"JSON has more than {MAX_ESCAPES} escapes")
    may_have_halves = has_escapes and _SURROGATE_ESCAPE.search(text) is not None
    if len(text) > MAX_BESIDE_BYTES:
        return _Large(text, most_parts, mends_text=mends_text, may_have_halves=may_have_halves).read()
    value, part_count = _read_at_once(text, most_parts)
    return (_whole(value, mends_text=mends_text) if may_have_halves else value), part_count


def _read_at_once(text: str, max_parts: int) -> tuple[Any, int]:
    brackets = text.count("[") + text.count("{")
    part_count = _count(text, brackets, max_parts)
    value = _parsed(text)
    if brackets > MAX_DEPTH and _is_deep(value):
        raise ValueError("JSON is nested too deeply")
    return value, part_count


def _count(text: str, brackets: int, max_parts: int) -> int:
    """Return how many parts a text has, or a few more. Raises TooLarge."""
    part_count = text.count(",") + brackets
    if part_count > FEW_PARTS:
        beside = _outside_of_texts(text, 4 * max_parts + 4)  # a name and a text for each part, and two quotes for each
        part_count = beside.count(",") + beside.count("[") + beside.count("{")
        if len(beside) > MAX_OUTSIDE_CHARS:
            raise TooLarge(f"JSON has more than {MAX_OUTSIDE_CHARS} characters outside of texts")
    if part_count > max_parts:
        raise TooLarge(f"JSON has more than {max_parts} parts")
    return part_count


def check_parts(text: str, max_parts: int) -> None:
    """Raise TooLarge for JSON of more parts than that, however long its texts are."""
    if text.count(",") + text.count("[") + text.count("{") > max_parts:
        beside = _outside_of_texts(text, 4 * max_parts + 4)
        if beside.count(",") + beside.count("[") + beside.count("{") > max_parts:
            raise TooLarge(f"JSON has more than {max_parts} parts")


def _outside_of_texts(text: str, most_quotes: int) -> str:
    """Return JSON without the text between quotes. Raises TooLarge."""
    outside, quotes, position = [], 0, 0
    while position < len(text):
        end = position + _BLOCK_CHARS
        while end < len(text) and text[end - 1] == "\\":  # no block ends within an escape
            end += 1
        block = text[position:end]
        if "\\" in block:
            block = block.replace("\\\\", "").replace('\\"', "")
        pieces = block.split('"')
        unquoted = pieces[quotes % 2 :: 2]
        quotes += len(pieces) - 1
        if quotes > most_quotes:
            raise TooLarge("JSON has too many strings")
        outside += unquoted
        position = end
    return "".join(outside)


def refuse_constant(constant: str) -> Any:  # noqa: ANN401 - the shape of json's hook
    """Raise ValueError: NaN and Infinity are no JSON."""
    raise ValueError(f"{constant} is not JSON")


def finite(digits: str) -> float:
    """Return a number with a fraction or an exponent. Raises ValueError for one that is too long, or too large."""
    if len(digits) > MAX_FLOAT_CHARS:
        raise ValueError(f"a number with a fraction or an exponent has more than {MAX_FLOAT_CHARS} characters")
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is not a number a float can hold")
    return number


def _short(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


# `json.dumps` and `json.loads` would make them, or parts of them, anew for every frame.
_WRITER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_READER: Any = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)
_COUNTING_READER: Any = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite, parse_int=_short)


def _scan_text(text: str, position: int) -> tuple[str, int]:
    """Return the text that begins behind a quote, and where it ends. Raises ValueError."""
    scanned, end = _decoder.scanstring(text, position, True)
    return str(scanned), int(end)


def _reader() -> Any:  # noqa: ANN401 - the decoder's scanner has no type
    """Return what reads JSON; where the interpreter does not count digits, it does, which takes longer."""
    return _READER if 0 < sys.get_int_max_str_digits() <= MAX_DIGITS else _COUNTING_READER


def _parsed(text: str) -> Any:  # noqa: ANN401 - any JSON
    reader = _reader()
    try:
        value, end = reader.scan_once(text, 0)
        return value if end == len(text) else reader.decode(text)  # with blanks around it, or with what is wrong
    except StopIteration:
        return reader.decode(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


class _Large:
    """Read an object with long texts: those in it, and in its `data`, one by one, and all else in small pieces."""

    def __init__(self, text: str, most_parts: int, *, mends_text: bool, may_have_halves: bool):
        self._text, self._most_parts = text, most_parts
        self._mends_text, self._may_have_halves, self._halves_left = mends_text, may_have_halves, MAX_HALVES
        self._members_left, self._pieces_left, self._parts = MAX_MEMBERS, MAX_PIECES, 0
        self._bytes_left = MAX_BESIDE_BYTES

    def read(self) -> tuple[dict[str, Any], int]:
        """Return the object, and of how many parts it is. Raises ValueError."""
        message, position = self._object(self._after_blanks(0), is_outer=True)
        if self._after_blanks(position) != len(self._text):
            raise ValueError("data follows the JSON object")
        return message, self._parts

    def _after_blanks(self, position: int) -> int:
        blanks = _BLANKS.match(self._text, position)
        return blanks.end() if blanks is not None else position

    def _expect(self, position: int, expected: str) -> str:
        actual = self._text[position : position + 1]
        if not actual or actual not in expected:
            raise ValueError(f"there is no {' or '.join(expected)} at character {position} of a JSON object")
        return actual

    def _object(self, position: int, *, is_outer: bool) -> tuple[dict[str, Any], int]:
        """Return the object that begins at a character, and where it ends."""
        self._expect(position, "{")
        members: dict[str, Any] = {}
        position = self._after_blanks(position + 1)
        if self._text[position : position + 1] == "}":
            return members, position + 1
        while True:
            self._members_left -= 1
            if self._members_left < 0:
                raise TooLarge(f"a large JSON object has more than {MAX_MEMBERS} members")
            self._expect(position, '"')
            name, position = self._scan_whole_text(position + 1)
            position = self._after_blanks(position)
            self._expect(position, ":")
            members[name], position = self._value(self._after_blanks(position + 1), name if is_outer else "")
            position = self._after_blanks(position)
            if self._expect(position, ",}") == "}":
                return members, position + 1
            position = self._after_blanks(position + 1)

    def _value(self, position: int, name: str) -> tuple[Any, int]:
        first = self._text[position : position + 1]
        if first == '"':
            return self._scan_whole_text(position + 1)
        if first == "{" and name == "data":
            return self._object(position, is_outer=False)
        is_list = first in ("[", "{")
        self._pieces_left -= is_list
        if self._pieces_left < 0:
            raise TooLarge(f"a large JSON object has more than {MAX_PIECES} lists and objects")
        max_chars = self._bytes_left if is_list else min(self._bytes_left, 2 * MAX_DIGITS)
        piece = self._text[position : position + max_chars]
        brackets = piece.count("[") + piece.count("{") if is_list else 0
        if brackets:
            self._parts += _count(piece, brackets, self._most_parts - self._parts)
        try:
            value, end = _reader().scan_once(piece, 0)
        except (ValueError, StopIteration, RecursionError):
            if position + max_chars < len(self._text):
                raise TooLarge(f"a JSON object has more than {MAX_BESIDE_BYTES} bytes beside its texts") from None
            raise ValueError("a part of a JSON object is not valid JSON") from None
        self._bytes_left -= end
        if brackets > MAX_DEPTH and _is_deep(value):
            raise ValueError("JSON is nested too deeply")
        if self._may_have_halves and is_list and _SURROGATE_ESCAPE.search(piece, 0, end):
            value = _whole(value, mends_text=self._mends_text)
        return value, position + end

    def _scan_whole_text(self, position: int) -> tuple[str, int]:
        """Return the text that begins behind a quote, without lone surrogates, and where it ends."""
        text, end = _scan_text(self._text, position)
        if not self._may_have_halves or text.isascii():
            return text, end
        blocks = [self._mended(text[start : start + _MENDED_CHARS]) for start in range(0, len(text), _MENDED_CHARS)]
        del text  # before it is in memory once more; one half makes all of it take twice its size
        return "".join(blocks), end

    def _mended(self, block: str) -> str:
        if block.isascii():
            return block
        mended = block.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # fastest of all ways
        if mended == block:
            return block
        if not self._mends_text:
            raise ValueError("a string holds a lone surrogate")
        self._halves_left -= mended.count("\ufffd") - block.count("\ufffd")
        if self._halves_left < 0:
            raise TooLarge(f"texts hold more than {MAX_HALVES} lone surrogates")
        return mended


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _whole(value: Any, *, mends_text: bool) -> Any:  # noqa: ANN401 - any JSON
    """Return a value without lone surrogates, which no encoding can carry. Raises ValueError."""
    text = _WRITER.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        if not mends_text:
            raise ValueError("a string holds a lone surrogate") from None
    else:
        return value
    mended, count = _LONE_SURROGATE.subn("\ufffd", text, MAX_HALVES + 1)
    if count > MAX_HALVES:
        raise TooLarge(f"texts hold more than {MAX_HALVES} lone surrogates")
    return _parsed(mended)


def json_writer() -> Callable[[Mapping[str, Any]], str]:
    """Return what writes an object as ASCII, without blanks. It raises ValueError for what JSON cannot say."""
    writer = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return writer.encode
    in_pieces = make(None, writer.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)

    def write(message: Mapping[str, Any]) -> str:
        try:
            return "".join(in_pieces(message, 0))
        except RecursionError:
            return writer.encode(message)  # which looks for what holds itself, and says so

    return write
