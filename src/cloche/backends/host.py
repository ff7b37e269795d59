"""What this host gives, measured once per process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloche.core.levels import Level
from cloche.jail.probe import run_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Hold the probe's findings. Empty text means that a thing works; else it is the kernel's answer.

    `owns_ids` says that we are a root that may give every sandbox an outside id of its own.
    """

    uid: int
    owns_ids: bool
    lists_children: bool
    landlock_abi: int
    seccomp: str
    namespaces: str
    idmapped: str
    can_switch_identity: bool
    cgroup_version: int
    cgroup_folders: Mapping[str, str] = field(default_factory=dict)
    cgroup_reason: str = ""

    def without_cgroups(self) -> Host:
        """Return the same host as it would be for a user without a delegated control group."""
        reason = "control groups are not used"
        return replace(self, cgroup_version=0, cgroup_folders={}, cgroup_reason=reason)

    def level(self) -> Level:
        """Return the strongest level this host can reach."""
        if self.seccomp:
            return Level.PROCESS
        if not self.namespaces:
            return Level.JAIL
        can_confine = self.landlock_abi > 0 and (self.can_switch_identity or self.uid != 0)
        can_confine = can_confine and self.lists_children  # without them a tree that nothing encloses cannot be found
        return Level.CONFINED if can_confine else Level.PROCESS


@functools.cache
def measure_host(executable: str = sys.executable) -> Host:
    """Run the probe process. Raises OSError when it cannot be run."""
    found = run_probe(executable)
    cgroup: Mapping[str, Any] = found["cgroup"]
    return Host(
        uid=found["uid"],
        owns_ids=found["owns_ids"],
        lists_children=found["lists_children"],
        landlock_abi=found["landlock"],
        seccomp=found["seccomp"],
        namespaces=found["namespaces"],
        idmapped=found["idmapped"],
        can_switch_identity=found["can_switch_identity"],
        cgroup_version=cgroup["version"],
        cgroup_folders=cgroup["folders"],
        cgroup_reason=cgroup["reason"],
    )


def namespace_remedy(host: Host | None = None) -> str:
    """Say in one line how to get user namespaces here."""
    if host is not None and host.namespaces.startswith("uid_map"):
        return "run Cloche as an ordinary user, or map a range of ids for this root"
    restricted = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
    if _reads(restricted) == "1":
        return "allow user namespaces: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if _reads("/proc/sys/user/max_user_namespaces") == "0":
        return "allow user namespaces: sudo sysctl -w user.max_user_namespaces=10000"
    if _reads("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "allow user namespaces: sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "inside a container: start it with a seccomp profile that allows unshare, and an unmasked /proc"
    return "use a kernel and a container profile that let this user create user namespaces"


def _reads(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
