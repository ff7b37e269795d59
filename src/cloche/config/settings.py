"""The settings of a run: `load_settings` returns one `Settings`, cached until a source changes; `check_runnable` checks
them.

`given_options` and `list_options_in_signature` are for functions with the keywords of `SandboxOptions`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.fleet_settings import FleetSettings
from cloche.core.limits import Limits
from cloche.core.policy import TIERS, Policy

from .autofix_settings import AutoFixSettings
from .keys import CEILING_FIELDS, KEYS, Settings
from .options import SandboxOptions
from .origins import ARGUMENT, ConfiguredValue, Layer, Origin
from .resolve import effective_network, resolve_settings
from .sources import ConfigPaths, fingerprint

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SandboxOptions",
    "Settings",
    "check_runnable",
    "given_options",
    "list_options_in_signature",
    "load_settings",
]

F = TypeVar("F", bound=Callable[..., object])

HOST_TIER = 4
MOST_CACHED = 64
# Types that can be part of the cache key, as can lists of text; with other values the settings are not cached.
_COMPARABLE = (bool, int, float, str, type(None), Level)
_cache: dict[Hashable, Settings] = {}


def load_settings(
    arguments: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    config_file: str | os.PathLike[str] | None = None,
    home: Path | None = None,
    has_checkout: bool = True,
) -> Settings:
    """Return the settings of a run.

    `arguments` are the keywords of `cloche.run` that configure a sandbox, None meaning "not given"; `config` among them
    is the same as `config_file`. `secrets` are no setting, and left out (`execution/secrets.py`). Without
    `has_checkout` the files of the working directory, which may only tighten, are left out. The other parameters
    replace the process's environment, working directory and home.
    Raises InvalidRequest naming the source and the invalid key.
    """
    options = dict(arguments or {})
    named = options.pop("config", None) or config_file
    options.pop("secrets", None)
    variables = os.environ if environ is None else environ
    config_paths = ConfigPaths(environ=variables, cwd=cwd, home=home, config_file=named, has_checkout=has_checkout)
    for name, value in options.items():
        if type(value) in (list, tuple) and all(type(item) is str for item in value):
            options[name] = tuple(value)
        elif type(value) not in _COMPARABLE:
            return _build_settings(options, config_paths)
    cache_key = (has_checkout, tuple(sorted(options.items())), fingerprint(config_paths))
    settings = _cache.get(cache_key)
    if settings is None:
        if len(_cache) >= MOST_CACHED:
            _cache.clear()
        settings = _cache[cache_key] = _build_settings(options, config_paths)
    return settings


def _build_settings(options: Mapping[str, Any], config_paths: ConfigPaths) -> Settings:
    resolved, ceilings = resolve_settings(options, config_paths)
    fields_by_section: dict[str, dict[str, Any]] = {
        name: {} for name in ("", "limits", "policy", "autofix", "fleet", "images", "roots", "remotes")
    }
    for key in KEYS:
        if key.settings_field and key.name in resolved:
            section, _, name = key.settings_field.rpartition(".")
            fields_by_section[section][name] = resolved[key.name].value
    policy = fields_by_section["policy"]
    policy["network"] = effective_network(resolved)
    policy["accept_claimed_level"] = resolved["require_level"].origin.kind == "tier"
    if policy["level"] is None:
        policy["level"], _ = _implied_level(resolved)
    return Settings(
        **fields_by_section[""],
        limits=Limits(**fields_by_section["limits"]),
        policy=Policy(**policy),
        autofix=AutoFixSettings(**fields_by_section["autofix"]),
        fleet=FleetSettings(**fields_by_section["fleet"]),
        ceilings=MappingProxyType({CEILING_FIELDS[name]: ceiling.value for name, ceiling in ceilings.items()}),
        images=MappingProxyType(fields_by_section["images"]),
        roots=MappingProxyType({root: folder for root, folder in fields_by_section["roots"].items() if folder}),
        remotes=MappingProxyType(fields_by_section["remotes"]),
        origins=MappingProxyType(_origins(resolved, ceilings)),
    )


def _implied_level(resolved: Layer) -> tuple[Level | None, str]:
    """Return the level that another key implies, and that key."""
    if resolved["backend"].value == "subprocess":
        return Level.PROCESS, "backend"
    return (Level.JAIL, "runtime") if resolved["runtime"].value is not None else (None, "level")


def _origins(resolved: Layer, ceilings: Mapping[str, ConfiguredValue]) -> dict[str, Origin]:
    origins_by_label: dict[str, list[Origin]] = {}
    for key in KEYS:
        if key.settings_field and key.name in resolved:
            origins_by_label.setdefault(key.label, []).append(resolved[key.name].origin)
    origins = {label: Origin.joined(key_origins) for label, key_origins in origins_by_label.items()}
    if resolved["level"].value is None:
        origins["level"] = resolved[_implied_level(resolved)[1]].origin
    return origins | {f"ceilings.{name}": configured.origin for name, configured in ceilings.items()}


def check_runnable(settings: Settings) -> None:
    """Raise PolicyDenied or InvalidRequest, with a remedy, if these settings allow no code to run. Pure."""
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
    if settings.packages_lock and not settings.policy.packages:
        raise InvalidRequest(
            "locked: it has no effect without packages; name them (packages=, --packages NAME), or leave locked out"
        )


def _check_level(settings: Settings) -> None:
    """Refuse an exact level that is below the required one, or is not the runtime's."""
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


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None or (). Raises TypeError for an unknown keyword."""
    annotations = SandboxOptions.__annotations__
    for name in options:
        if name not in annotations:
            raise TypeError(f"unexpected keyword {name!r}; known: {', '.join(sorted(annotations))}")
    return {name: value for name, value in options.items() if value is not None and value != ()}


def list_options_in_signature(function: F) -> F:
    """Make `help` and `inspect.signature` show each keyword of SandboxOptions instead of `**options`."""
    *own, _ = inspect.signature(function).parameters.values()
    names = {name: getattr(kind, "__forward_arg__", kind) for name, kind in SandboxOptions.__annotations__.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(name, kind, default=None, annotation=annotation) for name, annotation in names.items()]
    returned = inspect.signature(function).return_annotation
    vars(function)["__signature__"] = inspect.Signature([*own, *listed], return_annotation=returned)
    return function
