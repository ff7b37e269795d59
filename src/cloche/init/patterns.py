"""Match paths with patterns such as `*.csv` and `out/**`: on both sides of the wire, since neither trusts the other.

`*` matches any characters of one name, `?` one, a name `**` any number of names; all else itself. The time of any match
is at most proportional to the product of the two lengths.
"""

from __future__ import annotations

ANY_NAMES = "**"


def matches(pattern: str, path: str) -> bool:
    """Tell whether a relative path matches; both have `/` between names."""
    names = pattern.split("/")
    reached = _with_skipped({0}, names)
    for name in path.split("/"):
        steps = {
            index + (names[index] != ANY_NAMES) for index in reached if index < len(names) and _fits(names[index], name)
        }
        reached = _with_skipped(steps, names)
    return len(names) in reached


def _with_skipped(reached: set[int], names: list[str]) -> set[int]:
    """Return the positions in a pattern, with those behind each `**` that matches no more names."""
    positions = set(reached)
    for index, name in enumerate(names):
        if index in positions and name == ANY_NAMES:
            positions.add(index + 1)
    return positions


def _fits(pattern: str, name: str) -> bool:
    """Tell whether a name matches one component of a pattern."""
    pattern_index = name_index = mark = 0
    star = -1
    while name_index < len(name):
        if pattern_index < len(pattern) and pattern[pattern_index] == "*":
            star, mark = pattern_index, name_index
            pattern_index += 1
        elif pattern_index < len(pattern) and pattern[pattern_index] in ("?", name[name_index]):
            pattern_index, name_index = pattern_index + 1, name_index + 1
        elif star >= 0:  # the last star takes one character more
            mark += 1
            pattern_index, name_index = star + 1, mark
        else:
            return False
    return not pattern[pattern_index:].strip("*")
