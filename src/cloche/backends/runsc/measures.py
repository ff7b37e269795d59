"""Say, before a run and truly, what a container of gVisor enforces on this host."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.enforcement import Measure
from cloche.core.levels import Control, State

from ..host import Host

ENFORCED, PARTIAL = State.ENFORCED, State.PARTIAL
_ROOM = "the cap has room for what /tmp and /dev/shm may hold, which a program can use as memory"


def measures(host: Host) -> Mapping[Control, Measure]:
    """Return one measure per control."""
    return {
        Control.FILESYSTEM: _enforced("gVisor: a root of its own, read-only; this host's system is shown through it"),
        Control.NETWORK: _enforced("gVisor's own network, with nothing but loopback; no interface of the host's"),
        Control.MEMORY: _memory(host),
        Control.CPU: _cpu(host),
        Control.PIDS: _enforced("RLIMIT_NPROC in gVisor's kernel"),
        Control.DISK: _enforced("tmpfs with size and inode limits; /tmp and /dev/shm with size limits"),
        Control.TIME: _enforced("wall clock outside, whole tree killed"),
        Control.OUTPUT: _enforced("bounded buffers outside, flood limit kills"),
        Control.SYSCALLS: _enforced(
            "gVisor: no system call reaches the host's kernel; seccomp allowlist inside, seccomp around gVisor itself"
        ),
        Control.IDENTITY: _identity(host),
    }


def _enforced(mechanism: str) -> Measure:
    return Measure(state=ENFORCED, mechanism=mechanism)


def _memory(host: Host) -> Measure:
    if host.cgroup_version:
        mechanism = f"cgroup v{host.cgroup_version} around gVisor"
        return Measure(state=PARTIAL, mechanism=mechanism, reason=_ROOM)
    return Measure(
        state=PARTIAL,
        mechanism="gVisor's memory is looked at every 50 ms",
        reason=f"{host.cgroup_reason}; it can be overshot in between, and {_ROOM}",
    )


def _cpu(host: Host) -> Measure:
    if host.cgroup_version:
        return _enforced(f"cgroup v{host.cgroup_version} quota")
    return Measure(
        state=PARTIAL,
        mechanism="processor affinity",
        reason=f"{host.cgroup_reason}; whole processors only, shared with others",
    )


def _identity(host: Host) -> Measure:
    if host.uid == 0:
        return _enforced("an ordinary id of gVisor's; gVisor itself runs as nobody in a user namespace")
    return Measure(
        state=PARTIAL,
        mechanism="an ordinary id of gVisor's, in a user namespace",
        reason="an ordinary user can only give their own id to gVisor itself",
    )
