"""Say, before a run and truly, what each level enforces on this host."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.enforcement import ABSENT, Measure
from cloche.core.levels import Control, Level, State

from ..host import Host

ENFORCED, PARTIAL = State.ENFORCED, State.PARTIAL


def measures(level: Level, host: Host) -> Mapping[Control, Measure]:
    """Return one measure per control for a run at `level`."""
    if level is Level.NONE:
        return {Control.TIME: _TIME, Control.OUTPUT: _OUTPUT}
    by_level = {Level.JAIL: _jail, Level.CONFINED: _confined, Level.PROCESS: _process}
    return {
        Control.TIME: _TIME,
        Control.OUTPUT: _OUTPUT,
        Control.MEMORY: _memory(host),
        Control.CPU: _cpu(host),
        Control.PIDS: _pids(level, host),
        **by_level[level](host),
    }


_TIME = Measure(state=ENFORCED, mechanism="wall clock outside, whole tree killed")
_OUTPUT = Measure(state=ENFORCED, mechanism="bounded buffers outside, flood limit kills")
_FOLDER = Measure(
    state=PARTIAL,
    mechanism="RLIMIT_FSIZE per file; folder summed every 100 ms",
    reason="a folder of the host stands in for the workspace; it can be overfilled for a moment, and what a program "
    "deleted and still holds open is not counted",
)


def _jail(host: Host) -> Mapping[Control, Measure]:
    landlock = f", Landlock {host.landlock_abi}" if host.landlock_abi else ""
    return {
        Control.FILESYSTEM: Measure(state=ENFORCED, mechanism=f"mount namespace with a root of its own{landlock}"),
        Control.NETWORK: Measure(state=ENFORCED, mechanism="network namespace with nothing but loopback"),
        Control.DISK: Measure(state=ENFORCED, mechanism="tmpfs with size and inode limits"),
        Control.SYSCALLS: Measure(state=ENFORCED, mechanism="seccomp allowlist, no capabilities, no new privileges"),
        Control.IDENTITY: _identity(host, "user namespace"),
    }


def _confined(host: Host) -> Mapping[Control, Measure]:
    return {
        Control.FILESYSTEM: Measure(
            state=PARTIAL,
            mechanism=f"Landlock {host.landlock_abi}",
            reason="contents are out of reach, but names, sizes and times of the host's files can still be asked for"
            + ("" if host.owns_ids else ", and modes, times and attributes of the user's own files can be changed"),
        ),
        Control.NETWORK: Measure(state=ENFORCED, mechanism="seccomp refuses every socket"),
        Control.DISK: _FOLDER,
        Control.SYSCALLS: Measure(state=ENFORCED, mechanism="seccomp allowlist, no new privileges"),
        Control.IDENTITY: _identity(host, "setuid"),
    }


def _process(_: Host) -> Mapping[Control, Measure]:
    return {Control.DISK: _FOLDER, Control.FILESYSTEM: ABSENT, Control.NETWORK: ABSENT}


def _identity(host: Host, mechanism: str) -> Measure:
    if host.owns_ids:
        return Measure(state=ENFORCED, mechanism=f"{mechanism}, outside id of its own")
    return Measure(state=PARTIAL, mechanism=mechanism, reason="an ordinary user can only give their own id")


def _memory(host: Host) -> Measure:
    if host.cgroup_version:
        return Measure(
            state=ENFORCED,
            mechanism=f"cgroup v{host.cgroup_version} caps memory plus the sizes of the workspace and /tmp; "
            "the memory of processes is summed every 20 ms",
        )
    return Measure(
        state=PARTIAL,
        mechanism="RLIMIT_DATA per process; the tree's memory is summed every 20 ms",
        reason=f"{host.cgroup_reason}; the tree can overshoot by what it touches in 20 ms (a large one: in a second), "
        "and shared memory that no process has in its tables is not seen",
    )


def _cpu(host: Host) -> Measure:
    if host.cgroup_version:
        return Measure(state=ENFORCED, mechanism=f"cgroup v{host.cgroup_version} quota")
    return Measure(
        state=PARTIAL,
        mechanism="processor affinity",
        reason=f"{host.cgroup_reason}; whole processors only, shared with others",
    )


def _pids(level: Level, host: Host) -> Measure:
    if host.cgroup_version:
        return Measure(state=ENFORCED, mechanism=f"cgroup v{host.cgroup_version}")
    if level is Level.JAIL:
        return Measure(state=ENFORCED, mechanism="RLIMIT_NPROC, counted per user namespace")
    if level is Level.CONFINED and host.owns_ids:
        return Measure(state=ENFORCED, mechanism="RLIMIT_NPROC of an id of its own")
    if host.uid == 0:
        return Measure(state=State.ABSENT, reason="RLIMIT_NPROC does not bind root")
    return Measure(
        state=PARTIAL,
        mechanism="RLIMIT_NPROC above what this user runs now",
        reason="the kernel counts every process of the user",
    )
