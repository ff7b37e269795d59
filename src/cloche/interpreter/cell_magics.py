"""The magics over a whole cell, and the table of them: scripts, files to write, output to capture, formats, times.

`%time` and `%timeit` of a line are here too, beside those of a cell.
"""

from __future__ import annotations

import os
import sys
import time

from . import command_line
from .command_line import UsageError, number, print_line, split_line, take_options
from .rich import Shown, bundle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .magics import CellMagic, Magics

_LONG_ENOUGH_S = 0.2
_MOST_LOOPS = 10**9
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "μs"), (1e-9, "ns"))


def duration(seconds: float, digits: int = 3) -> str:
    """Return a time with its unit: `1.23 ms`, `2min 5s`."""
    if seconds >= 60:
        whole_seconds = int(seconds)
        units = (
            (whole_seconds // 86400, "d"),
            (whole_seconds // 3600 % 24, "h"),
            (whole_seconds // 60 % 60, "min"),
            (whole_seconds % 60, "s"),
        )
        return " ".join(f"{count}{unit}" for count, unit in units if count)
    size, unit = next((unit_row for unit_row in _UNITS if seconds >= unit_row[0]), _UNITS[-1])
    return f"{seconds / size:.{digits}g} {unit}" if seconds > 0 else "0 ns"


def time_line(magics: Magics, line: str) -> Any:
    """Run a line once, print how long it took, and return its value."""
    if not line.strip():
        raise UsageError("%time takes an expression or a statement")
    return _time(magics, line)


def time_cell(magics: Magics, line: str, body: str) -> Any:
    """Run a cell once, print how long it took, and return its value."""
    if line.strip():
        raise UsageError("%%time takes nothing on its line; the code stands below it")
    return _time(magics, body)


def _time(magics: Magics, source: str) -> Any:
    before, began = _used(), time.perf_counter()
    value = magics.host.run_cell(source)
    wall, after = time.perf_counter() - began, _used()
    user, system = (after[index] - before[index] for index in (0, 1))
    print_line(f"CPU times: user {duration(user)}, sys: {duration(system)}, total: {duration(user + system)}")
    print_line(f"Wall time: {duration(wall)}")
    return value


def _used() -> tuple[float, float]:
    """Return the processor time so far, outside the kernel and in it, with that of children that have ended."""
    import resource

    own, ended = (resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + ended.ru_utime, own.ru_stime + ended.ru_stime


class TimeitResult:
    """The result of `%timeit -o`: seconds for one loop in each run, and statistics."""

    def __init__(self, loops: int, all_runs: list[float], digits: int) -> None:
        self.loops, self.repeat, self.all_runs, self._digits = loops, len(all_runs), all_runs, digits
        self.timings = [total / loops for total in all_runs]
        self.best, self.worst = min(self.timings), max(self.timings)

    @property
    def average(self) -> float:
        return sum(self.timings) / self.repeat

    @property
    def stdev(self) -> float:
        mean = self.average
        return float((sum((timing - mean) ** 2 for timing in self.timings) / self.repeat) ** 0.5)

    def __str__(self) -> str:
        average, stdev = duration(self.average, self._digits), duration(self.stdev, self._digits)
        runs = f"{self.repeat} run{'s' if self.repeat > 1 else ''}"
        loops = f"{self.loops:,} loop{'s' if self.loops > 1 else ''}"
        return f"{average} ± {stdev} per loop (mean ± std. dev. of {runs}, {loops} each)"

    def __repr__(self) -> str:
        return f"<TimeitResult : {self}>"


def timeit_line(magics: Magics, line: str) -> TimeitResult | None:
    """Run a statement many times and print how long it takes."""
    options, statement = _timeit_options(line)
    if not statement:
        raise UsageError("%timeit takes a statement")
    return _timeit(magics, options, statement, "pass")


def timeit_cell(magics: Magics, line: str, body: str) -> TimeitResult | None:
    """Run a cell many times and print how long it takes; its line is run before each run, untimed."""
    options, setup = _timeit_options(line)
    return _timeit(magics, options, body, setup or "pass")


def _timeit_options(line: str) -> tuple[dict[str, str], str]:
    return take_options(line, flags="tcqov", valued="nrp")


def _timeit(magics: Magics, options: dict[str, str], statement: str, setup: str) -> TimeitResult | None:
    import timeit

    clock = time.process_time if "c" in options else time.perf_counter
    timer = timeit.Timer(statement, setup, clock, globals=magics.host.namespace)
    loops = number(options["n"], "-n") if options.get("n", "0") != "0" else _find_loops(timer)
    runs = number(options.get("r", "7"), "-r")
    result = TimeitResult(loops, timer.repeat(runs, loops), number(options.get("p", "3"), "-p"))
    if "q" not in options:
        print_line(str(result))
    return result if "o" in options else None


def _find_loops(timer: Any) -> int:
    """Return the least power of ten of loops that takes long enough to be measured."""
    loops = 1
    while loops < _MOST_LOOPS and timer.timeit(loops) < _LONG_ENOUGH_S:
        loops *= 10
    return loops


_SCRIPT_OPTIONS = ("out=", "err=", "no-raise-error")


def script(*program: str) -> CellMagic:
    """Make a magic that gives a cell to a program as its standard input."""

    def run(magics: Magics, line: str, body: str) -> None:
        options, remainder = _script_options(line)
        argv = [*program, *split_line(remainder)]
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
    ours, remainder = [], line.strip()
    while remainder.startswith(tuple(f"--{name.rstrip('=')}" for name in _SCRIPT_OPTIONS)):
        count = 2 if remainder.startswith(("--out ", "--err ")) else 1
        pieces = remainder.split(None, count)
        ours += pieces[:count]
        remainder = pieces[count] if len(pieces) > count else ""
    return take_options(" ".join(ours), long=_SCRIPT_OPTIONS)[0], remainder


def _run_script(magics: Magics, argv: list[str], options: dict[str, str], body: str) -> int:
    if "out" not in options and "err" not in options:
        return command_line.run_attached(argv, body)
    code, output, errors = command_line.run_captured(argv, body)
    for name, text, stream in (("out", output, sys.stdout), ("err", errors, sys.stderr)):
        if name in options:
            magics.host.namespace[options[name]] = text
        else:
            stream.write(text)
    return code


def writefile(magics: Magics, line: str, body: str) -> None:
    """Write a cell to a file, or with `-a` to its end."""
    del magics
    options, remainder = take_options(line, flags="a")
    arguments = split_line(remainder)
    if len(arguments) != 1:
        raise UsageError("%%writefile takes one file name, and -a to append")
    path = os.path.expanduser(arguments[0])
    verb = "Appending to" if "a" in options else "Overwriting" if os.path.exists(path) else "Writing"
    with open(path, "a" if "a" in options else "w", encoding="utf-8") as file:
        file.write(body)
    print_line(f"{verb} {path}")


def show_as(mime: str) -> CellMagic:
    """Make a magic that shows a cell in one format."""

    def show(magics: Magics, line: str, body: str) -> None:
        del line
        magics.host.display.display({mime: body}, raw=True)

    return show


class Captured:
    """The captured output of a cell: `stdout`, `stderr`, `outputs`; `show()` prints and displays it."""

    def __init__(self, magics: Magics) -> None:
        self._display = magics.host.display
        self.stdout = self.stderr = ""
        self.shown = Shown()

    def __str__(self) -> str:
        return self.stdout

    def show(self) -> None:
        """Print and display the captured output."""
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)
        for data, metadata in self.outputs:
            self._display.display(data, raw=True, metadata=metadata)

    @property
    def outputs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the displayed outputs, each a bundle and its metadata."""
        return [(data, metadata) for data, metadata, _ in self.shown.outputs]

    __call__ = show


def capture(magics: Magics, line: str, body: str) -> None:
    """Run a cell and keep its output in a variable; `--no-stdout` and the like exempt that stream."""
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
    """Also take options behind the variable's name."""
    name, _, remainder = name.partition(" ")
    more, _ = take_options(remainder, long=("no-stdout", "no-stderr", "no-display"))
    return {**options, **more}, name


def _run_captured(magics: Magics, body: str, captured: Captured, options: dict[str, str]) -> None:
    import io

    streams = [name for name in ("stdout", "stderr") if f"no-{name}" not in options]
    display, before = magics.host.display, {}
    emit, clear = display.emit, display.clear
    for name in streams:
        before[name] = getattr(sys, name)
        setattr(sys, name, io.StringIO())
    if "no-display" not in options:
        display.emit, display.clear = captured.shown.emit, captured.shown.clear
    try:
        value = magics.host.run_cell(body)
        if value is not None:
            display.emit(*bundle(value), None, False)
        display.flush_figures()
    finally:
        display.emit, display.clear = emit, clear
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
    "time": time_cell,
    "timeit": timeit_cell,
}
