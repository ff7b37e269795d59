"""JSON that a guest wrote, read strictly and in bounded time.

Theory of operation: the scanner of `json` holds the interpreter's lock from the first character to the last, so a
thread would not keep its work from the event loop. What bounds it is what it is given. Long texts (pictures, pages)
are cheap, values cost some hundred nanoseconds each, and more where the collector of garbage is behind: so the values
are counted before anything is parsed, those bytes that only look like some because they stand inside a text left out.
What is accepted can be written as JSON again: no NaN, nothing infinite, no half of a character, no number that is too
long to be printed, nothing nested so deeply that a writer would give up.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .units import KIB, MIB

MAX_BYTES = 9 * MIB  # of one text: a bundle of 8 MiB, as drivers write it, and what comes with it
MAX_WIDE_BYTES = MAX_BYTES // 2  # of one that is not ASCII: in memory it may take four times as much
MAX_PARTS = 40_000  # commas, lists and objects outside of texts; a value of 64 KiB has at most 32,768
FEW_PARTS = 32  # that are not looked at twice, whether they stand in texts or not
MAX_BESIDE_BYTES = MIB  # all that is outside of texts
MAX_ESCAPES = 1 << 20  # in all texts together
MAX_HALVES = 65_536  # of characters, to be replaced
MAX_DEPTH = 200
MAX_DIGITS = 4300  # of an integer: what CPython prints unless it is told otherwise
_BLOCK_CHARS = 256 * KIB
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TooMuch(ValueError):
    """Say that a guest told more than any value needs."""


def as_text(body: bytes | bytearray | memoryview) -> str:
    """Return what UTF-8 spells. Raises ValueError for what is none, TooMuch for more than is ever parsed."""
    if len(body) > MAX_BYTES:
        raise TooMuch(f"{len(body)} bytes of JSON are more than {MAX_BYTES}")
    try:
        return str(body, "ascii")
    except UnicodeDecodeError:
        if len(body) > MAX_WIDE_BYTES:
            raise TooMuch(f"{len(body)} bytes of JSON that is not ASCII are more than {MAX_WIDE_BYTES}") from None
        return str(body, "utf-8")


def decode(text: str, most_parts: int = MAX_PARTS, *, mends_text: bool = False) -> tuple[Any, int]:
    """Return the value that a text spells, and of how many parts it is.

    Raises TooMuch for more than `most_parts`, else ValueError for whatever could not be written as JSON again.
    Halves of characters become U+FFFD where it `mends_text`.
    """
    brackets = text.count("[") + text.count("{")
    parts = _count(text, brackets, min(most_parts, MAX_PARTS - len(text) // 256))
    has_escapes = "\\" in text
    if has_escapes and len(text) > MAX_ESCAPES and text.count("\\") > MAX_ESCAPES:
        raise TooMuch(f"JSON has more than {MAX_ESCAPES} escapes")
    value = _parsed(text)
    if brackets > MAX_DEPTH and _is_deep(value):
        raise ValueError("JSON is nested too deeply")
    if has_escapes and _SURROGATE_ESCAPE.search(text):
        value = _whole(value, mends_text=mends_text)
    return value, parts


def _count(text: str, brackets: int, most: int) -> int:
    """Return how many parts a text has, or a little more. Raises TooMuch."""
    parts = text.count(",") + brackets
    if parts > FEW_PARTS or len(text) > MAX_BESIDE_BYTES:
        beside = _outside_of_texts(text, 4 * most + 4)  # a name and a text for each part, and two quotes for each
        parts = beside.count(",") + beside.count("[") + beside.count("{")
    if parts > most:
        raise TooMuch(f"JSON has more than {most} parts")
    return parts


def _outside_of_texts(text: str, most_quotes: int) -> str:
    """Return JSON without what is in quotes. Raises TooMuch."""
    kept, quotes, size, at = [], 0, 0, 0
    while at < len(text):
        end = at + _BLOCK_CHARS
        while end < len(text) and text[end - 1] == "\\":  # no block ends within an escape
            end += 1
        block = text[at:end]
        if "\\" in block:
            block = block.replace("\\\\", "").replace('\\"', "")
        pieces = block.split('"')
        found = pieces[quotes % 2 :: 2]
        quotes += len(pieces) - 1
        size += sum(map(len, found))
        if quotes > most_quotes or size > MAX_BESIDE_BYTES:
            raise TooMuch("JSON has more than any value needs outside of texts")
        kept += found
        at = end
    return "".join(kept)


def _refuse(word: str) -> Any:  # noqa: ANN401 - the shape of json's hook
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is no number a float can hold")
    return number


def _printable(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


# `json.dumps` and `json.loads` would make them, or parts of them, anew for every frame.
_WRITER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_READER: Any = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_COUNTING_READER: Any = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, parse_int=_printable)


def _parsed(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Return what a text spells. Raises ValueError."""
    has_bound = 0 < sys.get_int_max_str_digits() <= MAX_DIGITS
    reader = _READER if has_bound else _COUNTING_READER
    try:
        value, end = reader.scan_once(text, 0)
        return value if end == len(text) else reader.decode(text)  # with blanks around it, or with what is wrong
    except StopIteration:
        return reader.decode(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _whole(value: Any, *, mends_text: bool) -> Any:  # noqa: ANN401 - any JSON
    """Return a value in which no character is a half, which no encoding could carry. Raises ValueError."""
    text = _WRITER.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        if not mends_text:
            raise ValueError("a text holds half of a character") from None
    else:
        return value
    mended, count = _LONE_SURROGATE.subn("\ufffd", text, MAX_HALVES + 1)
    if count > MAX_HALVES:
        raise TooMuch(f"texts hold more than {MAX_HALVES} halves of characters")
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
