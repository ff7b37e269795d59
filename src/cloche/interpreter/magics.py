"""The magics of a session: `%name line` and `%%name line` over a cell.

A magic is a function of the session's `Magics`, the line, and for a cell its body. What it returns is its value.
"""

from __future__ import annotations

from . import commands
from .rewriting import cell_magic, rewrite
from .usage import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from .rich import Display

    class Host(Protocol):
        """The session, as magics see it."""

        @property
        def namespace(self) -> dict[str, Any]:
            """The program's names."""
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
    """The magics of one session, `line` and `cell` by name, to which a program adds its own.

    `hidden` is what the session's namespace held at the beginning, which is not the program's.
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
        """Run `%name line`; `scope` is what the line sees, the namespace when it is not given. Raises UsageError."""
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
        return line if name in _NOT_EXPANDED else commands.expand(line, self.scope)

    def system(self, command: str) -> None:
        """Run a command of the shell, as it stands; `_exit_code` in the namespace says how it ended."""
        commands.system(command, self.host.namespace)

    def getoutput(self, command: str) -> commands.SList:
        """Run a command of the shell, as it stands, and return the lines it printed."""
        return commands.getoutput(command, self.host.namespace)

    def add(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        """Add a program's own magic: a function of the line, for kind `cell` also of the body."""
        if kind not in ("line", "cell", "line_cell"):
            raise UsageError(f"a magic is of kind line, cell or line_cell, not {kind}")
        if kind != "cell":
            self.line[name] = lambda _magics, line: function(line)
        if kind != "line":
            self.cell[name] = lambda _magics, line, body: function(line, body)


def listed(mark: str, known: Mapping[str, Any]) -> str:
    """Return the names of magics in one line."""
    return " ".join(f"{mark}{name}" for name in sorted(known))
