"""Apply a unified diff that a model wrote: found by its text, since its line numbers are seldom right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_HUNKS = 200
MOST_OLD_LINES = 5_000  # of all hunks
MOST_LINES = 20_000
_HUNK = re.compile(r"^@@(?: -(\d+)(?:,\d+)? \+\d+(?:,\d+)?)? ?.*$")
_HEADERS = ("diff ", "index ", "--- ", "+++ ", "new file", "old mode", "new mode", "\\ No newline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Hold the lines that a hunk replaces and those it puts there; `line` is where it says they are, counted from 1."""

    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def looks_like_patch(text: str) -> bool:
    """Tell whether a text is a diff: a hunk's header, or the names of both files, and lines that change."""
    lines = text.strip("\n").split("\n")
    has_hunk = any(line.startswith("@@ ") or line.strip() == "@@" for line in lines)
    has_names = any(line.startswith("--- ") for line in lines) and any(line.startswith("+++ ") for line in lines)
    changes = sum(line[:1] in "+-" and bool(line) for line in lines)
    return (has_hunk or has_names) and changes > 0


def apply_patch(code: str, patch: str) -> str | None:
    """Return the code with a diff applied; None where it does not fit, or changes nothing."""
    lines = code.split("\n")
    shift = 0
    hunks = list(_hunks(patch))
    if not hunks or len(hunks) > MOST_HUNKS or len(lines) > MOST_LINES:
        return None
    if sum(len(hunk.old) for hunk in hunks) > MOST_OLD_LINES:
        return None
    for hunk in hunks:
        at = _place_of(lines, hunk, hunk.line - 1 + shift)
        if at is None:
            return None
        lines[at : at + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old)
    patched = "\n".join(lines)
    return patched if patched != code else None


def _hunks(patch: str) -> Iterator[Hunk]:
    """Yield the hunks; lines before the first header belong to one without a place."""
    line, old, new = 1, list[str](), list[str]()
    is_changed = False
    for text in patch.strip("\n").split("\n"):
        match = _HUNK.match(text)
        if match is not None or text.startswith(_HEADERS):
            if is_changed:
                yield Hunk(line=line, old=tuple(old), new=tuple(new))
            line, old, new, is_changed = int(match[1] or 1) if match else line, [], [], False
            continue
        sign, rest = text[:1], text[1:]
        if sign not in ("+", "-"):
            rest = rest if sign == " " else text
        else:
            is_changed = True
        if sign != "+":
            old.append(rest)
        if sign != "-":
            new.append(rest)
    if is_changed:
        yield Hunk(line=line, old=tuple(old), new=tuple(new))


def _place_of(lines: list[str], hunk: Hunk, wanted: int) -> int | None:
    """Return where a hunk's lines are, the nearest to where it says; blanks at the ends of lines do not count."""
    if not hunk.old:
        return min(max(wanted, 0), len(lines)) if len(lines) > 1 or lines == [""] else None
    old = [line.rstrip() for line in hunk.old]
    bare = [line.rstrip() for line in lines]
    first = old[0]
    places = [at for at, line in enumerate(bare) if line == first and bare[at : at + len(old)] == old]
    return min(places, key=lambda at: abs(at - wanted), default=None)
