"""Turn a request into what a container must run: commands, files, environment."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.languages import language_named, render, render_env, render_generated
from cloche.core.request import Request

from ..containers.guest import BUILD, ENVIRONMENT
from ..containers.program import Program, files_of, sets_interpreter_variables, source_of
from .images import Image

FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def build_program(request: Request, image: Image) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for an engine that is missing."""
    if request.code is None:
        return Program(commands=(request.argv,), env=environment(image, request.env), files=request.files)
    language = language_named(request.language)
    source, files = source_of(language), files_of(request, language)
    engine = image.engine(language)
    version = image.version(engine)
    env = environment(image, {**render_env(engine, source, BUILD), **request.env})
    if language.name == "python" and image.has_reaper and not sets_interpreter_variables(request.env):
        python = {"path": source, "argv": list(request.argv), "extra_paths": [], "customizes": False}
        return Program(commands=(), env=env, files=files, engine=engine, version=version, python=python)
    return Program(
        commands=render(engine, image.programs, source, BUILD, request.argv),
        env=env,
        files=files,
        engine=engine,
        version=version,
        build=BUILD,
        generated=render_generated(engine, source, BUILD),
    )


def environment(image: Image, more: Mapping[str, str]) -> dict[str, str]:
    """Return a guest's environment: what the image sets, below the fixed minimum, below `more`."""
    return {"PATH": FALLBACK_PATH, **image.env, **ENVIRONMENT, **more}
