"""The program of a run or session as its first process receives it, and the settings that every guest has.

Commands, files, environment and rlimits do not depend on the backend that starts the container. A session is the first
process's own interpreter, or an engine with its driver. `LOOK` is a script for any `sh` that prints which of `PROGRAMS`
an image has.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cloche.core.errors import BackendUnavailable
from cloche.core.languages import LANGUAGES, Engine, Language, language_named, render, render_env, render_generated
from cloche.core.limits import KIB, MIB, Limits
from cloche.core.record import dataclass, field, replace
from cloche.core.request import InputFile, Request, source_of

from ..call_languages import CallingProgram, with_calls
from ..layout import STARTUP_FILE, guest_variables, sites_of, startup_text, with_layers, with_startup
from ..saved_files import time_for_files
from ..session_languages import DRIVERS, ONCE, Codec, Driver, Interrupt, JsonCodec, check_variables, session_language
from ..toolchain import sets_interpreter_variables, version_numbers

WORKSPACE, BUILD = "/workspace", "/tmp/build"
TEMPORARY = ("/tmp", "/dev/shm")
NOFILE = 1024
# fs/coredump.c: with RLIMIT_CORE 0 a core_pattern pipe program of the host still gets the dump; 1 aborts it.
ULIMITS: Mapping[str, int] = {"core": 1, "nofile": NOFILE, "memlock": 64 * KIB, "msgqueue": 819_200}
REAPERS = 1  # our first process
GVISOR_THREADS = 256  # of gVisor itself, counted by the same control group
# Memory of the first process: an interpreter with its usual modules.
REAPER_BYTES = 24 * MIB
ENVIRONMENT: Mapping[str, str] = guest_variables(WORKSPACE)
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # for an image that sets no PATH

# Folder of a session's driver. Not /tmp, which a policy may make read-only, and whose files programs list.
FOLDER = "/dev/shm/.cloche"
STARTUP_FOLDER = "/dev/shm/.cloche-startup"  # of every Python interpreter, see `layout.with_startup`
LINK, ANSWERS = 3, 4  # as in `inside/program.py`

PROGRAMS = tuple(
    dict.fromkeys(name for lang in LANGUAGES.values() for engine in lang.engines for name in engine.programs)
)
# Prints one line per program found: name, path, first line of its version output.
LOOK = """
for name in "$@"; do
  path=$(command -v "$name" 2>/dev/null) || continue
  case $name in
    go) version=$("$path" version 2>&1 </dev/null | head -n 1) ;;
    env|sh|tsx|cc) version= ;;
    *) version=$("$path" --version 2>&1 </dev/null | head -n 1) ;;
  esac
  printf '%s\\t%s\\t%s\\n' "$name" "$path" "$version"
done
"""


class Equipment(Protocol):
    """The programs that an image has for a language."""

    @property
    def programs(self) -> Mapping[str, str]:
        """Return the programs' paths by their names."""
        ...

    def engine(self, language: Language) -> Engine:
        """Return the first engine that can run. Raises BackendUnavailable that names the missing programs."""
        ...

    def version(self, engine: Engine) -> str:
        """Return the version of an engine."""
        ...


def engine_of(language: Language, programs: Mapping[str, str], versions: Mapping[str, str]) -> Engine | None:
    """Return the first engine whose programs are present, the main one in a sufficient version."""
    for engine in language.engines:
        main = versions.get(engine.programs[0], "")
        if all(name in programs for name in engine.programs) and version_numbers(main) >= engine.least_version:
            return engine
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One run. Without `commands`, the first process itself becomes the Python program.

    `own_file` is the one of `files` with the code, if the user named none; it is removed after the run.
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

    def input_hashes(self) -> dict[str, str]:
        """Return the SHA-256 of the input files by path."""
        return {file.path: hashlib.sha256(file.data).hexdigest() for file in self.files}

    def order(self, request: Request, limits: Limits, timeout_s: float) -> dict[str, Any]:
        """Return the order for the first process."""
        return {
            "do": "run",
            "commands": [list(argv) for argv in self.commands],
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
    """Return the language of a request; that of a bare command is bash."""
    return language_named(request.language if request.code is not None else "bash")


def program_of(
    request: Request,
    image: Equipment,
    env: Mapping[str, str],
    *,
    has_interpreter: bool,
    extra_paths: Sequence[str] = (),
    customizes: bool = False,
    number: int = 0,
) -> Program:
    """Return the program of a request in an image, whose own variables are `env`.

    `has_interpreter`: the first process is a Python interpreter, which can become the program itself. It also finds
    packages in `extra_paths`, and runs the site's own customization if it `customizes`. Programs that run concurrently
    in one workspace each have a `number`, which is part of the names of their own files. Raises InvalidRequest, or
    BackendUnavailable for a missing engine.
    """
    base = {**env, **ENVIRONMENT}

    def with_startup_folder(variables: Mapping[str, str]) -> Mapping[str, str]:
        return with_startup(variables, STARTUP_FOLDER) if has_interpreter else variables

    if request.code is None:
        return Program(commands=(request.argv,), env=with_startup_folder({**base, **request.env}), files=request.files)
    language = language_named(request.language)
    path, files = source_of(request, language=language.name, file_name=_numbered(language.file_name, number))
    source, own_file = f"{WORKSPACE}/{path}", "" if request.source_path else path
    build = _numbered(BUILD, number)
    engine = image.engine(language)
    version = image.version(engine)
    variables = with_startup_folder({**base, **render_env(engine, source, build), **request.env})
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
        commands=render(engine, image.programs, source, build, request.argv),
        env=variables,
        files=files,
        own_file=own_file,
        engine=engine,
        version=version,
        build=build,
        generated=render_generated(engine, source, build),
    )


