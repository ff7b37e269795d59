"""Bounds on JSON from clients: counted while it is received, before any of it is parsed.

Theory of operation: a parser in C holds the GIL until it is done, even in a thread, and a value of two bytes becomes an
object of a hundred. So the bounds apply to the objects that the parser would create: they are estimated by the commas,
colons and opening brackets outside of strings, one for each value and key, and by the escapes inside. Text beyond a
certain size must be ASCII without escapes, as base64 is: a string with a single character beyond the BMP takes four
bytes for each of its characters (PEP 393).
"""

from __future__ import annotations

MOST_PARTS, BYTES_OF_PART, MOST_PARTS_AT_ALL = (
    20_000,
    32,
    65_536,
)  # values and names; one more is allowed for each so many bytes
MOST_RICH = 8 << 20  # bytes, of JSON that has escapes or is not ASCII
MOST_ESCAPES = 1 << 20


class TooMuch(Exception):
    """Say which bound a JSON text exceeds."""


class JsonBounds:
    """Count the parts of one JSON text, given in any pieces; refuse it at the first one beyond a bound."""

    __slots__ = ("_escapes", "_is_escaped", "_is_in_string", "_is_rich", "_quotes", "parts", "seen")

    def __init__(self) -> None:
        self.seen = self.parts = self._quotes = self._escapes = 0
        self._is_in_string = self._is_escaped = self._is_rich = False

    def feed(self, piece: bytes) -> None:
        """Count a piece. Raises TooMuch."""
        self.seen += len(piece)
        self._escapes += piece.count(b"\\")
        self._is_rich = self._is_rich or self._escapes > 0 or not piece.isascii()
        if self._escapes > MOST_ESCAPES or (self._is_rich and self.seen > MOST_RICH):
            raise TooMuch(
                f"the body has more than {MOST_ESCAPES} escapes, or {MOST_RICH} bytes with characters beyond ASCII"
            )
        piece = self._without_escapes(piece)
        self._quotes += piece.count(b'"')
        max_parts = min(MOST_PARTS + self.seen // BYTES_OF_PART, MOST_PARTS_AT_ALL)
        if self._quotes <= 2 * max_parts + 2:
            texts = piece.split(b'"')
            outside = b"".join(texts[self._is_in_string :: 2])
            self._is_in_string ^= len(texts) % 2 == 0
            self.parts += sum(outside.count(sign) for sign in (b",", b":", b"[", b"{"))
        if self._quotes > 2 * max_parts + 2 or self.parts > max_parts:
            raise TooMuch(f"the body has more than {max_parts} values and names")

    def _without_escapes(self, piece: bytes) -> bytes:
        """Return a piece without escaped quotes and backslashes. The previous piece may end within an escape."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"")
            self._is_escaped = piece.endswith(b"\\")
            piece = piece.replace(rb"\"", b"")
        return piece
