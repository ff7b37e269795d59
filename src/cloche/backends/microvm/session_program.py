"""Turn the wish for a session into what a place in a virtual machine must run."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.errors import BackendUnavailable
from cloche.core.languages import render_env

from ..containers.guest import BUILD, ENVIRONMENT
from ..containers.session_program import SessionProgram, check_variables, driven_session, path_of, python_session
from ..drivers import session_language
from .image import Image

PATH = "/usr/local/bin:/usr/bin:/bin"


def build_session_program(name: str, env: Mapping[str, str], image: Image) -> SessionProgram:
    """Return what serves a session. Raises InvalidRequest, or BackendUnavailable where there can be none."""
    language, driver = session_language(name)
    base = {"PATH": PATH, **ENVIRONMENT}
    if driver is None:
        check_variables(env)
        return python_session(language, {**base, **env})
    engine = image.engine(language)
    if driver.program not in image.programs:
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {engine.name} cannot hold one")
    variables = {**base, **render_env(engine, path_of(driver), BUILD), **env}
    return driven_session(language, driver, image.programs[driver.program], variables)
