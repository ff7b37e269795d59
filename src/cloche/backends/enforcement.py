"""The controls that each kind of sandbox enforces, known before a run; and the refusal if a policy asks for more.

The rows of all backends are in this module, one per control. Its functions are pure: facts about the host, a daemon or
a machine are arguments, and so are the texts of a refusal. A control without a row in a backend counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from cloche.core.enforcement import ABSENT, Control, Enforcement, Level, Measure, State, shortfalls
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import Policy
from cloche.core.record import replace

from .host import Host

Controls = Mapping[Control, Measure]
# The controls that are missing at the levels chosen only by name, for trusted code.
LOST_BELOW_CONFINED = (Control.FILESYSTEM, Control.NETWORK, Control.SYSCALLS, Control.IDENTITY)
_ON_REQUEST = (Level.PROCESS, Level.NONE)


def _enforced(mechanism: str) -> Measure:
    return Measure(state=State.ENFORCED, mechanism=mechanism)


def _partial(mechanism: str, reason: str) -> Measure:
    return Measure(state=State.PARTIAL, mechanism=mechanism, reason=reason)


def _absent(reason: str) -> Measure:
    return Measure(state=State.ABSENT, reason=reason)


# Rows shared by several kinds of sandboxes.
_TIME = _enforced("wall clock outside, whole tree killed")
_MACHINE_TIME = _enforced("wall clock outside; a machine that does not react is killed")
_OUTPUT = _enforced("bounded buffers outside, flood limit kills")


def _cpu(host: Host) -> Measure:
    if host.cgroup_version:
        return _enforced(f"cgroup v{host.cgroup_version} quota")
    return _partial("processor affinity", f"{host.cgroup_reason}; only whole processors, shared with other programs")


# The local backend: a jail, or less, of this host's kernel.


def local_controls(level: Level, host: Host) -> Controls:
    """Return the controls of a run of the local backend at `level`."""
    if level is Level.NONE:
        return {Control.TIME: _TIME, Control.OUTPUT: _OUTPUT}
    by_level = {Level.JAIL: _jail, Level.CONFINED: _confined, Level.PROCESS: _process}
    return {
        Control.TIME: _TIME,
        Control.OUTPUT: _OUTPUT,
        Control.MEMORY: _local_memory(level, host),
        Control.CPU: _cpu(host),
        Control.PIDS: _local_pids(level, host),
        **by_level[level](host),
    }


_FOLDER = _partial(
    "RLIMIT_FSIZE per file; folder summed every 100 ms",
    "a folder of the host stands in for the workspace; it can be overfilled for a moment, and what a program "
    "deleted and still holds open is not counted",
)


_SUBORDINATE = _enforced("user namespace, outside id of its own from the user's range in /etc/subuid")


def _jail(host: Host) -> Controls:
    landlock = f", Landlock {host.landlock_abi}" if host.landlock_abi else ""
    return {
        Control.FILESYSTEM: _enforced(f"mount namespace with a root of its own{landlock}"),
        Control.NETWORK: _enforced("network namespace with nothing but loopback"),
        Control.DISK: _enforced("tmpfs with size and inode limits"),
        Control.SYSCALLS: _enforced("seccomp allowlist, no capabilities, no new privileges"),
        Control.IDENTITY: _SUBORDINATE if host.ids is not None else _local_identity(host, "user namespace"),
    }


def with_life_confined(enforcement: Enforcement) -> Enforcement:
    """Return the controls of a live sandbox at level `confined`, derived from those of a single run."""
    held = enforcement[Control.FILESYSTEM]
    lacks = (
        "no process namespace: the existence and session of other processes can be queried by number; children "
        "find no /proc/self, and openpty and /dev/shm are not there (multiprocessing of Python has stand-ins)"
    )
    if lacks in held.reason:
        return enforcement
    changed = {Control.FILESYSTEM: replace(held, reason=f"{held.reason}; {lacks}")}
    return Enforcement(level=enforcement.level, controls={**enforcement.controls, **changed})


def with_users(enforcement: Enforcement, host: Host) -> Enforcement:
    """Return the controls of a jail with several users, derived from those with one user."""
    source = "its own" if host.owns_ids else "the user's range in /etc/subuid"
    changed = {
        Control.SYSCALLS: _enforced("seccomp allowlist, no new privileges; root inside has nine capabilities"),
        Control.IDENTITY: _enforced(
            f"user namespace, many outside ids of {source}; its users are not isolated from each other"
        ),
    }
    return Enforcement(level=enforcement.level, controls={**enforcement.controls, **changed})


NAMESPACE = "network namespace with nothing but loopback"
CONNECTED = "a guest's sockets are made and connected for it, to the egress process alone"
# The egress process knows which host an address was connected for, but not the content sent there.
_UNSEEN = "not checked: what is inside TLS, and in other streams than HTTP and TLS"
_REACHED = {"allowlist": "listed hosts", "open": "public addresses, on ports 80, 443 and those of the policy"}


def with_network(
    enforcement: Enforcement, mode: str, *, is_proxied: bool, is_through_host: bool = False, path_kind: str = NAMESPACE
) -> Enforcement:
    """Return the controls with a network served by the egress process, derived from those without a network.

    `path_kind` says how guests reach the network. With `is_through_host`, gVisor's guests use sockets of the host's
    kernel in that namespace.
    """
    mechanism = f"{path_kind}; the egress process reaches {_REACHED[mode]}"
    if is_through_host:
        mechanism += "; gVisor passes socket calls to the host's kernel"
    if is_proxied:
        reason = f"addresses are chosen by the operator's upstream proxy; {_UNSEEN}"
        measure = _partial(mechanism, reason)
    else:
        measure = _enforced(f"{mechanism}; {_UNSEEN}")
    return Enforcement(level=enforcement.level, controls={**enforcement.controls, Control.NETWORK: measure})


def with_less_than_preferred(enforcement: Enforcement, why: str) -> Enforcement:
    """Return the controls of docker's own runtime if gVisor is preferred, with the reason why gVisor is not used."""
    held = enforcement[Control.SYSCALLS]
    reason = "; ".join(filter(None, (held.reason, f"docker's own runtime, though gVisor is preferred: {why}")))
    changed = {**enforcement.controls, Control.SYSCALLS: replace(held, reason=reason)}
    return replace(enforcement, controls=changed)


