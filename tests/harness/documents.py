"""The examples in the documents: what they are, and whether what was printed is what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, kind: str) -> list[str]:
    """Return a document's fenced blocks of one kind."""
    return [text for found, text in _BLOCK.findall(document.read_text()) if found == kind]


def commands(document: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a document's console blocks with what it should print."""
    for text in blocks(document, "console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def matches(expected: str, printed: str) -> bool:
    """Compare, with `...` for anything and without regard to the amount of blank space."""
    first, *rest = (" ".join(piece.split()) for piece in expected.split("..."))
    text = " ".join(printed.split())
    if not rest:
        return text == first
    if not text.startswith(first):
        return False
    *pieces, last = rest
    at = len(first)
    for piece in pieces:  # a regular expression would try every place for every piece
        at = text.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return text.endswith(last) and at + len(last) <= len(text)
