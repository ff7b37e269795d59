"""What runs the operator's own code where the backend that was chosen is missing (S12).

Theory of operation: nothing falls back unless the policy says `fallback: process` *and* the caller marked this code as
trusted; what a model wrote never is. Then the local backend is tried, at its strongest. Where even that does not give
what the policy asks for, a child process with limits does, unless the policy asks for more than that: a level, a
control, or a network that is off because somebody said so. The screen reads what such a process is to run. The result,
the log and the command line say that it happened.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from cloche.core.errors import BackendUnavailable, PolicyDenied
from cloche.core.levels import Control, Level
from cloche.core.policy import Policy, ScreenMode

from .config_keys import ARGUMENT, DEFAULT, Origin
from .factory import backend_named, capabilities_of
from .selection import Found, misfit
from .settings import Settings

LOCAL = "local"
log = logging.getLogger("cloche.runtime")


def fall_back(missing: BackendUnavailable, settings: Settings, policy: Policy) -> Found:
    """Return what may run trusted code instead of what is missing.

    Raises `missing` where there is no fallback, or none that gives what the policy asks for; PolicyDenied where the
    network has to be off and would not be.
    """
    if policy.fallback == "none":
        raise missing
    if not policy.trusted:
        _refuse(missing, f"fallback {policy.fallback!r} ({_origin(settings, 'fallback')}) is for trusted code only")
    if policy.runtime is not None:
        _refuse(missing, f"runtime {policy.runtime} ({_origin(settings, 'runtime')}) is demanded, so nothing else runs")
    local = capabilities_of(LOCAL, level=policy.level)
    why_not_local = misfit(local, policy)
    if not why_not_local and local.level > Level.PROCESS:
        return _found(missing, settings, policy, local.level)
    if policy.level not in (None, Level.PROCESS):
        _refuse(missing, f"level {policy.level} is asked for, so nothing less runs ({why_not_local})")
    if policy.require_level is not None and policy.require_level > Level.PROCESS:
        _refuse(missing, f"level {policy.require_level} is required, so nothing less runs ({why_not_local})")
    _check_network(settings, policy)
    as_process = policy.with_changes(level=Level.PROCESS, screen=_screen(settings))
    why_no_process = misfit(capabilities_of(LOCAL, level=Level.PROCESS), as_process)
    if why_no_process:
        _refuse(missing, f"a child process does not do instead: {why_no_process}")
    return _found(missing, settings, as_process, Level.PROCESS)


def check_local(policy: Policy) -> None:
    """Raise BackendUnavailable where the local backend does not give what the policy asks for."""
    why_not = misfit(capabilities_of(LOCAL, level=policy.level), policy)
    if why_not:
        raise BackendUnavailable(
            f'backend "local": {why_not}.', remedy='Run "cloche doctor" to see what this host has.'
        )


def _check_network(settings: Settings, policy: Policy) -> None:
    """Raise PolicyDenied where the network was said to be off or narrow: a child process has all of the host's."""
    origin = _origin(settings, "network")
    if Control.NETWORK in policy.require_controls:
        said = f"the policy requires the control network ({_origin(settings, 'require')})"
    elif policy.network != "open" and origin != DEFAULT:
        said = f"the policy says network {policy.network} ({origin})"
    else:
        return
    raise PolicyDenied(
        f"{said}, and backend {settings.backend!r} is missing. Even trusted code does not fall back to a child process "
        "then, which would have the host's network. Start the backend, or take the network out of the policy"
    )


def _screen(settings: Settings) -> ScreenMode:
    """Return the screen of a child process: the one that was asked for, else the strict one; never none."""
    asked = settings.policy.screen
    return "block" if asked == "off" else asked


def _found(missing: BackendUnavailable, settings: Settings, policy: Policy, level: Level) -> Found:
    note = {"asked": settings.backend, "used": LOCAL, "level": str(level), "reason": missing.reason}
    log.info("backend %s is missing, trusted code falls back to level %s: %s", settings.backend, level, missing)
    return Found(backend=backend_named(LOCAL), policy=policy, notes={"fallback": note})


def _refuse(missing: BackendUnavailable, why: str) -> NoReturn:
    raise BackendUnavailable(f"{missing.reason} There is no fallback: {why}.", remedy=missing.remedy) from missing


def _origin(settings: Settings, word: str) -> Origin:
    return settings.origins.get(word, ARGUMENT)
