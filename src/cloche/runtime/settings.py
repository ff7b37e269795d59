"""What holds for a run, each value with where it came from."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.levels import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.tiers import TIERS
from cloche.core.units import format_size

from .config import settle
from .config_autofix import WORDS as AUTOFIX_WORDS
from .config_autofix import AutoFixSettings, settings_of
from .config_keys import ANY_LANGUAGE, LIMIT_FIELDS, POLICY_WORDS, ROOTS, Layer, Prefer, Wish, shown_limit
from .config_sources import Places, fingerprint
from .config_tighten import effective_network

HOST_TIER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold what was configured.

    `ceilings` is keyed by the fields of `Limits`, `images` by language (`*` is any other), `roots` by those of
    `memory` and `configs` that have a folder of the host. `skill_path` names folders with skills, besides the
    platform's. `audit` None leaves it to the door. `origins` says for every word, as one writes it in a file, which
    source its value came from: "default", "tier 3", "preset minimal (argument)", a file's path, "environment
    SANDBOX_TYPE" or "argument".
    """

    backend: str = "local"
    prefer: Prefer = "strongest"
    tier: int | None = None
    preset: str | None = None
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    autofix: AutoFixSettings = field(default_factory=AutoFixSettings)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    audit: bool | None = None
    audit_folder: str | None = None
    audit_keep: tuple[str, ...] = ()
    audit_keep_age_s: float | None = None
    audit_keep_bytes: int | None = None
    skill_path: tuple[str, ...] = ()
    roots: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def image_for(self, language: str) -> str | None:
        """Return the image configured for `language`; None leaves it to the table of languages."""
        return self.images.get(language, self.images.get(ANY_LANGUAGE))

    def as_rows(self) -> list[tuple[str, str, str]]:
        """Return key, value and origin of everything that holds, as text for `cloche config show`."""
        shown = {**self._choices(), **self._limits(), **self._rules(), **self.autofix.as_rows()}
        shown |= {f"images.{language}": image for language, image in self.images.items()}
        shown |= {f"roots.{root}": folder for root, folder in self.roots.items()}
        shown |= {f"ceilings.{_word_of(f)}": shown_limit(_word_of(f), most) for f, most in self.ceilings.items()}
        return [(key, value, self.origins.get(key, "default")) for key, value in shown.items()]

    def _choices(self) -> dict[str, str]:
        return {
            "backend": self.backend,
            "prefer": self.prefer,
            "tier": str(self.tier or "none"),
            "preset": self.preset or "none",
            "audit": self._audit(),
            "audit_keep": _listed(self.audit_keep),
            "audit_keep_age": "none" if self.audit_keep_age_s is None else f"{self.audit_keep_age_s:g}s",
            "audit_keep_size": "none" if self.audit_keep_bytes is None else format_size(self.audit_keep_bytes),
            "skill_path": _listed(self.skill_path),
        }

    def _audit(self) -> str:
        if self.audit is None:
            return "on in the command line"
        return self.audit_folder or "on" if self.audit else "off"

    def _limits(self) -> dict[str, str]:
        return {word: shown_limit(word, getattr(self.limits, name)) for word, name in LIMIT_FIELDS.items()}

    def _rules(self) -> dict[str, str]:
        policy = self.policy
        required = [
            *([policy.require_level] if policy.require_level is not None else []),
            *policy.require_controls,
        ]
        packages = [policy.packages] if isinstance(policy.packages, str) else policy.packages
        return {
            "network": policy.network,
            "network_allow": _listed(policy.network_allow),
            "require": _listed(required),
            "best_effort": _listed(policy.best_effort),
            "fallback": policy.fallback,
            "trusted": str(policy.trusted).lower(),
            "screen": policy.screen,
            "packages": _listed(packages),
            "languages": _listed(policy.languages),
            "warm": str(policy.warm).lower(),
            "preload": _listed(policy.preload),
            "user": policy.user or "unprivileged",
            "level": str(policy.level) if policy.level is not None else "strongest",
            "runtime": policy.runtime or "any",
        }


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


MOST_SETTLED = 64
# Values that say all by being equal; anything else is settled anew each time.
_PLAIN = (bool, int, float, str, type(None), Level)
_settled: dict[Hashable, Settings] = {}


