"""The keywords that say how a sandbox is made; the same everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .config_keys import SandboxOptions

__all__ = ["SandboxOptions", "given", "spelled_out"]

F = TypeVar("F", bound=Callable[..., object])


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller really gave, or raise TypeError for a keyword that does not exist."""
    known = SandboxOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword {name!r}; known: {', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None and value != ()}


def spelled_out(function: F) -> F:
    """Let `help` and `inspect.signature` show each keyword of SandboxOptions instead of `**options`."""
    *own, _ = inspect.signature(function).parameters.values()
    names = {name: getattr(kind, "__forward_arg__", kind) for name, kind in SandboxOptions.__annotations__.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(name, kind, default=None, annotation=what) for name, what in names.items()]
    returned = inspect.signature(function).return_annotation
    vars(function)["__signature__"] = inspect.Signature([*own, *listed], return_annotation=returned)
    return function
