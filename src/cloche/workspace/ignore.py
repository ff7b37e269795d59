"""Patterns in gitignore's syntax, matched as git does: for `.gitignore`, `.clocheignore`, and the policy.

Theory of operation: paths are bytes, and a pattern becomes one regular expression. The text between two stars has a
fixed width, so its first match is as good as any later one and needs no backtracking (an atomic group). Matching
therefore takes at most the product of the lengths for any pattern. Consecutive patterns with the same sign form one
alternation, or a few; the last group that matches decides. A pattern without a slash is matched against the last name,
the others against the path.

Git compares the part of a path pattern before its first special character literally, and treats a `**` after it as if a
slash preceded it; this module does the same. A malformed pattern matches nothing in git; as a hiding rule it is
refused.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

MOST_BYTES, MOST_PATTERNS, MOST_CHARACTERS = 1 << 16, 500, 500
MOST_KEPT = 50_000  # cached names: most names of a project occur many times
_MOST_JOINED = 4096  # bytes of patterns in one expression, so that a match takes at most some milliseconds
_SLASH = ord("/")
_ALL = frozenset(range(1, 256)) - {_SLASH}
_CLASSES: dict[bytes, frozenset[int]] = {
    name: frozenset(map(ord, chars))
    for name, chars in {
        b"alpha": string.ascii_letters, b"digit": string.digits, b"alnum": string.ascii_letters + string.digits,
        b"lower": string.ascii_lowercase, b"upper": string.ascii_uppercase, b"space": " \t\n\r",
        b"punct": string.punctuation, b"xdigit": string.hexdigits, b"blank": " \t",
        b"cntrl": "".join(map(chr, (*range(1, 32), 127))), b"print": "".join(map(chr, range(32, 127))),
        b"graph": "".join(map(chr, range(33, 127))),
    }.items()
}  # fmt: skip
# Tokens of a pattern besides expressions for single characters.
_STAR, _FOLDERS, _REST = object(), object(), object()  # `*`, `**/`, and `**` at the end
_FOLDER = rb"[^/]*+/"


class _MalformedError(ValueError):
    """Report a pattern that matches nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreRule:
    """One line. `text` is the pattern without `!` and outer slashes. `expression` is None for a malformed pattern.

    `problem` says why the pattern can match no path, or not the intended one.
    """

    line: bytes
    text: bytes
    is_negated: bool
    is_for_folders: bool
    is_anchored: bool
    expression: bytes | None
    problem: str

    @property
    def is_literal(self) -> bool:
        """Tell whether the pattern has no special character."""
        return not _SPECIAL.search(self.text)


_SPECIAL = re.compile(rb"[*?\[\\]")


def parse_line(line: bytes) -> IgnoreRule | None:
    """Parse one line; None for a blank line or a comment."""
    text = _without_trailing_blanks(line.removesuffix(b"\r"))
    if not text or text.startswith(b"#"):
        return None
    is_negated, text = text.startswith(b"!"), text.removeprefix(b"!")
    is_for_folders, text = text.endswith(b"/"), text.removesuffix(b"/")
    is_anchored = b"/" in text
    text = text.removeprefix(b"/")
    expression, problem = None, _problem(text)
    try:
        expression = _path_expression(text) if is_anchored else _joined(list(_tokens(text, is_path=False)))
    except _MalformedError as error:
        problem = str(error)
    return IgnoreRule(
        line=line, text=text, is_negated=is_negated, is_for_folders=is_for_folders, is_anchored=is_anchored,
        expression=expression, problem=problem,
    )  # fmt: skip


def _problem(text: bytes) -> str:
    if not text:
        return "it is empty"
    if text.endswith(b"\t"):
        return "it ends with a tab, which would be part of the name"
    for name in text.split(b"/"):
        if name in (b"", b".", b".."):
            return f'no path can contain "{name.decode()}" in it'
    return ""


def _without_trailing_blanks(line: bytes) -> bytes:
    stripped = line.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    return stripped + b" " if backslashes % 2 and len(stripped) < len(line) else stripped


# From characters to tokens.


