"""How programs of other languages than Python find their caller's functions: a file that their engine loads first."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from cloche.core.errors import InvalidRequest
from cloche.core.languages import Engine
from cloche.jail.messages import Run

MODULES: Mapping[str, str] = {"javascript": "host_functions.cjs", "bash": "host_functions.sh"}
NODE, BASH = "node", "bash"


def load_calls(run: Run, language: str, engine: Engine) -> None:
    """Have the program of a run load the file by which it calls functions of its caller; Python needs none.

    Raises InvalidRequest for a language, or an engine, whose programs cannot call.
    """
    if run.python is not None:
        return
    name = MODULES.get(language)
    if name is None or engine.name not in (NODE, BASH):
        raise InvalidRequest(
            f"tools: {language} programs cannot call functions of the caller (Python, JavaScript with node, and Bash "
            "can); leave tools out"
        )
    path = f"{run.folders[0]}/{name}"
    run.generated = {**run.generated, path: _text(name)}
    if engine.name == BASH:
        run.env = {**run.env, "BASH_ENV": path}
    else:
        program, *arguments = run.commands[-1]
        run.commands = [*run.commands[:-1], [program, "--require", path, *arguments]]


@functools.cache
def _text(name: str) -> str:
    from importlib.resources import files  # which imports what no other run needs

    return (files("cloche.interpreter") / name).read_text(encoding="utf-8")
