"""What holds for a run: one `Settings`, kept until a source says something else; and whether it lets code run.

`given` and `spelled_out` serve the calls that take the keywords of `SandboxOptions`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.limits import Limits
from cloche.core.policy import TIERS, Policy

from .keys import ARGUMENT, KEYS, LIMIT_FIELDS, AutoFixSettings, Layer, Origin, SandboxOptions, Settings, Wish
from .resolve import effective_network, settle
from .sources import Places, fingerprint

__all__ = ["SandboxOptions", "Settings", "check_runnable", "given", "load_settings", "spelled_out"]

F = TypeVar("F", bound=Callable[..., object])

HOST_TIER = 4
MOST_SETTLED = 64
# Values that say all by being equal; anything else is settled anew each time.
_PLAIN = (bool, int, float, str, type(None), Level)
_settled: dict[Hashable, Settings] = {}


def load_settings(
    arguments: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    config_file: str | os.PathLike[str] | None = None,
    home: Path | None = None,
) -> Settings:
    """Return what holds for a run.

    `arguments` are the keywords of `cloche.run` that say how a sandbox is made, None meaning "not given";
    `config` among them is the same as `config_file`. The other parameters replace the process's environment,
    working directory and home. Raises InvalidRequest naming the source and the key that is wrong.
    """
    asked = dict(arguments or {})
    named = asked.pop("config", None) or config_file
    variables = os.environ if environ is None else environ
    places = Places(environ=variables, cwd=cwd, home=home, config_file=named)
    if not all(type(value) in _PLAIN for value in asked.values()):
        return _settle(asked, places)
    known = (tuple(sorted(asked.items())), fingerprint(places))
    found = _settled.get(known)
    if found is None:
        if len(_settled) >= MOST_SETTLED:
            _settled.clear()
        found = _settled[known] = _settle(asked, places)
    return found


def _settle(asked: Mapping[str, Any], places: Places) -> Settings:
    held, ceilings = settle(asked, places)
    parts: dict[str, dict[str, Any]] = {"": {}, "limits": {}, "policy": {}, "autofix": {}, "images": {}, "roots": {}}
    for key in KEYS:
        if key.goes_to and key.name in held:
            part, _, name = key.goes_to.rpartition(".")
            parts[part][name] = held[key.name].value
    policy = parts["policy"]
    policy["network"] = effective_network(held)
    if policy["level"] is None:
        policy["level"], _ = _implied_level(held)
    return Settings(
        **parts[""],
        limits=Limits(**parts["limits"]),
        policy=Policy(**policy),
        autofix=AutoFixSettings(**parts["autofix"]),
        ceilings=MappingProxyType({LIMIT_FIELDS[limit]: most.value for limit, most in ceilings.items()}),
        images=MappingProxyType(parts["images"]),
        roots=MappingProxyType({root: folder for root, folder in parts["roots"].items() if folder}),
        origins=MappingProxyType(_origins(held, ceilings)),
    )


def _implied_level(held: Layer) -> tuple[Level | None, str]:
    """Return the level that another key stands for, and that key."""
    if held["backend"].value == "subprocess":
        return Level.PROCESS, "backend"
    return (Level.JAIL, "runtime") if held["runtime"].value is not None else (None, "level")


def _origins(held: Layer, ceilings: Mapping[str, Wish]) -> dict[str, Origin]:
    """Return where the value of each key came from, by the name under which it is shown."""
    parts: dict[str, list[Origin]] = {}
    for key in KEYS:
        if key.goes_to and key.name in held:
            parts.setdefault(key.label, []).append(held[key.name].origin)
    origins = {label: Origin.joined(found) for label, found in parts.items()}
    if held["level"].value is None:
        origins["level"] = held[_implied_level(held)[1]].origin
    return origins | {f"ceilings.{limit}": wish.origin for limit, wish in ceilings.items()}


def check_runnable(settings: Settings) -> None:
    """Raise PolicyDenied or InvalidRequest, with the remedy, when these settings let no code run. Pure."""
    tier = TIERS[settings.tier] if settings.tier is not None else None
    if tier is not None and not tier.runs_code:
        chosen = settings.origins.get("tier", ARGUMENT)
        raise PolicyDenied(f"tier {tier.number} ({chosen}) runs no code; choose tier 3 for code in a sandbox")
    if settings.backend == "none" and settings.tier != HOST_TIER:
        chosen = settings.origins.get("backend", ARGUMENT)
        raise InvalidRequest(
            f'backend "none" ({chosen}) runs code on the host, which only tier {HOST_TIER} does; '
            f'set tier {HOST_TIER} if that is meant, or use backend "local"'
        )
    _check_level(settings)


def _check_level(settings: Settings) -> None:
    """Refuse a level that is asked for exactly and lies below the one that is required, or is not the runtime's."""
    runtime, level = settings.policy.runtime, settings.policy.level
    if runtime is not None and level is not Level.JAIL:
        by = settings.origins.get("runtime", ARGUMENT)
        raise InvalidRequest(f"runtime {runtime} ({by}) is level jail, but level {level} is asked for; drop one")
    reached = Level.PROCESS if settings.backend == "none" else settings.policy.level
    required = settings.policy.require_level
    if reached is not None and required is not None and reached < required:
        by = settings.origins.get("require", ARGUMENT)
        raise PolicyDenied(
            f"level {required} is required ({by}), but backend {settings.backend!r} is to run at level "
            f'{reached}; use backend "local" or a stronger one, or require less'
        )


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