def with_hosts_stack(enforcement: Enforcement, *, is_root_outside: bool) -> Enforcement:
    """Return the controls for gVisor with `--network=host`, derived from those with gVisor's own network stack.

    `is_root_outside` says that gVisor then runs outside the user namespace that it otherwise has.
    """
    around = enforcement[Control.SYSCALLS].mechanism.partition("; ")[2]
    changed = {Control.SYSCALLS: _enforced(f"gVisor: only system calls on sockets reach the host's kernel; {around}")}
    if is_root_outside:
        changed[Control.IDENTITY] = _partial(
            "an id of gVisor's own kernel",
            "with the host's stack, gVisor itself is root outside, with the container's capabilities and SYS_PTRACE",
        )
    return Enforcement(level=enforcement.level, controls={**enforcement.controls, **changed})


def _confined(host: Host) -> Controls:
    return {
        Control.FILESYSTEM: _partial(
            f"Landlock {host.landlock_abi}",
            "contents of the host's files cannot be read, but their names, sizes and times can"
            + ("" if host.owns_ids else ", and modes, times and attributes of the user's own files can be changed"),
        ),
        Control.NETWORK: _enforced("seccomp refuses every socket except connected pairs"),
        Control.DISK: _FOLDER,
        Control.SYSCALLS: _enforced("seccomp allowlist, no new privileges"),
        Control.IDENTITY: _local_identity(host, "setuid"),
    }


def _process(_: Host) -> Controls:
    return {Control.DISK: _FOLDER, Control.FILESYSTEM: ABSENT, Control.NETWORK: ABSENT}


def _local_identity(host: Host, mechanism: str) -> Measure:
    if host.owns_ids:
        return _enforced(f"{mechanism}, outside id of its own")
    because = f": {host.ids_reason}" if host.ids_reason else ""
    return _partial(mechanism, f"an ordinary user can only give their own id{because}")


def _local_memory(level: Level, host: Host) -> Measure:
    where = f"cgroup v{host.cgroup_version} caps memory plus the sizes of the workspace and /tmp"
    if host.cgroup_version and level is Level.PROCESS:
        return _partial(f"{where}; the memory of processes is summed every 20 ms", _MAY_LOWER)
    if host.cgroup_version:
        return _enforced(f"{where}; the memory of processes is summed every 20 ms")
    reason = (
        f"{host.cgroup_reason}; the limit can be exceeded for 20 ms (by a large tree: for a second), "
        "and shared memory that no process has mapped is not counted"
    )
    mechanism = "RLIMIT_DATA per process; the tree's memory is summed every 20 ms"
    return _partial(mechanism, f"{reason}; {_MAY_LOWER}" if level is Level.PROCESS else reason)


