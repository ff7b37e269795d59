"""Text from untrusted sources, for people: what a terminal would obey, and what nobody could see, becomes an escape.

This is the one place that says which characters those are. Whatever prints what a guest, a skill, a log, a client or
the rest of the world has written sends it through here: what is read must be what is there. `sendable` is for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Printable by the letter of Unicode, and yet not to be seen: what is ignorable unless it is supported (Unicode's
# Default_Ignorable_Code_Point), blanks that are no spaces, a note without a head, a filler.
_UNSEEN = frozenset(
    map(
        chr,
        (
            0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x2800, 0x3164, 0xFFA0,
            *range(0xFE00, 0xFE10), 0x16FE4, 0x1D159, *range(0xE0000, 0xE1000),
        ),
    )
)  # fmt: skip
MOST_KNOWN = 10_000  # characters whose form is remembered


def is_seen(char: str) -> bool:
    """Tell whether a character is what it looks like; lines and tabs are."""
    return char in "\n\t" or (char.isprintable() and char not in _UNSEEN)


class _Forms(dict[int, str]):
    """Hold how characters are shown, worked out when they are first met."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        form = char if is_seen(char) else _escape(number)
        if len(self) < MOST_KNOWN:
            self[number] = form
        return form


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


_FORMS = _Forms()
_FORMS_OF_OUTPUT = _Forms({ord("\r"): "\r"})
_FORMS_OF_NAMES = _Forms({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def plain(text: str) -> str:
    """Return text of lines and tabs, with an escape for whatever a terminal would obey or nobody would see."""
    return text.translate(_FORMS)


def plain_line(text: str) -> str:
    """Return text on one line, its blanks single, likewise."""
    return plain(" ".join(text.split()))


def plain_name(text: str) -> str:
    """Return text on one line, likewise, with nothing left out: line breaks and tabs are escapes, too."""
    return text.translate(_FORMS_OF_NAMES)


def plain_output(text: str) -> str:
    """Return what a program prints, likewise; it may go back to the beginning of its line, as progress bars do."""
    return text.translate(_FORMS_OF_OUTPUT)


def sendable(text: str) -> str:
    """Return text that every protocol takes: half of a character pair, or a byte that is no text, is an escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def sendable_data(data: Any) -> Any:  # noqa: ANN401 - any plain data
    """Return plain data with all of its text likewise: every reader of JSON takes it then."""
    if isinstance(data, str):
        return sendable(data)
    if isinstance(data, Mapping):
        return {sendable_data(name): sendable_data(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [sendable_data(one) for one in data]
    return data