def _tokens(text: bytes, *, is_path: bool) -> Iterator[object]:
    position = 0
    while position < len(text):
        begin, char = position, text[position : position + 1]
        position += 1
        if char == b"*":
            while text[position : position + 1] == b"*":
                position += 1
            follows = re.compile(rb"\\?/|\Z").match(text, position)
            is_whole = is_path and position - begin > 1 and (not begin or text[begin - 1] == _SLASH)
            if not is_whole or follows is None:
                yield _STAR
                continue
            if follows[0] == b"\\/":  # git: an escaped slash requires at least one folder
                yield from (_STAR, b"/")
            yield _FOLDERS if follows[0] else _REST
            position = follows.end()
        elif char == b"?":
            yield b"[^/]"
        elif char == b"[":
            accepted, position = _parse_class(text, position)
            yield _class_expression(accepted)
        elif char == b"\\":
            if position == len(text):
                raise _MalformedError("nothing follows the backslash at its end")
            yield re.escape(text[position : position + 1])
            position += 1
        else:
            yield re.escape(char)


def _parse_class(text: bytes, position: int) -> tuple[frozenset[int], int]:
    """Return the characters of a class and the position after it, following git's `wildmatch.c` step by step."""
    is_negated = text[position : position + 1] in (b"!", b"^")
    position += is_negated
    accepted: set[int] = set()
    previous = 0
    while True:
        char, position = _class_character(text, position)
        if char == ord("\\"):
            char, position = _class_character(text, position)
            accepted.add(char)
        elif char == ord("-") and previous and text[position : position + 1] not in (b"]", b""):
            char, position = _class_character(text, position)
            if char == ord("\\"):
                char, position = _class_character(text, position)
            accepted.update(range(previous, char + 1))
            char = 0
        elif (
            char == ord("[")
            and text[position : position + 1] == b":"
            and (end := _named_class_end(text, position)) is not None
        ):
            name = text[position + 1 : end - 1]
            if name not in _CLASSES:
                raise _MalformedError(f"there is no class [:{name.decode(errors='replace')}:]")
            accepted |= _CLASSES[name]
            char, position = 0, end + 1
        else:
            accepted.add(char)
        previous = char
        if text[position : position + 1] == b"]":
            return (_ALL - accepted if is_negated else frozenset(accepted) & _ALL), position + 1


def _class_character(text: bytes, position: int) -> tuple[int, int]:
    if position >= len(text):
        raise _MalformedError("a [ has no ] behind it")
    return text[position], position + 1


def _named_class_end(text: bytes, position: int) -> int | None:
    """Return the position of the bracket that ends `[:NAME:]`, given that of the first colon; None if there is no such
    class.
    """
    end = text.find(b"]", position + 1)
    if end < 0:
        raise _MalformedError("a [ has no ] behind it")
    return end if end > position + 1 and text[end - 1 : end] == b":" else None


def _class_expression(accepted: frozenset[int]) -> bytes:
    if not accepted:
        raise _MalformedError("a class in it matches no character")
    return b"[" + b"".join(b"\\x%02x" % char for char in sorted(accepted)) + b"]"


# From tokens to an expression.


def _path_expression(text: bytes) -> bytes:
    special = _SPECIAL.search(text)
    literal = text if special is None else text[: special.start()]
    head, *runs = _split(_tokens(text[len(literal) :], is_path=True), _FOLDERS)
    middle = b"".join(b"(?>(?:%s)*?%s)" % (_FOLDER, _names(run)) for run in runs[:-1])
    end = b"(?:%s)*%s" % (_FOLDER, _names(runs[-1])) if runs else b""
    return re.escape(literal) + _names(head) + middle + end


def _split(tokens: Iterable[object], separator: object) -> list[list[object]]:
    runs: list[list[object]] = [[]]
    for token in tokens:
        if token is separator:
            runs.append([])
        else:
            runs[-1].append(token)
    return runs


def _names(tokens: Sequence[object]) -> bytes:
    ends = tokens[-1:] == [_REST]
    names: list[list[object]] = [[]]
    for token in tokens[:-1] if ends else tokens:
        if token == b"/":
            names.append([])
        else:
            names[-1].append(token)
    return b"/".join(map(_joined, names)) + (rb"(?s:.*)" if ends else b"")


def _joined(tokens: Sequence[object]) -> bytes:
    """Return an expression for one name, with each star and the text after it in an atomic group."""
    first, *following = [b"".join(map(_expression, run)) for run in _split(tokens, _STAR)]
    if not following:
        return first
    middle = b"".join(b"(?>[^/]*?%s)" % piece for piece in following[:-1] if piece)
    return first + middle + rb"(?>[^/]*%s(?=/|\Z))" % following[-1]


def _expression(token: object) -> bytes:
    if not isinstance(token, bytes):
        raise TypeError("a token that is not an expression")
    return token


