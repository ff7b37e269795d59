"""`%time` and `%timeit`, of a line and of a cell."""

from __future__ import annotations

import time

from .usage import UsageError, number, say, take_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .magics import Magics

_LONG_ENOUGH_S = 0.2
_MOST_LOOPS = 10**9
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "μs"), (1e-9, "ns"))


def duration(seconds: float, digits: int = 3) -> str:
    """Return a time with its unit: `1.23 ms`, `2min 5s`."""
    if seconds >= 60:
        whole = int(seconds)
        parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
        return " ".join(f"{count}{unit}" for count, unit in parts if count)
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
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
    user, system = (after[at] - before[at] for at in (0, 1))
    say(f"CPU times: user {duration(user)}, sys: {duration(system)}, total: {duration(user + system)}")
    say(f"Wall time: {duration(wall)}")
    return value


def _used() -> tuple[float, float]:
    """Return the processor time so far, outside the kernel and in it, with that of children that have ended."""
    import resource

    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + ended.ru_utime, own.ru_stime + ended.ru_stime


class TimeitResult:
    """What `%timeit -o` returns: seconds for one loop in each run, and what follows from them."""

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
        return float((sum((one - mean) ** 2 for one in self.timings) / self.repeat) ** 0.5)

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
        say(str(result))
    return result if "o" in options else None


def _find_loops(timer: Any) -> int:
    """Return the least power of ten of loops that takes long enough to be measured."""
    loops = 1
    while loops < _MOST_LOOPS and timer.timeit(loops) < _LONG_ENOUGH_S:
        loops *= 10
    return loops
