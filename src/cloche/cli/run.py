"""`cloche run`: reads the source, runs it, passes its output on as it arrives.

With `--fix` the output of failed runs is held back, progress of the repair is shown, and the diff at the end.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line

from ._named import refuse_name, refuse_options
from ._review import check_review, settle_changes, tell_folder, without_folder
from .app import root
from .options import (
    Command,
    argument,
    debug_option,
    flag,
    folder_options,
    in_option,
    json_option,
    no_sandbox_option,
    option,
    output_options,
    program_options,
    sandbox_options,
)
from .output import GuestWriter, exit_code_of, log_to_stderr, say, showing_progress

if TYPE_CHECKING:
    from types import TracebackType

    from rich.status import Status as Spinner

    from cloche.autofix.loop import AutoFix
    from cloche.config.options import SandboxOptions
    from cloche.core.events import Event, Stream
    from cloche.core.fixing import FixAsking, FixEvent
    from cloche.core.result import FixReport, FixRound, Result
    from cloche.execution.inputs import Content

MIB = 1024 * 1024
MAX_CODE_BYTES = 16 * MIB
MOST_DIFF_LINES = 200
MOST_LINE_CHARS = 400
STYLES = {"+": "green", "-": "red", "@": "cyan"}

NOTES: Mapping[str, str] = {  # by status
    "timeout": "the code was stopped at its time limit",
    "out_of_memory": "the code was stopped at its memory limit",
    "output_limit": "the code printed or displayed too much",
    "pids_limit": "the code reached its limit of processes",
    "disk_limit": "the code reached its limit of disk space",
    "signaled": "the code ended by a signal",
    "denied": "the policy blocked the code while it ran",
}
MORE: Mapping[str, str] = {  # by status
    "timeout": "--timeout TIME gives it more",
    "out_of_memory": "a larger --memory gives it more",
    "output_limit": "a larger flood_limit in the configuration gives it more",
    "pids_limit": "a larger --pids gives it more",
    "disk_limit": "a larger --disk gives it more",
}
MOST_TOLD = 5  # refused connections
_NAMES_LOST = re.compile(r"(?i)name resolution|Name or service not known|Could not resolve host|Network is unreachable")


class Source(NamedTuple):
    """Hold the code and its origin; after `took_stdin` the program has no input to read."""

    code: str
    name: str
    argv: tuple[str, ...]
    took_stdin: bool = False


class _Run(Command):
    """Note whether the first argument stands before any dashes: it may then be meant as a sandbox's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the parameter `bare`: that argument, or None."""
        arguments = list(args)
        remaining = super().parse_args(ctx, args)
        before = arguments[: arguments.index("--")] if "--" in arguments else arguments
        first = (ctx.params.get("words") or ())[:1]
        ctx.params["bare"] = first[0] if first and first[0] in before else None
        return remaining


