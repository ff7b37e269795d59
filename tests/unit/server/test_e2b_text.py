"""Output of commands in pieces: where they are cut."""

from __future__ import annotations

import pytest

from cloche.server.e2b.envd.processes import at_character


@pytest.mark.parametrize("text", ["", "a", "é", "a€", "€😀", "😀é😀"])
def test_pieces_end_with_a_character_wherever_they_were_cut(text: str) -> None:
    """Each piece is text for itself, and nothing is lost."""
    data = text.encode()
    for cut in range(len(data) + 1):
        first, begun = at_character(data[:cut])
        second, rest = at_character(begun + data[cut:])
        assert (first.decode() + second.decode(), rest) == (text, b"")


@pytest.mark.parametrize("data", [b"\xff", b"\x80\x80\x80\x80", b"\xc3\xc3a", b"\xf0\x9f\x98\x80\x80"])
def test_what_is_no_text_is_not_held_up(data: bytes) -> None:
    """Only what could go on waits for more."""
    assert at_character(data) == (data, b"")
