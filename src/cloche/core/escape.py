"""Escape text from untrusted sources: control characters and invisible ones become visible escapes.

All text of a guest, a skill, a log or a client that is printed goes through this module; only here is it decided which
characters are escaped. `utf8_safe` is for programs: text that any protocol can carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Printable according to Unicode, and yet invisible: Default_Ignorable_Code_Point, blanks that are no spaces, fillers.
_INVISIBLE = frozenset(
    map(
        chr,
        (
            0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x2800, 0x3164, 0xFFA0,
            *range(0xFE00, 0xFE10), 0x16FE4, 0x1D159, *range(0xE0000, 0xE1000),
        ),
    )
)  # fmt: skip
MOST_CACHED = 10_000  # characters


def is_visible(char: str) -> bool:
    """Tell whether a character is visible and harmless to a terminal; line feed and tab count as such."""
    return char in "\n\t" or (char.isprintable() and char not in _INVISIBLE)


class _EscapeTable(dict[int, str]):
    """Map code points to their text or escape, for `str.translate`; entries are made when first used."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        form = char if is_visible(char) else _escape(number)
        if len(self) < MOST_CACHED:
            self[number] = form
        return form


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


_ESCAPES = _EscapeTable()
_ESCAPES_OF_OUTPUT = _EscapeTable({ord("\r"): "\r"})
_ESCAPES_OF_NAMES = _EscapeTable({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def escape(text: str) -> str:
    """Return text with escapes for control characters and invisible ones; line feeds and tabs stay."""
    return text.translate(_ESCAPES)


def escape_line(text: str) -> str:
    """Return escaped text on one line, with single blanks."""
    return escape(" ".join(text.split()))


def escape_name(text: str) -> str:
    """Return escaped text on one line; line breaks and tabs become escapes, too."""
    return text.translate(_ESCAPES_OF_NAMES)


def escape_output(text: str) -> str:
    """Return a program's output escaped; carriage returns stay, as progress bars use them."""
    return text.translate(_ESCAPES_OF_OUTPUT)


def utf8_safe(text: str) -> str:
    """Return text that can be encoded as UTF-8: a lone surrogate becomes an escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def utf8_safe_data(data: Any) -> Any:  # noqa: ANN401 - any plain data
    """Return plain data with `utf8_safe` applied to all of its text, so that any JSON reader takes it."""
    if isinstance(data, str):
        return data if data.isascii() else utf8_safe(data)
    if data is None or isinstance(data, (int, float)):  # said first: to be no mapping takes longer
        return data
    if isinstance(data, (dict, Mapping)):
        return {utf8_safe_data(name): utf8_safe_data(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [utf8_safe_data(item) for item in data]
    return data