@root.command("run", cls=_Run, no_args_is_help=True)
@argument("words", nargs=-1, metavar="FILE|-", help="The file to run (- is stdin), then -- and its arguments.")
@option("-c", "code", metavar="CODE", help="Run CODE instead of a file.")
@option("--language", metavar="NAME", help="The program's language. Default: by file name or first line, else python.")
@in_option()
@sandbox_options()
@folder_options()
@flag("--review", help="Show the changes to the folder, and ask which to write.")
@program_options()
@output_options()
@option("--requirements", metavar="FILE", help="First install the packages of this requirements.txt.")
@flag("--fix", help="Send a failing program to the configured model, and run its answer.")
@option("--max-fix", metavar="N", type=int, help="Ask at most N times. Default: 4.")
@option("--save-fix", metavar="FILE", help="Write the repaired program to FILE.")
@json_option()
@no_sandbox_option()
@debug_option("Print the debug log and the jail's plan.")
def _run(
    words: tuple[str, ...],
    bare: str | None,
    code: str | None,
    language: str | None,
    inside: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    out: str | None,
    spill: str | None,
    requirements: str | None,
    fix: bool,
    max_fix: int | None,
    save_fix: str | None,
    as_json: bool,
    review: bool,
    no_sandbox: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Run a program in a throwaway sandbox or a named one.

    The program's output and exit code pass through. Cloche's own exit codes: 124 time-out, 137 out of memory, 125
    Cloche failed, 2 usage error.
    """
    if sandbox_debug:
        log_to_stderr()
    if max_fix is not None and not fix:
        raise InvalidRequest("--max-fix is a limit for --fix; give --fix, too")
    if save_fix is not None and not fix:
        raise InvalidRequest("--save-fix saves the result of --fix; give --fix, too")
    if inside is not None:
        refuse_options(inside, {**options, "requirements": requirements, "no_sandbox": no_sandbox})
    elif bare is not None:
        refuse_name(bare, f"cloche run --in {bare} {'FILE' if code is None else '-c CODE'}")
    check_review(options, review=review, name=inside)
    rules, folder = without_folder(with_backend(options, no_sandbox=no_sandbox))
    if requirements is not None:
        from .packages import with_requirements

        rules = {**rules, "packages": with_requirements(options.get("packages"), requirements)}
    source = read_source(words, code)
    from cloche.sync_run import run

    keywords: dict[str, Any] = {
        "language": language or detect_source(source),
        "argv": source.argv,
        "stdin": b"" if source.took_stdin else read_stdin(),
        "env": read_pairs(env),
        "files": read_files(file),
        "out": out,
        "spill": spill,
    }
    fixes = partial(_run_fixing, max_fix=max_fix, save_fix=save_fix, config=options.get("config")) if fix else None
    if folder is None and inside is None:
        start = partial(run, source.code, **keywords, warm=False, **rules)
        return run_and_report(partial(fixes, start) if fixes else start, as_json=as_json, debug=sandbox_debug)
    from cloche.sync import Sandbox

    settings: dict[str, Any] = {**rules, **(folder or {})}
    with Sandbox(**settings) if inside is None else Sandbox.attach(inside) as sandbox:
        tell_folder(sandbox.notes)
        start = partial(
            sandbox.run, source.code, **keywords, timeout=None if inside is None else options.get("timeout")
        )
        exit_code = run_and_report(partial(fixes, start) if fixes else start, as_json=as_json, debug=sandbox_debug)
        if folder is not None:
            settle_changes(sandbox, review=review)
    return exit_code


def run_and_report(start: Callable[..., Result], *, as_json: bool, debug: bool) -> int:
    """Call `start` with the callbacks of a run, pass its output on, report its end; return its exit code."""
    writers: dict[Stream, GuestWriter] = {"stdout": GuestWriter(1), "stderr": GuestWriter(2)}
    with showing_progress():
        result = start(
            on_output=None if as_json else lambda stream, data: writers[stream].write(data),
            on_event=_print_plan if debug else None,
        )
    for writer in writers.values():
        writer.finish()
    conclude(result, as_json=as_json)
    return exit_code_of(result)


def _run_fixing(
    start: Callable[..., Result],
    *,
    max_fix: int | None,
    save_fix: str | None,
    config: object,
    on_output: Callable[[Stream, bytes], None] | None,
    on_event: Callable[[Event], None] | None,
) -> Result:
    """Run with --fix, and pass on the output of the last run, however it ended."""
    with BufferedOutput() as held:

        def take(event: Event) -> None:
            held.take(event)
            if on_event is not None:
                on_event(event)

        try:
            with FixProgress() as progress:
                result = start(on_event=take, autofix=fixer_for(max_fix, config, progress))
        finally:  # also after Ctrl-C in a round: there will be no more output
            if on_output is not None:
                held.pass_on(on_output)
    if save_fix is not None and result.fix is not None:
        save_code(result.fix, save_fix)
    return result


def detect_source(source: Source) -> str:
    """Return the language by file name or first line; code without either is Python, as with any `-c`."""
    from cloche.core.languages import detect_language

    first_line = source.code.partition("\n")[0]
    if not source.name and not first_line.startswith("#!"):
        return "python"
    return detect_language(source.name, first_line).name


def with_backend(options: SandboxOptions, *, no_sandbox: bool) -> SandboxOptions:
    """Return the options with the backend of --no-sandbox, and print a warning about it."""
    if not no_sandbox:
        return options
    if options.get("backend") not in (None, "subprocess"):
        raise InvalidRequest("--no-sandbox and --backend exclude each other; give one")
    say("no sandbox: the code runs as a child process on this host, with limits but without isolation")
    return {**options, "backend": "subprocess"}


def read_source(
    arguments: tuple[str, ...], code: str | None, *, choices: str = "a FILE, - for stdin, or -c CODE"
) -> Source:
    """Return the code: from -c, from stdin (`-`), or from the file of the first argument. Errors name the choices."""
    if code is not None:
        return Source(code, "", arguments)
    if not arguments:
        raise InvalidRequest(f"nothing to run: give {choices}")
    name, *argv = arguments
    if name == "-":
        return Source(read_code(), "", tuple(argv), took_stdin=True)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = _read_all(fd, MAX_CODE_BYTES, name)
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(f"cannot read {name!r}: {error.strerror}; give {choices}") from error
    return Source(_decode(data), os.path.basename(name), tuple(argv))


def read_code() -> str:
    """Return the code from stdin."""
    return _decode(_read_all(0, MAX_CODE_BYTES, "stdin"))


def read_stdin() -> bytes:
    """Return the program's input from stdin; empty if stdin is a terminal."""
    from cloche.core.request import MAX_STDIN_BYTES

    try:
        return b"" if os.isatty(0) else _read_all(0, MAX_STDIN_BYTES, "stdin")
    except OSError:  # closed, or a directory: there is nothing to read
        return b""


def _read_all(fd: int, max_bytes: int, name: str) -> bytes:
    chunks, size = [], 0
    while chunk := os.read(fd, MIB):
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise InvalidRequest(f"{name}: more than {max_bytes // MIB} MiB; pass the data with --file instead")
    return b"".join(chunks)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def read_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Return the variables that --env sets or passes on."""
    return dict(_pair(pair) for pair in pairs)


def read_files(specs: Iterable[str]) -> dict[str, Content]:
    """Return the contents of --file by their path in the workspace."""
    return dict(_file(spec) for spec in specs)


def _pair(text: str) -> tuple[str, str]:
    """Split K=V; a bare K passes the caller's own value on."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise InvalidRequest(f"--env {name}: there is no such variable here to pass on; write {name}=VALUE")
    return name, os.environ[name]


def _file(text: str) -> tuple[str, Content]:
    """Split SRC[:DST]; a colon within an existing name is kept."""
    from pathlib import Path

    source, colon, target = (text, "", "") if os.path.exists(text) else text.rpartition(":")
    path = Path(source if colon else text)
    return target or path.absolute().name, path


def _print_plan(event: Event) -> None:
    from cloche.core.events import Started

    if isinstance(event, Started):
        for number, step in enumerate(event.plan, 1):
            text = escape(f"{number:3} {step.seconds * 1000:8.2f} ms  {step.name}: {step.description}")
            print(text, file=sys.stderr, flush=True)


def say_fallback(notes: Mapping[str, Any]) -> None:
    """Print on stderr that a fallback ran instead of the requested backend, if it did."""
    fallback = notes.get("fallback")
    if fallback is not None:
        say(f"fallback: this ran on backend {fallback['used']} at level {fallback['level']}. {fallback['reason']}")


def _signal_of(result: Result) -> str:
    """Return the signal that ended the program, if its exit code tells it."""
    import signal

    number = result.exit_code - 128
    is_known = result.status == "signaled" and number in signal.valid_signals()
    return f", {signal.strsignal(number)}" if is_known else ""


def say_network(result: Result) -> None:
    """Print why connections were refused or failed."""
    explained = [row for row in result.meta.get("network", ()) if row["why"]]
    for row in explained[:MOST_TOLD]:
        say(f"network: {row['why']}")
    if len(explained) > MOST_TOLD:
        say(f"network: {len(explained) - MOST_TOLD} more were refused or failed; --json has all")


def conclude(result: Result, *, as_json: bool, tells_network: bool = True) -> None:
    """Print notes on the end of a run on stderr, or the whole result as JSON.

    Without `tells_network` nothing is said of refused connections, of which the caller tells in another form.
    """
    if as_json:
        import json

        print(json.dumps(result.as_dict(), default=str), flush=True)
        return
    say_fallback(result.meta)
    for warning in result.meta.get("screen", ()):
        say(f"screen: {warning}")
    for path in result.meta.get("files_left_out", ()):
        say(f"left out, not a regular file inside the given directory: {path}")
    note = NOTES.get(str(result.status))
    if note is not None:
        more = MORE.get(str(result.status), "")
        say(f"{result.status}: {note}{_signal_of(result)} ({result.duration:.2f} s){more and f'; {more}'}")
    for advice in ("advice", "host_advice"):
        if not result.ok and advice in result.meta:
            say(result.meta[advice])
    if hint := "" if result.ok else _hint(result):
        say(hint)
    if tells_network:
        say_network(result)
    if refused := result.meta.get("refused"):
        say(f"the value and figures that the code reported are dropped: {refused}")
    if partial := result.meta.get("files_partial"):
        say(f"files may be missing ({partial}): the search for them is limited; write fewer files, or one archive")
    if result.fix is not None:
        conclude_fix(result.fix)


def _hint(result: Result) -> str:
    """Return the options that would help a program whose last line reports a missing module, host or memory."""
    last = result.stderr[-MOST_LINE_CHARS:].rstrip().rpartition("\n")[2]
    if missing := re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]{1,100})'", last):
        name = missing[1].partition(".")[0]
        return f"{name} is not in the sandbox: --packages NAMES brings packages, --file and --workspace your modules"
    if "network" not in result.meta and _NAMES_LOST.search(last):
        return "the network reaches no host but those of --network-allow HOST"
    memory = result.meta.get("limits", {}).get("memory_bytes")
    if memory and re.search(r"\bMemoryError\b|Cannot allocate memory|bad_alloc", last):
        from cloche.core.limits import format_size

        return f"the sandbox has {format_size(memory)} of memory; a larger --memory gives it more"
    return ""


