"""Warm starts of the local backend: this process's pools, jails built ahead, and the choice of a run's start."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass
from cloche.egress import client as egress
from cloche.egress.client import operator_proxies
from cloche.forkserver.pool import LOADED_SLOT_BYTES, SLOT_BYTES, Pool
from cloche.forkserver.slot import Slot, SlotNetwork
from cloche.jail.messages import Building, Run, Spec
from cloche.jail.setup import keepers
from cloche.jail.setup.plan import compile_building, compile_prefork_jail

from .. import subordinate_ids
from ..garbage_collection import group_name, new_folder
from ..host import Host
from ..network import network_key, network_rules
from ..toolchain import has_customization, python_toolchain, user_site
from .plan import KIND, GuestPaths, guest_environment, move

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

# The modules that programs import most. Each megabyte of a template costs every run about 0.15 ms, so large and rarer
# ones (typing, dataclasses, pathlib, subprocess) are left to programs that import them, or to `preload`.
USUAL_MODULES = (
    "traceback", "re", "math", "json", "random", "datetime", "collections", "itertools", "functools", "string", "copy",
    "contextlib", "bisect", "heapq",
)  # fmt: skip
SLOTS_PER_CORE = 4
LEAST_SLOTS = 2
MOST_POOLS = 4  # one per set of preloaded modules; the least recently used one is closed
KEPT_BYTES = 4 * 1024 * 1024  # files of earlier results that a slot's control group may still be charged for

WAITING_TASKS = 64  # most waiting tasks of one calling process: helpers, reapers and guests

MOST_BUILDINGS = 64
_buildings: dict[Hashable, Building] = {}
_jails: dict[Hashable, WarmJail] = {}
_pools: dict[Hashable, Pool] = {}
_lock = threading.Lock()


@dataclass(slots=True)
class WarmJail:
    """Describe a jail that can be built ahead of the code that will run in it.

    In a prefork jail (`is_prefork`), namespaces and mounts are reused by the next guest. Each guest there is one
    process, so a program that is compiled first gets a jail for itself.
    """

    base_key: Hashable
    spec: Spec
    run: Run
    is_prefork: bool
    rules: NetworkRules | None = None
    has_secrets: bool = False

    @property
    def key(self) -> Hashable:
        """Return the key that two runs must share to use the same jail; with a network, it includes the egress
        process.
        """
        if self.rules is None:
            return self.base_key
        return self.base_key, egress.process_id(has_secrets=self.has_secrets)

    def open_network(self) -> egress.SandboxNetwork | None:
        """Return a network for jails of this kind; None if they have no network. Raises OSError."""
        if self.rules is None:
            return None
        if self.has_secrets:
            from ..secrets import open_waiting_network  # needed by some jails only

            return open_waiting_network(self.rules)
        return egress.open_network(self.rules, proxies=operator_proxies())

    def building(self) -> Building:
        """Return the steps that build it, compiled once per kind."""
        return _remembered(
            self.base_key,
            lambda: (
                compile_prefork_jail(self.spec, self.run)
                if self.is_prefork
                else compile_building(self.spec, self.run, has_workspace=False)
            ),
        )

    @property
    def level(self) -> str:
        return self.spec.level

    def prepare(self, slot: Slot) -> None:
        """Have the slot's helper build this jail."""
        spec, building = self.spec, None
        if spec.folder:  # the slot's own folder, renamed to the run's with its orders
            spec = move(spec, slot.keep_folder(new_folder()))
            building = compile_building(spec, self.run, has_workspace=False)
        slot.open(spec)
        network = self.open_network()
        slot.prepare(
            self.key,
            building or self.building(),
            self._as_body(),
            is_prefork=self.is_prefork,
            rebuilds=True,
            network=network,
        )

    @property
    def key_of_kept(self) -> Hashable:
        """Return the key of the jail that keeps one sandbox's workspace."""
        return ("kept", self.key)

    def building_of_kept(self, *, has_workspace: bool) -> Building:
        """Return the steps that build the jail that keeps a workspace, which it makes unless `has_workspace`."""
        return _remembered(
            (self.base_key, has_workspace),
            lambda: compile_prefork_jail(self.spec, self.run, keeps_workspace=True, has_workspace=has_workspace),
        )

    def prepare_kept(self, slot: Slot, workspace: int, network: SlotNetwork | None = None) -> None:
        """Have a sandbox's helper build a jail that keeps its workspace; -1 stands for a workspace still to be made.

        The jail has a network of its own unless the sandbox has one already.
        """
        building = self.building_of_kept(has_workspace=workspace >= 0)
        body, network = self._as_body(), network or self.open_network()
        slot.prepare(
            self.key_of_kept, building, body, is_prefork=True, rebuilds=False, workspace=workspace, network=network
        )

    def _as_body(self) -> dict[str, Any]:
        return {"private": self.run.private, "wants_python": self.run.python is not None}