_MAY_LOWER = "a program may lower its own oom_score_adj, so that the kernel kills another process instead"


def _local_pids(level: Level, host: Host) -> Measure:
    if host.cgroup_version:
        return _enforced(f"cgroup v{host.cgroup_version}")
    if level is Level.JAIL:
        return _enforced("RLIMIT_NPROC, counted per user namespace")
    if level is Level.CONFINED and host.owns_ids:
        return _enforced("RLIMIT_NPROC of an id of its own")
    if level is Level.CONFINED:
        return _partial(
            "seccomp notifies before each new process or thread, and the tree is counted",
            "processes that start during the count may exceed the limit; if seccomp has another listener, "
            "RLIMIT_NPROC counts all processes of the user",
        )
    if host.uid == 0:
        return _absent("RLIMIT_NPROC does not bind root")
    return _partial("RLIMIT_NPROC above what this user runs now", "the kernel counts every process of the user")


# The docker backend: containers of a daemon.


class DaemonFacts(Protocol):
    """Hold the facts that decide a daemon's controls; `info` is the daemon's answer to `docker info`."""

    @property
    def info(self) -> Mapping[str, object]: ...

    @property
    def has_seccomp(self) -> bool: ...

    @property
    def is_id_mapped(self) -> bool: ...


def docker_controls(daemon: DaemonFacts, policy: Policy, level: Level = Level.JAIL) -> Controls:
    """Return the controls of a daemon's container, at level `jail` or `gvisor`."""
    info = daemon.info
    container = f"container of {policy.runtime}" if policy.runtime is not None else "container"
    rows = {
        Control.FILESYSTEM: _enforced(f"{container} with a read-only root of its own, no mounts of the host"),
        Control.NETWORK: _docker_network(policy),
        Control.MEMORY: _docker_memory(info),
        Control.CPU: _if_able(info, "CpuCfsQuota", "CPU quota of a control group"),
        Control.PIDS: _if_able(info, "PidsLimit", "pids control group"),
        Control.DISK: _enforced("tmpfs with size and inode limits"),
        Control.TIME: _TIME,
        Control.OUTPUT: _OUTPUT,
        Control.SYSCALLS: _docker_syscalls(daemon),
        Control.IDENTITY: _docker_identity(daemon),
    }
    return {**rows, **_docker_gvisor(info)} if level is Level.GVISOR else rows


def _docker_gvisor(info: Mapping[str, object]) -> Controls:
    """Return the rows that differ when gVisor's kernel serves the container."""
    memory = _docker_memory(info, "memory control group around gVisor")
    if memory.state is State.ENFORCED:
        reason = "the cap includes the size of the file systems in memory, which a program can use as memory"
        memory = _partial(memory.mechanism, reason)
    return {
        Control.SYSCALLS: _enforced("gVisor: no system call reaches the host's kernel; seccomp around gVisor itself"),
        Control.MEMORY: memory,
        Control.PIDS: _enforced("RLIMIT_NPROC in gVisor's kernel, pids control group with room for gVisor around it"),
    }


def _docker_network(policy: Policy) -> Measure:
    if policy.network == "off":
        return _enforced("network namespace with nothing but loopback")
    if policy.network == "bridge":
        return _partial("docker's bridge", "it can reach any address that this host's firewall allows")
    return _absent("containers of docker have no network rules")


_WATCHED = "memory control group, cap with room for the file systems in memory; private memory watched every 20 ms"


def _docker_memory(info: Mapping[str, object], mechanism: str = _WATCHED) -> Measure:
    if not info.get("MemoryLimit"):
        return _absent("this daemon has no memory control group")
    if not info.get("SwapLimit"):
        return _partial(mechanism, "this host cannot limit swap")
    return _enforced(mechanism)


def _if_able(info: Mapping[str, object], key: str, mechanism: str) -> Measure:
    if info.get(key):
        return _enforced(mechanism)
    return _absent(f"this daemon does not support it ({key} is off)")


