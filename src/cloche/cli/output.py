"""Output of the command line: exit codes, messages on stderr, the guest's output, tables, a bar for long downloads.

The program's exit code passes through. Cloche's own codes: 124 time-out, 137 out of memory, 125 Cloche failed, 2 usage
error, 130 Ctrl-C, 143 terminated, 141 closed output pipe. The guest's output is written unchanged to files and pipes,
and escaped on a terminal.
"""

from __future__ import annotations

import codecs
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape, escape_line, escape_output, utf8_safe

if TYPE_CHECKING:
    from cloche.core.events import Progress
    from cloche.core.result import Result

EXIT_USAGE = 2
EXIT_FAILED = 125
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE
_EXIT_BY_STATUS = {"timeout": 124, "out_of_memory": 137}
RED, PLAIN = b"\x1b[31m", b"\x1b[0m"
PIPED_COLUMNS = 200  # wide enough that a row stays one line, for grep
READ_COLUMNS = 100  # for rows that are read, or are in a log

Row = Mapping[str, Any]


class OutputFailed(ClocheError):
    """Report that the output cannot be written, for example because a disk is full."""


def exit_code_of(result: Result) -> int:
    """Return the exit code of `cloche run` for `result`."""
    return _EXIT_BY_STATUS.get(str(result.status), result.exit_code & 0xFF)


def exit_code_of_error(error: ClocheError) -> int:
    """Return the exit code for an error: 2 for a usage error, else 125."""
    return EXIT_USAGE if isinstance(error, InvalidRequest) else EXIT_FAILED


def guarded(work: Callable[[], int], *, debug: bool = False, as_json: bool = False) -> int:
    """Run the work of one command and return the exit code; each exception becomes one line on stderr."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's "ignore" stays
            signal.signal(number, _exit_orderly)
    logging.getLogger("cloche.config").addHandler(
        _say_handler
    )  # it logs files of the working directory that are ignored
    try:
        _debug_by_environment()
        code = work()
        sys.stdout.flush()  # an error here is reported; at the interpreter's end it would be a traceback
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_UNREAD
    except ClocheError as error:
        _report(error, str(error), debug=debug, as_json=as_json)
        return exit_code_of_error(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _unexpected(error, debug=debug, as_json=as_json)
        say(f"cannot write {error.filename or 'the output'}: {error.strerror}; make room there, and try again")
        if error.filename is None:
            _discard_stdout()
        return EXIT_FAILED
    except Exception as error:
        return _unexpected(error, debug=debug, as_json=as_json)


def _unexpected(error: Exception, *, debug: bool, as_json: bool) -> int:
    text = f"unexpected {type(error).__name__}: {error}. This is a defect of Cloche"
    _report(error, text if debug else f"{text}; --sandbox-debug shows where", debug=debug, as_json=as_json)
    return EXIT_FAILED


def say(text: str) -> None:
    """Print one line on stderr."""
    line = escape(" ".join(text.splitlines()))
    print(f"cloche: {line}", file=sys.stderr, flush=True)


class _SayHandler(logging.Handler):
    """Print log records as messages."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


_say_handler = _SayHandler()


def log_to_say() -> None:
    """Print a line on stderr for every event that could not be written to the audit log."""
    logging.getLogger("cloche.audit").addHandler(_say_handler)


class PlainFormatter(logging.Formatter):
    """Escape control characters in log lines: they may quote the guest."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


def log_to_stderr() -> None:
    """Print the library's log, with the time since the start."""
    _log_from(logging.INFO)
    logging.getLogger("cloche").setLevel(logging.DEBUG)


