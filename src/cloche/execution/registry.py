"""Backends by name: the only module that imports concrete ones, each on first use.

Their rows are in `core.policy.BACKEND_ROWS`. This module creates the backend objects, measures their capabilities on
this host, and removes the leftovers of dead processes (`collect_garbage`).
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
from cloche.core.languages import Engine, Language
from cloche.core.layers import SupportsImageDigests, SupportsOwnInterpreter
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate of `auto`: a backend, at one level if it has several."""

    backend: str
    level: Level | None = None
    max_level: Level


# Candidates of `auto`, the fastest first. Remote services are none: code leaves this machine only if configured.
OPTIONS: Sequence[Option] = tuple(
    Option(backend=name, level=row.auto_level, max_level=row.auto_max_level)
    for name, row in BACKEND_ROWS.items()
    if row.auto_max_level is not None
)


def row_of(name: str) -> BackendRow:
    """Return the row of the backend called `name` (any case). Raises InvalidRequest naming the known ones."""
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
    """Return the backend called `name`, with these images and accounts if it uses any.

    If two backends share the name, the first that works is returned; `needs_image` excludes the one without images.
    Raises InvalidRequest for an unknown name, BackendUnavailable with a remedy for one that is not available here.
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
    return backends[0]  # available; it fetches a missing image itself, or reports it


def _check(backend: Backend) -> None:
    if has_power(backend, SupportsCheck):
        cast("SupportsCheck", backend).check()


def has_power(backend: Backend, power: type) -> bool:
    """Tell whether a backend has the methods of a protocol."""
    return _has_methods(type(backend), power)


@cache
def _has_methods(kind: type, power: type) -> bool:
    """Tell whether a class has the methods of a protocol; cached, since every run asks."""
    return issubclass(kind, power)


def _backends_of(name: str, *, needs_image: bool = False) -> list[Backend]:
    """Return the backends behind a name, best first, without checking whether they work here."""
    instead = None if needs_image else row_of(name).alternative
    return [_backend_of(name), *([_load(instead, os.getpid())] if instead else [])]


def _backend_of(name: str) -> Backend:
    row = row_of(name)
    if row.provider is None:
        raise BackendUnavailable(f"backend {name!r} is a choice among the others.", remedy="Name one of them here.")
    backend = _load(row.provider, os.getpid())
    if row.is_remote and not has_power(backend, SupportsAccount):
        raise InternalError(f"backend {name!r} sends code elsewhere, but does not name the account")
    return backend


def _set_up(
    backend: Backend, images: Mapping[str, str] | None, accounts: Mapping[str, RemoteAccount] | None
) -> Backend:
    if accounts and (account := accounts.get(backend.name)) and has_power(backend, SupportsAccount):
        backend = cast("Backend", cast("SupportsAccount", backend).with_account(account))
    return with_images(backend, images or {})


def collect_garbage(accounts: Mapping[str, RemoteAccount] | None = None) -> Mapping[str, Sequence[str]]:
    """Remove the leftovers of dead processes, and return them by backend. Unavailable backends are skipped.

    Remote providers are only contacted if an account is given; their failures are logged, and the others continue.
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


def image_digests(name: str) -> Sequence[str]:
    """Return the digests of a backend's images; none of one that has no list. Blocks. Raises BackendUnavailable."""
    backend = _backend_of(name)
    return backend.image_digests() if isinstance(backend, SupportsImageDigests) else ()


def prune_copies(folder: str) -> list[str]:
    """Remove backends' copies of layers that no longer exist below a folder; return a line for each."""
    removed: list[str] = []
    for provider in (row.provider for row in BACKEND_ROWS.values() if row.provider is not None):
        with suppress_logged(log, "the unreachable backend keeps its leftovers", BackendUnavailable):
            backend = _load(provider, os.getpid())
            if isinstance(backend, SupportsOwnInterpreter):
                removed += [f"{backend.name}: {line}" for line in backend.prune_layers(folder)]
    return removed


def counter_of(account: RemoteAccount) -> Counter | None:
    """Return the usage counter of an account, None if it has no limit."""
    from cloche.backends.remote.quota import counter_for  # imports sqlite3, which only remote backends need

    return counter_for(account)


def is_shown_anyway(path: str) -> bool:
    """Tell whether every jail shows a host path."""
    from cloche.backends.toolchain import SHOWN_TREES

    return any(path == top or path.startswith(f"{top}/") for top in SHOWN_TREES)


def prefixes_for(program: str) -> tuple[str, ...]:
    """Return the folders that a jail must show so that a host program can run there."""
    from cloche.backends.toolchain import suggested_prefixes

    return suggested_prefixes(program)


