"""Choose the backend of a run: the named one, the best available, or a fallback for trusted code.

Theory of operation: `choose` is pure except for `probe`, which measures one option and is called for as few as
possible: a daemon that could not be chosen is not contacted. An option fits if it enforces everything that the policy
asks for; otherwise `unmet_policy` gives the reason, in the words of the backend's own refusal. Choosing downloads
nothing, and remote services are no options. If nothing fits, the error lists every reason; only `fall_back` decides
whether something weaker may run.

Fallback (S12): it requires that the policy says `fallback: process` *and* the caller marked this code as trusted, which
code written by a model never is. Then the local backend is tried at its strongest level. If that does not meet the
policy, a child process with limits is used, unless the policy asks for more: a level, a control, or a network that was
explicitly turned off. The screen then checks the code. The result, the log and the command line report the fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from cloche.config.keys import AUTO, Settings
from cloche.config.options import Prefer
from cloche.config.origins import ARGUMENT, DEFAULT, Origin
from cloche.core.enforcement import Control, Level, shortfalls
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied
from cloche.core.policy import Policy, ScreenMode
from cloche.core.protocols import Backend, Capabilities
from cloche.core.record import dataclass, field, replace
from cloche.core.remote import RemoteAccount

from .registry import OPTIONS, Option, backend_named, capabilities_of, policy_for, row_of, why_not_ready

log = logging.getLogger("cloche.runtime")
LOCAL = "local"
LEVELS_WITHOUT_ISOLATION = (Level.PROCESS, Level.NONE)  # requested by name, so their missing controls are accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCriteria:
    """The inputs of the choice. `wants_image`: the call itself named an image."""

    policy: Policy
    prefer: Prefer = "strongest"
    images: Mapping[str, str] = field(default_factory=dict)
    wants_image: bool = False
    accounts: Mapping[str, RemoteAccount] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBackend:
    """A backend, the policy to open it with, and notes about the choice for the result's meta."""

    backend: Backend
    policy: Policy
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The chosen option, None if nothing fits, and the reason against each of the others."""

    option: Option | None
    passed_over: Mapping[str, str]


Probe = Callable[[Option], "str | Capabilities"]


def find(name: str, criteria: BackendCriteria) -> FoundBackend:
    """Return the backend of that name, or the one that `auto` chooses. May wait some seconds for a daemon's answer.

    Raises BackendUnavailable with a remedy if there is none; InvalidRequest for a contradiction.
    """
    if name == AUTO:
        return _find_auto(criteria)
    policy = policy_for(name, criteria.policy)
    if criteria.wants_image and not row_of(name).takes_image:
        raise InvalidRequest(f"image: backend {name!r} runs the host's own toolchains and takes no image; drop it")
    # Images of the configuration are for this host's daemon, and not for other machines.
    images = criteria.images if criteria.wants_image or not row_of(name).is_remote else {}
    backend = backend_named(name, images=images, needs_image=criteria.wants_image, accounts=criteria.accounts)
    return FoundBackend(backend=backend, policy=policy)


def _find_auto(criteria: BackendCriteria) -> FoundBackend:
    choice = choose(OPTIONS, criteria, _probe_for(criteria))
    if choice.option is None:
        raise BackendUnavailable(
            f'backend "auto": no backend here gives what is requested. {_join_reasons(choice.passed_over)}.',
            remedy="Ask for less, set up one of these, or name a backend; "
            '"cloche backends" lists what each of them needs.',
        )
    name, level = choice.option.backend, choice.option.level
    log.debug("auto takes the %s: %s; not %s", criteria.prefer, name, choice.passed_over)
    return FoundBackend(
        backend=backend_named(name, images=criteria.images, needs_image=criteria.wants_image),
        policy=criteria.policy.with_changes(level=level),
        notes={"choice": {"backend": name, "prefer": criteria.prefer, "passed_over": dict(choice.passed_over)}},
    )


def choose(options: Sequence[Option], criteria: BackendCriteria, probe: Probe) -> BackendChoice:
    """Choose among options that are sorted by speed, the fastest first. Pure apart from `probe`."""
    is_by_level = criteria.prefer == "strongest"
    ordered = sorted(options, key=lambda option: -option.max_level) if is_by_level else options
    best: tuple[Level, Option] | None = None
    passed_over: dict[str, str] = {}
    for option in ordered:
        if best is not None and (not is_by_level or option.max_level <= best[0]):
            continue
        level = _reason_without_probing(option, criteria) or level_or_reason(option, criteria, probe)
        if isinstance(level, str):
            passed_over[option.backend] = level
        elif best is None or level > best[0]:
            best = level, option
    return BackendChoice(option=best[1] if best else None, passed_over=passed_over)


def level_or_reason(option: Option, criteria: BackendCriteria, probe: Probe) -> str | Level:
    """Measure an option: return its level, or why it does not fit."""
    capabilities = probe(option)
    if isinstance(capabilities, str):
        return capabilities
    return unmet_policy(capabilities, criteria.policy) or capabilities.level


def _reason_without_probing(option: Option, criteria: BackendCriteria) -> str:
    """Return why an option cannot fit on any machine; empty if it might."""
    row, policy = row_of(option.backend), criteria.policy
    required_level = max(policy.require_level or Level.NONE, policy.level or Level.NONE)
    if required_level > option.max_level:
        return f"level {required_level} is required, and it gives {option.max_level} at most"
    if policy.level is not None and option.level not in (None, policy.level):
        return f"level {policy.level} is required, and it gives {option.level}"
    if criteria.wants_image and row.provider is not None and not row.takes_image:
        return "an image is requested, and it takes none"
    return ""


def unmet_policy(capabilities: Capabilities, policy: Policy) -> str:
    """Return what a backend lacks of a policy; empty if nothing. Pure."""
    if not capabilities.available:
        return (
            f"{capabilities.reason.rstrip('.')}; {capabilities.remedy}" if capabilities.remedy else capabilities.reason
        )
    missing = shortfalls(
        capabilities.as_enforcement(),
        level=policy.require_level,
        controls=policy.require_controls,
        best_effort=tuple(Control) if policy.level in LEVELS_WITHOUT_ISOLATION else policy.best_effort,
        accept_claimed=policy.accept_claimed,
        accept_claimed_level=policy.accept_claimed_level,
    )
    if policy.network not in capabilities.networks:
        missing.append(f"network {policy.network!r} is requested, and it has {' or '.join(capabilities.networks)} only")
    if missing and capabilities.reason:
        missing.append(capabilities.reason)
    return "; ".join(missing)


def _probe_for(criteria: BackendCriteria) -> Probe:
    def probe(option: Option) -> str | Capabilities:
        level = option.level if option.level is not None else criteria.policy.level
        image_options: Any = {"images": criteria.images, "needs_image": criteria.wants_image}
        capabilities = capabilities_of(option.backend, level=level, **image_options)
        return (why_not_ready(option.backend, **image_options) if capabilities.available else "") or capabilities

    return probe


def _join_reasons(passed_over: Mapping[str, str]) -> str:
    return ". ".join(f"{name}: {why.rstrip('.')}" for name, why in passed_over.items())


def describe(name: str, criteria: BackendCriteria) -> Capabilities:
    """Return a backend's capabilities here; for `auto`, those of the backend that it would choose now."""
    if name != AUTO:
        return capabilities_of(name, images=criteria.images, accounts=criteria.accounts)
    choice = choose(OPTIONS, criteria, _probe_for(criteria))
    if choice.option is None:
        return Capabilities(backend=AUTO, available=False, reason=_join_reasons(choice.passed_over))
    capabilities = capabilities_of(choice.option.backend, level=choice.option.level, images=criteria.images)
    return replace(capabilities, backend=AUTO, reason=f"it would choose {choice.option.backend}", remedy="")


