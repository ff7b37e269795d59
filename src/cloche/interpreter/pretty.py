"""The text of a value: its `repr`, over several lines when it is long, cut when it is too long, never an exception.

Theory of operation: a value is written into nested groups of words and possible breaks. A group that fits on the rest
of its line stays there; else each of the group's breaks becomes a new line, and the groups inside decide for
themselves. The writer stops after a number of characters, so a list of lists of millions costs no more than its
beginning. The printer has the methods that `_repr_pretty_(printer, cycle)` of other people's classes calls.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Any

if TYPE_CHECKING:
    Break = tuple[str, int, bool]  # what stands there without a break, how far the next line goes in, must it break

MAX_TEXT_BYTES = 64 << 10
MAX_ITEMS = 1000  # of one container
_MAX_DEPTH = 60
_WIDTH = 79
_MAX_ERROR = 500
_SURELY_TOO_WIDE = 1 << 30


class Group:
    """Words, breaks and groups that belong together, and how wide they are on one line."""

    __slots__ = ("items", "width")

    def __init__(self) -> None:
        self.items: list[str | Break | Group] = []
        self.width = 0


class _Closing:
    """Call a function at the end of a `with` block."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.close()


class Printer:
    """Write values into groups; `finish` lays them out as text."""

    float_format = ""  # set by %precision, for every printer

    def __init__(self) -> None:
        self.groups = [Group()]
        self.indentation = 0
        self.left = MAX_TEXT_BYTES
        self.stack: list[int] = []

    def text(self, text: str) -> None:
        self.groups[-1].items.append(text)
        self.groups[-1].width += len(text)
        self.left -= len(text)

    def breakable(self, sep: str = " ") -> None:
        self.groups[-1].items.append((sep, self.indentation, False))
        self.groups[-1].width += len(sep)

    def break_(self) -> None:
        self.groups[-1].items.append(("", self.indentation, True))
        self.groups[-1].width += _SURELY_TOO_WIDE

    def begin_group(self, indent: int = 0, open: str = "") -> None:  # noqa: A002 - the name is the protocol's
        if open:
            self.text(open)
        self.groups.append(Group())
        self.indentation += indent

    def end_group(self, dedent: int = 0, close: str = "") -> None:
        self.indentation -= dedent
        inner = self.groups.pop()
        self.groups[-1].items.append(inner)
        self.groups[-1].width += inner.width
        if close:
            self.text(close)

    def group(self, indent: int = 0, open: str = "", close: str = "") -> _Closing:  # noqa: A002
        self.begin_group(indent, open)
        return _Closing(lambda: self.end_group(indent, close))

    def indent(self, indent: int) -> _Closing:
        self.indentation += indent

        def back() -> None:
            self.indentation -= indent

        return _Closing(back)

    def pretty(self, value: object) -> None:
        """Write any value; exceptions of its methods become part of the text."""
        if len(self.stack) > _MAX_DEPTH:
            return self.text("...")
        is_cycle = id(value) in self.stack
        self.stack.append(id(value))
        depth, indentation = len(self.groups), self.indentation
        self.begin_group()
        try:
            self._write(value, is_cycle=is_cycle)
        except Exception as error:
            self.text(_whose_repr_failed(value, error))
        finally:
            while len(self.groups) > depth:
                self.end_group()
            self.indentation = indentation
            self.stack.pop()

    def _write(self, value: Any, *, is_cycle: bool) -> None:
        kind = type(value)
        own = None if isinstance(value, type) else getattr(kind, "_repr_pretty_", None)
        writer = _WRITERS.get(kind.__repr__) or _COLLECTIONS.get((kind.__module__, kind.__name__))
        if callable(own):
            value._repr_pretty_(self, is_cycle)
        elif writer is None:
            self._lines(safe_repr(value))
        elif is_cycle:
            self.text(_CYCLES.get(kind.__name__, f"<{kind.__name__} that holds itself>"))
        else:
            writer(self, value)

    def _lines(self, text: str) -> None:
        """Write text of several lines, each at the indentation of this place."""
        lines = text.split("\n")
        self.text(lines[0])
        for line in lines[1:]:
            self.break_()
            self.text(line)

    def items(self, opened: str, values: Iterable[Any], closed: str, write: Callable[[Any], None]) -> None:
        """Write the items of a container, as far as there is room."""
        with self.group(len(opened), opened, closed):
            for index, value in enumerate(values):
                if index:
                    self.text(",")
                    self.breakable()
                if index >= MAX_ITEMS or self.left <= 0:
                    self.text("...")
                    break
                write(value)

    def pair(self, pair: tuple[object, object]) -> None:
        """Write a key and its value."""
        self.pretty(pair[0])
        self.text(": ")
        self.pretty(pair[1])

    def finish(self) -> str:
        """Return everything written so far as text."""
        out: list[str] = []
        for group in self.groups:
            _lay_out(group, out, 0)
        return "".join(out)


def _lay_out(group: Group, out: list[str], column: int) -> int:
    """Append a group's text to `out`; return the column where it ends."""
    fits = column + group.width <= _WIDTH
    for item in group.items:
        if isinstance(item, Group):
            column = _lay_out(item, out, column)
            continue
        if isinstance(item, str):
            text = item
        else:
            separator, indentation, is_hard = item
            stays = fits and not is_hard
            text = separator if stays else "\n" + " " * indentation
            column = column if stays else -1
        out.append(text)
        column += len(text)
    return column


