"""The local backend: the native jail of this host, at the strongest level that the host and the policy allow."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cloche.core.enforcement import Enforcement, Level, NetworkMode
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.languages import Language
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities, Keeping
from cloche.core.record import replace
from cloche.egress.client import operator_proxies, rest
from cloche.hostfs import may_search_all

from ..enforcement import CONNECTED, LOST_BELOW_CONFINED, NAMESPACE, check_policy, local_controls, with_network
from ..garbage_collection import remove_folders, remove_groups
from ..host import Host, measure_host, why_unread_memory, with_limit
from ..network import SERVED
from ..remedies import group_remedy, has_unified_groups, look_around, remedy, why_not_higher
from ..session_languages import DRIVERS
from ..toolchain import Toolchain, find_toolchain, languages_here
from .plan import KIND, closed_folder, closed_to_guests, has_range
from .prefork import close_pools
from .sandbox import LocalOpenSandbox

if TYPE_CHECKING:
    from .live import LocalLiveSandbox

DOCTOR = 'run "cloche doctor"'
MOST_SETTLED = 64


class _Closable(Protocol):
    async def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)


class LocalBackend:
    """Provide sandboxes made by this host's kernel alone.

    With `use_cgroups=False`, control groups are not used even if available. Limits then rest on rlimits and on summing
    the process tree, as for a user without a delegated group.
    """

    name = "local"
    takes_secrets = writes_secret_files = prepares_for_secrets = True
    starts_eagerly = True  # its runs need no task before they wait for the first time
    serves_functions = "all"  # of the caller, to all guests

    def __init__(self, *, use_cgroups: bool = True):
        self._use_cgroups = use_cgroups
        self._settled: dict[Policy, tuple[Host, Enforcement]] = {}
        self._last: tuple[Policy, Host, Enforcement] | None = None
        self._plain: tuple[Host, Host] | None = None

    def capabilities(self) -> Capabilities:
        """Return this host's strongest level with its controls; measured once per process."""
        return self._capabilities(None)

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return the controls enforced at a level; unavailable, with the reason, at a level above this host's."""
        return self._capabilities(level)

    def languages(self) -> tuple[str, ...]:
        """Return the languages with a toolchain on this host."""
        return languages_here()

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages whose sessions can run on this host."""
        return tuple(DRIVERS)

    def _capabilities(self, required_level: Level | None) -> Capabilities:
        try:
            host = self._host()
        except OSError as error:
            return Capabilities(backend=self.name, available=False, reason=str(error), remedy=DOCTOR)
        best = host.level()
        level = best if required_level is None else required_level
        return Capabilities(
            backend=self.name,
            available=level <= best,
            level=level,
            controls=local_controls(level, host) if level <= best else {},
            networks=_networks(level),
            reason=_why_not(level, host) if required_level is not None else _why_not_higher(host),
            remedy=remedy(host, look_around()),
            not_live=_why_no_life(level, host),
            not_users="" if has_range(host) else "this host has no range of ids to give",
            names_accounts=level is Level.JAIL,
        )

    def toolchain(self, language: Language) -> Toolchain:
        """Return the toolchain that runs `language` here. Raises BackendUnavailable naming the package to install."""
        return find_toolchain(language)

    def check_layers(self, policy: Policy) -> None:
        """Do nothing: layers work at every level."""

    def check_node_modules(self, policy: Policy) -> None:
        """Do nothing: layers of npm packages work at every level."""

    def check_added_layers(self, policy: Policy) -> None:
        """Raise BackendUnavailable if the guest, a user other than root, may not search the layers' folder."""
        if os.geteuid() != 0 or may_search_all() or self._settle(policy)[1].level is not Level.CONFINED:
            return
        if closed := closed_folder(policy.layers):
            raise BackendUnavailable(closed_to_guests(closed))

    def open(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[LocalOpenSandbox]:
        """Open a sandbox; nothing is started before its first run.

        Entering it raises BackendUnavailable if this host cannot enforce the policy.
        """
        return _Opening(self._make, policy, limits)

    def why_no_view(self, level: Level | None) -> str:
        """Return the reason why a folder cannot be shown copy-on-write; see core.changes.SupportsHostFolder."""
        host = self._host()
        if (host.level() if level is None else level) is not Level.JAIL:
            return "only level jail has such views"
        return (
            f"this host does not support id-mapped mounts: {host.idmapped}" if host.owns_ids and host.idmapped else ""
        )

    def open_live(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[LocalLiveSandbox]:
        """Open a live sandbox; nothing is started before it is used.

        Entering it raises BackendUnavailable if no sandbox can live at the level.
        """
        return _Opening(self._make_live, policy, limits)

    def open_kept(
        self, policy: Policy, limits: Limits, keeping: Keeping
    ) -> AbstractAsyncContextManager[LocalLiveSandbox]:
        """Open a live sandbox and hand it to a keeper when it is entered; see core.protocols.SupportsNames."""
        return _Entering(lambda: self._make_live(policy, limits, keeping), lambda sandbox: sandbox.connected())

    def attach_live(
        self,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        connect: Callable[[], Awaitable[socket.socket]],
        check_greeting: Callable[[Mapping[str, Any]], None],
        join_network: Callable[[], socket.socket],
    ) -> AbstractAsyncContextManager[LocalLiveSandbox]:
        """Reconnect to a sandbox that a keeper holds; see core.protocols.SupportsNames."""

        def make() -> LocalLiveSandbox:
            sandbox_class = _live_class(enforcement.level)
            return sandbox_class(policy=policy, limits=limits, enforcement=enforcement, host=self._host())

        async def join(sandbox: LocalLiveSandbox) -> None:
            await sandbox.join(await connect(), join_network, check_greeting=check_greeting)

        return _Entering(make, join)

    def _make(self, policy: Policy, limits: Limits) -> LocalOpenSandbox:
        if policy.on_network == "ask" and policy.network in SERVED:
            raise InvalidRequest(
                'on_network: "ask" needs a live sandbox with an approver (sandbox.network.ask, or a '
                "toolbox's approver); leave it out for single runs"
            )
        host, enforcement = self._settle(policy)
        return LocalOpenSandbox(policy=policy, limits=limits, enforcement=enforcement, host=host)

    def _make_live(self, policy: Policy, limits: Limits, keeping: Keeping | None = None) -> LocalLiveSandbox:
        host, enforcement = self._settle(policy)
        why = _why_no_life(enforcement.level, host)
        if why:
            raise BackendUnavailable(
                f"{why}.",
                remedy=f"{_remedy(host) if host.level() < Level.JAIL else 'Leave level out, or use level jail.'} "
                "Without live=True, runs take turns at any level.",
            )
        sandbox_class = _live_class(enforcement.level)
        return sandbox_class(policy=policy, limits=limits, enforcement=enforcement, host=host, keeping=keeping)

    def _settle(self, policy: Policy) -> tuple[Host, Enforcement]:
        try:
            host = self._host()
        except OSError as error:
            message = f"the local backend cannot start a process here: {error}"
            raise BackendUnavailable(with_limit(message, error.errno)) from error
        if (policy.host_folder is not None or policy.home is not None) and host.ids is not None:
            host = self._without_ids(host)
        return host, self._enforced(policy, host)

    def _without_ids(self, host: Host) -> Host:
        """Return the host without subordinate ids: files of a folder view belong to the user's own id."""
        if self._plain is None or self._plain[0] is not host:
            self._plain = (
                host,
                replace(host, ids=None, ids_reason="files of a workspace belong to the user"),
            )
        return self._plain[1]

    def _enforced(self, policy: Policy, host: Host) -> Enforcement:
        """Return the enforcement for a policy, cached per policy. Raises BackendUnavailable."""
        last = self._last
        if last is not None and last[0] is policy and last[1] is host:  # cheaper than hashing all fields of the policy
            return last[2]
        settled = self._settled.get(policy)
        if settled is None or settled[0] is not host:
            level = _choose_level(policy, host)
            if policy.secrets is not None and level is not Level.JAIL:
                from cloche.core.secrets import noun_of  # needed by this error only

                noun, is_chosen = noun_of(policy.secrets), host.level() >= Level.JAIL
                raise BackendUnavailable(
                    f"{noun} need level jail, and this sandbox has level {level}.",
                    remedy=f"{'Choose no other level.' if is_chosen else _remedy(host)} Or leave the {noun} out.",
                )
            enforcement = Enforcement(level=level, controls=local_controls(level, host))
            if policy.network in SERVED and level in (Level.JAIL, Level.CONFINED):
                path_kind = NAMESPACE if level is Level.JAIL else CONNECTED
                enforcement = with_network(
                    enforcement, policy.network, is_proxied=bool(operator_proxies()), path_kind=path_kind
                )
            _check(policy, enforcement, host)
            if len(self._settled) >= MOST_SETTLED:
                self._settled.clear()
            settled = self._settled[policy] = (host, enforcement)
        self._last = (policy, *settled)
        return settled[1]

    def drain(self) -> None:
        """End this process's warm templates and prepared sandboxes; the next run starts cold."""
        close_pools()
        rest()

    def collect_garbage(self) -> list[str]:
        """Remove empty control groups and folders of dead processes; return a line for each."""
        groups = [f"control group {name}" for name in remove_groups(self._host(), KIND)]
        return [*groups, *(f"folder {path}" for path in remove_folders())]

    def _host(self) -> Host:
        host = measure_host()
        if host.ids is not None:
            host.ids.hold()
        return host if self._use_cgroups else host.without_cgroups()


class _Opening(Generic[S]):
    """Hold a sandbox open for a block. A class, because a generator-based context manager takes longer at every run."""

    __slots__ = ("_limits", "_make", "_policy", "_sandbox")

    def __init__(self, make: Callable[[Policy, Limits], S], policy: Policy, limits: Limits) -> None:
        self._make, self._policy, self._limits = make, policy, limits
        self._sandbox: S | None = None

    async def __aenter__(self) -> S:
        self._sandbox = self._make(self._policy, self._limits)
        return self._sandbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()


class _Entering:
    """Hold a sandbox that is opened when the block is entered."""

    def __init__(self, make: Callable[[], LocalLiveSandbox], begin: Callable[[LocalLiveSandbox], Awaitable[object]]):
        self._make, self._begin = make, begin
        self._sandbox: LocalLiveSandbox | None = None

    async def __aenter__(self) -> LocalLiveSandbox:
        sandbox = self._sandbox = self._make()
        try:
            await self._begin(sandbox)
        except BaseException:
            await finish(sandbox.close())
            raise
        return sandbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()


def _live_class(level: Level) -> type[LocalLiveSandbox]:
    """Return the class of live sandboxes at a level; imported late, since a throwaway run needs neither module."""
    if level is Level.CONFINED:
        from .confined_live import ConfinedLiveSandbox

        return ConfinedLiveSandbox
    from .live import LocalLiveSandbox

    return LocalLiveSandbox


def _why_no_life(level: Level, host: Host) -> str:
    if level is Level.CONFINED:
        from .confined_live import why_no_life

        return why_no_life(host)
    why = f" ({_why_not_higher(host)})" if host.level() < Level.JAIL else ""
    requirement = "level jail or confined, and this one has level"
    return "" if level is Level.JAIL else f"a live sandbox needs {requirement} {level}{why}"


def _choose_level(policy: Policy, host: Host) -> Level:
    """Return the policy's level, or the strongest of `jail` and `confined` if it names none."""
    best = host.level()
    policy_level = policy.level
    if policy_level is None:
        is_excused = best >= Level.PROCESS and set(policy.best_effort) >= set(LOST_BELOW_CONFINED)
        if best < Level.CONFINED and not is_excused:
            raise BackendUnavailable(f"neither jail nor confined works here: {_why_not_higher(host)}. {_remedy(host)}")
        return best
    if policy_level > best:
        raise BackendUnavailable(
            f"level {policy_level} cannot be reached here: {_why_not_higher(host)}. {_remedy(host)}"
        )
    return policy_level


def _networks(level: Level) -> tuple[NetworkMode, ...]:
    """Return the network modes at a level: below confined, the backend cannot keep a guest from opening sockets."""
    return ("off",) if _why_no_network(level) else ("off", *SERVED)


def _why_no_network(level: Level) -> str:
    """Return the reason why the network must be off at a level; empty if it need not be."""
    if level < Level.CONFINED:
        return "the local backend has a network (allowlist, open) or none only at levels jail and confined"
    return why_unread_memory() if level is Level.CONFINED else ""


def _check(policy: Policy, enforcement: Enforcement, host: Host) -> None:

    def lacks(missing: str) -> BackendUnavailable:
        reason = _why_not_higher(host)
        because = f" ({reason})" if reason and policy.require_level and policy.require_level > enforcement.level else ""
        return BackendUnavailable(f"{missing}{because}. {_remedy(host)}")

    check_policy(
        policy,
        enforcement,
        networks=_networks(enforcement.level),
        can_ask=True,
        has_account=enforcement.level is Level.JAIL,
        network=_why_no_network(enforcement.level),
        lacks=lacks,
    )


def _remedy(host: Host) -> str:
    advice = remedy(host, look_around())
    # At jail, the limits of a control group are the most important missing controls.
    if not advice and not host.cgroup_version:
        advice = group_remedy(host.uid, is_unified=has_unified_groups())
    see = f"{DOCTOR} to see what this host can enforce."
    return f"To fix it: {advice}; or {see}" if advice else f"To fix it: {see}"


def _why_not(level: Level, host: Host) -> str:
    if level <= host.level():
        return ""
    return f"level {level} cannot be reached here: {_why_not_higher(host) or 'a jail shares the host kernel'}"


def _why_not_higher(host: Host) -> str:
    return why_not_higher(host, look_around()) if host.level() < Level.JAIL else ""
