"""Resolve settings, policy and backend before a sandbox opens, and cache the result."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from cloche.audit.log import Audit, audit_for
from cloche.audit.recording import refusals
from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.settings import check_runnable, given_options, load_settings
from cloche.core.enforcement import Control, Level
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.loops import become_task
from cloche.core.policy import Policy, ScreenMode
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, field, replace
from cloche.core.screen import Finding, apply_screen

from .accounts import accounts_of
from .registry import policy_for, row_of
from .selection import LOCAL, BackendCriteria, FoundBackend, check_local, fall_back, find

if TYPE_CHECKING:
    from cloche.core.secrets import SecretSet

log = logging.getLogger("cloche.runtime")
MOST_CACHED = 64
SHORT_CODE_CHARS = 4 << 10  # screened without a thread
_cache: dict[int, Prepared] = {}  # by id(settings): unchanged settings are the same object
os.register_at_fork(after_in_child=_cache.clear)  # a forked child measures again


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that is decided before a sandbox opens. Results have `notes` in their meta.

    `audit` is the log that records it, None if auditing is off.
    """

    settings: Settings
    backend: Backend
    policy: Policy
    limits: Limits
    notes: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


def prepare(**options: Unpack[SandboxOptions]) -> Prepared:
    """Resolve settings, policy and backend, or raise before anything is started.

    May wait some seconds for a daemon's answer if a backend needs one.
    """
    resolved = _read_options(options)
    cached = _cached(resolved)
    if cached is not None:
        return cached
    _check_options(resolved)
    return _make_prepared(resolved, _find_and_screen(resolved))


async def prepare_in_thread(**options: Unpack[SandboxOptions]) -> Prepared:
    """Do the same as `prepare`, in a thread if it may wait for a daemon."""
    resolved = _read_options(options)
    cached = _cached(resolved)
    if cached is not None:
        return cached
    _check_options(resolved)
    if resolved.backend is None and row_of(resolved.settings.backend).queries_service:
        return _make_prepared(resolved, await asyncio.to_thread(_find_and_screen, resolved))
    return _make_prepared(resolved, _find_and_screen(resolved))


def level_kept(prepared: Prepared) -> tuple[str, ...]:
    """Return the level and controls that another backend must give in order not to be weaker than this one.

    May wait for a daemon.
    """
    policy = prepared.policy
    configured = prepared.backend.capabilities().level if policy.level is None else policy.level
    return (str(max(configured, policy.require_level or Level.NONE)), *map(str, policy.require_controls))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The settings of a call, the backend object given with it, whether it names an image, and its secrets."""

    settings: Settings
    backend: Backend | None
    wants_image: bool
    secrets: SecretSet | None = None


def _read_options(options: SandboxOptions) -> ResolvedOptions:
    arguments = given_options(options)
    chosen = arguments.get("backend")
    if chosen is not None and not isinstance(chosen, str):
        if not callable(getattr(chosen, "open", None)):
            raise InvalidRequest(f"backend: give a name or a backend object, not {type(chosen).__name__}")
        if "prefer" in arguments:
            raise InvalidRequest("prefer is for a choice among backends, but backend names one; drop one of the two")
        if "runtime" in arguments:
            raise InvalidRequest("runtime names a backend or docker's runtime, but one is given; drop one of the two")
        del arguments["backend"]
    else:
        chosen = None
    wants_image = "image" in arguments
    if "secrets" not in arguments:
        settings = load_settings(arguments)
        return ResolvedOptions(
            settings=settings, backend=chosen, wants_image=wants_image, secrets=_without_secrets(settings)
        )
    from .secrets import read_with_settings  # needed by some runs only

    secrets, settings = read_with_settings(arguments, getattr(chosen, "name", None))
    return ResolvedOptions(settings=settings, backend=chosen, wants_image=wants_image, secrets=secrets)


def _without_secrets(settings: Settings) -> SecretSet | None:
    """Return an empty set for a call without secrets whose network rules have methods and paths."""
    if not any("/" in rule for rule in settings.policy.network_allow):
        return None
    from .secrets import opens_for_rules

    return opens_for_rules(settings.policy)


def _check_options(resolved: ResolvedOptions) -> None:
    with refusals(resolved.settings):
        check_runnable(resolved.settings)


def _find_and_screen(resolved: ResolvedOptions) -> FoundBackend:
    with refusals(resolved.settings):
        found_backend = _screened(_find_backend(resolved), resolved)
        if resolved.secrets is None:
            return found_backend
        from .secrets import with_secrets

        return with_secrets(found_backend, resolved.secrets)


def _screened(found_backend: FoundBackend, resolved: ResolvedOptions) -> FoundBackend:
    """Set the strict screen if best effort ends at level process because the host offers no more (R2b)."""
    policy, origin = found_backend.policy, resolved.settings.origins.get("screen")
    may_be_less = policy.level is None and Control.FILESYSTEM in policy.best_effort
    if not may_be_less or origin != "default" or (resolved.backend is None and resolved.settings.backend != LOCAL):
        return found_backend
    if found_backend.backend.capabilities().level > Level.PROCESS:
        return found_backend
    return replace(found_backend, policy=policy.with_changes(screen="block"))


async def screen(mode: ScreenMode, language: str, code: str) -> tuple[Finding, ...]:
    """Screen code, in a thread if it is long; see core.screen.apply_screen. Raises PolicyDenied."""
    if mode == "off" or len(code) <= SHORT_CODE_CHARS:
        return apply_screen(mode, language, code)
    await become_task()
    return await asyncio.to_thread(apply_screen, mode, language, code)


def _find_backend(resolved: ResolvedOptions) -> FoundBackend:
    settings = resolved.settings
    if resolved.backend is not None:
        return FoundBackend(backend=resolved.backend, policy=settings.policy)
    criteria = BackendCriteria(
        policy=settings.policy, prefer=settings.prefer, images=settings.images, wants_image=resolved.wants_image,
        accounts=accounts_of(settings),
    )  # fmt: skip
    try:
        if settings.backend == LOCAL and settings.policy.trusted and settings.policy.fallback != "none":
            check_local(settings.policy)
        return find(settings.backend, criteria)
    except BackendUnavailable as error:
        return fall_back(error, settings, policy_for(settings.backend, settings.policy))


def _make_prepared(resolved: ResolvedOptions, found_backend: FoundBackend) -> Prepared:
    limits = resolved.settings.limits
    log.debug("backend %s, policy %s, limits %s", found_backend.backend.name, found_backend.policy, limits)
    prepared = Prepared(
        settings=resolved.settings, backend=found_backend.backend, policy=found_backend.policy, limits=limits,
        notes=found_backend.notes, audit=audit_for(resolved.settings),
    )  # fmt: skip
    _store(resolved, prepared)
    return prepared


def _cached(resolved: ResolvedOptions) -> Prepared | None:
    """Return the cached result for the same settings object, if it depends on nothing else."""
    settings = resolved.settings
    cached = _cache.get(id(settings))
    if cached is None or cached.settings is not settings or resolved.backend is not None or resolved.wants_image:
        return None
    if resolved.secrets is not None:
        return None
    return cached if audit_for(settings) is cached.audit else None


def _store(resolved: ResolvedOptions, prepared: Prepared) -> None:
    """Cache the result, unless it depends on more than the settings or on the state of a service."""
    settings = resolved.settings
    if resolved.backend is not None or resolved.wants_image or settings.policy.trusted or prepared.notes:
        return
    if resolved.secrets is not None:
        return
    if row_of(settings.backend).queries_service:
        return
    if len(_cache) >= MOST_CACHED:
        _cache.clear()
    _cache[id(settings)] = prepared
