"""What strangers wrote is shown so that a terminal obeys none of it and nothing of it is unseen."""

import sys
import unicodedata

import pytest

from cloche.core.escape import escape, escape_line, escape_name, escape_output, is_visible

# Ranges of Unicode whose characters are obeyed, reorder what is read, or are not seen at all.
UNSEEN = [
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0xA0), (0xAD, 0xAD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160),
    (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0x2800, 0x2800),
    (0x3164, 0x3164), (0xD800, 0xF8FF), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF9, 0xFFFB),
    (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF), (0xF0000, 0x10FFFF),
]  # fmt: skip


def test_all_of_unicode() -> None:
    """A character comes out as it is, or as an escape of ASCII alone; once is enough."""
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        shown = escape(char)
        assert shown == char if is_visible(char) else shown.isascii() and shown.isprintable() and shown.startswith("\\")
        if is_visible(char) and char not in "\n\t":
            assert unicodedata.category(char)[0] not in "CZ" or char == " "


@pytest.mark.parametrize(("first", "last"), UNSEEN)
def test_what_is_not_seen_is_shown(first: int, last: int) -> None:
    """Each is named by its number, in the middle of other text as alone."""
    for number in range(first, last + 1):
        name = f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
        assert escape(f"a{chr(number)}b") == f"a{name}b"


def test_what_people_write_stays() -> None:
    """Letters, marks, pictures and blanks of any script are theirs."""
    for text in ("déjà vu", "é", "中文", "العربية", "हिन्दी", "한국어", "😀", "a\n\tb", r"\x1b[31m", "[red]x[/red]"):
        assert escape(text) == escape(escape(text)) == text


def test_lines_and_output() -> None:
    """A line has no blanks to hide behind, a name is one line; output may go back to the beginning of its line."""
    assert escape_line(" a\n\tb\r\x1b ") == "a b \\x1b"
    assert escape_name(" a\n\tb\r\x1b\u3164 ") == " a\\n\\tb\\r\\x1b\\u3164 "
    assert (escape("1\r2"), escape_output("1\r2\x1b[K")) == ("1\\x0d2", "1\r2\\x1b[K")
