"""The smallest session there can be: cells over one namespace, with what the modules under test are for."""

import ast
from typing import Any

from cloche.interpreter.cell_magics import CELL_MAGICS
from cloche.interpreter.ipython import install
from cloche.interpreter.line_magics import LINE_MAGICS
from cloche.interpreter.magics import Magics, cell_magic, rewrite
from cloche.interpreter.rich import Display, Shown


class Notebook:
    """Run cells as a session does."""

    is_notebook = False  # as a session answers it for a plain cell

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__, "Out": {}}
        self.history = [""]
        self.shown = Shown()
        self.display = Display(self.shown.emit, self.shown.clear)
        install(self.display, self.namespace)
        self.magics = Magics(self, LINE_MAGICS, CELL_MAGICS)

    def cell(self, source: str) -> Any:
        """Run one cell to its end."""
        self.history.append(source)
        try:
            return self.run_cell(source)
        finally:
            self.display.flush_figures()

    def run_cell(self, source: str) -> Any:
        """Run a text with magics, and return the value of its last expression."""
        magic = cell_magic(source)
        if magic is not None:
            return self.magics.run_cell(*magic)
        tree = parsed(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), self.namespace)
        return eval(compile(ast.Expression(last.value), "<cell>", "eval"), self.namespace) if last else None

    @property
    def sent(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return what is displayed."""
        return [(data, metadata) for data, metadata, _ in self.shown.outputs]

    def mimes(self) -> list[list[str]]:
        """Return the types of each bundle that was sent."""
        return [sorted(data) for data, _ in self.sent]


def parsed(source: str) -> ast.Module:
    """Parse a cell, rewriting the line where it fails as long as that helps."""
    while True:
        try:
            return ast.parse(source)
        except SyntaxError as error:
            rewritten = rewrite(source, error.lineno or 0)
            if rewritten is None:
                raise
            source = rewritten
