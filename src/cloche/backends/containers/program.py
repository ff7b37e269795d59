"""One run as the first process of a container takes it: commands, files, environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cloche.core.languages import Engine, Language, language_named, render, render_env, render_generated
from cloche.core.limits import Limits
from cloche.core.request import InputFile, Request, source_of

from ..walking import time_for_files
from .guest import BUILD, ENVIRONMENT, NOFILE, WORKSPACE

# Variables of the interpreter itself take effect at its start only, so a run that sets one starts a new interpreter.
_HARMLESS = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONUSERBASE"})


class Equipment(Protocol):
    """Say which programs an image has for a language."""

    @property
    def programs(self) -> Mapping[str, str]:
        """Return the programs' paths by their names."""
        ...

    def engine(self, language: Language) -> Engine:
        """Return the first engine that is there. Raises BackendUnavailable saying what is missing."""
        ...

    def version(self, engine: Engine) -> str:
        """Return the version of an engine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Hold one run: without `commands`, the first process itself becomes the Python program.

    `own_file` is the one of `files` that holds the code, where the user named none; it is removed after the run.
    """

    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    files: tuple[InputFile, ...]
    own_file: str = ""
    engine: Engine | None = None
    version: str = ""
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
            "own_file": self.own_file,
            "has_stdin": bool(request.stdin),
            "timeout_s": timeout_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "walk_s": time_for_files(timeout_s),
            "pids": limits.pids,
            "nofile": NOFILE,
        }


def language_of(request: Request) -> Language:
    """Return the language of a request; a bare command runs where a shell does."""
    return language_named(request.language if request.code is not None else "bash")


def sets_interpreter_variables(env: Mapping[str, str]) -> bool:
    """Tell whether a variable is among them that takes effect when the interpreter starts."""
    return any(name.startswith("PYTHON") and name not in _HARMLESS for name in env)


def program_of(
    request: Request,
    image: Equipment,
    env: Mapping[str, str],
    *,
    has_interpreter: bool,
    extra_paths: Sequence[str] = (),
    customizes: bool = False,
) -> Program:
    """Return the program of a request in an image, whose own variables are `env`.

    `has_interpreter` says that the first process is an interpreter of Python, which can become the program itself; that
    finds packages in `extra_paths` too, and runs the site's own customization if it `customizes`.
    Raises InvalidRequest, or BackendUnavailable for an engine that is missing.
    """
    base = {**env, **ENVIRONMENT}
    if request.code is None:
        return Program(commands=(request.argv,), env={**base, **request.env}, files=request.files)
    language = language_named(request.language)
    path, files = source_of(request, language=language.name, file_name=language.file_name)
    source, own_file = f"{WORKSPACE}/{path}", "" if request.source_path else path
    engine = image.engine(language)
    version = image.version(engine)
    variables = {**base, **render_env(engine, source, BUILD), **request.env}
    if language.name == "python" and has_interpreter and not sets_interpreter_variables(request.env):
        python = {
            "path": source,
            "argv": list(request.argv),
            "extra_paths": list(extra_paths),
            "customizes": customizes,
        }
        return Program(
            commands=(), env=variables, files=files, own_file=own_file, engine=engine, version=version, python=python
        )
    return Program(
        commands=render(engine, image.programs, source, BUILD, request.argv),
        env=variables,
        files=files,
        own_file=own_file,
        engine=engine,
        version=version,
        build=BUILD,
        generated=render_generated(engine, source, BUILD),
    )
