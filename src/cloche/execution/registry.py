"""Backends by name: the only file that imports concrete ones, each when it is first used.

Their rows are in `core.policy.BACKEND_ROWS`. Here the objects are made and measured on this host, and `collect_garbage`
removes what dead processes left.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, InternalError, InvalidRequest
from cloche.core.layers import SupportsOwnInterpreter
from cloche.core.limits import Limits
from cloche.core.policy import BACKEND_ROWS, BackendRow, Policy
from cloche.core.processes import no_life_of
from cloche.core.protocols import (
    Backend,
    Capabilities,
    SupportsAccount,
    SupportsBuilding,
    SupportsCheck,
    SupportsGarbageCollection,
    SupportsImages,
    SupportsLevels,
    SupportsLive,
    SupportsReadiness,
    SupportsWorkspaceContainers,
)
from cloche.core.record import dataclass, replace
from cloche.core.remote import RemoteAccount
from cloche.core.request import WorkspaceContainer
from cloche.core.result import KillCause, Result, decide
from cloche.core.suppressed import suppress_logged
from cloche.keeper import registry as names
from cloche.packages.folders import default_folder, sweep

if TYPE_CHECKING:
    from cloche.backends.remote.quota import Counter

log = logging.getLogger("cloche.runtime")
LINUX, WINDOWS = "linux", "win32"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
USE_LOCAL = 'Use the default backend "local", which needs nothing to be set up.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Name one thing that `auto` may choose: a backend, at one level where it has several."""

    backend: str
    level: Level | None = None
    max_level: Level


# What `auto` may choose, the fastest first. Services are not here: code leaves this machine only when it is told to.
OPTIONS: Sequence[Option] = tuple(
    Option(backend=name, level=row.auto_level, max_level=row.auto_max_level)
    for name, row in BACKEND_ROWS.items()
    if row.auto_max_level is not None
)


def row_of(name: str) -> BackendRow:
    """Return the row of the backend called `name` (any case), or raise InvalidRequest naming the known ones."""
    row = BACKEND_ROWS.get(name) or BACKEND_ROWS.get(name.strip().lower())
    if row is None:
        raise InvalidRequest(f"unknown backend {name!r}; known backends: {', '.join(BACKEND_ROWS)}")
    return row


def backend_named(
    name: str,
    *,
    images: Mapping[str, str] | None = None,
    needs_image: bool = False,
    accounts: Mapping[str, RemoteAccount] | None = None,
) -> Backend:
    """Return the backend called `name`, with these images and accounts where it uses any.

    Of a name with two backends behind it, the first that works; `needs_image` leaves out the one without images. Raises
    InvalidRequest for an unknown name, BackendUnavailable with the remedy for one that cannot be had here.
    """
    backends = [_set_up(candidate, images, accounts) for candidate in _backends_of(name, needs_image=needs_image)]
    if len(backends) == 1:
        _check(backends[0])
        return backends[0]
    measured = [_measure(candidate, name, row_of(name).level) for candidate in backends]
    for backend, can in zip(backends, measured, strict=True):
        if can.available:
            return backend
    none = _unavailable(name, measured)
    try:
        _check(backends[0])
    except BackendUnavailable as error:
        raise BackendUnavailable(f"backend {name!r}: {none.reason}.", remedy=none.remedy) from error
    return backends[0]  # it is there; what it lacks, an image say, it gets itself, or says so


def _check(backend: Backend) -> None:
    if has_power(backend, SupportsCheck):
        cast("SupportsCheck", backend).check()


def has_power(backend: Backend, power: type) -> bool:
    """Tell whether a backend has the methods of a protocol."""
    return _has_methods(type(backend), power)


@cache
def _has_methods(kind: type, power: type) -> bool:
    """Tell whether a class has the methods of a protocol; looked up once, for each run asks."""
    return issubclass(kind, power)


def _backends_of(name: str, *, needs_image: bool = False) -> list[Backend]:
    """Return the backends behind a name, best first, without asking them whether they work here."""
    instead = None if needs_image else row_of(name).alternative
    return [_backend_of(name), *([_load(instead, os.getpid())] if instead else [])]


def _backend_of(name: str) -> Backend:
    """Return a backend without asking it whether it works here."""
    row = row_of(name)
    if row.provider is None and not row.needs:
        raise BackendUnavailable(f"backend {name!r} is a choice among the others.", remedy="Name one of them here.")
    if row.provider is None:
        reason = f"backend {name!r} ({row.needs}) is not part of this version of Cloche."
        raise BackendUnavailable(reason, remedy=USE_LOCAL)
    backend = _load(row.provider, os.getpid())
    if row.is_remote and not has_power(backend, SupportsAccount):
        raise InternalError(f"backend {name!r} sends code elsewhere, and cannot say with which account")
    return backend


