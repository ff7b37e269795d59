"""What magics have in common: the error of a wrong line, and how a line is taken apart."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


class UsageError(Exception):
    """A magic that does not exist, or was not called as it is meant to be. A session prints it as one line."""


def say(text: str) -> None:
    """Print a line for the program's reader."""
    sys.stdout.write(f"{text}\n")


def warn(text: str) -> None:
    """Print a line beside the program's output."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


def words(line: str) -> list[str]:
    """Split a line as a shell does. Raises UsageError for a quote without end."""
    import shlex

    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error}: {line}") from None


def take_options(
    line: str, flags: str = "", valued: str = "", long: Collection[str] = ()
) -> tuple[dict[str, str], str]:
    """Take options from the beginning of a line; return them and the rest as it was written.

    `flags` are letters that stand alone (`-q`), `valued` letters with a value (`-n 5`, `-n5`), `long` whole words
    (`--no-stderr`), with a value when they end in `=`. `--` ends the options.
    """
    import re

    options: dict[str, str] = {}
    rest = line.strip()
    while found := re.match(r"(--?[A-Za-z][\w-]*|--)(=?)(\S*)\s*", rest):
        word, equals, value = found.groups()
        after = rest[found.end() :]
        if word == "--":
            return options, after
        if word.startswith("--"):
            after = _take_long(word[2:], f"{equals}{value}", after, long, options)
        elif word[1] in valued:
            given = word[2:] + equals + value
            given, after = (given, after) if given else _first_word(after)
            options[word[1]] = given
        elif not equals and not value and all(letter in flags for letter in word[1:]):
            options.update(dict.fromkeys(word[1:], ""))
        else:
            raise UsageError(f"unknown option {word}")
        rest = after
    return options, rest


def _take_long(name: str, given: str, after: str, long: Collection[str], options: dict[str, str]) -> str:
    if name in long and not given:
        options[name] = ""
    elif f"{name}=" in long:
        options[name], after = (given[1:], after) if given else _first_word(after)
    else:
        raise UsageError(f"unknown option --{name}")
    return after


def _first_word(line: str) -> tuple[str, str]:
    word, _, rest = line.partition(" ")
    if not word:
        raise UsageError("an option lacks its value")
    return word, rest.lstrip()


def number(text: str, what: str) -> int:
    """Return a whole number of one or more. Raises UsageError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{what} takes a whole number of one or more, not {text!r}")
    return int(text)
