"""The patterns of `.clocheignore` and of the policy, which say what else is hidden; their syntax is that of gitignore.

Theory of operation: a pattern becomes one regular expression. Between two stars everything has a fixed width, so the
first place where it fits is as good as any later one, and is kept (an atomic group): no pattern takes longer than the
product of the lengths, whatever it holds. Patterns of one sign that follow each other are one alternation; the last of
these groups that matches decides. A pattern without a slash is matched with the last name, the others with the path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cloche.core.errors import InvalidRequest

MOST_BYTES, MOST_PATTERNS, MOST_CHARACTERS = 1 << 16, 500, 500
MOST_KEPT = 50_000  # names whose answer is kept: most names of a project are there many times
_STAR = object()
_ANY_FOLDERS, _ANY_PATH = r"(?:[^/]++/)*", r"[^/]++(?:/[^/]++)*+"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    is_negated: bool
    is_anchored: bool
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    is_negated: bool
    name: re.Pattern[str] | None
    path: re.Pattern[str] | None


class IgnorePatterns:
    """Match relative paths with lines of gitignore's syntax; `!` shows again what an earlier line has hidden.

    Raises InvalidRequest where there are too many, or one is too long; `where` begins the sentence.
    """

    def __init__(self, lines: Sequence[str], *, where: str) -> None:
        rules = [rule for line in lines if (rule := _parse(line, where)) is not None]
        if len(rules) > MOST_PATTERNS:
            raise InvalidRequest(f"{where}: has {len(rules)} patterns, {MOST_PATTERNS} are allowed; join some of them")
        self._kept: dict[str, bool] = {}
        self._groups = tuple(reversed([_group(sign, tuple(each)) for sign, each in groupby(rules, _sign)]))
        self._has_paths = any(group.path for group in self._groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def hides(self, name: str, path: str, *, is_folder: bool) -> bool:
        """Tell whether the path, whose last part is the name, is hidden."""
        if is_folder:
            name, path = name + "/", path + "/"
        if not self._has_paths:
            return self._hides_name(name)
        for group in self._groups:
            if (group.name and group.name.match(name)) or (group.path and group.path.match(path)):
                return not group.is_negated
        return False

    def _hides_name(self, name: str) -> bool:
        found = self._kept.get(name)
        if found is None:
            first = next((group for group in self._groups if group.name and group.name.match(name)), None)
            found = first is not None and not first.is_negated
            if len(self._kept) < MOST_KEPT:
                self._kept[name] = found
        return found


def _sign(rule: _Rule) -> bool:
    return rule.is_negated


def _group(sign: bool, rules: Sequence[_Rule]) -> _Group:
    return _Group(
        is_negated=sign,
        name=_joined([rule.expression for rule in rules if not rule.is_anchored]),
        path=_joined([rule.expression for rule in rules if rule.is_anchored]),
    )


def _joined(expressions: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(expressions)) if expressions else None


def _parse(line: str, where: str) -> _Rule | None:
    """Read one line; None for a blank one and a comment."""
    text = _without_trailing_blanks(line.removesuffix("\r"))
    if not text or text.startswith("#"):
        return None
    if len(text) > MOST_CHARACTERS or "\0" in text:
        raise InvalidRequest(f"{where}: a pattern has more than {MOST_CHARACTERS} characters, or a zero byte")
    is_negated = text.startswith("!")
    text = text.removeprefix("!")
    only_folders = text.endswith("/")
    parts = [part for part in text.split("/") if part]
    if not parts:
        return None
    is_anchored = "/" in text.rstrip("/")
    end = r"/\Z" if only_folders else r"/?\Z"
    return _Rule(is_negated=is_negated, is_anchored=is_anchored, expression=_expression(parts) + end)


def _without_trailing_blanks(text: str) -> str:
    stripped = text.rstrip(" \t")
    is_escaped = stripped.endswith("\\") and stripped != text
    return stripped + " " if is_escaped else stripped


def _expression(parts: Sequence[str]) -> str:
    """Return a regular expression for names with slashes between; `**` stands for any number of names."""
    if all(part == "**" for part in parts):
        return _ANY_PATH
    before, *rest = _runs(parts)
    head = _names(before)
    if not rest:
        return head
    start = f"{head}/" if head else ""
    middle = "".join(f"(?>{_ANY_FOLDERS}?{_names(run)}(?=/))/" for run in rest[:-1])
    end = f"{_ANY_FOLDERS}{_names(rest[-1])}" if rest[-1] else _ANY_PATH  # `a/**` is everything below
    return start + middle + end


def _runs(parts: Sequence[str]) -> list[list[str]]:
    """Return the parts between the `**`; an empty one first or last where the pattern begins or ends with `**`."""
    runs: list[list[str]] = [[]]
    for before, part in zip(("", *parts), parts, strict=False):
        if part != "**":
            runs[-1].append(part)
        elif before != "**":
            runs.append([])
    return runs


def _names(parts: Sequence[str]) -> str:
    return "/".join(map(_name, parts))


def _name(part: str) -> str:
    """Return a regular expression for one whole name, in an atomic group."""
    pieces: list[str] = [""]
    for token in _tokens(part):
        if token is _STAR:
            pieces.append("")
        else:
            pieces[-1] += str(token)
    first, *rest = pieces
    if not rest:
        return first
    middle = "".join(f"(?>[^/]*?{piece})" for piece in rest[:-1] if piece)
    return f"{first}{middle}(?>[^/]*{rest[-1]}(?=/|\\Z))"


def _tokens(part: str) -> Iterator[object]:
    at = 0
    while at < len(part):
        char = part[at]
        if char == "*":
            yield _STAR
        elif char == "?":
            yield "[^/]"
        elif char == "[" and (found := _class_at(part, at)) is not None:
            expression, at = found
            yield expression
            continue
        elif char == "\\" and at + 1 < len(part):
            at += 1
            yield re.escape(part[at])
        else:
            yield re.escape(char)
        at += 1


def _class_at(part: str, at: int) -> tuple[str, int] | None:
    """Return a class such as `[a-z]` or `[!0-9]`, and the place behind it; None where none is closed or it is wrong."""
    start = at + 2 if part[at + 1 : at + 2] in ("!", "^") else at + 1
    end = part.find("]", start + 1)
    if end < 0:
        return None
    inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", part[start:end])
    expression = f"(?!/)[{'^' if start == at + 2 else ''}{inner}]"
    try:
        re.compile(expression)
    except re.error:
        return None
    return expression, end + 1