def _docker_syscalls(daemon: DaemonFacts) -> Measure:
    if daemon.has_seccomp:
        return _enforced("seccomp allowlist, no capabilities, no new privileges")
    return _partial("no capabilities, no new privileges", "this daemon was built or started without seccomp")


def _docker_identity(daemon: DaemonFacts) -> Measure:
    if daemon.is_id_mapped:
        return _enforced("an id of the daemon's user namespace, not root inside")
    return _enforced("an id of its own outside, that no user of the host has")


def docker_with_users(enforcement: Enforcement, daemon: DaemonFacts) -> Enforcement:
    """Return the controls of a container with several users, derived from those with one user."""
    if daemon.is_id_mapped or enforcement.level is Level.GVISOR:
        where = "gVisor's own kernel" if enforcement.level is Level.GVISOR else "the daemon's user namespace"
        identity = _enforced(f"ids of {where}; its users are not isolated from each other")
    else:
        mechanism = "root inside has nine capabilities, and no new privileges"
        identity = _partial(mechanism, "root and the other users inside have the same ids outside")
    changed = {Control.IDENTITY: identity}
    if enforcement.level is not Level.GVISOR and daemon.has_seccomp:
        changed[Control.SYSCALLS] = _enforced("seccomp allowlist, no new privileges; root inside has nine capabilities")
    return Enforcement(level=enforcement.level, controls={**enforcement.controls, **changed})


# gVisor without a daemon.


def gvisor_controls(host: Host) -> Controls:
    """Return the controls of a gVisor container on this host."""
    return {
        Control.FILESYSTEM: _enforced("gVisor: a root of its own, read-only; this host's system is shown through it"),
        Control.NETWORK: _enforced("gVisor's own network, with nothing but loopback; no interface of the host's"),
        Control.MEMORY: _gvisor_memory(host),
        Control.CPU: _cpu(host),
        Control.PIDS: _enforced("RLIMIT_NPROC in gVisor's kernel"),
        Control.DISK: _enforced("tmpfs with size and inode limits; /tmp and /dev/shm with size limits"),
        Control.TIME: _TIME,
        Control.OUTPUT: _OUTPUT,
        Control.SYSCALLS: _enforced(
            "gVisor: no system call reaches the host's kernel; seccomp allowlist inside, seccomp around gVisor itself"
        ),
        Control.IDENTITY: _gvisor_identity(host),
    }


_ROOM = "the cap includes the size of /tmp and /dev/shm, which a program can use as memory"


def _gvisor_memory(host: Host) -> Measure:
    if host.cgroup_version:
        return _partial(f"cgroup v{host.cgroup_version} around gVisor", _ROOM)
    return _partial(
        "gVisor's memory is measured every 50 ms",
        f"{host.cgroup_reason}; the limit can be exceeded in between, and {_ROOM}",
    )


def _gvisor_identity(host: Host) -> Measure:
    if host.uid == 0:
        return _enforced("an ordinary id of gVisor's; gVisor itself runs as nobody in a user namespace")
    return _partial(
        "an id of gVisor's without capabilities, in a user namespace",
        "an ordinary user can only give their own id, which gVisor itself has, and which is 0 inside",
    )


# Cloche's own virtual machines, on QEMU or Firecracker.

NOT_A_WALL = "software emulation (no KVM): QEMU's authors do not call its translator a security boundary"
_AROUND: Mapping[str, str] = {
    "qemu": "QEMU under its own seccomp filter",
    "firecracker": "Firecracker under its own seccomp filters, in a root of its own",
}


def microvm_controls(kind: Literal["kvm", "tcg"], *, is_root: bool, monitor: str = "qemu") -> Controls:
    """Return the controls of a virtual machine: on KVM or emulated (`tcg`), by monitor, started by root or not."""
    return {
        Control.FILESYSTEM: _enforced("root disk opened read-only by the monitor, nothing of the host shared"),
        Control.NETWORK: _enforced("a machine without a network device"),
        Control.MEMORY: _enforced(
            "control group (v2) in the guest, private memory watched every 20 ms; the size of the machine around it"
        ),
        Control.CPU: _enforced(_processors(kind)),
        Control.PIDS: _enforced("pids control group (v2) in the guest"),
        Control.DISK: _enforced("tmpfs with size and inode limits in the guest; no disk that could be written"),
        Control.TIME: _MACHINE_TIME,
        Control.OUTPUT: _OUTPUT,
        Control.SYSCALLS: _microvm_syscalls(kind, _AROUND[monitor]),
        Control.IDENTITY: _microvm_identity(is_root),
    }