def _numbered(path: str, number: int) -> str:
    name, suffix = os.path.splitext(path)
    return f"{name}-{number}{suffix}" if number else path


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProgram:
    """A session's program and its protocol. Without `commands`, the first process forks the interpreter."""

    language: Language
    env: Mapping[str, str]
    new_codec: Callable[[], Codec]
    interrupt: Interrupt
    commands: tuple[tuple[str, ...], ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, Any] | None = None

    def order(self, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the order of `init` that starts it with the environment `env`."""
        files = [[path, 0o644, text.encode().hex()] for path, text in self.generated.items()]
        order: dict[str, Any] = {"env": dict(env), "cwd": WORKSPACE, "files": files}
        if self.python is not None:
            return {**order, "python": {**self.python, "is_session": True}}
        return {**order, "argv": list(self.commands[0])}


def session_of(
    language: Language,
    driver: Driver | None,
    image: Equipment,
    env: Mapping[str, str],
    session_variables: Mapping[str, str],
    *,
    extra_paths: Sequence[str] = (),
    customizes: bool = False,
) -> SessionProgram:
    """Return a session in an image, whose own variables are `env`; `session_variables` override them.

    The image must have the program of the `driver`. Raises InvalidRequest for variables that the running interpreter
    cannot apply any more.
    """
    base = {**env, **ENVIRONMENT}
    if driver is None:
        check_variables(session_variables)
        return python_session(language, {**base, **session_variables}, extra_paths=extra_paths, customizes=customizes)
    path = f"{FOLDER}/{driver.file_name}"
    return SessionProgram(
        language=language,
        env=with_startup(
            {**base, **render_env(image.engine(language), path, BUILD), **session_variables}, STARTUP_FOLDER
        ),
        new_codec=driver.new_codec,
        interrupt=driver.interrupt,
        commands=(tuple(driver.command(image.programs[driver.program], path, LINK, ANSWERS)),),
        generated={path: driver.text()},
    )


def session_in(name: str, env: Mapping[str, str], image: Equipment, path: str = IMAGE_PATH) -> SessionProgram:
    """Return the program of a session of a language, with programs found by `path`; `env` are the session's variables.

    Raises InvalidRequest, or BackendUnavailable if the image cannot hold one.
    """
    language, driver = session_language(name)
    if driver is not None and driver.program not in image.programs:
        engine = image.engine(language)
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {engine.name} cannot hold one")
    return session_of(language, driver, image, {"PATH": path}, env)


def program_with_calls(program: Program, language: str) -> Program:
    """Return a program that can call functions of its caller. Python needs nothing for that, and no command can."""
    if program.engine is None or language == "python":
        return program
    start = CallingProgram(commands=program.commands, env=program.env, generated=program.generated)
    start = with_calls(start, language, program.engine.name, program.build)
    return replace(program, **_fields(start))


def session_with_calls(program: SessionProgram) -> SessionProgram:
    """Return the program of a session whose cells can call functions of the caller."""
    driver = DRIVERS[program.language.name]
    if driver is None:
        return program
    start = CallingProgram(commands=program.commands, env=program.env, generated=program.generated)
    return replace(program, **_fields(with_calls(start, program.language.name, driver.program, FOLDER)))


def _fields(start: CallingProgram) -> dict[str, Any]:
    return {"commands": tuple(map(tuple, start.commands)), "env": start.env, "generated": start.generated}


def program_with_layers(program: Program, layers: Sequence[str]) -> Program:
    """Return a program that finds the packages in `layers`, which are folders of its container."""
    if not layers:
        return program
    python = {**program.python, "layers": sites_of(layers)} if program.python is not None else None
    env, generated = with_startup(program.env, STARTUP_FOLDER), dict(program.generated)
    if env != program.env:  # without our first process, nobody else writes the startup file
        generated[f"{STARTUP_FOLDER}/{STARTUP_FILE}"] = startup_text()
    return replace(program, env=with_layers(env, layers), python=python, generated=generated)


def session_with_layers(session: SessionProgram, layers: Sequence[str]) -> SessionProgram:
    """Return a session that finds the packages in `layers`."""
    if not layers:
        return session
    python = {**session.python, "layers": sites_of(layers)} if session.python is not None else None
    return replace(session, env=with_layers(session.env, layers), python=python)


def python_session(
    language: Language, env: Mapping[str, str], *, extra_paths: Sequence[str] = (), customizes: bool = False
) -> SessionProgram:
    """Return a session of Python with the environment `env`."""
    settings = {
        "path": f"{WORKSPACE}/cell",
        "home": WORKSPACE,
        "argv": [],
        "extra_paths": list(extra_paths),
        "customizes": customizes,
    }
    env = with_startup(env, STARTUP_FOLDER)
    return SessionProgram(language=language, env=env, new_codec=JsonCodec, interrupt=ONCE, python=settings)
