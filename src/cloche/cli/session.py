"""`cloche session`: an interpreter that keeps its state, at a prompt or for cells from a pipe.

Theory of operation of the prompt: cells run in the library's background loop, and the main thread waits. The handler of
SIGINT (Ctrl-C) requests an interrupt in a new thread, because the waiting thread may hold a lock that the interrupt
needs. A second Ctrl-C within a second raises KeyboardInterrupt in the main thread, which ends the run and kills
everything, as in any blocking call. Lines that begin with a colon are commands of the prompt (`COMMANDS`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import click

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape_line, escape_name
from cloche.core.record import dataclass, field

from ._named import refuse_options
from ._review import check_review, settle_changes, tell_folder, without_folder
from .app import root
from .options import (
    Command,
    debug_option,
    flag,
    folder_options,
    in_option,
    json_option,
    no_sandbox_option,
    option,
    program_options,
    sandbox_options,
)
from .output import exit_code_of, log_to_stderr, say, showing_progress
from .run import read_code, read_files, read_pairs, say_fallback, with_backend

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType, TracebackType

    from cloche.config.options import SandboxOptions
    from cloche.core.result import Result
    from cloche.sync import Session

    from .cells import CellPrinter

log = logging.getLogger("cloche.cli")
DOUBLE_PRESS_S = 1.0
MOST_HISTORY_LINES = 10_000
KILLED = b"\ncloche: the second Ctrl-C ends the session\n"
_SEPARATOR = re.compile(r"^# ?%%.*$", re.MULTILINE)


class _Session(Command):
    """Add a hint to the usage error for an argument that may be meant as a sandbox's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse. Raises click.UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if not error.message.startswith("Got unexpected"):
                raise
            more = "To use a sandbox with a name: cloche session --in NAME"
            raise click.UsageError(f"{error.message}. {more}", ctx) from None


