"""`cloche run --fix`: hold back what failed runs print, show how far the repair is, say at last what changed."""

from __future__ import annotations

import sys
import tempfile
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cloche.agent.autofix import AutoFix
from cloche.core.errors import InvalidRequest
from cloche.core.events import Event, OutputChunk, Started, Stream
from cloche.core.fixing import FixAnswering, FixAsking, FixEvent, FixRunning, FixTried
from cloche.core.plain import plain, plain_line
from cloche.core.result import FixReport, FixRound, FixStop
from cloche.core.units import MIB
from cloche.hostfs import open_named

from .exits import say
from .terminal import Writer

if TYPE_CHECKING:
    from rich.status import Status

MOST_DIFF_LINES = 200
MOST_LINE_CHARS = 400
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def fixer_for(max_fix: int | None, config: object, shown: FixShown) -> AutoFix:
    """Return the fixer of the configuration, with --max-fix over it."""
    return AutoFix(max_rounds=max_fix, config=None if config is None else str(config), on_event=shown.take)


class HeldOutput:
    """Keep the output of the run that is going on, and pass on that of the last; what is long waits on disk."""

    def __init__(self) -> None:
        self._data = tempfile.SpooledTemporaryFile(max_size=4 * MIB)  # noqa: SIM115 - closed with this object
        self._pieces: list[tuple[Stream, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def take(self, event: Event) -> None:
        """Keep output; a run that starts takes the place of the one before."""
        if isinstance(event, Started):
            self._pieces.clear()
            self._data.seek(0)
            self._data.truncate()
        elif isinstance(event, OutputChunk) and event.data:
            self._data.write(event.data)
            if self._pieces and self._pieces[-1][0] == event.stream:
                self._pieces[-1] = (event.stream, self._pieces[-1][1] + len(event.data))
            else:
                self._pieces.append((event.stream, len(event.data)))

    def pass_on(self, writers: dict[Stream, Writer]) -> None:
        """Write what was kept, in its order."""
        self._data.seek(0)
        for stream, size in self._pieces:
            for start in range(0, size, MIB):
                writers[stream].write(self._data.read(min(MIB, size - start)))


class FixShown:
    """Show the rounds on a terminal; elsewhere only where code is sent."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._was_told = False
        self._spinner: Status | None = None
        self._text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def take(self, event: FixEvent) -> None:
        """Show an event; called in another thread than the one that waits for the result."""
        if isinstance(event, FixAsking):
            self._ask(event)
        elif isinstance(event, FixAnswering):
            self._spin(f"{self._text}: {event.chars} characters")
        elif isinstance(event, FixRunning):
            self._spin(f"round {event.number}: running")
        elif isinstance(event, FixTried):
            self._stop()
            if self._is_terminal:
                say(f"round {event.round.number}: {_outcome(event.round)}")

    def _ask(self, event: FixAsking) -> None:
        where = f"{event.model} at {event.host}" if event.host else event.model
        if not self._was_told:
            self._was_told = True
            say(f"the program failed ({event.error}); --fix sends its code and output to {where}")
        self._text = f"round {event.number} of {event.max_rounds}: asking {where}"
        self._spin(self._text)

    def _spin(self, text: str) -> None:
        if not self._is_terminal:
            return
        from rich.console import Console
        from rich.text import Text

        shown = Text(plain_line(text))
        if self._spinner is None:
            self._spinner = Console(stderr=True).status(shown)
            self._spinner.start()
        else:
            self._spinner.update(shown)

    def _stop(self) -> None:
        spinner, self._spinner = self._spinner, None
        if spinner is not None:
            spinner.stop()


def _outcome(one: FixRound) -> str:
    from cloche.agent.autofix_prompt import error_line

    if one.result is None:
        return one.refusal
    return "it works" if one.result.ok else error_line(one.result)


def conclude_fix(report: FixReport) -> None:
    """Say on stderr how it ended and what changed."""
    if report.stop is FixStop.NOT_NEEDED:
        return
    where = f"{report.model} at {report.host}" if report.host else report.model
    say(f"{report.message} ({where}, about {report.tokens} tokens, {report.duration_s:.1f} s)")
    if report.diff:
        say("what changed in the program that ran last:")
        _print_diff(report.diff)


def save_code(report: FixReport, name: str) -> None:
    """Write a program that was repaired to a file, in place of what is there; without a repair, nothing."""
    if report.stop is not FixStop.FIXED:
        return
    try:
        open_named(name, report.code.encode("utf-8", "surrogateescape")).close()
    except OSError as error:
        raise InvalidRequest(f"--save-fix: cannot write {name!r}: {error.strerror}") from error
    say(f"the repaired program is in {name}; nobody has read it yet")


def _print_diff(diff: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    lines = diff.splitlines()
    for line in lines[:MOST_DIFF_LINES]:
        console.print(Text(plain(line[:MOST_LINE_CHARS]), style=STYLES.get(line[:1], "")))
    if len(lines) > MOST_DIFF_LINES:
        say(f"{len(lines) - MOST_DIFF_LINES} more lines; --json shows the whole program")