def _processors(kind: str) -> str:
    around = "the machine's processors" if kind == "kvm" else "the machine's only processor, as it is emulated,"
    return f"CPU quota of a control group (v2) in the guest; {around} around it"


def _microvm_syscalls(kind: str, around: str) -> Measure:
    if kind == "kvm":
        return _enforced(f"a kernel of its own on KVM; {around}")
    return _partial(f"a kernel of its own on an emulated processor (TCG); {around}", NOT_A_WALL)


def _microvm_identity(is_root: bool) -> Measure:
    if is_root:
        return _enforced("the monitor has an id of its own, that no user of the host has; not root inside")
    return _partial(
        "not root inside; the monitor has no new privileges and only its own files",
        "the monitor runs as the calling user",
    )


# Machines of microsandbox. None could be run during development, so no control that rests on it alone counts as
# enforced.

_UNTRIED = "as microsandbox documents it; not tested with this version of Cloche"


def microsandbox_controls() -> Controls:
    """Return the controls of a microsandbox machine."""
    return {
        Control.FILESYSTEM: _partial("the image's own root, nothing of the host's shared", _UNTRIED),
        Control.NETWORK: _partial("a network policy that denies all, in both directions", _UNTRIED),
        Control.MEMORY: _partial(
            "RLIMIT_DATA of each process; the size of the machine for all, with its places in memory", _UNTRIED
        ),
        Control.CPU: _partial("the machine's processors, rounded up", _UNTRIED),
        Control.PIDS: _partial("limit of processes per user in the guest", _UNTRIED),
        Control.DISK: _partial("places in memory with a size; no limit on the number of files", _UNTRIED),
        Control.TIME: _MACHINE_TIME,
        Control.OUTPUT: _OUTPUT,
        Control.SYSCALLS: _partial("a kernel of its own on KVM, under libkrun", _UNTRIED),
        Control.IDENTITY: _partial("not root inside; the monitor runs as the calling user", _UNTRIED),
    }


# Refusals.


def check_policy(
    policy: Policy,
    enforcement: Enforcement,
    *,
    networks: tuple[str, ...] = ("off",),
    network: str,
    remedy: str = "leave network off, or pass what the code needs as files",
    level: str = "",
    can_ask: bool = False,
    has_account: bool = False,
    lacks: Callable[[str], BackendUnavailable],
) -> None:
    """Raise BackendUnavailable if a control that a policy asks for would be missing.

    `networks` are the backend's network modes. `network` and `level` are the texts for other modes and levels: they
    complete "network 'open': " and "level jail is not what "; an empty `level` accepts any level. `remedy` is the
    advice for a missing network mode. `can_ask` says that an approver may decide about hosts that no rule names,
    `has_account` that a live sandbox's account can be named.
    `lacks` makes the error for a missing control. Raises InvalidRequest for docker's bridge on any other backend.
    """
    if policy.network == "bridge" and "bridge" not in networks:
        raise InvalidRequest(
            "network 'bridge' is docker's own, which only backend \"docker\" with its own runtime has; "
            "use it, or network 'open', which reaches public hosts by rules"
        )
    if policy.network not in networks:
        raise BackendUnavailable(f"network {policy.network!r}: {network}, in this version; {remedy}")
    if policy.on_network == "ask" and policy.network != "off" and not can_ask:
        raise BackendUnavailable(
            'on_network "ask": only backend "local" can ask about hosts; use it, or leave on_network out'
        )
    if policy.account is not None and not has_account:
        raise BackendUnavailable(
            'account: only backend "local" at level jail can name the account of a live sandbox; use it, or leave '
            "account out"
        )
    if level and policy.level not in (None, enforcement.level):
        raise BackendUnavailable(f"level {policy.level} is not what {level}")
    missing = shortfalls(
        enforcement, level=policy.require_level, controls=policy.require_controls, best_effort=_excused(policy),
        accept_claimed=policy.accept_claimed, accept_claimed_level=policy.accept_claimed_level,
    )  # fmt: skip
    if missing:
        raise lacks("; ".join(missing))


def _excused(policy: Policy) -> tuple[Control, ...]:
    """Return the controls that may be absent: those named by the policy, or all at a level without controls."""
    return tuple(Control) if policy.level in _ON_REQUEST else policy.best_effort
