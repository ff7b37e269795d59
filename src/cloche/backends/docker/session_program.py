"""Turn the wish for a session into what a container of an image must run."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.errors import BackendUnavailable
from cloche.core.languages import render_env

from ..containers.guest import BUILD
from ..containers.session_program import SessionProgram, check_variables, driven_session, path_of, python_session
from ..drivers import session_language
from .images import Image
from .program import environment


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
    if driver is None:
        check_variables(env)
        return python_session(language, environment(image, env))
    of_engine = render_env(image.engine(language), path_of(driver), BUILD)
    return driven_session(language, driver, image.programs[program], environment(image, {**of_engine, **env}))