def _set_up(
    backend: Backend, images: Mapping[str, str] | None, accounts: Mapping[str, RemoteAccount] | None
) -> Backend:
    """Return the backend with what is configured for it."""
    if accounts and (account := accounts.get(backend.name)) and has_power(backend, SupportsAccount):
        return cast("Backend", cast("SupportsAccount", backend).with_account(account))
    return with_images(backend, images or {})


def collect_garbage(accounts: Mapping[str, RemoteAccount] | None = None) -> Mapping[str, Sequence[str]]:
    """Remove what dead processes left, by backend; those that cannot be had have nothing of ours to remove.

    Providers are asked only where an account is given; what they answer wrongly is logged, and the others go on.
    """
    removed: dict[str, Sequence[str]] = {}
    tried: set[str] = set()
    for name, row in BACKEND_ROWS.items():
        for target in (row.provider, row.alternative):
            if target is None or target in tried or (row.is_remote and name not in (accounts or {})):
                continue
            tried.add(target)
            try:
                backend = _set_up(_load(target, os.getpid()), None, accounts)
                if isinstance(backend, SupportsGarbageCollection):
                    removed[backend.name] = backend.collect_garbage()
            except BackendUnavailable as error:
                log.log(logging.WARNING if row.is_remote else logging.DEBUG, "%s", error)
    if removed_items := sweep(default_folder()):
        removed["packages"] = [f"folder {path}" for path in removed_items]
    if removed_items := names.clear():
        removed["keeper"] = [f"file {path}" for path in removed_items]
    return removed


def prune_copies(folder: str) -> list[str]:
    """Remove the copies that backends keep of layers which are no longer below a folder; return a line for each."""
    removed: list[str] = []
    for provider in (row.provider for row in BACKEND_ROWS.values() if row.provider is not None):
        with suppress_logged(log, "what cannot be had keeps what it has", BackendUnavailable):
            backend = _load(provider, os.getpid())
            if isinstance(backend, SupportsOwnInterpreter):
                removed += [f"{backend.name}: {line}" for line in backend.prune_layers(folder)]
    return removed


def counter_of(account: RemoteAccount) -> Counter | None:
    """Return what counts the use of an account, None where nothing is limited."""
    from cloche.backends.remote.quota import counter_for  # SQLite, where code goes elsewhere alone

    return counter_for(account)


def is_shown_anyway(path: str) -> bool:
    """Tell whether every jail shows a path of this host."""
    from cloche.backends.toolchain import SHOWN_TREES

    return any(path == top or path.startswith(f"{top}/") for top in SHOWN_TREES)


def prefixes_for(program: str) -> tuple[str, ...]:
    """Return the folders that a jail must show for a program of this host to run there."""
    from cloche.backends.toolchain import suggested_prefixes

    return suggested_prefixes(program)


def npm_programs() -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return this host's npm and its Node, by name, and what a jail shows for them. Raises BackendUnavailable."""
    from cloche.backends.toolchain import npm_toolchain

    toolchain = npm_toolchain()
    return toolchain.programs, toolchain.binds


def guest_environment() -> Mapping[str, str]:
    """Return the variables that a guest of the local backend would get on this host."""
    from cloche.backends.layout import guest_variables, search_path

    return {"PATH": search_path(), **guest_variables()}


def container_profile() -> str:
    """Return the seccomp profile of a container in which jails can be made, as JSON."""
    from cloche.backends.container_profile import FILE

    return FILE.read_text(encoding="utf-8")


def is_gvisor() -> bool:
    """Tell whether this machine's kernel is gVisor."""
    from cloche.backends.remedies import look_around

    return look_around().is_gvisor


def group_remedy(uid: int, *, is_unified: bool | None = None) -> str:
    """Say how a user gets control groups: of version 2 if that is so, which is looked for where it is not said."""
    from cloche.backends import remedies

    return remedies.group_remedy(uid, is_unified=remedies.has_unified_groups() if is_unified is None else is_unified)


def build_image(name: str, packages: Sequence[str]) -> str:
    """Build the image that a backend runs in, and return a line that names it.

    Raises InvalidRequest for a backend that has none to build, BackendUnavailable for a program that is missing,
    StartFailed for what could not be had.
    """
    backend = _backend_of(name)
    if not isinstance(backend, SupportsBuilding):
        raise InvalidRequest(f"backend {name!r} runs in no image that is built here; microvm does")
    return backend.build_image(packages)


