"""Turn a request into what a container must run: commands, files, environment."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.request import Request

from ..containers.guest import ENVIRONMENT
from ..containers.program import Program, program_of
from .images import Image

FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def build_program(request: Request, image: Image) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for an engine that is missing."""
    return program_of(request, image, {"PATH": FALLBACK_PATH, **image.env}, has_interpreter=image.has_reaper)


def environment(image: Image, more: Mapping[str, str]) -> dict[str, str]:
    """Return a guest's environment: what the image sets, below the fixed minimum, below `more`."""
    return {"PATH": FALLBACK_PATH, **image.env, **ENVIRONMENT, **more}
