"""Finding secrets whose values are known, in whatever way they are written.

Theory of operation: nothing is matched by a pattern that could go back and try again. A text is looked at in a few
views: as it is, with its escapes undone (URLs, HTML, JSON and the like, up to three times), and without white space,
as wrapped base64 is. Each view knows for each of its bytes where that stands in the text. In each of them every way
to write a secret is looked for as plain bytes, once as it is and once in small letters. What is found is struck out
of the text.
"""

from __future__ import annotations

import base64
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

LEAST_CHARS = 4  # a shorter value would be found everywhere
LEAST_ANY_CASE = 8  # and a short one in any case, too
MOST_ESCAPES_WITHIN = 3

# One byte, one character, or one of the names that HTML has for what it cannot write; each of bounded length.
_ESCAPE = re.compile(
    rb"%[0-9A-Fa-f]{2}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|&#[0-9]{1,7};|&#[xX][0-9A-Fa-f]{1,6};"
    rb"|&(?:amp|lt|gt|quot|apos);|\\[\"'/\\]"
)
_GAPS = re.compile(rb"(?:[\s\0]|\\[nrt])+")  # UTF-16 is one, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """Hold the ways to write some secrets: `exact` is looked for as it is, `small` among small letters."""

    exact: tuple[bytes, ...] = ()
    small: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _View:
    """Hold text in another form. From `at[i]` on, a byte stands `shift[i]` further on in the text."""

    data: bytes
    at: list[int] = field(default_factory=list)
    shift: list[int] = field(default_factory=list)
    has_gaps: bool = False

    def origin(self, place: int) -> int:
        """Return where in the text the byte at a place stands."""
        found = bisect_right(self.at, place) - 1
        return place + (self.shift[found] if found >= 0 else 0)


def strike_out(text: str, needles: Needles, instead: str) -> str:
    """Return text with something else in the place of every secret."""
    data = text.encode("utf-8", "surrogatepass")
    spans = sorted({span for view in _views(data) for span in _found(view, needles)})
    if not spans:
        return text
    pieces, end = [], 0
    for start, stop in spans:
        if start >= end:
            pieces += [data[end:start], instead.encode()]
        end = max(end, stop)
    pieces.append(data[end:])
    return b"".join(pieces).decode("utf-8", "surrogatepass")


def _views(data: bytes) -> Iterator[_View]:
    view = _View(data)
    yield view
    if _GAPS.search(data):
        yield _replaced(view, _GAPS)
    for _ in range(MOST_ESCAPES_WITHIN):
        if not _ESCAPE.search(view.data):
            return
        view = _replaced(view, _ESCAPE)
        yield view


def _replaced(view: _View, pattern: re.Pattern[bytes]) -> _View:
    """Return the view with what the pattern finds undone."""
    pieces, done, size = [], 0, 0
    fresh = _View(b"", has_gaps=pattern is _GAPS)
    for match in pattern.finditer(view.data):
        start, end = match.span()
        meant = _meant(match[0]) if pattern is _ESCAPE else b""
        pieces += [view.data[done:start], meant]
        _note(fresh, view, size, done)
        _carry_on(fresh, view, size, done, start)
        size += start - done
        if meant:
            _note(fresh, view, size, start)
        size += len(meant)
        done = end
    _note(fresh, view, size, done)
    _carry_on(fresh, view, size, done, len(view.data))
    pieces.append(view.data[done:])
    fresh.data = b"".join(pieces)
    return fresh


def _note(fresh: _View, view: _View, place: int, old: int) -> None:
    """Note that from `place` on the fresh view goes on where `old` stands in the one before."""
    if fresh.at and fresh.at[-1] == place:
        fresh.at.pop()
        fresh.shift.pop()
    fresh.at.append(place)
    fresh.shift.append(view.origin(old) - place)


def _carry_on(fresh: _View, view: _View, place: int, old: int, end: int) -> None:
    """Note what the view before knows of its bytes between `old` and `end`, which stand from `place` on in the next."""
    for found in range(bisect_right(view.at, old), bisect_left(view.at, end)):
        at = view.at[found] - old + place
        fresh.at.append(at)
        fresh.shift.append(view.at[found] + view.shift[found] - at)


def _meant(escape: bytes) -> bytes:
    """Return what an escape stands for."""
    if escape[:1] == b"%":
        return bytes([int(escape[1:], 16)])
    if escape[:1] == b"&":
        import html

        return html.unescape(escape.decode("ascii")).encode("utf-8", "surrogatepass")
    if escape[1:2] not in b"xu":
        return escape[1:]
    code = int(escape[2:], base=16)  # noqa: FURB166 - not 0x, but \x and \u
    return bytes([code]) if escape[1:2] == b"x" else chr(code).encode("utf-8", "surrogatepass")


def _found(view: _View, needles: Needles) -> Iterator[tuple[int, int]]:
    for data, wanted in ((view.data, needles.exact), (view.data.lower(), needles.small)):
        for needle in wanted:
            place = data.find(needle)
            while place >= 0:
                end = place + len(needle)
                yield view.origin(place), _end(view, end)
                place = data.find(needle, end)


def _end(view: _View, place: int) -> int:
    """Return where in the text that ends which ends at a place of the view: with its last escape, before a gap."""
    return view.origin(place - 1) + 1 if view.has_gaps else view.origin(place)


def needles_for(values: Iterable[str]) -> Needles:
    """Return all ways to write some secrets that are looked for, the longest first."""
    exact: set[bytes] = set()
    small: set[bytes] = set()
    for value in values:
        some, others = _written(value)
        exact.update(some)
        small.update(others)
    return Needles(exact=_longest_first(exact), small=_longest_first(small))


def _longest_first(found: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(sorted(found, key=lambda data: (-len(data), data)))


@lru_cache(maxsize=64)
def _written(value: str) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Return a secret as it stands, in a URL, in JSON, as Python prints it, in hex, in base64; and in small letters."""
    from urllib.parse import quote, quote_plus

    raw = value.encode("utf-8", "surrogateescape")
    texts = [value, quote(raw, safe=""), quote(raw), quote_plus(raw), value.replace(" ", "+")]
    texts += [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
    small = [value, value.replace(" ", "+"), "".join(value.split())] if len(value) >= LEAST_ANY_CASE else []
    if len(raw) >= LEAST_ANY_CASE:
        texts += [*_in_base64(raw), *_in_base64(value.encode("utf-16-le", "surrogatepass"))]
        small.append(raw.hex())
    lines = value.splitlines()
    if len(lines) > 1:  # a key, of which one line is enough to give some of it away
        texts += [line for line in lines if len(line) >= 4 * LEAST_CHARS and not line.startswith("-----")]
    exact = [text.encode("utf-8", "surrogatepass") for text in texts]
    return (
        [one for one in exact if len(one) >= LEAST_CHARS],
        [text.encode("utf-8", "surrogatepass").lower() for text in small if len(text) >= LEAST_ANY_CASE],
    )


def _in_base64(raw: bytes) -> Iterator[str]:
    """Yield it alone, and behind others as in `user:password`: the characters that depend on this secret alone."""
    for encoded in (base64.b64encode, base64.urlsafe_b64encode):
        yield encoded(raw).decode().rstrip("=")
        for before in range(3):
            inner = encoded(bytes(before) + raw).decode()[(before * 8 + 5) // 6 : (before + len(raw)) * 8 // 6]
            if len(inner) >= 2 * LEAST_CHARS:
                yield inner
