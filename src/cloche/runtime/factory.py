"""Backends by name. The only file that names concrete ones; each is imported when it is first used."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from cloche.core.capabilities import Capabilities
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.levels import Level
from cloche.core.policy import Policy
from cloche.core.protocols import Backend, SupportsCheck, SupportsClearing

log = logging.getLogger("cloche.runtime")
USE_LOCAL = 'Use the default backend "local", which needs nothing to be set up.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Say where a backend's code is, or why there is none.

    `target` is "module:attribute", called without arguments; `level` is the one level that this name stands
    for; `missing` explains the lack of a backend when there is no target; `takes_image` says whether an image
    can be chosen.
    """

    summary: str
    target: str | None = None
    level: Level | None = None
    missing: Callable[[], str] | None = None
    takes_image: bool = False


def _absent(name: str, *, needs: str) -> Callable[[], str]:
    def explain() -> str:
        return f"backend {name!r} ({needs}) is not part of this version of Cloche. {USE_LOCAL}"

    return explain


_LOCAL = "cloche.backends.local:LocalBackend"
_DOCKER = "cloche.backends.docker:DockerBackend"

PROVIDERS: Mapping[str, Provider] = {
    "local": Provider(summary="native Linux jail, nothing to set up", target=_LOCAL),
    "auto": Provider(summary="the strongest backend there is; today that is local", target=_LOCAL),
    "subprocess": Provider(summary="child process with limits, no isolation", target=_LOCAL, level=Level.PROCESS),
    "none": Provider(summary="the host itself; a child process with limits", target=_LOCAL, level=Level.PROCESS),
    "docker": Provider(summary="throwaway container", target="cloche.backends.docker:DockerBackend", takes_image=True),
    "gvisor": Provider(summary="container on gVisor", target=_DOCKER, level=Level.GVISOR, takes_image=True),
    "firecracker": Provider(summary="microVM on Firecracker", missing=_absent("firecracker", needs="a microVM")),
    "microvm": Provider(summary="microVM on QEMU", missing=_absent("microvm", needs="a microVM")),
    "microsandbox": Provider(summary="microsandbox server", missing=_absent("microsandbox", needs="its server")),
    "e2b": Provider(summary="E2B cloud", missing=_absent("e2b", needs="a remote service")),
    "daytona": Provider(summary="Daytona cloud", missing=_absent("daytona", needs="a remote service")),
    "kubernetes": Provider(summary="pods of a cluster", missing=_absent("kubernetes", needs="a cluster")),
    "ray": Provider(summary="workers of a Ray cluster", missing=_absent("ray", needs="a cluster")),
}


def provider_named(name: str) -> Provider:
    """Return the provider called `name` (any case), or raise InvalidRequest naming the known ones."""
    try:
        return PROVIDERS[name.strip().lower()]
    except KeyError:
        raise InvalidRequest(f"unknown backend {name!r}; known backends: {', '.join(PROVIDERS)}") from None


def backend_named(name: str) -> Backend:
    """Return the backend called `name`.

    Raises InvalidRequest for an unknown name, BackendUnavailable with the remedy for one that cannot be had
    here.
    """
    provider = provider_named(name)
    if provider.target is None:
        raise BackendUnavailable(provider.missing() if provider.missing else f"backend {name!r} is not available")
    backend = _load(provider.target, os.getpid())
    if isinstance(backend, SupportsCheck):
        backend.check()
    return backend


def clear_remains() -> Mapping[str, Sequence[str]]:
    """Remove what dead processes left, by backend; those that cannot be had have nothing of ours to remove."""
    found: dict[str, Sequence[str]] = {}
    for name in PROVIDERS:
        try:
            backend = backend_named(name)
        except BackendUnavailable as error:
            log.debug("%s", error)
            continue
        if isinstance(backend, SupportsClearing) and backend.name not in found:
            found[backend.name] = backend.clear()
    return found


@cache
def _load(target: str, _pid: int) -> Backend:
    """Make a backend once per process; a forked child measures for itself."""
    module, _, attribute = target.partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), attribute)())
    except ImportError as error:
        raise BackendUnavailable(f"{module} cannot be imported: {error}. Install the extra that brings it.") from error


def policy_for(name: str, policy: Policy) -> Policy:
    """Return the policy with the level that the name stands for (`subprocess` is always `process`)."""
    level = provider_named(name).level
    if level is None:
        return policy
    if policy.level not in (None, level):
        raise InvalidRequest(f"backend {name!r} runs at level {level}, but level {policy.level} is asked for; drop one")
    return policy.with_changes(level=level)


def capabilities_of(name: str) -> Capabilities:
    """Say what a backend can do here, without raising: what is missing becomes `reason`."""
    try:
        found = backend_named(name).capabilities()
    except BackendUnavailable as error:
        return Capabilities(backend=name, available=False, reason=str(error))
    level = provider_named(name).level
    if level is None or not found.available:
        return found
    if found.level < level:
        return Capabilities(backend=name, available=False, reason=found.reason, remedy=found.remedy)
    return Capabilities(backend=name, available=True, level=level, reason=f"backend {name!r} stands for this level")
