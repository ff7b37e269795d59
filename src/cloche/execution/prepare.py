"""Settling what a call asks for before anything starts: settings, rules and backend, kept for as long as they hold."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from cloche.audit.log import Audit, audit_for
from cloche.audit.recording import refusals
from cloche.config.keys import SandboxOptions, Settings
from cloche.config.settings import check_runnable, given_options, load_settings
from cloche.core.enforcement import Control, Level
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Backend

from .registry import policy_for, row_of
from .selection import LOCAL, Found, Wish, check_local, fall_back, find

log = logging.getLogger("cloche.runtime")
MOST_PREPARED = 64
_before: dict[int, Prepared] = {}  # by the settings' identity: these are the same object for as long as they hold
os.register_at_fork(after_in_child=_before.clear)  # a forked child measures for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Hold everything that is settled before a sandbox opens; results carry `notes` in their meta.

    `audit` is where it is recorded, None where that is off.
    """

    settings: Settings
    backend: Backend
    policy: Policy
    limits: Limits
    notes: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


def prepare(**options: Unpack[SandboxOptions]) -> Prepared:
    """Settle settings, rules and backend, or raise before anything is started.

    May wait some seconds for the answer of a daemon, where a backend needs one.
    """
    order = _read_order(options)
    found = _prepared_before(order)
    if found is not None:
        return found
    _check_order(order)
    return _prepared(order, _find(order))


async def prepare_beside(**options: Unpack[SandboxOptions]) -> Prepared:
    """Do as `prepare` does, in a thread where that may take its time."""
    order = _read_order(options)
    found = _prepared_before(order)
    if found is not None:
        return found
    _check_order(order)
    if order.given is None and row_of(order.settings.backend).asks_around:
        return _prepared(order, await asyncio.to_thread(_find, order))
    return _prepared(order, _find(order))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Hold the settings of a call, the backend object that was given with it, and whether an image was."""

    settings: Settings
    given: Backend | None
    wants_image: bool


def _read_order(options: SandboxOptions) -> Order:
    arguments = given_options(options)
    chosen = arguments.get("backend")
    if chosen is not None and not isinstance(chosen, str):
        if not callable(getattr(chosen, "open", None)):
            raise InvalidRequest(f"backend: give a name or a backend object, not {type(chosen).__name__}")
        if "prefer" in arguments:
            raise InvalidRequest("prefer is for a choice among backends, but one is given; drop one of the two")
        if "runtime" in arguments:
            raise InvalidRequest("runtime names a backend or docker's runtime, but one is given; drop one of the two")
        del arguments["backend"]
    else:
        chosen = None
    return Order(settings=load_settings(arguments), given=chosen, wants_image="image" in arguments)


def _check_order(order: Order) -> None:
    with refusals(order.settings):
        check_runnable(order.settings)
    _check_packages(order.settings.policy)


def _find(order: Order) -> Found:
    """Return the backend with the policy for it, that of a fallback where the policy has one."""
    with refusals(order.settings):
        return _screened(_find_backend(order), order)


def _screened(found: Found, order: Order) -> Found:
    """Let what comes to level process by best effort, on a host that has no more, have the strict screen too (R2b)."""
    policy, origin = found.policy, order.settings.origins.get("screen")
    may_be_less = policy.level is None and Control.FILESYSTEM in policy.best_effort
    if not may_be_less or origin != "default" or (order.given is None and order.settings.backend != LOCAL):
        return found
    if found.backend.capabilities().level > Level.PROCESS:
        return found
    return replace(found, policy=policy.with_changes(screen="block"))


def _find_backend(order: Order) -> Found:
    settings = order.settings
    if order.given is not None:
        return Found(backend=order.given, policy=settings.policy)
    wish = Wish(policy=settings.policy, prefer=settings.prefer, images=settings.images, wants_image=order.wants_image)
    try:
        if settings.backend == LOCAL and settings.policy.trusted and settings.policy.fallback != "none":
            check_local(settings.policy)
        return find(settings.backend, wish)
    except BackendUnavailable as error:
        return fall_back(error, settings, policy_for(settings.backend, settings.policy))


def _prepared(order: Order, found: Found) -> Prepared:
    limits = order.settings.limits
    log.debug("backend %s, policy %s, limits %s", found.backend.name, found.policy, limits)
    prepared = Prepared(
        settings=order.settings, backend=found.backend, policy=found.policy, limits=limits, notes=found.notes,
        audit=audit_for(order.settings),
    )  # fmt: skip
    _remember(order, prepared)
    return prepared


def _prepared_before(order: Order) -> Prepared | None:
    """Return what the very same settings came to before, where that depends on nothing else."""
    settings = order.settings
    found = _before.get(id(settings))
    if found is None or found.settings is not settings or order.given is not None or order.wants_image:
        return None
    return found if audit_for(settings) is found.audit else None


def _remember(order: Order, prepared: Prepared) -> None:
    """Keep what need not be settled again: a backend that is there or not without asking anybody."""
    settings = order.settings
    if order.given is not None or order.wants_image or settings.policy.trusted or prepared.notes:
        return
    if row_of(settings.backend).asks_around:
        return
    if len(_before) >= MOST_PREPARED:
        _before.clear()
    _before[id(settings)] = prepared


def _check_packages(policy: Policy) -> None:
    if policy.packages:
        raise BackendUnavailable(
            "packages: this version of Cloche installs none. Install them next to Cloche (pip install); "
            "the local sandbox shows the packages of its own interpreter."
        )
