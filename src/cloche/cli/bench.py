"""`cloche bench`: the cost of a run on this machine, measured in turns with a plain subprocess."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

from .app import root
from .options import option

if TYPE_CHECKING:
    from cloche.bench.report import Report

RUNS_PER_ROUND = 10


@root.command("bench")
@option("--rounds", metavar="N", default=50, help="Turns of each variant.")
@option("--runs", metavar="N", type=int, help="Runs from four threads. Default: ten per round.")
@option("--json", "json_file", metavar="FILE", help="Write all figures to FILE as JSON.")
@option("--plot", "plot_file", metavar="FILE", help="Draw a plot to FILE, .png or .svg; needs matplotlib.")
def _bench(**options: Any) -> int:  # noqa: ANN401 - as BenchCommand says
    """Measure the cost of runs on this machine.

    Runs take turns with a plain subprocess. The exit code is 1 if processes, mounts, control groups or folders are left
    behind.
    """
    return bench(BenchCommand(**options))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """Hold the options of the command. `runs` None means ten per round."""

    rounds: int
    runs: int | None
    json_file: str | None
    plot_file: str | None


def bench(command: BenchCommand) -> int:
    """Measure, print each table when it is complete, write the files; return 1 if something is left behind."""
    from cloche.bench.report import check_plot, measure, write_plot
    from cloche.bench.scenarios import BenchSize

    from ._bench_report import show_end, show_event, show_head

    if command.rounds < 1 or (command.runs is not None and command.runs < 1):
        raise InvalidRequest("--rounds and --runs must be at least 1")
    if command.plot_file:
        check_plot(command.plot_file)
    setting = BenchSize(rounds=command.rounds, runs=command.runs or RUNS_PER_ROUND * command.rounds)
    report: Report = {}

    def show(event: Report) -> None:
        if len(report["events"]) == 1:
            show_head(report)
        show_event(event)

    try:
        measure(setting, report, _tell, show)
        show_end(report)
    finally:  # after an error or Ctrl-C the complete tables are still written
        if report.get("events"):
            _write(command, report, write_plot)
    return 1 if report["leaks"] else 0


def _write(command: BenchCommand, report: Report, write_plot: Callable[[Report, str], None]) -> None:
    """Write the files of --json and --plot. Raises InvalidRequest."""
    from cloche.hostfs import open_named

    name: str | None = None
    try:
        if name := command.json_file:
            open_named(name, f"{json.dumps(report)}\n".encode()).close()
        if name := command.plot_file:
            write_plot(report, name)
    except OSError as error:
        raise InvalidRequest(f"cannot write {name!r}: {error.strerror}") from error


def _tell(text: str) -> None:
    """Print progress on a terminal."""
    if sys.stderr.isatty():
        print(f"measuring {text}", file=sys.stderr, flush=True)
