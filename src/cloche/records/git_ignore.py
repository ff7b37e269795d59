"""Patterns of `.gitignore` files, matched in time that is bounded by lengths: no pattern makes a match take forever.

A pattern is a list of names between slashes, and a name a list of characters; in both, `None` stands for any number
(`**` and `*`), which one function matches by trying again after the last such place only.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

MOST_PATTERNS = 5_000
_MOST_LENGTH = 1024
_COST_BETWEEN_CHECKS = 4096
_ALL = frozenset(range(256)) - {ord("/")}
_CLASSES: dict[bytes, frozenset[int]] = {
    name: frozenset(map(ord, chars))
    for name, chars in {
        b"alpha": string.ascii_letters, b"digit": string.digits, b"alnum": string.ascii_letters + string.digits,
        b"lower": string.ascii_lowercase, b"upper": string.ascii_uppercase, b"space": string.whitespace,
        b"punct": string.punctuation, b"xdigit": string.hexdigits, b"blank": " \t",
    }.items()
}  # fmt: skip


class _Name(NamedTuple):
    """A pattern for one name; `exact` where it has no wildcard."""

    exact: bytes | None
    parts: tuple[Container[Any] | None, ...]

    def __contains__(self, name: object) -> bool:
        if self.exact is not None:
            return name == self.exact
        return isinstance(name, bytes) and _matches(self.parts, name)


class Pattern(NamedTuple):
    """One line of a file of patterns."""

    is_negated: bool
    is_for_folders: bool
    is_anchored: bool
    names: tuple[Container[Any] | None, ...]
    cost: int  # the length that a path is compared with again and again

    def matches(self, path: bytes, *, is_folder: bool) -> bool:
        """Tell whether a path, from the folder of the file, is meant."""
        if self.is_for_folders and not is_folder:
            return False
        parts = path.split(b"/")
        return _matches(self.names, parts if self.is_anchored else parts[-1:])


class Rules(NamedTuple):
    """The patterns of one file, the last first; `base` is its folder, with a slash, or empty."""

    base: bytes
    patterns: tuple[Pattern, ...]


def parse_rules(data: bytes, base: bytes) -> tuple[Rules, bool]:
    """Return the rules of a file, and whether all lines of it are among them: those that are too long are not."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = [pattern for line in lines if len(line) <= _MOST_LENGTH and (pattern := _parse_line(line))]
    is_whole = len(found) <= MOST_PATTERNS and all(len(line) <= _MOST_LENGTH for line in lines)
    return Rules(base, tuple(reversed(found[:MOST_PATTERNS]))), is_whole


def is_ignored(stack: Sequence[Rules], path: bytes, *, is_folder: bool, check: Callable[[], None]) -> bool:
    """Tell whether a path is ignored: the last pattern that matches decides, of the deepest file that has one.

    `check` is called from time to time, and may raise.
    """
    spent = 0
    for rules in reversed(stack):
        relative = path[len(rules.base) :]
        for pattern in rules.patterns:
            spent += pattern.cost
            if spent > _COST_BETWEEN_CHECKS:
                check()
                spent = 0
            if pattern.matches(relative, is_folder=is_folder):
                return not pattern.is_negated
    return False


def _parse_line(line: bytes) -> Pattern | None:
    text = _without_trailing_spaces(line.removesuffix(b"\r"))
    if not text or text.startswith(b"#"):
        return None
    is_negated, text = text.startswith(b"!"), text.removeprefix(b"!")
    is_for_folders, text = text.endswith(b"/"), text.removesuffix(b"/")
    if not text:
        return None
    parts = text.removeprefix(b"/").split(b"/")
    names: list[Container[Any] | None] = [
        None if part == b"**" and len(parts) > 1 else _parse_name(part) for part in parts
    ]
    if names[-1] is None:
        names.append(_Name(None, (None,)))  # what is below, not the folder itself
    cost = len(text) if any(char in text for char in b"*?[") else 0
    return Pattern(is_negated, is_for_folders, b"/" in text, tuple(names), cost)


def _without_trailing_spaces(line: bytes) -> bytes:
    kept = line.rstrip(b" ")
    backslashes = len(kept) - len(kept.rstrip(b"\\"))
    return kept + b" " if backslashes % 2 and len(kept) < len(line) else kept


def _parse_name(text: bytes) -> _Name:
    if not any(char in text for char in b"*?[\\"):
        return _Name(text, ())
    parts: list[Container[Any] | None] = []
    at = 0
    while at < len(text):
        char, at = text[at : at + 1], at + 1
        if char == b"*":
            if not parts or parts[-1] is not None:
                parts.append(None)
        elif char == b"?":
            parts.append(_ALL)
        elif char == b"[":
            accepted, at = _parse_set(text, at)
            parts.append(accepted)
        else:
            if char == b"\\":
                char, at = text[at : at + 1], at + 1
            parts.append(frozenset(char))  # nothing, after a backslash at the end: it never matches
    return _Name(None, tuple(parts))


def _parse_set(text: bytes, at: int) -> tuple[frozenset[int], int]:
    """Return the characters of a set, and where it ends; none for one that does not end."""
    is_negated = text[at : at + 1] in (b"!", b"^")
    at += is_negated
    found: set[int] = set()
    start = at
    while at < len(text) and (text[at] != ord("]") or at == start):
        end = text.find(b":]", at + 2)
        if text[at : at + 2] == b"[:" and end >= 0:
            found |= _CLASSES.get(text[at + 2 : end], frozenset())
            at = end + 2
            continue
        first, at = _set_character(text, at)
        last = first
        if text[at : at + 1] == b"-" and text[at + 1 : at + 2] not in (b"]", b""):
            last, at = _set_character(text, at + 1)
        found.update(range(first, last + 1))
    if at >= len(text):
        return frozenset(), len(text)
    return (_ALL - found if is_negated else frozenset(found)) - {ord("/")}, at + 1


def _set_character(text: bytes, at: int) -> tuple[int, int]:
    if text[at : at + 1] == b"\\" and at + 1 < len(text):
        at += 1
    return text[at], at + 1


def _matches(pattern: Sequence[Container[Any] | None], items: Sequence[Any]) -> bool:
    """Tell whether items match a pattern, in at most as many steps as the product of their lengths."""
    here = at = 0
    star, mark = -1, 0
    while at < len(items):
        part = pattern[here] if here < len(pattern) else frozenset()
        if part is None:
            star, mark, here = here, at, here + 1
        elif items[at] in part:
            here, at = here + 1, at + 1
        elif star >= 0:
            mark += 1
            here, at = star + 1, mark
        else:
            return False
    return all(part is None for part in pattern[here:])