def _log_from(level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(relativeCreated)6.0f ms %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _debug_by_environment() -> None:
    """Print the log of the namespaces in CLOCHE_DEBUG. Raises InvalidRequest."""
    text = os.environ.get("CLOCHE_DEBUG")
    if text:
        from cloche.core.debugging import read_namespaces, switch

        on = read_namespaces(text)
        _log_from(logging.WARNING)
        switch(on)


def _report(error: Exception, text: str, *, debug: bool, as_json: bool) -> None:
    if debug:
        import traceback

        print(escape("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    say(text)
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": utf8_safe(str(error))}}))


def _exit_orderly(number: int, _frame: FrameType | None) -> None:
    """Exit as after Ctrl-C: what runs is killed and waited for first."""
    raise SystemExit(128 + number)


def _discard_stdout() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class GuestWriter:
    """Write one stream of the guest to a descriptor of this process, completely and without a buffer.

    On a terminal it is escaped unless `is_raw`, and red with `is_red` unless NO_COLOR is set.
    """

    def __init__(self, fd: int, *, is_red: bool = False, is_raw: bool = False) -> None:
        self.fd = fd
        self._is_terminal = os.isatty(fd) and not is_raw
        self._is_red = is_red and self._is_terminal and not os.environ.get("NO_COLOR")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end inside a character

    def write(self, data: bytes) -> None:
        """Write `data`. Raises BrokenPipeError if the pipe is closed, OutputFailed."""
        if self._is_terminal:
            data = self._coloured(escape_output(self._decoder.decode(data)))
        self._write_all(data)

    def finish(self) -> None:
        """Write an incomplete last character."""
        if self._is_terminal:
            self._write_all(self._coloured(escape_output(self._decoder.decode(b"", final=True))))

    def _coloured(self, text: str) -> bytes:
        data = text.encode("utf-8", "replace")
        return b"%s%s%s" % (RED, data, PLAIN) if self._is_red and data else data

    def _write_all(self, data: bytes) -> None:
        unwritten = memoryview(data)
        while unwritten:
            try:
                unwritten = unwritten[os.write(self.fd, unwritten) :]
            except BlockingIOError:  # the descriptor's other owner made it non-blocking
                import select

                select.select([], [self.fd], [])
            except BrokenPipeError:
                raise
            except OSError as error:
                raise OutputFailed(f"cannot pass the output on: {error.strerror}; the run was stopped") from error


def show(
    rows: Sequence[Row],
    *,
    as_json: bool,
    title: str = "",
    piped_columns: int = PIPED_COLUMNS,
    below: Sequence[str] = (),
) -> None:
    """Print rows that share their keys, as a table or as JSON.

    `piped_columns` is the table's width without a terminal. Values of the keys `below` are sentences, paths and
    commands: they follow the table, one per line, and are not wrapped.
    """
    if as_json:
        print(json.dumps([dict(row) for row in rows], default=str, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    names = [name for name in (rows[0] if rows else ()) if name not in below]
    columns = [Column(name, overflow="fold") for name in names]  # long words are wrapped, not cut
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    wide = None if sys.stdout.isatty() else piped_columns
    Console(markup=False, highlight=False, emoji=False, width=wide).print(table)
    for row in rows:
        for name in below:
            if row[name]:
                print(escape_line(f"{_cell(row[names[0]])}: {name}: {_cell(row[name])}"))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


@contextmanager
def showing_progress() -> Iterator[None]:
    """Show progress on stderr while the block runs, if it is a terminal; nothing is drawn before the first event."""
    if not sys.stderr.isatty():
        yield
        return
    from cloche.core.events import progress_sinks

    bar = _Bar()
    progress_sinks.append(bar.show)
    try:
        yield
    finally:
        progress_sinks.remove(bar.show)
        bar.close()


class _Bar:
    """Draw one bar at a time."""

    def __init__(self) -> None:
        self._drawn: object = None

    def show(self, progress: Progress) -> None:
        """Draw the progress."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn
        from rich.progress import Progress as Drawing

        if progress.is_over:
            self.close()
            return
        if not isinstance(self._drawn, Drawing):
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
            self._drawn = Drawing(*columns, console=Console(stderr=True), transient=True)
            self._drawn.add_task(escape_line(progress.what), total=None)
            self._drawn.start()
        total = progress.total or None
        self._drawn.update(
            self._drawn.task_ids[0], description=escape_line(progress.what), completed=progress.done, total=total
        )

    def close(self) -> None:
        """Remove the bar."""
        drawn, self._drawn = self._drawn, None
        stop = getattr(drawn, "stop", None)
        if stop is not None:
            stop()
