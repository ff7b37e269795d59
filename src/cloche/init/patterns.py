"""Match paths with patterns such as `*.csv` and `out/**`: on both sides of the wire, as neither need believe the other.

`*` stands for any characters of one name, `?` for one, a name `**` for any number of names; all else for itself. None
takes longer than the product of the two lengths, whatever they hold.
"""

from __future__ import annotations

ANY_NAMES = "**"


def matches(pattern: str, path: str) -> bool:
    """Tell whether a relative path matches; both have `/` between names."""
    parts = pattern.split("/")
    reached = _with_skipped({0}, parts)
    for name in path.split("/"):
        steps = {at + (parts[at] != ANY_NAMES) for at in reached if at < len(parts) and _fits(parts[at], name)}
        reached = _with_skipped(steps, parts)
    return len(parts) in reached


def _with_skipped(reached: set[int], parts: list[str]) -> set[int]:
    """Return the places in a pattern, with those behind each `**` that stands for no more names."""
    found = set(reached)
    for at, part in enumerate(parts):
        if at in found and part == ANY_NAMES:
            found.add(at + 1)
    return found


def _fits(pattern: str, name: str) -> bool:
    """Tell whether one name matches one part of a pattern."""
    at = place = mark = 0
    star = -1
    while place < len(name):
        if at < len(pattern) and pattern[at] == "*":
            star, mark = at, place
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", name[place]):
            at, place = at + 1, place + 1
        elif star >= 0:  # the last star takes one character more
            mark += 1
            at, place = star + 1, mark
        else:
            return False
    return not pattern[at:].strip("*")
