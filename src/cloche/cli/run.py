"""`cloche run`: read the source, run it, pass its output on as it comes."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.events import Event, Started, Stream
from cloche.core.languages import detect_language
from cloche.core.plain import plain
from cloche.core.request import MAX_STDIN_BYTES
from cloche.core.result import Result, Status
from cloche.core.units import MIB
from cloche.runtime.inputs import Content
from cloche.runtime.options import SandboxOptions
from cloche.sync import run

from .exits import exit_code_of, say
from .pulling import progress_shown
from .terminal import Writer

MAX_CODE_BYTES = 16 * MIB

NOTES = {
    Status.TIMEOUT: "the code was stopped at its time limit",
    Status.OUT_OF_MEMORY: "the code was stopped at its memory limit",
    Status.OUTPUT_LIMIT: "the code printed or showed without end",
    Status.PIDS_LIMIT: "the code reached its limit of processes",
    Status.DISK_LIMIT: "the code reached its limit of disk space",
    Status.SIGNALED: "the code ended by a signal",
    Status.DENIED: "the policy blocked the code while it ran",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """Hold the command line of `cloche run`, parsed and not yet checked."""

    words: tuple[str, ...] = ()
    code: str | None = None
    language: str | None = None
    env: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    out: str | None = None
    spill: str | None = None
    as_json: bool = False
    no_sandbox: bool = False
    debug: bool = False
    fix: bool = False
    max_fix: int | None = None
    save_fix: str | None = None
    options: SandboxOptions = field(default_factory=SandboxOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Hold the code and where it came from; `took_stdin`: nothing is left for the program to read."""

    code: str
    name: str
    argv: tuple[str, ...]
    took_stdin: bool = False


def run_command(command: RunCommand) -> int:
    """Run what the command line says and return the exit code."""
    if command.debug:
        log_to_stderr()
    if command.max_fix is not None and not command.fix:
        raise InvalidRequest("--max-fix says how often --fix may ask; give --fix, too")
    if command.save_fix is not None and not command.fix:
        raise InvalidRequest("--save-fix is for what --fix repairs; give --fix, too")
    options: SandboxOptions = {"warm": False, **with_backend(command.options, no_sandbox=command.no_sandbox)}
    source = read_source(command)
    language = command.language or _detect(source)
    stdout, stderr = Writer(1), Writer(2)
    writers: dict[Stream, Writer] = {"stdout": stdout, "stderr": stderr}
    wanted = {
        "language": language,
        "argv": source.argv,
        "stdin": b"" if source.took_stdin else read_stdin(),
        "env": read_pairs(command.env),
        "files": read_files(command.files),
        "out": command.out,
        "spill": command.spill,
        **options,
    }
    with progress_shown():
        result = (_run_fixing if command.fix else _run_plainly)(command, source.code, wanted, writers)
    stdout.finish()
    stderr.finish()
    _conclude(result, as_json=command.as_json)
    return exit_code_of(result)


def _run_plainly(command: RunCommand, code: str, wanted: Mapping[str, Any], writers: dict[Stream, Writer]) -> Result:
    """Run once, and pass output on as it comes."""
    return run(
        code,
        on_output=None if command.as_json else lambda stream, data: writers[stream].write(data),
        on_event=_print_plan if command.debug else None,
        **wanted,
    )


def _run_fixing(command: RunCommand, code: str, wanted: Mapping[str, Any], writers: dict[Stream, Writer]) -> Result:
    """Run with --fix, and pass on what the last run printed, however it ended."""
    from .fixing import FixShown, HeldOutput, fixer_for, save_code

    with HeldOutput() as held:

        def take(event: Event) -> None:
            held.take(event)
            if command.debug:
                _print_plan(event)

        try:
            with FixShown() as shown:
                fixer = fixer_for(command.max_fix, wanted.get("config"), shown)
                result = run(code, on_event=take, autofix=fixer, **wanted)
        finally:  # after Ctrl-C in a round, too: what was printed by then is all that there will be
            if not command.as_json:
                held.pass_on(writers)
    if command.save_fix is not None and result.fix is not None:
        save_code(result.fix, command.save_fix)
    return result


def _detect(source: Source) -> str:
    """Tell the language by name or first line; code without either is Python, as with any `-c`."""
    first_line = source.code.partition("\n")[0]
    if not source.name and not first_line.startswith("#!"):
        return "python"
    return detect_language(source.name, first_line).name


