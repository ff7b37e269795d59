"""The magics over a whole cell, and the table of them: scripts, files to write, output to capture, formats, times."""

from __future__ import annotations

import os
import sys

from . import commands, timing
from .rich import bundle
from .usage import UsageError, say, take_options, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .magics import CellMagic, Magics

_SCRIPT_OPTIONS = ("out=", "err=", "no-raise-error")


def script(*program: str) -> CellMagic:
    """Make a magic that gives a cell to a program as its standard input."""

    def run(magics: Magics, line: str, body: str) -> None:
        options, rest = _script_options(line)
        argv = [*program, *words(rest)]
        if not argv:
            raise UsageError("%%script takes a program and its arguments")
        code = _run_script(magics, argv, options, body)
        magics.host.namespace["_exit_code"] = code
        if code != 0 and "no-raise-error" not in options:
            import subprocess

            raise subprocess.CalledProcessError(code, argv)

    return run


def python(magics: Magics, line: str, body: str) -> None:
    """Give a cell to another interpreter of the same kind."""
    script(sys.executable or "python3", "-")(magics, line, body)


def _script_options(line: str) -> tuple[dict[str, str], str]:
    """Take our options from the line; any other is the program's."""
    ours, rest = [], line.strip()
    while rest.startswith(tuple(f"--{name.rstrip('=')}" for name in _SCRIPT_OPTIONS)):
        count = 2 if rest.startswith(("--out ", "--err ")) else 1
        parts = rest.split(None, count)
        ours += parts[:count]
        rest = parts[count] if len(parts) > count else ""
    return take_options(" ".join(ours), long=_SCRIPT_OPTIONS)[0], rest


def _run_script(magics: Magics, argv: list[str], options: dict[str, str], body: str) -> int:
    if "out" not in options and "err" not in options:
        return commands.run_attached(argv, body)
    code, output, errors = commands.run_captured(argv, body)
    for name, text, stream in (("out", output, sys.stdout), ("err", errors, sys.stderr)):
        if name in options:
            magics.host.namespace[options[name]] = text
        else:
            stream.write(text)
    return code


def writefile(magics: Magics, line: str, body: str) -> None:
    """Write a cell to a file, or with `-a` to its end."""
    del magics
    options, rest = take_options(line, flags="a")
    given = words(rest)
    if len(given) != 1:
        raise UsageError("%%writefile takes one file name, and -a to append")
    path = os.path.expanduser(given[0])
    done = "Appending to" if "a" in options else "Overwriting" if os.path.exists(path) else "Writing"
    with open(path, "a" if "a" in options else "w", encoding="utf-8") as file:
        file.write(body)
    say(f"{done} {path}")


def show_as(mime: str) -> CellMagic:
    """Make a magic that shows a cell in one format."""

    def show(magics: Magics, line: str, body: str) -> None:
        del line
        magics.host.display.display({mime: body}, raw=True)

    return show


class Captured:
    """What a cell said instead of saying it: `stdout`, `stderr`, `outputs`; `show()` says it after all."""

    def __init__(self, magics: Magics) -> None:
        self._display = magics.host.display
        self.stdout = self.stderr = ""
        self.outputs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __str__(self) -> str:
        return self.stdout

    def show(self) -> None:
        """Say what was captured."""
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)
        for data, metadata in self.outputs:
            self._display.display(data, raw=True, metadata=metadata)

    __call__ = show


def capture(magics: Magics, line: str, body: str) -> None:
    """Run a cell and keep what it says in a variable; `--no-stdout` and the like let that one through."""
    options, name = take_options(line, long=("no-stdout", "no-stderr", "no-display"))
    if not name and line.strip() and not line.strip().startswith("--"):
        raise UsageError(f"%%capture takes the name of a variable, not {line}")
    options, name = _name_before_options(options, name)
    if name and not name.isidentifier():
        raise UsageError(f"%%capture takes the name of a variable, not {name}")
    captured = Captured(magics)
    if name:
        magics.host.namespace[name] = captured
    _run_captured(magics, body, captured, options)


def _name_before_options(options: dict[str, str], name: str) -> tuple[dict[str, str], str]:
    """Take options that stand after the variable's name, too."""
    name, _, rest = name.partition(" ")
    more, _ = take_options(rest, long=("no-stdout", "no-stderr", "no-display"))
    return {**options, **more}, name


def _run_captured(magics: Magics, body: str, captured: Captured, options: dict[str, str]) -> None:
    import io

    streams = [name for name in ("stdout", "stderr") if f"no-{name}" not in options]
    display, emit, before = magics.host.display, magics.host.display.emit, {}
    for name in streams:
        before[name] = getattr(sys, name)
        setattr(sys, name, io.StringIO())
    if "no-display" not in options:
        display.emit = lambda data, metadata: captured.outputs.append((data, metadata))
    try:
        value = magics.host.run_cell(body)
        if value is not None:
            display.emit(*bundle(value))
        display.flush_figures()
    finally:
        display.emit = emit
        for name, stream in before.items():
            setattr(captured, name, getattr(sys, name).getvalue() if _has_value(name) else "")
            setattr(sys, name, stream)


def _has_value(name: str) -> bool:
    """Tell whether the program left our stream in its place."""
    return hasattr(getattr(sys, name), "getvalue")


CELL_MAGICS: dict[str, CellMagic] = {
    "bash": script("bash"),
    "sh": script("sh"),
    "script": script(),
    "python": python,
    "python3": python,
    "writefile": writefile,
    "file": writefile,
    "capture": capture,
    "html": show_as("text/html"),
    "HTML": show_as("text/html"),
    "markdown": show_as("text/markdown"),
    "latex": show_as("text/latex"),
    "svg": show_as("image/svg+xml"),
    "SVG": show_as("image/svg+xml"),
    "javascript": show_as("application/javascript"),
    "js": show_as("application/javascript"),
    "time": timing.time_cell,
    "timeit": timing.timeit_cell,
}
