"""Which tier a toolbox has, and the options of the sandbox that goes with it."""

from __future__ import annotations

from typing import cast

from cloche.core.levels import Level
from cloche.core.protocols import Backend
from cloche.core.tiers import TIERS, parse_tier
from cloche.runtime.options import SandboxOptions, given
from cloche.runtime.settings import Settings, load_settings

DEFAULT_TIER = 3


def tier_of(options: SandboxOptions) -> int:
    """Return the tier that is asked for, else the configured one; but the host's only when it is asked for here."""
    asked = options.get("tier")
    if asked is not None:
        return parse_tier(asked, name="tier")
    return min(settings_of(options).tier or DEFAULT_TIER, DEFAULT_TIER)


def settings_of(options: SandboxOptions) -> Settings:
    """Return the settings that options come to; a backend that is an object is left out."""
    return load_settings({name: value for name, value in given(options).items() if not _is_object(name, value)})


def _is_object(name: str, value: object) -> bool:
    return name == "backend" and not isinstance(value, str)


def with_tier(options: SandboxOptions, tier: int) -> SandboxOptions:
    """Return the options of a tier's sandbox. Tiers without code have a workspace all the same, for files alone."""
    found = options.copy()
    found["tier"] = tier
    if not TIERS[tier].runs_code:
        found["tier"] = None
        if settings_of(found).tier is not None:  # a configured one would hold: no code runs in either
            found["tier"] = DEFAULT_TIER
    return found


def level_of(backend: object) -> Level | None:
    """Return the level that a backend of the caller's own says it has; None for the named ones."""
    if backend is None or isinstance(backend, str):
        return None
    return cast("Backend", backend).capabilities().level
