"""What of this host a container shows, and the program that it runs: the same toolchains as in the native jail."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from cloche.core.errors import BackendUnavailable
from cloche.core.languages import Engine, Language, language_named
from cloche.core.request import Request

from ..containers.guest import ENVIRONMENT
from ..containers.program import Program, program_of
from ..containers.session_program import SessionProgram, check_variables, driven_session, python_session
from ..drivers import session_language
from ..layout import has_customization, is_below, user_site
from ..toolchain import Toolchain, engine_version, find_toolchain
from .plan import SYSTEM_PATH, Shown


@functools.cache
def python_toolchain() -> Toolchain:
    """Return the caller's own interpreter."""
    return find_toolchain(language_named("python"))


def plain_ground() -> Shown:
    """Return what every container shows."""
    return _shown(())


def ground_for(request: Request | None) -> Shown:
    """Return what the container of a request shows. Raises BackendUnavailable for a missing toolchain."""
    toolchain = _toolchain(request) if request is not None else None
    return _shown(toolchain.binds if toolchain is not None else ())


def session_ground(name: str) -> Shown:
    """Return what the container of a session shows. Raises BackendUnavailable for a language without sessions."""
    language, driver = session_language(name)
    return _shown(find_toolchain(language).binds if driver is not None else ())


def _shown(binds: tuple[str, ...]) -> Shown:
    python = python_toolchain()
    all_binds = sorted({*python.binds, *user_site(), *binds})
    kept = [path for path in all_binds if not any(path != one and is_below(path, one) for one in all_binds)]
    return Shown(python=python.programs["python3"], binds=tuple(kept))


def _toolchain(request: Request) -> Toolchain | None:
    if request.code is None:
        return None
    language = language_named(request.language)
    return python_toolchain() if language.name == "python" else find_toolchain(language)


@dataclass(frozen=True, slots=True)
class _Equipped:
    """Say of a toolchain of this host what is asked of an image elsewhere; see containers.program.Equipment."""

    toolchain: Toolchain

    @property
    def programs(self) -> Mapping[str, str]:
        return self.toolchain.programs

    def engine(self, language: Language) -> Engine:  # noqa: ARG002 - it was found for this language
        return self.toolchain.engine

    def version(self, engine: Engine) -> str:  # noqa: ARG002 - it has one only
        if self.toolchain is python_toolchain():
            return f"{platform.python_implementation()} {platform.python_version()}"
        return engine_version(self.toolchain)


def build_program(request: Request) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for a missing toolchain."""
    toolchain = _toolchain(request)
    env = _environment(toolchain.env if toolchain is not None else {}, {})
    return program_of(
        request,
        _Equipped(toolchain or python_toolchain()),
        env,
        has_interpreter=True,
        extra_paths=user_site(),
        customizes=has_customization(),
    )


def build_session_program(name: str, env: Mapping[str, str]) -> SessionProgram:
    """Return what serves a session. Raises InvalidRequest, or BackendUnavailable where there can be none."""
    language, driver = session_language(name)
    if driver is None:
        check_variables(env)
        return python_session(
            language, _environment(python_toolchain().env, env), extra_paths=user_site(), customizes=has_customization()
        )
    toolchain = find_toolchain(language)
    if driver.program not in toolchain.programs:
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {toolchain.engine.name} cannot")
    return driven_session(language, driver, toolchain.programs[driver.program], _environment(toolchain.env, env))


def _environment(toolchain: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    programs = os.path.dirname(sys.executable)
    path = SYSTEM_PATH if is_below(programs, "/usr") else f"{programs}:{SYSTEM_PATH}"
    return {"PATH": path, **ENVIRONMENT, **toolchain, **given}
