"""Settings of a container (a pure decision), for the daemon's API and as arguments of `docker run`.

Both are made from one record, so the shown command makes the same container.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import NetworkMode
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass, field, replace
from cloche.core.request import WorkspaceContainer
from cloche.egress.client import process_id
from cloche.jail.setup.seccomp import NETLINK_ROUTE, profile, profile_text

from ..containers.program import ENVIRONMENT, GVISOR_THREADS, REAPER_BYTES, REAPERS, ULIMITS, WORKSPACE
from ..network import NAME_SERVER_ADDRESS, network_rules

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

PROFILE_FILE = str(files("cloche.backends.docker") / "seccomp.json")
RUNC, RUNSC, RUNSC_NETWORK = "runc", "runsc", "runsc-network"  # docker's own runtime, and gVisor's (see `runtimes`)
GVISOR = (RUNSC, RUNSC_NETWORK)
NETWORKS: tuple[NetworkMode, ...] = ("off", "bridge")
# Capabilities of root inside, as in a jail with several users: see `jail.setup.privileges.ROOT_INSIDE`.
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
)  # fmt: skip
FOR_ALL = ("/var/tmp",)  # world-writable, even if the other homes belong to root
SHELLS = 2  # if the first process is a shell, a second one waits for the program
# Ids that no user of a host has. A daemon that maps ids has only the first 65,536 (subuid(5)).
FIRST_ID, IDS, MAPPED_ID = 1_950_000_000, 100_000, 65_534


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """Settings of one container. `volume` names an existing workspace; "" creates a new one.

    `runtime` is "" for the daemon's default. `homes` are additional writable folders. With `has_users`, the first
    process is root with `CAPABILITIES`, and `user` is one of the users inside.
    """

    image: str
    command: tuple[str, ...]
    user: int
    memory_bytes: int
    cpus: float
    pids: int
    guests: int
    disk_bytes: int
    inodes: int
    tmp_bytes: int
    network: str = "none"
    runtime: str = ""
    has_seccomp: bool = True
    is_id_mapped: bool = False
    is_tmp_writable: bool = True
    volume: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    homes: tuple[str, ...] = ()
    has_users: bool = False
    rules: NetworkRules | None = None  # set if the network is served
    layers: Mapping[str, str] = field(default_factory=dict)  # read-only volumes and their mount points
    binds: Mapping[str, str] = field(default_factory=dict)  # files of the host, by their paths inside, read-only

    @property
    def is_gvisor(self) -> bool:
        return self.runtime in GVISOR

    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for two containers if one can replace the other."""
        is_own_id = self.user >= FIRST_ID
        return (
            self.image, self.command, None if is_own_id else self.user, self.memory_bytes, self.cpus, self.pids,
            self.disk_bytes, self.inodes, self.tmp_bytes, self.network, self.runtime, self.is_tmp_writable,
            self.rules and (self.rules, process_id()), tuple(self.layers.items()),
        )  # fmt: skip

    def ulimits(self) -> Mapping[str, int]:
        """Return the rlimits of each process. gVisor's kernel counts processes only by `nproc`."""
        return {**ULIMITS, "nproc": self.guests + REAPERS} if self.is_gvisor else ULIMITS

    def workspace_options(self) -> str:
        """Return the mount options of a new workspace."""
        mode = "0755" if self.has_users else "0700"
        owner = "mode=0777" if self.is_id_mapped else f"mode={mode},uid={self.user},gid={self.user}"
        return f"size={self.disk_bytes},nr_inodes={self.inodes},{owner},nosuid,nodev"

    def tmpfs(self) -> Mapping[str, str]:
        """Return the other tmpfs mounts with their options."""
        common = f"size={self.tmp_bytes},nr_inodes={self.inodes},mode=1777,nosuid,nodev"
        of_root = common.replace("mode=1777", "mode=0755") if self.has_users else common
        homes = {path: f"{common if path in FOR_ALL else of_root},exec" for path in self.homes}
        return {
            "/tmp": f"{common},exec{'' if self.is_tmp_writable else ',ro'}",
            "/dev/shm": f"{common},noexec",
            **homes,
        }

    @property
    def first_user(self) -> int:
        """Return the id of the first process."""
        return 0 if self.has_users else self.user

    def api(self) -> dict[str, Any]:
        """Return the request body that creates the container."""
        return {
            "Image": self.image,
            "Entrypoint": [self.command[0]],
            "Cmd": list(self.command[1:]),
            "User": f"{self.first_user}:{self.first_user}",
            "WorkingDir": "/",
            "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "Labels": dict(self.labels),
            "Hostname": "sandbox",
            # No process in it needs time to finish, so a daemon that stops does not wait for it.
            "StopSignal": "SIGKILL",
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "HostConfig": self._host_config(),
        }

    def _host_config(self) -> dict[str, Any]:
        config = {
            "AutoRemove": True,
            "NetworkMode": self.network,
            "Memory": self.memory_bytes,
            "MemorySwap": self.memory_bytes,
            "NanoCpus": round(self.cpus * 1e9),
            "PidsLimit": self.pids,
            "CapDrop": ["ALL"],
            **({"CapAdd": list(CAPABILITIES)} if self.has_users else {}),
            "Privileged": False,
            "ReadonlyRootfs": True,
            "SecurityOpt": ["no-new-privileges", *([f"seccomp={self._profile()}"] if self.has_seccomp else [])],
            "Tmpfs": dict(self.tmpfs()),
            # A private IPC namespace without docker's own /dev/shm, whose files no limit counts.
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "Ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in self.ulimits().items()],
            "LogConfig": {"Type": "none", "Config": {}},
            "RestartPolicy": {"Name": "no"},
            "Mounts": [self._workspace(), *self._layers(), *self._binds()],
        }
        if self.rules is not None:
            config["Dns"] = [NAME_SERVER_ADDRESS]
        return {**config, "Runtime": self.runtime} if self.runtime else config

    def _profile(self) -> str:
        return json.dumps(profile_with_users()) if self.has_users else profile_text()

    def _workspace(self) -> dict[str, Any]:
        if self.volume:
            return {"Type": "volume", "Source": self.volume, "Target": "/workspace", "VolumeOptions": {"NoCopy": True}}
        options = {"type": "tmpfs", "device": "tmpfs", "o": self.workspace_options()}
        driver = {"Name": "local", "Options": options}
        return {
            "Type": "volume",
            "Target": "/workspace",
            "VolumeOptions": {"NoCopy": True, "DriverConfig": driver, "Labels": dict(self.labels)},
        }

    def _layers(self) -> list[dict[str, Any]]:
        mount = {"Type": "volume", "ReadOnly": True, "VolumeOptions": {"NoCopy": True}}
        return [{**mount, "Source": volume, "Target": target} for volume, target in self.layers.items()]

    def _binds(self) -> list[dict[str, Any]]:
        return [
            {"Type": "bind", "ReadOnly": True, "Source": path, "Target": target} for target, path in self.binds.items()
        ]

    def arguments(self) -> list[str]:
        """Return the arguments of the `docker run` that makes the same container."""
        arguments = ["docker", "run", "--rm", "--interactive", *self.isolation()]
        arguments += [f"--user={self.user}:{self.user}", "--workdir=/", "--stop-signal=SIGKILL"]
        arguments.append(f"--mount={self._mount_option()}")
        arguments += [
            f"--mount=type=volume,src={volume},dst={target},readonly,volume-nocopy"
            for volume, target in self.layers.items()
        ]
        arguments += [f"--mount=type=bind,src={path},dst={target},readonly" for target, path in self.binds.items()]
        arguments += [f"--label={name}={value}" for name, value in self.labels.items()]
        arguments += [f"--env={name}={value}" for name, value in ENVIRONMENT.items()]
        return [*arguments, f"--entrypoint={self.command[0]}", self.image, *self.command[1:]]

    def isolation(self) -> list[str]:
        """Return the options that isolate and limit a container, independent of its program."""
        return [
            f"--network={self.network}",
            f"--memory={self.memory_bytes}", f"--memory-swap={self.memory_bytes}", f"--cpus={self.cpus:g}",
            f"--pids-limit={self.pids}", "--cap-drop=ALL", "--security-opt=no-new-privileges",
            *([f"--security-opt=seccomp={PROFILE_FILE}"] if self.has_seccomp else []),
            "--read-only", "--hostname=sandbox", "--ipc=none", "--cgroupns=private", "--log-driver=none",
            *([f"--runtime={self.runtime}"] if self.runtime else []),
            *([f"--dns={NAME_SERVER_ADDRESS}"] if self.rules is not None else []),
            *(f"--tmpfs={target}:{options}" for target, options in self.tmpfs().items()),
            *(f"--ulimit={name}={limit}:{limit}" for name, limit in self.ulimits().items()),
        ]  # fmt: skip

    def _mount_option(self) -> str:
        option = f"type=volume,{f'src={self.volume},' if self.volume else ''}dst=/workspace,volume-nocopy"
        if self.volume:
            return option
        quoted = f'"volume-opt=o={self.workspace_options()}"'
        return f"{option},volume-driver=local,volume-opt=type=tmpfs,volume-opt=device=tmpfs,{quoted}"