def npm_programs() -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the paths of npm and Node on this host, and the folders that a jail shows for them. Raises
    BackendUnavailable.
    """
    from cloche.backends.toolchain import npm_toolchain

    toolchain = npm_toolchain()
    return toolchain.programs, toolchain.binds


def engine_here(language: Language) -> tuple[Engine, Mapping[str, str], Mapping[str, str]]:
    """Return the engine that runs a language on this host, its programs' paths and its variables.

    Raises LanguageUnavailable.
    """
    from cloche.backends.toolchain import find_toolchain

    toolchain = find_toolchain(language)
    return toolchain.engine, toolchain.programs, toolchain.env


def guest_environment() -> Mapping[str, str]:
    """Return the variables of a local guest on this host."""
    from cloche.backends.layout import guest_variables, search_path

    return {"PATH": search_path(), **guest_variables()}


def container_profile() -> str:
    """Return the seccomp profile, as JSON, for a container in which jails can be created."""
    from cloche.backends.container_profile import FILE

    return FILE.read_text(encoding="utf-8")


def is_gvisor() -> bool:
    """Tell whether this machine's kernel is gVisor."""
    from cloche.backends.remedies import look_around

    return look_around().is_gvisor


def group_remedy(uid: int, *, is_unified: bool | None = None) -> str:
    """Return how a user gets control groups. `is_unified` says whether they are version 2; by default it is
    detected.
    """
    from cloche.backends import remedies

    return remedies.group_remedy(uid, is_unified=remedies.has_unified_groups() if is_unified is None else is_unified)


def build_image(name: str, packages: Sequence[str]) -> str:
    """Build the image of a backend, and return a line that names it.

    Raises InvalidRequest for a backend without an image to build, BackendUnavailable for a missing program, StartFailed
    for a failed download.
    """
    backend = _backend_of(name)
    if not isinstance(backend, SupportsBuilding):
        raise InvalidRequest(f"backend {name!r} does not use an image that is built here; microvm does")
    return backend.build_image(packages)


def workspace_arguments(container: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
    """Return the argument list that starts an agent's container. Raises BackendUnavailable."""
    return cast("SupportsWorkspaceContainers", _backend_of("docker")).workspace_arguments(container, policy, limits)


def _check_packing(target: str) -> None:
    """Raise BackendUnavailable in a frozen or embedding program, unless the backend needs no interpreter on this
    host.
    """
    if target == BACKEND_ROWS["cloche"].provider:
        return
    remedy = "Install Cloche with pip into a virtual environment, and run that one's python."
    if getattr(sys, "frozen", False):  # sys.executable is the frozen program, which ignores interpreter options
        why = (
            "this program was frozen (with PyInstaller, for example), so there is no Python interpreter to start "
            "sandboxes with."
        )
    elif not os.path.isfile(os.path.join(PACKAGE, "interpreter", "oneshot.py")):
        why = f"Cloche is imported from an archive, {os.path.dirname(PACKAGE)}, but its modules must be files."
    elif not sys.executable:
        why = "this program embeds Python, and sys.executable does not name an interpreter to start sandboxes with."
    else:
        return
    raise BackendUnavailable(why, remedy=remedy)


@cache
def _load(target: str, _pid: int) -> Backend:
    """Create a backend once per process; a forked child measures again."""
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
    """Return the policy with the level that the name implies (`subprocess` is always `process`)."""
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
    """Return a backend's capabilities here, without raising: a missing requirement becomes `reason`.

    `level` requests exactly that level; None means the strongest.
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
    """Return the capabilities of gVisor here without docker."""
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
    reasons = "; and without it, ".join(capabilities.reason.rstrip(".") for capabilities in measured)
    remedies = " Or: ".join(capabilities.remedy for capabilities in measured if capabilities.remedy)
    return Capabilities(backend=name, available=False, reason=reasons, remedy=remedies)


def why_not_ready(name: str, images: Mapping[str, str], *, needs_image: bool = False) -> str:
    """Return what a run in an available backend would have to download first, or why that is unknown; empty if
    nothing.
    """
    try:
        backend = backend_named(name, images=images, needs_image=needs_image)
        return backend.why_not_ready() if isinstance(backend, SupportsReadiness) else ""
    except BackendUnavailable as error:
        return str(error)


def with_images(backend: Backend, images: Mapping[str, str]) -> Backend:
    """Return the backend with these images, if it uses any."""
    return cast("SupportsImages", backend).with_images(images) if has_power(backend, SupportsImages) else backend


def command_result(ended: Mapping[str, Any], cause: KillCause | None, **facts: Any) -> Result:  # noqa: ANN401 - passed on
    """Return the result of a command in a sandbox of backend `local`, from the reported end."""
    from cloche.backends import live_process

    return live_process.command_result(decide(live_process.observed_end(ended, cause)), ended, **facts)


def command_error(answer: dict[str, Any] | None, message: str, *, process: str | None) -> Exception:
    """Return why such a command did not start, or why its outcome is unknown."""
    from cloche.backends import live_process

    return live_process.command_error(answer, message, process=process)
