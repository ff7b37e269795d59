"""The magics of a session: `%name line`, `%%name line` over a cell, and all other lines that are no Python.

A magic is a function of the session's `Magics`, the line, and for a cell its body. Its result is the value. The tables
of them are in `line_magics` and `cell_magics`.

`rewrite` turns lines that are no Python (`!cmd`, `%magic`, `x = !cmd`, `obj?`) into calls; `cell_magic` finds a
`%%magic`. A cell is first compiled unchanged, so valid Python is never rewritten. The line of a syntax error is tried
as a magic. Rewriting keeps the number of lines, so that tracebacks point to the original lines.
"""

from __future__ import annotations

from . import command_line
from .command_line import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from .rich import Display

_NAME = r"[A-Za-z_]\w*"
_OBJECT = rf"{_NAME}(?:\.{_NAME}|\[[^\[\]]*\])*"


def rewrite(source: str, lineno: int) -> str | None:
    """Rewrite the line at `lineno` (the first is 1), with its continuation lines, into a call of `get_ipython()`.

    Returns the new source, or None if that line is no magic.
    """
    import re

    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    first = last = lineno - 1
    if not 0 <= first < len(lines):
        return None
    while first > 0 and lines[first - 1].endswith("\\"):
        first -= 1
    while last + 1 < len(lines) and lines[last].endswith("\\"):
        last += 1
    joined = [line[:-1].rstrip() if line.endswith("\\") else line.rstrip() for line in lines[first : last + 1]]
    text = " ".join(joined)
    line = text.strip()
    for pattern, write in _LINES:
        match = re.fullmatch(pattern, line)
        call = write(*(group or "" for group in match.groups())) if match else None
        if call is not None:
            indent = text[: len(text) - len(text.lstrip())]
            lines[first : last + 1] = [indent + call, *[""] * (last - first)]
            return "\n".join(lines)
    return None


def cell_magic(source: str) -> tuple[str, str, str] | None:
    """Take `%%name line` from the first line of a cell; return name, line and the rest, or None."""
    if not source.lstrip().startswith("%%"):
        return None
    import re

    text = re.sub(r"\r\n?", "\n", source)
    match = re.match(rf"\s*%%({_NAME})(?:[ \t]+([^\n]*))?[ \t]*(?:\n|\Z)", text)
    return (match[1], (match[2] or "").strip(), text[match.end() :]) if match else None


def _help(first: str, second: str) -> str:
    marks, name = (first, second) if first.startswith("?") else (second, first)
    return _magic("pinfo2" if marks == "??" else "pinfo", name)


def _magic(name: str, line: str) -> str:
    return f"get_ipython().run_line_magic({name!r}, {line.strip()!r})"


def _system(command: str) -> str:
    return f"get_ipython().system({command.strip()!r})"


def _output(command: str) -> str:
    return f"get_ipython().getoutput({command.strip()!r})"


def _assigned_output(target: str, command: str) -> str | None:
    return f"{target} = {_output(command)}" if _is_target(target) else None


def _assigned_magic(target: str, name: str, line: str) -> str | None:
    return f"{target} = {_magic(name, line)}" if _is_target(target) else None


def _is_target(text: str) -> bool:
    try:
        compile(f"{text} = 0", "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


# Tried in this order, on a line without its indentation.
_LINES = (
    (rf"(\?\??)\s*({_OBJECT})\s*;?", _help),
    (rf"({_OBJECT})\s*(\?\??)\s*;?", _help),
    (r"!!(.+)", _output),
    (r"!(.+)", _system),
    (rf"%({_NAME})(?:\s+(.*))?", _magic),
    (r"([^!%]*?[^!%=<>\s])\s*=\s*!(.+)", _assigned_output),
    (rf"([^!%]*?[^!%=<>\s])\s*=\s*%({_NAME})(?:\s+(.*))?", _assigned_magic),
)


if TYPE_CHECKING:

    class Host(Protocol):
        """The session, as magics see it."""

        @property
        def namespace(self) -> dict[str, Any]:
            """The program's names."""
            ...

        @property
        def is_notebook(self) -> bool:
            """Tell whether its cell runs as in a notebook."""
            ...

        @property
        def display(self) -> Display:
            """The session's display, already installed."""
            ...

        @property
        def history(self) -> list[str]:
            """The cells so far, `In`: the first element is empty."""
            ...

        def run_cell(self, source: str) -> Any:
            """Run a text as a cell within this one, with magics; return its last expression's value, or raise."""

    LineMagic = Callable[["Magics", str], Any]
    CellMagic = Callable[["Magics", str, str], Any]

__all__ = ["Magics", "UsageError", "cell_magic", "rewrite"]

# Their lines are code, or patterns, in which braces mean something else.
_NOT_EXPANDED = ("time", "timeit", "config", "pinfo", "pinfo2")


class Magics:
    """The magics of one session, `line` and `cell` by name; a program can add its own.

    `hidden` are the initial names of the session's namespace, which are not the program's.
    """

    def __init__(self, host: Host, line: Mapping[str, LineMagic], cell: Mapping[str, CellMagic]) -> None:
        self.host = host
        self.hidden = dict(host.namespace)
        self.line, self.cell = dict(line), dict(cell)
        self.scope: dict[str, Any] = {}  # the names that the line running now sees
        self.folder_before = ""
        if host.display.shell is not None:
            host.display.shell.magics = self

    def run_line(self, name: str, line: str, scope: dict[str, Any] | None = None) -> Any:
        """Run `%name line`; `scope` has the line's variables, by default the namespace. Raises UsageError."""
        if name not in self.line:
            hint = f"; there is a cell magic %%{name}, for the first line of a cell" if name in self.cell else ""
            raise UsageError(f"there is no line magic %{name}{hint}. Known: {listed('%', self.line)}")
        return self._in_scope(scope, lambda: self.line[name](self, self._expanded(name, line)))

    def run_cell(self, name: str, line: str, body: str, scope: dict[str, Any] | None = None) -> Any:
        """Run `%%name line` over a body. Raises UsageError."""
        if name not in self.cell:
            hint = f"; there is a line magic %{name}" if name in self.line else ""
            raise UsageError(f"there is no cell magic %%{name}{hint}. Known: {listed('%%', self.cell)}")
        return self._in_scope(scope, lambda: self.cell[name](self, self._expanded(name, line), body))

    def _in_scope(self, scope: dict[str, Any] | None, run: Callable[[], Any]) -> Any:
        before, self.scope = self.scope, self.host.namespace if scope is None else scope
        try:
            return run()
        finally:
            self.scope = before

    def _expanded(self, name: str, line: str) -> str:
        return line if name in _NOT_EXPANDED else command_line.expand(line, self.scope)

    def system(self, command: str) -> None:
        """Run a command of the shell, as it stands; `_exit_code` in the namespace says how it ended."""
        command_line.system(command, self.host.namespace)

    def getoutput(self, command: str) -> command_line.SList:
        """Run a command of the shell, as it stands, and return the lines it printed."""
        return command_line.getoutput(command, self.host.namespace)

    def add(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        """Add a program's own magic: a function of the line, for kind `cell` also of the body."""
        if kind not in ("line", "cell", "line_cell"):
            raise UsageError(f"a magic is of kind line, cell or line_cell, not {kind}")
        if kind != "cell":
            self.line[name] = lambda _magics, line: function(line)
        if kind != "line":
            self.cell[name] = lambda _magics, line, body: function(line, body)


def listed(mark: str, magics: Mapping[str, Any]) -> str:
    """Return the names of magics in one line."""
    return " ".join(f"{mark}{name}" for name in sorted(magics))