class _Plain(logging.Formatter):
    """Write messages without what a terminal would obey: they may quote whatever ran."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def log_to_stderr() -> None:
    """Print the library's log, with the time since the start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(relativeCreated)6.0f ms %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("cloche").setLevel(logging.DEBUG)


def with_backend(options: SandboxOptions, *, no_sandbox: bool) -> SandboxOptions:
    """Return the options with the backend that --no-sandbox stands for, and say what that means."""
    if not no_sandbox:
        return options
    if options.get("backend") not in (None, "subprocess"):
        raise InvalidRequest("--no-sandbox and --backend exclude each other; give one")
    say("no sandbox: the code runs as a child process on this host, with limits but without isolation")
    return {**options, "backend": "subprocess"}


def read_source(command: RunCommand) -> Source:
    """Return the code: from -c, from stdin (`-`), or from the file that the first word names."""
    if command.code is not None:
        return Source(code=command.code, name="", argv=command.words)
    if not command.words:
        raise InvalidRequest("nothing to run: give a FILE, - for stdin, or -c CODE")
    name, *argv = command.words
    if name == "-":
        return Source(code=read_code(), name="", argv=tuple(argv), took_stdin=True)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = _read_all(fd, MAX_CODE_BYTES, name)
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(f"cannot read {name!r}: {error.strerror}; give a FILE, - for stdin, or -c CODE") from error
    return Source(code=_decode(data), name=os.path.basename(name), argv=tuple(argv))


def read_code() -> str:
    """Return the code that is piped in."""
    return _decode(_read_all(0, MAX_CODE_BYTES, "stdin"))


def read_stdin() -> bytes:
    """Return what is piped in for the program; nothing when a person sits at a terminal."""
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


def read_pairs(words: Iterable[str]) -> dict[str, str]:
    """Return the variables that --env gives or passes on."""
    return dict(_pair(word) for word in words)


def read_files(words: Iterable[str]) -> dict[str, Content]:
    """Return what --file names, by its place in the workspace."""
    return dict(_file(word) for word in words)


def _pair(text: str) -> tuple[str, str]:
    """Split K=V; a bare K passes the caller's own value on."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise InvalidRequest(f"--env {name}: there is no such variable here to pass on; write {name}=VALUE")
    return name, os.environ[name]


def _file(text: str) -> tuple[str, Content]:
    """Split SRC[:DST]; a colon that belongs to an existing name is kept."""
    source, colon, target = (text, "", "") if os.path.exists(text) else text.rpartition(":")
    path = Path(source if colon else text)
    return target or path.absolute().name, path


def _print_plan(event: Event) -> None:
    if isinstance(event, Started):
        for number, step in enumerate(event.plan, 1):
            text = plain(f"{number:3} {step.seconds * 1000:8.2f} ms  {step.name}: {step.description}")
            print(text, file=sys.stderr, flush=True)


def say_fallback(notes: Mapping[str, Any]) -> None:
    """Say on stderr that something else ran than what was asked for, if it did."""
    fallback = notes.get("fallback")
    if fallback is not None:
        say(f"fallback: this ran on backend {fallback['used']} at level {fallback['level']}. {fallback['reason']}")


def _signal_of(result: Result) -> str:
    """Return which signal ended the program, as far as its exit code says that."""
    number = result.exit_code - 128
    is_known = result.status is Status.SIGNALED and number in signal.valid_signals()
    return f", {signal.strsignal(number)}" if is_known else ""


def _conclude(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.as_dict(), default=str), flush=True)
        return
    say_fallback(result.meta)
    for warning in result.meta.get("screen", ()):
        say(f"screen: {warning}")
    for path in result.meta.get("files_left_out", ()):
        say(f"left out, not a regular file inside the given directory: {path}")
    note = NOTES.get(result.status or Status.OK)
    if note is not None:
        say(f"{result.status}: {note}{_signal_of(result)} ({result.duration:.2f} s)")
    if refused := result.meta.get("refused"):
        say(f"nothing is kept of what the code told of its value and figures: {refused}")
    if partial := result.meta.get("files_partial"):
        say(f"files may be missing ({partial}): looking at them is bounded; write fewer files, or one archive")
    if result.fix is not None:
        from .fixing import conclude_fix

        conclude_fix(result.fix)