@root.command("session", cls=_Session)
@in_option()
@option("--language", metavar="NAME", default="python", help="python, javascript or bash.")
@option("--idle-timeout", metavar="TIME", help="End the session after this time without use, for example 30m.")
@sandbox_options()
@folder_options()
@flag("--review", help="Show the changes to the folder, and ask which to write.")
@program_options()
@option("--out", metavar="DIR", help="Copy files, images and HTML that cells make to DIR.")
@json_option("Print one JSON object per cell from a pipe.")
@no_sandbox_option()
@debug_option()
def _session(
    inside: str | None,
    language: str,
    idle_timeout: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    out: str | None,
    as_json: bool,
    review: bool,
    no_sandbox: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Open a prompt whose cells share one interpreter.

    A cell sees the definitions of earlier cells. :help at the prompt lists its commands. The sandbox is a throwaway
    one, or with --in a named one.

    Cells from a pipe are separated by lines that begin with # %%. They run until one fails; its exit code becomes the
    command's, as with run. The time limit applies to each cell.
    """
    if sandbox_debug:
        log_to_stderr()
    is_prompt = os.isatty(0)
    if is_prompt and as_json:
        raise InvalidRequest("--json is for cells from a pipe; leave it out at a terminal")
    from cloche.sync import Sandbox

    from .cells import CellPrinter

    if inside is not None:
        refuse_options(inside, {**options, "file": file, "no_sandbox": no_sandbox})
    cells = () if is_prompt else split_cells(read_code())
    check_review(options, review=review, name=inside)
    rules, folder = without_folder(with_backend(options, no_sandbox=no_sandbox))
    variables, files = read_pairs(env), read_files(file)
    with contextlib.ExitStack() as stack:
        with showing_progress():
            settings: dict[str, Any] = {"warm": False, **rules, **(folder or {"live": _is_remote(options)})}
            sandbox = stack.enter_context(
                Sandbox(env=variables, files=files, **settings)
                if inside is None
                else Sandbox.attach(inside, env=variables)
            )
            say_fallback(sandbox.notes)
            tell_folder(sandbox.notes)
            session = sandbox.session(language, idle_timeout=idle_timeout)
        timeout = None if inside is None else options.get("timeout")
        if is_prompt:
            exit_code = Prompt(session, CellPrinter(out), out=out, timeout=timeout).converse()
        else:
            exit_code = run_cells(session, cells, out=out, as_json=as_json, timeout=timeout)
        if folder is not None:
            session.close()
            settle_changes(sandbox, review=review)
    return exit_code


def _is_remote(options: SandboxOptions) -> bool:
    """Tell whether sessions need a live sandbox. In others they have checkpoints and forks on the local backend."""
    from cloche.config.settings import load_settings
    from cloche.core.policy import BACKEND_ROWS

    return BACKEND_ROWS[load_settings(options).backend].is_remote


def split_cells(text: str) -> list[str]:
    """Return the non-empty cells of a text; the separator lines begin with `# %%`."""
    return [cell.strip("\n") for cell in _SEPARATOR.split(text) if cell.strip()]


def run_cells(
    session: Session,
    cells: Iterable[str],
    *,
    out: str | None,
    as_json: bool,
    timeout: float | str | None = None,
) -> int:
    """Run cells in order up to the first one that fails; return its exit code, or 0."""
    import json

    from .cells import CellPrinter

    printer = CellPrinter(out)
    for number, code in enumerate(cells, 1):
        if as_json:
            result = session.run(code, out=out, timeout=timeout)
            print(json.dumps(result.as_dict(), default=str), flush=True)
        else:
            printer.begin(number)
            result = session.run(code, on_event=printer.take, out=out, timeout=timeout)
            printer.conclude(result)
        if not result.ok:
            return exit_code_of(result)
    return 0


@dataclass(slots=True, kw_only=True)
class ForkedSession:
    """Hold one session of the prompt, the first one or a fork; `count` is the number of cells it has run.

    `checkpoints` maps names to the count at each, oldest first. `origin` is the number of the session it was forked
    from.
    """

    session: Session
    count: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)
    origin: int | None = None


class Prompt:
    """Read and run cells at a terminal. `sessions` holds every session by its number, `at` is the current number."""

    def __init__(
        self,
        session: Session,
        printer: CellPrinter,
        *,
        out: str | None = None,
        timeout: float | str | None = None,
    ) -> None:
        self.sessions = {0: ForkedSession(session=session)}
        self.at = 0
        self._printer, self._out, self._timeout = printer, out, timeout
        self._last = 0
        self._is_left = False

    @property
    def current(self) -> ForkedSession:
        """Return the current session."""
        return self.sessions[self.at]

    def add_fork(self, session: Session) -> int:
        """Add a fork of the current session and return its number."""
        self._last += 1
        self.sessions[self._last] = ForkedSession(session=session, count=self.current.count, origin=self.at)
        return self._last

    def leave(self) -> None:
        """Leave the prompt after this command."""
        self._is_left = True

    def converse(self) -> int:
        """Read and run cells until the user leaves; return the exit code."""
        session = self.current.session
        _accept_any_bytes(sys.stdin)
        print(
            f"{escape_line(session.runtime)} in a sandbox. :help lists the commands, Ctrl-D leaves.",
            flush=True,
        )
        with line_editing(session.language):
            while not self._is_left:
                try:
                    self._take(self._read())
                except EOFError:
                    print(flush=True)
                    break
                except KeyboardInterrupt:
                    print(flush=True)
                except ClocheError as error:
                    say(str(error))
                    self._suggest_restart()
        return 0

    def _read(self) -> str:
        """Read one cell of one or more lines. Raises EOFError at the end of input."""
        from .cells import goes_on

        fork = f"[fork {self.at}] " if self.at else ""
        label = f"{fork}In [{self.current.count + 1}]: "
        text = input(label)
        while not is_command(text) and goes_on(text, self.current.session.language):
            text += "\n" + input("...: ".rjust(len(label)))
        return text

    def _take(self, text: str) -> None:
        if is_command(text):
            run_command(self, text)
        elif text.strip():
            self._run(text)

    def _run(self, code: str) -> None:
        current, printer = self.current, self._printer
        number = current.count + 1
        printer.begin(number)
        try:
            with Interrupts(current.session):
                result = current.session.run(code, on_event=printer.take, out=self._out, timeout=self._timeout)
        except KeyboardInterrupt:
            printer.end()
            self._suggest_restart()
            return
        current.count = number
        printer.conclude(result, label=f"Out[{number}]: ")
        if is_lost(result):
            self._suggest_restart()

    def _suggest_restart(self) -> None:
        if self.current.session.is_alive:
            return
        names = " ".join(self.current.checkpoints)
        back = f", :rollback goes back to a checkpoint ({names})" if names else ""
        say(f"this session has ended; :restart starts a new interpreter{back}")


def is_command(text: str) -> bool:
    """Return whether a text is a command of the prompt: a colon and a letter. Bash's own `:` is followed by a blank."""
    return text[:1] == ":" and text[1:2].isalpha()


def is_lost(result: Result) -> bool:
    """Return whether the interpreter ended with this cell."""
    return bool(result.meta.get("state") == "lost")


class Interrupts:
    """Turn Ctrl-C into an interrupt of the running cell; a second one within a second raises KeyboardInterrupt."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: float | None = None
        self._is_over = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        if self._last is not None and now - self._last < DOUBLE_PRESS_S:
            self._is_over = True
            os.write(2, KILLED)  # os.write, since the signal may have interrupted a print
            raise KeyboardInterrupt
        self._last = now
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        try:
            self._session.interrupt()
        except ClocheError as error:
            log.debug("there was nothing to interrupt: %s", error)


def _accept_any_bytes(stream: Any) -> None:  # noqa: ANN401 - whatever stands for stdin
    """Read bytes that are not UTF-8 as surrogates, as from a pipe."""
    with contextlib.suppress(AttributeError):
        stream.reconfigure(errors="surrogateescape")


@contextlib.contextmanager
def line_editing(language: str) -> Iterator[None]:
    """Edit lines with readline and store them in a file of the user's state; without readline, do nothing."""
    try:
        import readline

        from platformdirs import user_state_path
    except ImportError:
        yield
        return
    file = user_state_path("cloche") / f"history-{language}"
    readline.parse_and_bind("tab: tab-insert")
    readline.set_history_length(MOST_HISTORY_LINES)
    try:
        readline.read_history_file(file)
    except OSError as error:
        log.debug("earlier lines cannot be read: %s", error)
    length = readline.get_current_history_length()
    try:
        yield
    finally:
        try:
            _make_private(file)
            readline.append_history_file(readline.get_current_history_length() - length, file)
        except OSError as error:
            log.debug("the lines cannot be kept: %s", error)


def _make_private(file: Path) -> None:
    """Create a file that only this user may read, with its folders."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


Action = Callable[["Prompt", Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCommand:
    """Describe one command of the prompt: its arguments, summary and function."""

    summary: str
    act: Action
    arguments: str = ""
    min_arguments: int = 0
    max_arguments: int = 0


def run_command(prompt: Prompt, line: str) -> None:
    """Run a command of the prompt. Raises InvalidRequest for an unknown one, and the errors of the command."""
    import shlex

    try:
        name, *arguments = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest(f"{line.split(maxsplit=1)[0]}: {error}") from error
    command = COMMANDS.get(name.removeprefix(":"))
    if command is None:
        raise InvalidRequest(f"{name} is not a command; commands: {' '.join(f':{command}' for command in COMMANDS)}")
    if not command.min_arguments <= len(arguments) <= command.max_arguments:
        raise InvalidRequest(f"write it as {usage(name.removeprefix(':'), command)}")
    command.act(prompt, arguments)


def usage(name: str, command: PromptCommand) -> str:
    """Return the syntax of a command."""
    return f":{name} {command.arguments}".strip()


def print_line(text: str) -> None:
    """Print one line, escaped: it may contain names that the guest chose."""
    print(escape_name(text), flush=True)


def show_help(_: Prompt, __: Sequence[str]) -> None:
    """List the commands."""
    print_line("A blank line ends a cell with an open block. Ctrl-C interrupts a cell; twice, it ends the session.")
    for name, command in COMMANDS.items():
        print_line(f"  {usage(name, command):<20} {command.summary}")


def show_history(prompt: Prompt, _: Sequence[str]) -> None:
    """List the cells that were run."""
    for number, entry in enumerate(prompt.current.session.history, 1):
        first, *more = entry.code.splitlines() or [""]
        print_line(f"{number:4}  {entry.status:<8} {entry.duration:7.2f} s  {first}{' …' if more else ''}")


def restart(prompt: Prompt, _: Sequence[str]) -> None:
    """Start a new interpreter."""
    current = prompt.current
    current.session.restart()
    current.count = 0
    current.checkpoints.clear()
    print_line("a new interpreter, in the same workspace")


def checkpoint(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Store memory and files."""
    import shlex

    current = prompt.current
    name = arguments[0] if arguments else _free_name(current)
    current.session.checkpoint(name)
    current.checkpoints.pop(name, None)
    current.checkpoints[name] = current.count
    print_line(f"checkpoint {name}: :rollback {shlex.quote(name)} goes back to here")


def _free_name(current: ForkedSession) -> str:
    number = len(current.checkpoints) + 1
    while str(number) in current.checkpoints:
        number += 1
    return str(number)


def rollback(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Go back to a checkpoint."""
    current = prompt.current
    if not arguments and not current.checkpoints:
        raise InvalidRequest("there is no checkpoint; :checkpoint makes one")
    name = arguments[0] if arguments else list(current.checkpoints)[-1]
    current.session.rollback(name)
    current.count = current.checkpoints.get(name, current.count)
    names = list(current.checkpoints)
    for later in names[names.index(name) + 1 :] if name in names else ():
        del current.checkpoints[later]
    print_line(f"back at checkpoint {name}")


def fork(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Make copies of this session."""
    current = prompt.current
    forks = current.session.fork(_number(arguments[0]) if arguments else 1)
    numbers = [prompt.add_fork(session) for session in forks]
    print_line(f"fork {' '.join(str(number) for number in numbers)}: :switch {numbers[0]} goes there")


def show_forks(prompt: Prompt, _: Sequence[str]) -> None:
    """List all sessions of this prompt."""
    for number, current in prompt.sessions.items():
        mark = "*" if number == prompt.at else " "
        origin = "the first one" if current.origin is None else f"forked from {current.origin}"
        state = "" if current.session.is_alive else ", has ended"
        print_line(f"{mark} {number}  {origin}, {current.count} cells{state}")


def switch(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Continue in another session."""
    number = _number(arguments[0])
    _check_exists(prompt, number)
    prompt.at = number


def close(prompt: Prompt, arguments: Sequence[str]) -> None:
    """End a fork."""
    number = _number(arguments[0])
    _check_exists(prompt, number)
    if number == 0:
        raise InvalidRequest("0 is the first session, which ends with the prompt; :quit leaves")
    prompt.sessions.pop(number).session.close()
    if prompt.at == number:
        prompt.at = 0


def show_files(prompt: Prompt, _: Sequence[str]) -> None:
    """List the workspace."""
    for path in sorted(prompt.current.session.sandbox.list_files()):
        print_line(path)


def save(prompt: Prompt, arguments: Sequence[str]) -> None:
    """Copy a file out, under its own name; an existing file is replaced, a link never followed."""
    import posixpath

    from cloche.core.limits import format_size
    from cloche.hostfs import open_in_place_of

    path, folder = arguments
    sandbox = prompt.current.session.sandbox
    name = posixpath.basename(path)
    if name in ("", ".", ".."):
        raise InvalidRequest(f":save {path}: give the path of a file; :files lists them")
    data = sandbox.read_file(path, max_bytes=sandbox.limits.disk_bytes)
    target = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        open_in_place_of(folder, name, data).close()
    except OSError as error:
        raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error
    print_line(f"{target} ({format_size(len(data))})")


def show_limits(prompt: Prompt, _: Sequence[str]) -> None:
    """List the limits."""
    from cloche.core.limits import format_size

    for name, amount in prompt.current.session.sandbox.limits.as_dict().items():
        if name.endswith("_bytes"):
            print_line(f"  {name.removesuffix('_bytes'):<8} {format_size(int(amount))}")
        elif name == "timeout_s":
            print_line(f"  timeout  {amount:g} s")
        else:
            print_line(f"  {name:<8} {amount:g}")


def leave(prompt: Prompt, _: Sequence[str]) -> None:
    """Leave."""
    prompt.leave()


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(f"{text!r} is not a number")
    return int(text)


def _check_exists(prompt: Prompt, number: int) -> None:
    if number not in prompt.sessions:
        raise InvalidRequest(f"there is no session {number}; :forks lists them")


COMMANDS: Mapping[str, PromptCommand] = {
    "help": PromptCommand(summary="list these commands", act=show_help),
    "history": PromptCommand(summary="list the cells that were run", act=show_history),
    "restart": PromptCommand(summary="start a new interpreter; files stay, checkpoints do not", act=restart),
    "checkpoint": PromptCommand(summary="store memory and files", act=checkpoint, arguments="[NAME]", max_arguments=1),
    "rollback": PromptCommand(
        summary="go back to a checkpoint, the latest by default", act=rollback, arguments="[NAME]", max_arguments=1
    ),
    "fork": PromptCommand(summary="make N copies of this session", act=fork, arguments="[N]", max_arguments=1),
    "forks": PromptCommand(summary="list the sessions", act=show_forks),
    "switch": PromptCommand(
        summary="continue in session N", act=switch, arguments="N", min_arguments=1, max_arguments=1
    ),
    "close": PromptCommand(summary="end fork N", act=close, arguments="N", min_arguments=1, max_arguments=1),
    "files": PromptCommand(summary="list the files of the workspace", act=show_files),
    "save": PromptCommand(
        summary="copy a file to a folder here", act=save, arguments="PATH DIR", min_arguments=2, max_arguments=2
    ),
    "limits": PromptCommand(summary="list the limits of a cell", act=show_limits),
    "quit": PromptCommand(summary="leave, as Ctrl-D does", act=leave),
}
