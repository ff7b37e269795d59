"""The keywords that say how a sandbox is made; the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_keys import SandboxOptions

__all__ = ["SandboxOptions", "given"]


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller really gave, or raise TypeError for a keyword that does not exist."""
    known = SandboxOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword {name!r}; known: {', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None and value != ()}