def plan_container(
    policy: Policy,
    limits: Limits,
    *,
    image: str,
    command: Sequence[str],
    user: int,
    is_watched: bool,
    runtime: str = "",
    is_id_mapped: bool = False,
    labels: Mapping[str, str] | None = None,
) -> ContainerPlan:
    """Return the plan of one container.

    If the first process watches the guest's memory (`is_watched`), the control group's limit includes the maximum
    content of the tmpfs file systems. Otherwise that content counts as the guest's memory.
    """
    stored = limits.disk_bytes + 2 * limits.tmp_bytes + REAPER_BYTES if is_watched else 0
    return ContainerPlan(
        image=image,
        command=tuple(command),
        user=MAPPED_ID if policy.user == "nobody" or is_id_mapped else user,
        memory_bytes=limits.memory_bytes + stored,
        cpus=limits.cpus,
        guests=limits.pids,
        pids=limits.pids + (REAPERS if is_watched else SHELLS) + (GVISOR_THREADS if runtime in GVISOR else 0),
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        tmp_bytes=limits.tmp_bytes,
        network="bridge" if policy.network == "bridge" else "none",
        rules=network_rules(policy),
        runtime=runtime,
        has_seccomp=True,
        is_id_mapped=is_id_mapped,
        is_tmp_writable="/tmp" in policy.writable_paths,
        labels=labels or {},
    )