@dataclass(frozen=True, slots=True)
class Start:
    """Say how a run starts: the `name` in its result, and the `kind` of its jail.

    An `own` jail serves one run, a `single` jail one run each of several sandboxes, and a `kept` jail, with the
    workspace, all runs of one sandbox.
    """

    name: Literal["cold", "forked", "pooled"]
    kind: Literal["own", "single", "kept"] = "own"


COLD, FORKED = Start("cold"), Start("forked")  # in a newly started helper; in a slot's
FORKED_SINGLE, POOLED_SINGLE = Start("forked", "single"), Start("pooled", "single")
FORKED_KEPT, POOLED_KEPT = Start("forked", "kept"), Start("pooled", "kept")


def choose_start(slot: Slot | None, jail: WarmJail | None, *, is_last: bool = False) -> Start:
    """Choose how a run starts, given its slot. No I/O.

    `jail` is None for a session, which always has its own jail.
    """
    if slot is None:
        return COLD
    if jail is None:
        return FORKED
    if is_last:
        return POOLED_SINGLE if slot.key == jail.key else FORKED_SINGLE
    if jail.is_prefork:
        return POOLED_KEPT if slot.key == jail.key_of_kept else FORKED_KEPT
    return FORKED


def choose_second_start(slot: Slot | None, failed: Start, *, is_open: bool) -> Start | None:
    """Choose the second try of a run whose first start `failed` before its program ran; None for no second try. No I/O.

    `is_open` says that the helper had served the sandbox before. Its files may then be in the jail that failed, unless
    that jail had a waiting guest: another jail gets the workspace that the caller holds.
    """
    if slot is None:
        return None
    if not is_open:
        return COLD
    return FORKED_KEPT if failed is POOLED_KEPT else None


def _remembered(key: Hashable, compile_it: Callable[[], Building]) -> Building:
    building = _buildings.get(key)
    if building is None:
        if len(_buildings) >= MOST_BUILDINGS:
            _buildings.clear()
        building = _buildings[key] = compile_it()
    return building


def warm_jail(policy: Policy, limits: Limits, spec: Spec, run: Run, *, is_kept: bool = False) -> WarmJail:
    """Return the jail that a run needs; its key holds everything that two runs must share to use the same kind.

    A jail that `is_kept` has an interpreter ready even for a command, since the sandbox's next run may be Python's.
    """
    jail_key = (
        spec.origin, network_key(policy), spec.outside is None, spec.cgroup is None, tuple(run.binds),
        tuple(run.private), tuple(run.covered), tuple(run.replaced), run.python is None, len(run.commands) <= 1,
        is_kept,
    )  # fmt: skip
    jail = _jails.get(jail_key)
    if jail is None or spec.origin is None:
        jail = _new_jail(policy, limits, spec, run, is_kept=is_kept)
        if len(_jails) >= MOST_BUILDINGS:
            _jails.clear()
        if spec.origin is not None:
            _jails[jail_key] = jail
    return jail