def workspace_arguments(container: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
    """Return the argument list that starts an agent's container. Raises BackendUnavailable."""
    return cast("SupportsWorkspaceContainers", _backend_of("docker")).workspace_arguments(container, policy, limits)


def _check_packing(target: str) -> None:
    """Raise BackendUnavailable in a program that Cloche was packed into, for what starts interpreters or sends code."""
    if target == BACKEND_ROWS["cloche"].provider:
        return
    remedy = "Install Cloche with pip into a virtual environment, and run that one's python."
    if getattr(sys, "frozen", False):  # started again with other words it would do what it does, not what they say
        why = "this program was frozen, with PyInstaller or the like, and has no interpreter that sandboxes start with."
    elif not os.path.isfile(os.path.join(PACKAGE, "interpreter", "oneshot.py")):
        why = f"Cloche is imported from an archive, {os.path.dirname(PACKAGE)}, and its modules must be files."
    elif not sys.executable:
        why = "this program embeds Python, and sys.executable does not say which interpreter sandboxes start with."
    else:
        return
    raise BackendUnavailable(why, remedy=remedy)


@cache
def _load(target: str, _pid: int) -> Backend:
    """Make a backend once per process; a forked child measures for itself."""
    module, _, attribute = target.partition(":")
    _check_packing(target)
    if sys.platform != LINUX:
        from cloche.core.other_systems import unavailable_on

        needing = [name for name, row in BACKEND_ROWS.items() if target in (row.provider, row.alternative)]
        if all(BACKEND_ROWS[name].needs_linux for name in needing) or sys.platform == WINDOWS:
            raise unavailable_on(sys.platform, needing[0])
    try:
        return cast(Backend, getattr(importlib.import_module(module), attribute)())
    except ImportError as error:
        reason = f"{module} cannot be imported: {error}."
        raise BackendUnavailable(reason, remedy="Install the extra that brings it.") from error


def policy_for(name: str, policy: Policy) -> Policy:
    """Return the policy with the level that the name stands for (`subprocess` is always `process`)."""
    level = row_of(name).level
    if level is None:
        return policy
    if policy.level not in (None, level):
        raise InvalidRequest(f"backend {name!r} runs at level {level}, but level {policy.level} is asked for; drop one")
    return policy.with_changes(level=level)


def capabilities_of(
    name: str,
    *,
    level: Level | None = None,
    images: Mapping[str, str] | None = None,
    needs_image: bool = False,
    accounts: Mapping[str, RemoteAccount] | None = None,
) -> Capabilities:
    """Say what a backend can do here, without raising: what is missing becomes `reason`.

    `level` asks for one exactly, as names do that stand for one; None for the strongest.
    """
    try:
        backends = [_set_up(candidate, images, accounts) for candidate in _backends_of(name, needs_image=needs_image)]
    except BackendUnavailable as error:
        return Capabilities(backend=name, available=False, reason=error.reason, remedy=error.remedy)
    required_level = row_of(name).level if level is None else level
    measured = []
    for backend in backends:
        measured.append(_measure(backend, name, required_level))
        if measured[-1].available:
            capabilities = measured[-1]
            return (
                capabilities if isinstance(backend, SupportsLive) else replace(capabilities, not_live=no_life_of(name))
            )
    return _unavailable(name, measured)


def gvisor_without_docker() -> Capabilities:
    """Say what gVisor can do here without docker."""
    return _load(str(row_of("gvisor").alternative), os.getpid()).capabilities()


def _measure(backend: Backend, name: str, required_level: Level | None) -> Capabilities:
    if required_level is None:
        return backend.capabilities()
    if isinstance(backend, SupportsLevels):
        return replace(backend.capabilities_at(required_level), backend=name)
    capabilities = backend.capabilities()
    if capabilities.available and capabilities.level is not required_level:
        reason = f"it gives level {capabilities.level}, and level {required_level} is asked for"
        return Capabilities(backend=name, available=False, reason=reason)
    return capabilities


def _unavailable(name: str, measured: Sequence[Capabilities]) -> Capabilities:
    """Say why none of the backends behind a name can be used, and what to do about each."""
    reasons = "; and without it, ".join(capabilities.reason.rstrip(".") for capabilities in measured)
    remedies = " Or: ".join(capabilities.remedy for capabilities in measured if capabilities.remedy)
    return Capabilities(backend=name, available=False, reason=reasons, remedy=remedies)


def why_not_ready(name: str, images: Mapping[str, str], *, needs_image: bool = False) -> str:
    """Say what a run in an available backend would have to fetch first, or why that cannot be said."""
    try:
        backend = backend_named(name, images=images, needs_image=needs_image)
        return backend.why_not_ready() if isinstance(backend, SupportsReadiness) else ""
    except BackendUnavailable as error:
        return str(error)


def with_images(backend: Backend, images: Mapping[str, str]) -> Backend:
    """Return the backend with these images, where it uses any."""
    return cast("SupportsImages", backend).with_images(images) if has_power(backend, SupportsImages) else backend


def command_result(ended: Mapping[str, Any], cause: KillCause | None, **facts: Any) -> Result:  # noqa: ANN401 - theirs
    """Return what came of a command in a sandbox of backend `local`, by how its end was reported."""
    from cloche.backends import live

    return live.command_result(decide(live.observed_end(ended, cause)), ended, **facts)


def command_error(answer: dict[str, Any] | None, message: str, *, process: str | None) -> Exception:
    """Return why such a command did not start, or why its end is not known."""
    from cloche.backends import live

    return live.command_error(answer, message, process=process)
