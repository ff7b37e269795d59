"""How programs of other languages than Python find their caller's functions: a file that their engine loads first."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from cloche.core.errors import InvalidRequest
from cloche.core.languages import Engine
from cloche.core.record import dataclass, replace
from cloche.jail.messages import Run

MODULES: Mapping[str, str] = {"javascript": "host_functions.cjs", "bash": "host_functions.sh"}
NODE, BASH = "node", "bash"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallingProgram:
    """Hold how a program is started: its commands, of which the last one runs it, its variables, and files of ours."""

    commands: Sequence[Sequence[str]]
    env: Mapping[str, str]
    generated: Mapping[str, str]


def with_calls(start: CallingProgram, language: str, engine: str, folder: str) -> CallingProgram:
    """Return a start that loads the file by which the program calls functions of its caller, from `folder`.

    Raises InvalidRequest for a language, or an engine, whose programs cannot call.
    """
    name = MODULES.get(language)
    if language == "python":
        raise InvalidRequest(
            "tools: env has variables of the interpreter's own (PYTHON...), so the program starts as a command, which "
            "cannot call functions of the caller; leave these variables or tools out"
        )
    if name is None or engine not in (NODE, BASH):
        raise InvalidRequest(
            f"tools: {language} programs cannot call functions of the caller (Python, JavaScript with node, and Bash "
            "can); leave tools out"
        )
    path = f"{folder}/{name}"
    generated = {**start.generated, path: _text(name)}
    if engine == BASH:
        return replace(start, env={**start.env, "BASH_ENV": path}, generated=generated)
    program, *arguments = start.commands[-1]
    commands = [*start.commands[:-1], [program, "--require", path, *arguments]]
    return replace(start, commands=commands, generated=generated)


def load_calls(run: Run, language: str, engine: Engine) -> None:
    """Have the program of a run load its calls. Python needs nothing. Raises InvalidRequest, as `with_calls` does."""
    if run.python is None:
        start = CallingProgram(commands=run.commands, env=run.env, generated=run.generated)
        start = with_calls(start, language, engine.name, run.folders[0])
        run.commands, run.env = [list(command) for command in start.commands], dict(start.env)
        run.generated = dict(start.generated)


@functools.cache
def _text(name: str) -> str:
    from importlib.resources import files  # which imports what no other run needs

    return (files("cloche.interpreter") / name).read_text(encoding="utf-8")
