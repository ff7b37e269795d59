"""What a machine of microsandbox's is made of, decided purely, and in the words of its package.

Everything that a caller may choose and that the package knows is passed on: memory, processors, places in memory with
their sizes, limits of each process, environment, labels. No network, nothing of the host's, not root inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.units import MIB

from ..containers.guest import ENVIRONMENT, REAPER_BYTES, REAPERS, ULIMITS

OWNER_LABEL = "cloche.owner"
GUEST_ID, NOBODY = 1000, 65_534
KERNEL_BYTES = 128 * MIB  # what the kernel and microsandbox's own agent need besides
ROOT_BYTES = 16 * MIB  # of the image's root, what root inside may write: nobody is root there
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST_CPUS = 16
COMMAND = "python3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Describe one machine, and what each program in it may use."""

    image: str
    memory_mib: int
    processors: int
    disk_mib: int
    tmp_mib: int
    data_bytes: int  # of one process
    pids: int
    user: int
    is_tmp_writable: bool
    labels: Mapping[str, str]

    def creation(self, package: Any) -> dict[str, Any]:
        """Return what `Sandbox.create` is given besides a name."""
        places = {"/workspace": self.disk_mib, "/tmp": self.tmp_mib, "/dev/shm": self.tmp_mib}
        return {
            "image": package.Image.oci(self.image),
            "memory": self.memory_mib,
            "cpus": self.processors,
            "workdir": "/",
            "hostname": "sandbox",
            "user": "0",  # of what prepares it; programs are somebody else
            "security": package.SecurityProfile.RESTRICTED,
            "network": package.Network.none(),
            "volumes": {
                place: package.Volume.tmpfs(size_mib=size, nosuid=True, nodev=True, noexec=place == "/dev/shm")
                for place, size in places.items()
            },
            "labels": dict(self.labels),
            "pull_policy": package.PullPolicy.IF_MISSING,
            "ephemeral": True,
            "detached": False,
        }

    def preparation(self) -> list[str]:
        """Return what is run once, as root: the places belong to whoever programs run as."""
        tmp = "chmod 1777 /tmp /dev/shm" if self.is_tmp_writable else "chmod 0755 /tmp && chmod 1777 /dev/shm"
        return ["-c", f"chown {self.user}:{self.user} /workspace && chmod 0700 /workspace && {tmp}"]

    def execution(self, package: Any) -> dict[str, Any]:
        """Return what `exec_stream` is given besides a program and its words; the program serves one run."""
        limits = {**ULIMITS, "nproc": self.pids, "data": self.data_bytes}
        return {
            "cwd": "/",
            "user": str(self.user),
            "env": {"PATH": PATH, **ENVIRONMENT},
            "stdin": package.Stdin.pipe(),
            "tty": False,
            "rlimits": [package.Rlimit(package.RlimitResource(name), most, most) for name, most in limits.items()],
        }


def plan_machine(policy: Policy, limits: Limits, *, image: str, labels: Mapping[str, str]) -> Plan:
    """Return the plan of one machine; its memory has room for all that its places may hold."""
    everything = limits.memory_bytes + limits.disk_bytes + 2 * limits.tmp_bytes + REAPER_BYTES
    return Plan(
        image=image,
        memory_mib=math.ceil((everything + KERNEL_BYTES + ROOT_BYTES) / MIB),
        processors=min(MOST_CPUS, max(1, math.ceil(limits.cpus))),
        disk_mib=max(1, limits.disk_bytes // MIB),
        tmp_mib=max(1, limits.tmp_bytes // MIB),
        data_bytes=limits.memory_bytes + REAPER_BYTES,
        pids=limits.pids + REAPERS,
        user=NOBODY if policy.user == "nobody" else GUEST_ID,
        is_tmp_writable="/tmp" in policy.writable_paths,
        labels=labels,
    )
