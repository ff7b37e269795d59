"""`cloche session`: an interpreter that keeps its state, at a prompt or for cells that are piped in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from cloche.core.errors import InvalidRequest
from cloche.runtime.options import SandboxOptions
from cloche.sync import Sandbox, Session

from .exits import exit_code_of
from .pulling import progress_shown
from .run import log_to_stderr, read_code, read_files, read_pairs, say_fallback, with_backend
from .shown import Shown

_SEPARATOR = re.compile(r"^# ?%%.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCommand:
    """Hold the command line of `cloche session`, parsed and not yet checked."""

    language: str = "python"
    idle_timeout: str | None = None
    env: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    out: str | None = None
    as_json: bool = False
    no_sandbox: bool = False
    debug: bool = False
    options: SandboxOptions = field(default_factory=SandboxOptions)


def session_command(command: SessionCommand) -> int:
    """Hold the session that the command line asks for and return the exit code."""
    if command.debug:
        log_to_stderr()
    is_prompt = os.isatty(0)
    if is_prompt and command.as_json:
        raise InvalidRequest("--json is for cells that are piped in; at a terminal leave it out")
    cells = () if is_prompt else split_cells(read_code())
    options: SandboxOptions = {"warm": False, **with_backend(command.options, no_sandbox=command.no_sandbox)}
    env, files = read_pairs(command.env), read_files(command.files)
    with ExitStack() as stack:
        with progress_shown():
            sandbox = stack.enter_context(Sandbox(env=env, files=files, **options))
            say_fallback(sandbox.notes)
            session = sandbox.session(command.language, idle_timeout=command.idle_timeout)
        if not is_prompt:
            return run_cells(session, cells, out=command.out, as_json=command.as_json)
        from .prompt import Prompt

        return Prompt(session, Shown(command.out), out=command.out).converse()


def split_cells(text: str) -> list[str]:
    """Return the cells of a text, without those that are empty; the lines between them begin with `# %%`."""
    return [cell.strip("\n") for cell in _SEPARATOR.split(text) if cell.strip()]


def run_cells(session: Session, cells: Iterable[str], *, out: str | None, as_json: bool) -> int:
    """Run cells in order up to the first one that fails; return its exit code, or 0."""
    shown = Shown(out)
    for number, code in enumerate(cells, 1):
        if as_json:
            result = session.run(code, out=out)
            print(json.dumps(result.as_dict(), default=str), flush=True)
        else:
            shown.begin(number)
            result = session.run(code, on_event=shown.take, out=out)
            shown.conclude(result)
        if not result.ok:
            return exit_code_of(result)
    return 0