def _write_list(printer: Printer, value: list[Any]) -> None:
    printer.items("[", value, "]", printer.pretty)


def _write_tuple(printer: Printer, value: tuple[Any, ...]) -> None:
    printer.items("(", value, ",)" if len(value) == 1 else ")", printer.pretty)


def _write_dict(printer: Printer, value: dict[Any, Any]) -> None:
    printer.items("{", value.items(), "}", printer.pair)


def _write_set(printer: Printer, value: set[Any] | frozenset[Any]) -> None:
    """Write a set in order when it has one, so that equal sets look alike."""
    name = type(value).__name__
    if not value:
        return printer.text(f"{name}()")
    members: Iterable[Any] = value
    if len(value) <= MAX_ITEMS:
        try:
            members = sorted(value)
        except Exception:
            members = value  # which have no order
    opened, closed = ("{", "}") if name == "set" else (f"{name}({{", "})")
    return printer.items(opened, members, closed, printer.pretty)


def _write_float(printer: Printer, value: float) -> None:
    printer.text(Printer.float_format % value if Printer.float_format else repr(value))


def _write_class(printer: Printer, value: type) -> None:
    module, name = value.__module__, value.__qualname__
    printer.text(name if module in ("builtins", "exceptions") else f"{module}.{name}")


def _write_function(printer: Printer, value: Any) -> None:
    """Write a function with its signature instead of its address."""
    import inspect

    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        signature = "(...)"
    printer.text(f"<function {value.__module__}.{value.__qualname__}{signature}>")


def _write_defaultdict(printer: Printer, value: Any) -> None:
    with printer.group(12, "defaultdict(", ")"):
        printer.pretty(value.default_factory)
        printer.text(",")
        printer.breakable()
        _write_dict(printer, value)


def _write_counter(printer: Printer, value: Any) -> None:
    printer.items("Counter({", value.most_common(MAX_ITEMS + 1), "})", printer.pair)


def _write_ordered(printer: Printer, value: Any) -> None:
    printer.items("OrderedDict({", value.items(), "})", printer.pair)


def _write_deque(printer: Printer, value: Any) -> None:
    end = "])" if value.maxlen is None else f"], maxlen={value.maxlen})"
    printer.items("deque([", value, end, printer.pretty)


# By the function that `repr` would call: a subclass with a `__repr__` of its own is not treated like its base.
_WRITERS: dict[object, Callable[[Printer, Any], None]] = {
    list.__repr__: _write_list,
    tuple.__repr__: _write_tuple,
    dict.__repr__: _write_dict,
    set.__repr__: _write_set,
    frozenset.__repr__: _write_set,
    float.__repr__: _write_float,
    type.__repr__: _write_class,
    type(_write_class).__repr__: _write_function,
}
# By name, because `collections` may never be loaded.
_COLLECTIONS: dict[tuple[str, str], Callable[[Printer, Any], None]] = {
    ("collections", "defaultdict"): _write_defaultdict,
    ("collections", "Counter"): _write_counter,
    ("collections", "OrderedDict"): _write_ordered,
    ("collections", "deque"): _write_deque,
}
_CYCLES = {"list": "[...]", "tuple": "(...)", "dict": "{...}"}


def text_of(value: object) -> str:
    """Return the text of any value, at most `MAX_TEXT_BYTES` of UTF-8. Lets no ordinary exception out."""
    try:
        printer = Printer()
        printer.pretty(value)
        return bounded(printer.finish())
    except Exception as error:
        return bounded(_whose_repr_failed(value, error))


def safe_repr(value: object) -> str:
    """Return `repr(value)`, or a text that says that it failed and how."""
    try:
        return str.__str__(repr(value))  # a `__repr__` may return a subclass with methods of its own
    except Exception as error:
        return _whose_repr_failed(value, error)


def _whose_repr_failed(value: object, error: Exception) -> str:
    return f"<{type(value).__name__} object whose repr failed: {describe(error)}>"


def describe(error: BaseException) -> str:
    """Return an exception in one line, even one whose own text fails."""
    try:
        text = str.__str__(str(error))
    except Exception:
        text = "(its text failed too)"  # the program's own __str__, in a report that must not fail
    return f"{type(error).__name__}: {text[:_MAX_ERROR]}" if text else type(error).__name__


def bounded(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Return text that UTF-8 can hold in `limit` bytes: its head and its tail when it is longer."""
    if len(text) <= limit and text.isascii():
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    tail = limit // 4
    head = limit - tail - 100  # room for the words between
    left_out = len(data) - head - tail
    note = f"\n... ({left_out} bytes left out) ...\n"
    return data[:head].decode("utf-8", "ignore") + note + data[-tail:].decode("utf-8", "ignore")


def report(error: BaseException) -> None:
    """Print a traceback on standard error, without the frames of this package."""
    import traceback

    trace = without_ours(error.__traceback__)
    if sys.stderr is not None:
        traceback.print_exception(type(error), error, trace, file=sys.stderr)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package."""
    own_package = _package_of(report.__code__.co_filename)
    traces: list[TracebackType] = []
    while trace is not None:
        if _package_of(trace.tb_frame.f_code.co_filename) != own_package:
            traces.append(trace)
        trace = trace.tb_next
    shortened: TracebackType | None = None
    for entry in reversed(traces):
        shortened = type(entry)(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _package_of(name: str) -> str:
    """Return the folder of a file, or the package of a module that came from an archive as `<package.module>`."""
    return name.rpartition("/" if "/" in name else ".")[0]
