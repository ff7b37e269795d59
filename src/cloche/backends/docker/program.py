"""Turn a request into what a container must run: commands, files, environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.languages import Engine, Language, language_named, render, render_env, render_generated
from cloche.core.limits import Limits
from cloche.core.request import InputFile, Request

from .images import Image
from .plan import ENVIRONMENT, NOFILE

WORKSPACE, BUILD = "/workspace", "/tmp/build"
FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables of the interpreter itself take effect at its start only, so a run that sets one starts a new interpreter.
_HARMLESS = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONUSERBASE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Hold one run: without `commands`, the first process itself becomes the Python program."""

    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    files: tuple[InputFile, ...]
    engine: Engine | None = None
    build: str = ""
    generated: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, Any] | None = None

    def given(self) -> dict[str, str]:
        """Return the input files' hashes by path."""
        return {file.path: hashlib.sha256(file.data).hexdigest() for file in self.files}

    def order(self, request: Request, limits: Limits, timeout_s: float) -> dict[str, Any]:
        """Return the order as the first process takes it."""
        return {
            "do": "run",
            "is_session": False,
            "commands": [list(words) for words in self.commands],
            "python": dict(self.python) if self.python is not None else None,
            "env": dict(self.env),
            "build": self.build,
            "generated": dict(self.generated),
            "has_stdin": bool(request.stdin),
            "timeout_s": timeout_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "pids": limits.pids,
            "nofile": NOFILE,
        }


def language_of(request: Request) -> Language:
    """Return the language whose image runs a request; a bare command runs where a shell does."""
    return language_named(request.language if request.code is not None else "bash")


def build_program(request: Request, image: Image) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for an engine that is missing."""
    if request.code is None:
        return Program(commands=(request.argv,), env=environment(image, request.env), files=request.files)
    language = language_named(request.language)
    if any(file.path == language.file_name for file in request.files):
        raise InvalidRequest(f"file {language.file_name!r} is where the {language.name} code itself goes; rename yours")
    code = InputFile(path=language.file_name, data=request.code.encode("utf-8", "surrogatepass"))
    source, files = f"{WORKSPACE}/{language.file_name}", (*request.files, code)
    engine = image.engine(language)
    env = environment(image, {**render_env(engine, source, BUILD), **request.env})
    if language.name == "python" and image.has_reaper and not sets_interpreter_variables(request.env):
        python = {"path": source, "argv": list(request.argv), "extra_paths": [], "customizes": False}
        return Program(commands=(), env=env, files=files, engine=engine, python=python)
    return Program(
        commands=render(engine, image.programs, source, BUILD, request.argv),
        env=env,
        files=files,
        engine=engine,
        build=BUILD,
        generated=render_generated(engine, source, BUILD),
    )


def environment(image: Image, more: Mapping[str, str]) -> dict[str, str]:
    """Return a guest's environment: what the image sets, below the fixed minimum, below `more`."""
    return {"PATH": FALLBACK_PATH, **image.env, **ENVIRONMENT, **more}


def sets_interpreter_variables(env: Mapping[str, str]) -> bool:
    """Tell whether a variable is among them that a running interpreter cannot take any more."""
    return any(name.startswith("PYTHON") and name not in _HARMLESS for name in env)