def profile_with_users() -> dict[str, Any]:
    """Return the seccomp profile for several users: su and useradd fail if netlink sockets are refused with EPERM.

    Netlink protocols other than NETLINK_ROUTE are refused with EPROTONOSUPPORT, as on a kernel without them.
    """
    of_netlink = {"index": 0, "value": socket.AF_NETLINK, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
    not_of_routes = {"index": 2, "value": NETLINK_ROUTE, "valueTwo": 0, "op": "SCMP_CMP_NE"}
    rule = {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPROTONOSUPPORT}
    rules = profile()
    return {**rules, "syscalls": [*rules["syscalls"], {**rule, "args": [of_netlink, not_of_routes]}]}


def with_homes(plan: ContainerPlan, homes: tuple[str, ...]) -> ContainerPlan:
    """Return the plan of a container that lives, with additional writable folders, each as large as /tmp."""
    return replace(plan, homes=homes, memory_bytes=plan.memory_bytes + len(homes) * plan.tmp_bytes)


def workspace_arguments(container: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
    """Return the arguments of the `docker run` that starts an agent's container (C15), beginning with `docker`.

    It is isolated like a run's container, but lives as long as the agent and has folders of the host. Raises
    BackendUnavailable for a network that docker does not have, InvalidRequest for its bridge under gVisor.
    """
    if policy.network not in NETWORKS:
        raise BackendUnavailable(
            f"network {policy.network!r}: a container of docker's has the network off or bridge, in this version.",
            remedy="Leave network off, or use network 'bridge', which is docker's own, without any rules.",
        )
    if policy.network == "bridge" and container.runtime in GVISOR:
        raise InvalidRequest(
            "network 'bridge' is that of docker's own runtime, and runtime gvisor is asked for; drop one"
        )
    plan = plan_container(
        policy, limits, image=container.image, command=container.command, user=container.user, is_watched=False,
        runtime=container.runtime,
    )  # fmt: skip
    plan = replace(plan, pids=plan.pids - SHELLS)  # the command is the first process
    group = container.group if plan.user == container.user else plan.user
    arguments = ["docker", "run", "--rm", "--interactive", *(["--tty"] if container.has_terminal else [])]
    arguments += [*plan.isolation(), f"--user={plan.user}:{group}", f"--workdir={WORKSPACE}"]
    arguments += [f"--name={container.name}"] if container.name else []
    arguments += [f"--mount=type=bind,{_field('src', host)},dst={target}" for target, host in container.folders.items()]
    variables = {**ENVIRONMENT, **container.env}
    arguments += [f"--env={name}" if value is None else f"--env={name}={value}" for name, value in variables.items()]
    return [*arguments, container.image, *container.command]


def _field(name: str, value: str) -> str:
    """Return a field of a comma-separated mount option, quoted as docker reads it."""
    quoted = value.replace('"', '""')
    return f'"{name}={quoted}"'
