"""Turn the wish for a session into what a container must run: an engine with its driver, and their environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.languages import Language, render_env
from cloche.core.limits import Limits

from ..drivers import ONCE, Driver, Interrupt, session_language
from ..exchange import Codec, JsonCodec
from .images import Image
from .plan import NOFILE
from .program import BUILD, WORKSPACE, environment, sets_interpreter_variables

# Not in /tmp, which a policy may close, and where programs list their own files.
FOLDER = "/dev/shm/.cloche"
LINK = 3  # as in `reaper_program`


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


def image_language(name: str) -> Language:
    """Return the language whose image a session runs in. Raises BackendUnavailable for one without sessions."""
    return session_language(name)[0]


def build_session_program(name: str, env: Mapping[str, str], image: Image) -> SessionProgram:
    """Return what serves a session.

    Raises BackendUnavailable for a language without sessions and for an image that cannot have one.
    """
    language, driver = session_language(name)
    program = driver.program if driver is not None else "python3"
    missing = [] if image.has_reaper else ["Python 3.11 or later, which keeps a session in a container"]
    missing += [program] if program not in image.programs and driver is not None else []
    if missing:
        raise BackendUnavailable(
            f"image {image.name!r} cannot hold a {language.name} session: it has no {', and no '.join(missing)}. "
            'Use run instead; or build an image that has both with "docker build -f Dockerfile.sandbox -t '
            f'cloche-sandbox .", and name it: --image cloche-sandbox, images: {{{language.name}: NAME}}, or '
            f"CLOCHE_IMAGE_{language.name.upper()}"
        )
    return _python(language, env, image) if driver is None else _driven(language, env, image, driver)


def _python(language: Language, env: Mapping[str, str], image: Image) -> SessionProgram:
    if sets_interpreter_variables(env):
        raise InvalidRequest("env: PYTHON* variables take effect before a session begins; drop them")
    settings = {
        "path": f"{WORKSPACE}/cell", "home": WORKSPACE, "argv": [], "extra_paths": [], "customizes": False,
    }  # fmt: skip
    return SessionProgram(
        language=language, env=environment(image, env), new_codec=JsonCodec, interrupt=ONCE, python=settings
    )


def _driven(language: Language, env: Mapping[str, str], image: Image, driver: Driver) -> SessionProgram:
    path = f"{FOLDER}/{driver.file_name}"
    engine = image.engine(language)
    return SessionProgram(
        language=language,
        env=environment(image, {**render_env(engine, path, BUILD), **env}),
        new_codec=driver.new_codec,
        interrupt=driver.interrupt,
        commands=(tuple(driver.command(image.programs[driver.program], path, LINK)),),
        generated={path: driver.text()},
    )
