"""Turn a request into what a sandbox must run: commands, files, environment, and the toolchain they need."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from cloche.core.languages import Language, language_named, render, render_env, render_generated
from cloche.core.request import InputFile, Request, source_of
from cloche.jail.spec import Run

from ..layout import has_customization, user_site
from ..toolchain import Toolchain, engine_version, find_toolchain
from .plan import Places, guest_environment

# Variables of the interpreter itself take effect at its start only, so a run that sets one starts a new interpreter.
_INTERPRETER_VARIABLES = "PYTHON"
SHORT_BYTES = 2048  # a script that travels with its orders, beside the file that it is: it need not be read again
_HARMLESS = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONUSERBASE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Hold a run for the helper, the toolchain, and the input files' content by path."""

    run: Run
    toolchain: Toolchain | None
    language: Language | None
    given: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def has_value(self) -> bool:
        return self.run.python is not None

    def paths(self) -> tuple[str, ...]:
        """Return what must be shown besides the system's own trees: the interpreter always, then the toolchain."""
        mine = self.toolchain.binds if self.toolchain else ()
        if mine is python_toolchain().binds:
            return mine
        return tuple(dict.fromkeys((*python_toolchain().binds, *mine)))

    def runtime(self) -> str:
        """Name the engine with its version."""
        if self.toolchain is None:
            return "command"
        if self.has_value:
            return _python_runtime()
        return engine_version(self.toolchain) or self.toolchain.engine.name


@functools.cache
def _python_runtime() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


@functools.cache
def python_toolchain() -> Toolchain:
    """Return the caller's own interpreter."""
    return find_toolchain(language_named("python"))


def build_program(request: Request, places: Places, timeout_s: float) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for a missing toolchain."""
    if request.code is None:
        run = Run(commands=[list(request.argv)], env=guest_environment(places, request.env, {}))
        return _finished(run, request.files, timeout_s, None, None)
    language = language_named(request.language)
    toolchain = python_toolchain() if language.name == "python" else find_toolchain(language)
    path, files = source_of(request, language=language.name, file_name=language.file_name)
    source = f"{places.workspace}/{path}"
    build = f"{places.tmp}/.cloche-build"  # where no environment lies
    engine = toolchain.engine
    run = Run(env={**_environment(toolchain, places, source, build), **request.env})
    if language.name == "python" and not sets_interpreter_variables(request.env):
        run.python = {"path": source, "argv": list(request.argv), "extra_paths": list(user_site())}
        run.python["customizes"] = has_customization()
        if files[-1].path == path and len(files[-1].data) <= SHORT_BYTES:
            run.python["source"] = files[-1].data
    else:
        run.commands = [list(words) for words in render(engine, toolchain.programs, source, build, request.argv)]
        run.folders, run.generated = [build], dict(render_generated(engine, source, build))
    return _finished(run, files, timeout_s, toolchain, language)


_environments: dict[tuple[Places, str], Mapping[str, str]] = {}
MOST_ENVIRONMENTS = 64


def _environment(toolchain: Toolchain, places: Places, source: str, build: str) -> Mapping[str, str]:
    """Return a program's variables besides those of the request; Python's toolchain is the same for ever."""
    key = (places, source)
    found = _environments.get(key) if toolchain is python_toolchain() else None
    if found is None:
        env = {**render_env(toolchain.engine, source, build), **toolchain.env}
        found = guest_environment(places, {}, env)
        if toolchain is python_toolchain():
            if len(_environments) >= MOST_ENVIRONMENTS:
                _environments.clear()
            _environments[key] = found
    return found


def _finished(
    run: Run,
    files: tuple[InputFile, ...],
    timeout_s: float,
    toolchain: Toolchain | None,
    language: Language | None,
) -> Program:
    run.files, run.timeout_s = [(file.path, file.mode, file.data) for file in files], timeout_s
    given = {file.path: file.data for file in files}
    return Program(run=run, toolchain=toolchain, language=language, given=given)


def sets_interpreter_variables(env: Mapping[str, str]) -> bool:
    """Tell whether a variable is among them that takes effect when the interpreter starts."""
    return bool(env) and any(name.startswith(_INTERPRETER_VARIABLES) and name not in _HARMLESS for name in env)
