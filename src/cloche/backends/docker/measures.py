"""Say, before a run and truly, what a container of this daemon enforces."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.enforcement import ABSENT, Measure
from cloche.core.levels import Control, Level, State
from cloche.core.policy import Policy

from .daemon import Daemon

ENFORCED, PARTIAL = State.ENFORCED, State.PARTIAL


def measures(daemon: Daemon, policy: Policy, level: Level = Level.JAIL) -> Mapping[Control, Measure]:
    """Return one measure per control, at level `jail` or `gvisor`."""
    info = daemon.info
    container = f"container of {policy.runtime}" if policy.runtime is not None else "container"
    found = {
        Control.FILESYSTEM: _enforced(f"{container} with a read-only root of its own, no mounts of the host"),
        Control.NETWORK: _network(policy),
        Control.MEMORY: _memory(info),
        Control.CPU: _if_able(info, "CpuCfsQuota", "CPU quota of a control group"),
        Control.PIDS: _if_able(info, "PidsLimit", "pids control group"),
        Control.DISK: _enforced("tmpfs with size and inode limits"),
        Control.TIME: _enforced("wall clock outside, whole tree killed"),
        Control.OUTPUT: _enforced("bounded buffers outside, flood limit kills"),
        Control.SYSCALLS: _syscalls(daemon),
        Control.IDENTITY: _identity(daemon),
    }
    return {**found, **_gvisor(info)} if level is Level.GVISOR else found


def _gvisor(info: Mapping[str, object]) -> Mapping[Control, Measure]:
    """Return what is different where gVisor's own kernel stands between."""
    memory = _memory(info, "memory control group around gVisor")
    if memory.state is ENFORCED:
        reason = "the cap has room for what the file systems in memory may hold, which a program can use as memory"
        memory = Measure(state=PARTIAL, mechanism=memory.mechanism, reason=reason)
    return {
        Control.SYSCALLS: _enforced("gVisor: no system call reaches the host's kernel; seccomp around gVisor itself"),
        Control.MEMORY: memory,
        Control.PIDS: _enforced("RLIMIT_NPROC in gVisor's kernel, pids control group with room for gVisor around it"),
    }


def _enforced(mechanism: str) -> Measure:
    return Measure(state=ENFORCED, mechanism=mechanism)


def _network(policy: Policy) -> Measure:
    if policy.network == "off":
        return _enforced("network namespace with nothing but loopback")
    return Measure(state=ABSENT.state, reason="the policy opens the network")


_WATCHED = "memory control group, cap with room for the file systems in memory; private memory watched every 20 ms"


def _memory(info: Mapping[str, object], mechanism: str = _WATCHED) -> Measure:
    if not info.get("MemoryLimit"):
        return Measure(state=ABSENT.state, reason="this daemon has no memory control group")
    if not info.get("SwapLimit"):
        return Measure(state=PARTIAL, mechanism=mechanism, reason="this host cannot limit swap")
    return _enforced(mechanism)


def _if_able(info: Mapping[str, object], key: str, mechanism: str) -> Measure:
    if info.get(key):
        return _enforced(mechanism)
    return Measure(state=ABSENT.state, reason=f"this daemon says that it cannot ({key} is off)")


def _syscalls(daemon: Daemon) -> Measure:
    if daemon.has_seccomp:
        return _enforced("seccomp allowlist, no capabilities, no new privileges")
    reason = "this daemon was built or started without seccomp"
    return Measure(state=PARTIAL, mechanism="no capabilities, no new privileges", reason=reason)


def _identity(daemon: Daemon) -> Measure:
    if daemon.is_id_mapped:
        return _enforced("an id of the daemon's user namespace, not root inside")
    return _enforced("an id of its own outside, that no user of the host has")
