"""What the `.gitignore` files of a repository say together, by the matcher of `workspace/ignore.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cloche.workspace.ignore import Patterns, parse_line

MOST_PATTERNS = 5_000
_MOST_LENGTH = 1024


class Rules(NamedTuple):
    """The patterns of one file; `base` is its folder, with a slash, or empty."""

    base: bytes
    patterns: Patterns


def parse_rules(data: bytes, base: bytes) -> tuple[Rules, bool]:
    """Return the rules of a file, and whether all lines of it are among them: those that are too long are not."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = [rule for line in lines if len(line) <= _MOST_LENGTH and (rule := parse_line(line))]
    is_whole = len(found) <= MOST_PATTERNS and all(len(line) <= _MOST_LENGTH for line in lines)
    return Rules(base, Patterns(found[:MOST_PATTERNS])), is_whole


def is_ignored(stack: Sequence[Rules], path: bytes, *, is_folder: bool, check: Callable[[], None]) -> bool:
    """Tell whether a path is ignored: the last pattern that matches decides, of the deepest file that has one.

    `check` is called from time to time, and may raise.
    """
    name = path.rpartition(b"/")[2]
    for rules in reversed(stack):
        found = rules.patterns.decide(name, path[len(rules.base) :], is_folder=is_folder, check=check)
        if found is not None:
            return found
    return False
