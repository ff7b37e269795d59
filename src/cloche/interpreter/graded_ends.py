"""The rare ends of `graded_call`: results of derived classes, results that are no data, and programs that raise."""

import linecache
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FILE = "<string>"  # the name of what `exec` was given
# The data of a value, by the methods of the plain class alone.
_PLAIN: "Any" = (
    (int, int.__pos__),
    (float, float.__pos__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (bytearray, bytes),
    (list, lambda value: list.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    (set, lambda value: set.__or__(set(), value)),
    (frozenset, lambda value: frozenset(set.__or__(set(), value))),
    (dict, dict.copy),
)
_VIEWS: "Any" = (type({}.keys()), type({}.items()))  # equal to sets


class NotData(Exception):
    """Report a result that is no data."""


def plain(value: "Any", kind: type, depth: int) -> "Any":
    """Return the data of a value whose class is derived from a plain one, without a method of that class."""
    if kind in _VIEWS:
        return set(value)
    for base, convert in _PLAIN:
        if kind is base and kind is not bytearray:
            raise NotData(f"a result has too many parts, or is nested too deeply ({depth})")
        if base in kind.__mro__:
            return convert(value)
    if kind.__module__ == "numpy":
        return value.tolist()
    raise NotData(f"a result is of type {kind.__name__}, which is no plain data such as numbers, text and lists")


def report(error: BaseException, program: str) -> None:
    """Write what a program raised to standard error, without our own frames."""
    linecache.cache[_FILE] = (len(program), None, program.splitlines(keepends=True), _FILE)
    if type(error).__name__ == "NotData":  # of another copy of this module
        sys.stderr.write(f"cloche: {error}\n")
    elif isinstance(error, SystemExit):
        sys.stderr.write(f"cloche: the program ended itself: SystemExit({error.code!r})\n")
    else:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    sys.stdout.flush()
    sys.stderr.flush()
