"""`cloche images`: build what virtual machines run in."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cloche.core.plain import plain
from cloche.runtime.factory import build_image

from .pulling import progress_shown


def build(backend: str, packages: Sequence[str], *, as_json: bool) -> int:
    """Build the image of a backend, and print what came of it."""
    with progress_shown():
        line = build_image(backend, packages)
    print(json.dumps({"backend": backend, "built": line}) if as_json else plain(line))
    return 0
