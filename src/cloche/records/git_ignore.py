"""The combined rules of a repository's `.gitignore` files, by the matcher of `workspace/ignore.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cloche.workspace.ignore import Patterns, parse_line

MOST_PATTERNS = 5_000
_MOST_LENGTH = 1024


class IgnoreRules(NamedTuple):
    """The patterns of one file. `base` is its folder with a trailing slash, or empty."""

    base: bytes
    patterns: Patterns


def parse_rules(data: bytes, base: bytes) -> tuple[IgnoreRules, bool]:
    """Return the rules of a file, and whether they are complete: lines that are too long are left out."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rules = [rule for line in lines if len(line) <= _MOST_LENGTH and (rule := parse_line(line))]
    is_whole = len(rules) <= MOST_PATTERNS and all(len(line) <= _MOST_LENGTH for line in lines)
    return IgnoreRules(base, Patterns(rules[:MOST_PATTERNS])), is_whole


def is_ignored(stack: Sequence[IgnoreRules], path: bytes, *, is_folder: bool, check: Callable[[], None]) -> bool:
    """Tell whether a path is ignored: the last matching pattern of the deepest file with a match decides.

    `check` is called from time to time, and may raise.
    """
    name = path.rpartition(b"/")[2]
    for rules in reversed(stack):
        decision = rules.patterns.decide(name, path[len(rules.base) :], is_folder=is_folder, check=check)
        if decision is not None:
            return decision
    return False