def fall_back(missing: BackendUnavailable, settings: Settings, policy: Policy) -> FoundBackend:
    """Return a backend for trusted code in place of the missing one.

    Raises `missing` if there is no fallback, or none that meets the policy; PolicyDenied if the network must be off and
    would not be.
    """
    if policy.fallback == "none":
        raise missing
    if not policy.trusted:
        _no_fallback(
            missing, f"fallback {policy.fallback!r} ({_origin(settings, 'fallback')}) is for trusted code only"
        )
    if policy.runtime is not None:
        _no_fallback(
            missing, f"runtime {policy.runtime} ({_origin(settings, 'runtime')}) is required, so nothing else may run"
        )
    local = capabilities_of(LOCAL, level=policy.level)
    why_not_local = unmet_policy(local, policy)
    if not why_not_local and local.level > Level.PROCESS:
        return _fallback_to(missing, settings, policy, local.level)
    if policy.level not in (None, Level.PROCESS):
        _no_fallback(missing, f"level {policy.level} is required, so no weaker backend may run ({why_not_local})")
    if policy.require_level is not None and policy.require_level > Level.PROCESS:
        _no_fallback(missing, f"level {policy.require_level} is required, so no weaker level may run ({why_not_local})")
    _check_network(settings, policy)
    as_process = policy.with_changes(level=Level.PROCESS, screen=_screen(settings))
    why_no_process = unmet_policy(capabilities_of(LOCAL, level=Level.PROCESS), as_process)
    if why_no_process:
        _no_fallback(missing, f"a child process cannot take its place: {why_no_process}")
    return _fallback_to(missing, settings, as_process, Level.PROCESS)


def check_local(policy: Policy) -> None:
    """Raise BackendUnavailable if the local backend does not meet the policy."""
    why_not = unmet_policy(capabilities_of(LOCAL, level=policy.level), policy)
    if why_not:
        raise BackendUnavailable(
            f'backend "local": {why_not}.', remedy='Run "cloche doctor" to see what this host has.'
        )


def _check_network(settings: Settings, policy: Policy) -> None:
    """Raise PolicyDenied if the policy turns the network off or restricts it: a child process has the host's
    network.
    """
    origin = _origin(settings, "network")
    if Control.NETWORK in policy.require_controls:
        reason = f"the policy requires the control network ({_origin(settings, 'require')})"
    elif policy.network != "bridge" and origin != DEFAULT:
        reason = f"the policy says network {policy.network} ({origin})"
    else:
        return
    raise PolicyDenied(
        f"{reason}, and backend {settings.backend!r} is missing. Even trusted code does not fall back to a child "
        "process then, which would have the host's network. Start the backend, or take the network out of the policy"
    )


def _screen(settings: Settings) -> ScreenMode:
    """Return the screen mode of a child process: the configured one, or `block` if it is off."""
    screen = settings.policy.screen
    return "block" if screen == "off" else screen


def _fallback_to(missing: BackendUnavailable, settings: Settings, policy: Policy, level: Level) -> FoundBackend:
    fallback = {"asked": settings.backend, "used": LOCAL, "level": str(level), "reason": missing.reason}
    log.info("backend %s is missing, trusted code falls back to level %s: %s", settings.backend, level, missing)
    return FoundBackend(backend=backend_named(LOCAL), policy=policy, notes={"fallback": fallback})


def _no_fallback(missing: BackendUnavailable, why: str) -> NoReturn:
    raise BackendUnavailable(f"{missing.reason} There is no fallback: {why}.", remedy=missing.remedy) from missing


def _origin(settings: Settings, key: str) -> Origin:
    return settings.origins.get(key, ARGUMENT)
