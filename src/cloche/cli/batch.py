"""`cloche batch`: programs from a file, one result each; progress on stderr, the summary on stdout."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, Protocol

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_line

from .app import root
from .options import argument, flag, json_option, option, program_options, sandbox_options
from .output import EXIT_FAILED, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.progress import Progress

    from cloche.config.options import SandboxOptions
    from cloche.execution.batch_file import FileBatch
    from cloche.execution.batch_rows import BatchSummary

EXIT_INCOMPLETE = 1
DRAWN_EVERY_S, TOLD_EVERY_S = 0.25, 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

batch = root.group("batch", help="Many programs, one result each.")(lambda: None)


@batch.command("run")
@argument("source", metavar="PROGRAMS|-", help="The programs, a JSON object per line (- is stdin), also with gzip.")
@option("--out", metavar="FILE", required=True, help="Write the results here, in the order of the programs.")
@flag("--resume", help="Go on with the batch of --out, or begin it.")
@flag("--retry-lost", help="With --resume: also run programs again that may have run before.")
@flag("--idempotent", help="Programs may run twice, so none is lost.")
@option("--concurrency", metavar="N", type=int, help="Programs at once. Default: four for each processor.")
@option("--retries", metavar="N", type=int, default=2, help="Further attempts for a program that could not start.")
@option("--language", metavar="NAME", default="python", help="The language of programs that name none.")
@program_options()
@sandbox_options()
@flag("--full", help="Write all fields of each result: value, outputs, files, usage, enforcement, meta.")
@flag("--quiet", help="Show no progress.")
@json_option("Print the summary as JSON.")
def _run(
    source: str,
    out: str,
    resume: bool,
    retry_lost: bool,
    idempotent: bool,
    concurrency: int | None,
    retries: int,
    language: str,
    env: tuple[str, ...],
    file: tuple[str, ...],
    full: bool,
    quiet: bool,
    as_json: bool,
    options: SandboxOptions,
) -> int:
    """Run the programs of a file, each in its own throwaway sandbox.

    A killed batch goes on with --resume. Exit codes: 0 each program has a result, 1 some rows were wrong, lost or could
    not start, 125 Cloche failed, 2 usage error, 130 Ctrl-C.
    """
    import asyncio

    from cloche.execution.batch import BatchSettings, check_keywords
    from cloche.execution.batch_file import FileBatch, FileBatchSettings, open_source

    from .run import read_files, read_pairs

    if out == "-":
        raise InvalidRequest("--out: give a file; results must be in one, to be resumed")
    if retry_lost and not resume:
        raise InvalidRequest("--retry-lost is for --resume; give --resume, too")
    keywords = {"language": language, "env": read_pairs(env), "files": read_files(file)}
    BatchSettings(concurrency=concurrency, retries=retries)  # wrong options are an error before a file is made
    keywords["files"] = asyncio.run(check_keywords(keywords, options))  # the same files for all programs
    settings = FileBatchSettings(
        source=source, out=out, is_resumed=resume, retries_lost=retry_lost, is_idempotent=idempotent, is_full=full,
        concurrency=concurrency, retries=retries, keywords=keywords, options=options,
    )  # fmt: skip
    with open_source(source, os.path.dirname(os.path.abspath(out))) as (programs, facts):
        running = FileBatch(settings, programs, facts)
        try:
            number = asyncio.run(_run_shown(running, _display_for(running, is_quiet=quiet)))
        finally:
            running.close()
    return _conclude(running, number, as_json=as_json)


async def _run_shown(running: FileBatch, display: Display) -> int:
    """Run a batch and show its progress; return the number of the signal that stopped it, else 0."""
    import asyncio

    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        running.stop()
        if len(received) == 1:
            display.tell(f"{_count(len(running.running), 'program')} may still end; a second Ctrl-C kills them at once")

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's "ignore" stays
            loop.add_signal_handler(number, stop, number)
    showing = asyncio.create_task(_show(running, display))
    try:
        await running.run()
    finally:
        showing.cancel()
        await asyncio.wait([showing])
        display.close()
    return received[0] if received else 0


async def _show(running: FileBatch, display: Display) -> None:
    import asyncio

    while True:
        display.show(running)
        await asyncio.sleep(display.every_s)


def _conclude(running: FileBatch, number: int, *, as_json: bool) -> int:
    """Print the summary, and how to go on; return the exit code."""
    summary = {"out": running.settings.out, "programs": running.rows, **running.summary.as_dict()}
    print(json.dumps(summary) if as_json else _table(summary), flush=True)
    if not running.is_finished:
        if running.failure is not None:
            say(str(running.failure))
        say(f"{running.summary.rows} of {running.rows} programs have a row; go on with: {_command_to_resume()}")
        return 128 + number if number else EXIT_FAILED
    _say_errors(running.summary)
    return 0 if running.summary.is_complete else EXIT_INCOMPLETE


def _say_errors(summary: BatchSummary) -> None:
    """Say which row is invalid, and what to do about the lost ones."""
    if summary.first_invalid is not None:
        line, message = summary.first_invalid
        say(f"{_count(summary.errors['invalid'], 'row')} invalid; the first is line {line}: {message}")
    if summary.errors["lost"]:
        lost = _count(summary.errors["lost"], "program")
        say(f"{lost} may have run, and the results are lost; --resume --retry-lost runs them again")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _command_to_resume() -> str:
    words = sys.argv[1:]
    return shlex.join(["cloche", *words, *([] if "--resume" in words else ["--resume"])])


def _table(summary: Mapping[str, Any]) -> str:
    lines = [f"programs  {summary['programs']}", f"results   {summary['rows']}"]
    for name, count in summary["statuses"].items():
        lines.append(f"  {name}  {count}")
    for name, count in summary["errors"].items():
        if name not in summary["statuses"]:
            lines.append(f"  {name} (no status)  {count}")
    if summary["p50"] is not None:
        lines.append(f"duration  p50 {summary['p50']:g} s, p99 {summary['p99']:g} s")
        lines += [f"slowest   {row['duration']:g} s  {row['program']}" for row in summary["slowest"]]
    return "\n".join(map(escape_line, lines))


class Display(Protocol):
    """Show the progress of a batch."""

    every_s: float

    def show(self, running: FileBatch) -> None:
        """Show how far it is."""

    def tell(self, text: str) -> None:
        """Print a message."""

    def close(self) -> None:
        """Remove the drawing."""


def _display_for(running: FileBatch, *, is_quiet: bool) -> Display:
    if is_quiet:
        return _NoDisplay()
    return _Bar(running.rows) if sys.stderr.isatty() else _Lines()


def progress_line(running: FileBatch) -> str:
    """Return how far a batch is, with its rate and the time left."""
    done = running.summary.rows
    rate = (done - running.rows_before) / max(running.seconds, 1e-6)
    left = f", {_short((running.rows - done) / rate)} left" if rate > 0 else ""
    return f"{done} of {running.rows} programs, {rate:.3g} a second{left}"


def _short(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _NoDisplay:
    every_s = 3600.0

    def show(self, running: FileBatch) -> None:
        """Show nothing."""

    def tell(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        """Do nothing."""


class _Lines:
    """Print a line from time to time, for logs."""

    every_s = TOLD_EVERY_S

    def show(self, running: FileBatch) -> None:
        if running.seconds > self.every_s / 2:  # not for a batch that is over soon
            say(progress_line(running))

    def tell(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        """Do nothing."""


class _Bar:
    """Draw a bar on the terminal."""

    every_s = DRAWN_EVERY_S

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(), TextColumn("{task.description}", markup=False))
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self._progress.add_task("", total=total or None)
        self._progress.start()

    def show(self, running: FileBatch) -> None:
        text = progress_line(running)
        self._progress.update(self._task, completed=running.summary.rows, description=text, refresh=True)

    def tell(self, text: str) -> None:
        self._progress.console.print(f"cloche: {text}", markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()