# Matching.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The patterns of a group that apply to all entries, or only to folders."""

    names: frozenset[bytes]
    paths: frozenset[bytes]
    name: re.Pattern[bytes] | None
    path: re.Pattern[bytes] | None

    @classmethod
    def of(cls, rules: Sequence[IgnoreRule]) -> _Kind:
        literal = [rule for rule in rules if rule.is_literal]
        special = [rule for rule in rules if not rule.is_literal]
        return cls(
            names=frozenset(rule.text for rule in literal if not rule.is_anchored),
            paths=frozenset(rule.text for rule in literal if rule.is_anchored),
            name=_alternation([rule.expression or b"" for rule in special if not rule.is_anchored]),
            path=_alternation([rule.expression or b"" for rule in special if rule.is_anchored]),
        )

    def matches(self, name: bytes, path: bytes) -> bool:
        return (
            name in self.names
            or path in self.paths
            or (self.name is not None and self.name.match(name) is not None)
            or (self.path is not None and self.path.match(path) is not None)
        )


def _alternation(expressions: Sequence[bytes]) -> re.Pattern[bytes] | None:
    return re.compile(rb"(?:%s)\Z" % b"|".join(expressions)) if expressions else None


class Patterns:
    """Match relative paths against rules. A malformed rule matches nothing."""

    def __init__(self, rules: Iterable[IgnoreRule]):
        groups: list[tuple[bool, _Kind, _Kind | None]] = []
        readable = (rule for rule in rules if rule.expression is not None)
        for is_negated, same in groupby(readable, lambda rule: rule.is_negated):
            for some in _in_pieces(same):
                folders = [rule for rule in some if rule.is_for_folders]
                always = _Kind.of([rule for rule in some if not rule.is_for_folders])
                groups.append((is_negated, always, _Kind.of(folders) if folders else None))
        self._groups = tuple(reversed(groups))
        self.has_paths = any(kind and (kind.path or kind.paths) for group in groups for kind in group[1:])

    def __bool__(self) -> bool:
        return bool(self._groups)

    def decide(
        self, name: bytes, path: bytes, *, is_folder: bool, check: Callable[[], None] | None = None
    ) -> bool | None:
        """Tell whether the last matching rule includes or negates a path with this last name; None if no rule matches.

        `check` is called for each group of rules, and may raise.
        """
        for is_negated, always, folders in self._groups:
            if check is not None:
                check()
            if always.matches(name, path) or (is_folder and folders is not None and folders.matches(name, path)):
                return not is_negated
        return None


def _in_pieces(rules: Iterable[IgnoreRule]) -> Iterator[list[IgnoreRule]]:
    some: list[IgnoreRule] = []
    size = 0
    for rule in rules:
        if some and size + len(rule.text) > _MOST_JOINED:
            yield some
            some, size = [], 0
        some.append(rule)
        size += 0 if rule.is_literal else len(rule.text)
    yield some


class IgnorePatterns:
    """Match relative paths against lines in gitignore's syntax; `!` shows again what an earlier line has hidden.

    Raises InvalidRequest for too many patterns, for one that is too long, and for one that could hide nothing, since
    its intention is then unclear. `where` begins the message.
    """

    def __init__(self, lines: Sequence[str], *, where: str) -> None:
        rules = [rule for line in lines if (rule := _checked(line, where)) is not None]
        if len(rules) > MOST_PATTERNS:
            raise InvalidRequest(f"{where}: has {len(rules)} patterns, {MOST_PATTERNS} are allowed; join some of them")
        self._cache: dict[str, bool] = {}
        self._patterns = Patterns(rules)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def hides(self, name: str, path: str, *, is_folder: bool) -> bool:
        """Tell whether a path with this last name is hidden."""
        if self._patterns.has_paths:
            return bool(self._patterns.decide(os.fsencode(name), os.fsencode(path), is_folder=is_folder))
        key = f"{name}/" if is_folder else name
        is_hidden = self._cache.get(key)
        if is_hidden is None:
            encoded = os.fsencode(name)
            is_hidden = bool(self._patterns.decide(encoded, encoded, is_folder=is_folder))
            if len(self._cache) < MOST_KEPT:
                self._cache[key] = is_hidden
        return is_hidden


def _checked(line: str, where: str) -> IgnoreRule | None:
    rule = parse_line(os.fsencode(line))
    if rule is None:
        return None
    if len(line) > MOST_CHARACTERS or "\0" in line:
        raise InvalidRequest(f"{where}: a pattern has more than {MOST_CHARACTERS} characters, or a zero byte")
    if rule.problem:
        raise InvalidRequest(
            f"{where}: the pattern {escape_name(line)} cannot be used: {rule.problem}; correct or remove it"
        )
    return rule