def fixer_for(max_fix: int | None, config: object, shown: FixProgress) -> AutoFix:
    """Return the configured fixer, with the value of --max-fix."""
    from cloche.autofix.loop import AutoFix

    return AutoFix(max_rounds=max_fix, config=None if config is None else str(config), on_event=shown.take)


class BufferedOutput:
    """Buffer the output of each run, and pass on only that of the last one; long output is buffered on disk."""

    def __init__(self) -> None:
        import tempfile

        from cloche.hostfs import temporary_folder

        folder = temporary_folder()
        self._data = tempfile.SpooledTemporaryFile(max_size=4 * MIB, dir=folder)  # noqa: SIM115 - closed with this object
        self._pieces: list[tuple[Stream, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def take(self, event: Event) -> None:
        """Buffer output; the start of a run discards the output of the previous one."""
        from cloche.core.events import OutputChunk, Started

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

    def pass_on(self, write: Callable[[Stream, bytes], object]) -> None:
        """Write the buffered output in its order."""
        self._data.seek(0)
        for stream, size in self._pieces:
            for start in range(0, size, MIB):
                write(stream, self._data.read(min(MIB, size - start)))


class FixProgress:
    """Show the rounds on a terminal; elsewhere print only the host that code is sent to."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._was_told = False
        self._spinner: Spinner | None = None
        self._text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def take(self, event: FixEvent) -> None:
        """Show an event; called in another thread than the one that waits for the result."""
        from cloche.core.fixing import FixAnswering, FixAsking, FixRunning, FixTried

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

        shown = Text(escape_line(text))
        if self._spinner is None:
            self._spinner = Console(stderr=True).status(shown)
            self._spinner.start()
        else:
            self._spinner.update(shown)

    def _stop(self) -> None:
        spinner, self._spinner = self._spinner, None
        if spinner is not None:
            spinner.stop()


def _outcome(attempt: FixRound) -> str:
    from cloche.autofix.loop import error_line

    if attempt.result is None:
        return attempt.refusal
    return "it works" if attempt.result.ok else error_line(attempt.result)


def conclude_fix(report: FixReport) -> None:
    """Print on stderr how the repair ended, and the diff."""
    if report.stop == "not_needed":
        return
    where = f"{report.model} at {report.host}" if report.host else report.model
    say(f"{report.message} ({where}, about {report.tokens} tokens, {report.duration_s:.1f} s)")
    if report.diff:
        say("changes in the last program:")
        _print_diff(report.diff)


def save_code(report: FixReport, name: str) -> None:
    """Write a repaired program to a file and replace an existing one; do nothing without a repair."""
    from cloche.hostfs import open_named

    if report.stop != "fixed":
        return
    try:
        open_named(name, report.code.encode("utf-8", "surrogateescape")).close()
    except OSError as error:
        raise InvalidRequest(f"--save-fix: cannot write {name!r}: {error.strerror}") from error
    say(f"the repaired program is in {name}; review it before you use it")


def _print_diff(diff: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    lines = diff.splitlines()
    for line in lines[:MOST_DIFF_LINES]:
        console.print(Text(escape(line[:MOST_LINE_CHARS]), style=STYLES.get(line[:1], "")))
    if len(lines) > MOST_DIFF_LINES:
        say(f"{len(lines) - MOST_DIFF_LINES} more lines; --json shows the whole program")