def _new_jail(policy: Policy, limits: Limits, spec: Spec, run: Run, *, is_kept: bool) -> WarmJail:
    if spec.level != "jail":
        return _new_confined(policy, limits, spec, run)
    has_python = run.python is not None or is_kept
    # A root with one id owns pid 1's entries in /proc; no other user does. Then each run has its own jail.
    is_prefork = len(run.commands) <= 1 and (spec.outside is not None or os.geteuid() != 0)
    key = (
        policy.user, policy.writable_paths, limits.disk_bytes, limits.inodes, limits.tmp_bytes, tuple(spec.rlimits),
        tuple(run.binds), tuple(run.private), tuple(run.covered), tuple(run.replaced), has_python, is_prefork,
        spec.landlock_abi, bool(spec.cgroup), spec.cpu_affinity, spec.is_shown, network_key(policy),
    )  # fmt: skip
    bare = Run(binds=run.binds, covered=run.covered, replaced=run.replaced, private=run.private)
    bare.python = {} if has_python else None
    mine = spec.copy()  # the sandbox's own spec may get its own identity later
    mine.outside = spec.ids[:2] if spec.outside is not None else None
    return WarmJail(key, mine, bare, is_prefork, network_rules(policy), policy.secrets is not None)


def _new_confined(policy: Policy, limits: Limits, spec: Spec, run: Run) -> WarmJail:
    """Return the equivalent at level confined: a separate guest for each run, in a folder made ahead."""
    mine = spec.copy()
    mine.is_ahead = True
    mine.outside = spec.ids[:2] if spec.outside is not None else None
    if mine.outside is None:  # the kernel then counts waiting guests as this user's tasks, too
        mine.rlimits = [(name, amount + WAITING_TASKS * (name == "nproc")) for name, amount in spec.rlimits]
    limited = tuple(row for row in spec.rlimits if row[0] != "nproc" or mine.outside is not None)
    key = (
        "confined", policy.writable_paths, limits.disk_bytes, limits.inodes, limits.memory_bytes, limits.pids, limited,
        tuple(run.readable), run.keep_read_search, run.python is not None, spec.landlock_abi, bool(spec.cgroup),
        spec.cpu_affinity, spec.modules, tuple(spec.startup.items()),
    )  # fmt: skip
    bare = Run(readable=run.readable, keep_read_search=run.keep_read_search)
    bare.python = {} if run.python is not None else None
    return WarmJail(key, mine, bare, is_prefork=False)


def pool_for(policy: Policy, host: Host) -> Pool:
    """Return this process's pool for a policy's set of preloaded modules."""
    key = (policy.preload, host.cgroup_version, host.namespace)
    with _lock:
        chosen_pool = _pools.pop(key, None) or _new_pool(policy, host)
        _pools[key] = chosen_pool  # the last one used is the last one to go
        surplus = [_pools.pop(next(iter(_pools)))] if len(_pools) > MOST_POOLS else []
    for pool in surplus:
        pool.close()
    return chosen_pool


def preload_settings(modules: Sequence[str], home: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of `interpreter.preload` for runs with this environment."""
    return {
        "preload": list(modules),
        "extra_paths": list(user_site()),
        "customizes": has_customization(),
        "home": home,
        "ahead": {"env": dict(env), "shown": list(python_toolchain().binds)},
    }


def _new_pool(policy: Policy, host: Host) -> Pool:
    modules = list(dict.fromkeys((*USUAL_MODULES, *policy.preload)))
    return Pool(
        preload_settings(modules, "/workspace", guest_environment(GuestPaths(), {}, python_toolchain().env)),
        cgroup_version=host.cgroup_version,
        cgroup_folders=host.cgroup_folders,
        group_name=partial(group_name, KIND),
        least=LEAST_SLOTS,
        most=SLOTS_PER_CORE * len(os.sched_getaffinity(0)),
        slot_bytes=LOADED_SLOT_BYTES if policy.preload else SLOT_BYTES,
        namespace=host.namespace,
    )


def close_pools() -> None:
    """Close all pools and wait until their processes have ended; the next run starts cold, and the next keeper."""
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
    subordinate_ids.rest()
    keepers.end()


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for pool in _pools.values():
        pool.forget()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_pools)
