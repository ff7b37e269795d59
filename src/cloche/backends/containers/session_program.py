"""What a session in a container runs: the interpreter that is there already, or an engine with its driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.languages import Language
from cloche.core.limits import Limits

from ..drivers import ONCE, Codec, Driver, Interrupt, JsonCodec
from .guest import NOFILE, WORKSPACE
from .program import sets_interpreter_variables

# Not in /tmp, which a policy may close, and where programs list their own files.
FOLDER = "/dev/shm/.cloche"
LINK, ANSWERS = 3, 4  # as in `reaper_program`


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProgram:
    """Hold what a session runs and how to talk to it; without `commands`, the first process forks the interpreter."""

    language: Language
    env: Mapping[str, str]
    new_codec: Callable[[], Codec]
    interrupt: Interrupt
    commands: tuple[tuple[str, ...], ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, Any] | None = None

    def order(self, limits: Limits) -> dict[str, Any]:
        """Return the order as the first process takes it."""
        return {
            "do": "session",
            "is_session": True,
            "commands": [list(words) for words in self.commands],
            "python": dict(self.python) if self.python is not None else None,
            "env": dict(self.env),
            "build": FOLDER if self.generated else "",
            "generated": dict(self.generated),
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "nofile": NOFILE,
        }


def check_variables(env: Mapping[str, str]) -> None:
    """Raise InvalidRequest where variables are given that an interpreter which runs already cannot take any more."""
    if sets_interpreter_variables(env):
        raise InvalidRequest("env: PYTHON* variables take effect before a session begins; drop them")


def python_session(
    language: Language, env: Mapping[str, str], *, extra_paths: Sequence[str] = (), customizes: bool = False
) -> SessionProgram:
    """Return a session of Python, with the whole environment that it has."""
    settings = {
        "path": f"{WORKSPACE}/cell",
        "home": WORKSPACE,
        "argv": [],
        "extra_paths": list(extra_paths),
        "customizes": customizes,
    }
    return SessionProgram(language=language, env=env, new_codec=JsonCodec, interrupt=ONCE, python=settings)


def path_of(driver: Driver) -> str:
    """Return where a driver lies in its container."""
    return f"{FOLDER}/{driver.file_name}"


def driven_session(language: Language, driver: Driver, program: str, env: Mapping[str, str]) -> SessionProgram:
    """Return a session of an engine, which is at `program`, with the whole environment that it has."""
    path = path_of(driver)
    return SessionProgram(
        language=language,
        env=env,
        new_codec=driver.new_codec,
        interrupt=driver.interrupt,
        commands=(tuple(driver.command(program, path, LINK, ANSWERS)),),
        generated={path: driver.text()},
    )