def _settle(asked: Mapping[str, Any], places: Places) -> Settings:
    held, ceilings = settle(asked, places)
    images = {word.partition(".")[2]: wish.value for word, wish in held.items() if word.startswith("image.")}
    folders = {root: held[word].value for root in ROOTS if (word := f"roots.{root}") in held}
    return Settings(
        backend=held["backend"].value,
        prefer=held["prefer"].value,
        tier=held["tier"].value,
        preset=held["preset"].value,
        limits=Limits(**{field: held[word].value for word, field in LIMIT_FIELDS.items()}),
        policy=_policy(held),
        audit=held["audit"].value,
        audit_folder=held["audit_folder"].value,
        audit_keep=held["audit_keep"].value,
        audit_keep_age_s=held["audit_keep_age"].value,
        audit_keep_bytes=held["audit_keep_size"].value,
        autofix=settings_of({word: held[word].value for word in AUTOFIX_WORDS}),
        ceilings=MappingProxyType({LIMIT_FIELDS[word]: most.value for word, most in ceilings.items()}),
        images=MappingProxyType(images),
        skill_path=held["skill_path"].value,
        roots=MappingProxyType({root: folder for root, folder in folders.items() if folder}),
        origins=MappingProxyType(_origins(held, ceilings)),
    )


def _policy(held: Layer) -> Policy:
    words = {word: held[word].value for word in POLICY_WORDS}
    if words["level"] is None:
        words["level"], _ = _implied_level(held)
    return Policy(**words, network=effective_network(held), require_level=held["require_level"].value)  # type: ignore[arg-type]  # Policy checks it


def _implied_level(held: Layer) -> tuple[Level | None, str]:
    """Return the level that another word stands for, and that word."""
    if held["backend"].value == "subprocess":
        return Level.PROCESS, "backend"
    return (Level.JAIL, "runtime") if held["runtime"].value is not None else (None, "level")


def _origins(held: Layer, ceilings: Mapping[str, Wish]) -> dict[str, str]:
    """Return where each word came from; the two halves of `require` are one word to whoever wrote it."""
    origins = {word.replace("image.", "images."): wish.origin for word, wish in held.items()}
    halves = [origins.pop("require_level"), origins.pop("require_controls")]
    named = [origin for origin in dict.fromkeys(halves) if origin != "default"]
    origins["require"] = "; ".join(named) or "default"
    origins.pop("timeout_override", None)
    if held["level"].value is None:
        origins["level"] = held[_implied_level(held)[1]].origin
    return origins | {f"ceilings.{word}": wish.origin for word, wish in ceilings.items()}


def check_runnable(settings: Settings) -> None:
    """Raise PolicyDenied or InvalidRequest, with the remedy, when these settings let no code run. Pure."""
    tier = TIERS[settings.tier] if settings.tier is not None else None
    if tier is not None and not tier.runs_code:
        chosen = settings.origins.get("tier", "argument")
        raise PolicyDenied(f"tier {tier.number} ({chosen}) runs no code; choose tier 3 for code in a sandbox")
    if settings.backend == "none" and settings.tier != HOST_TIER:
        chosen = settings.origins.get("backend", "argument")
        raise InvalidRequest(
            f'backend "none" ({chosen}) runs code on the host, which only tier {HOST_TIER} does; '
            f'set tier {HOST_TIER} if that is meant, or use backend "local"'
        )
    _check_level(settings)


def _check_level(settings: Settings) -> None:
    """Refuse a level that is asked for exactly and lies below the one that is required, or is not the runtime's."""
    runtime, level = settings.policy.runtime, settings.policy.level
    if runtime is not None and level is not Level.JAIL:
        by = settings.origins.get("runtime", "argument")
        raise InvalidRequest(f"runtime {runtime} ({by}) is level jail, but level {level} is asked for; drop one")
    reached = Level.PROCESS if settings.backend == "none" else settings.policy.level
    required = settings.policy.require_level
    if reached is not None and required is not None and reached < required:
        by = settings.origins.get("require", "argument")
        raise PolicyDenied(
            f"level {required} is required ({by}), but backend {settings.backend!r} is to run at level "
            f'{reached}; use backend "local" or a stronger one, or require less'
        )


def _word_of(limit_field: str) -> str:
    return next(word for word, name in LIMIT_FIELDS.items() if name == limit_field)


def _listed(items: object) -> str:
    return ", ".join(str(item) for item in items) or "none" if isinstance(items, list | tuple) else str(items)
