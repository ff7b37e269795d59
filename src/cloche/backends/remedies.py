"""The reason why this host's level is limited, and the remedy: pure functions of measured facts.

`Host` (`host.py`) holds the outcome of probes; `Surroundings` holds the cause as far as files of this host show it: a
kernel switch, AppArmor, a container's profile, a systemd unit, gVisor. Errors of runs, `cloche backends` and `cloche
doctor` all show the texts of these functions. Each known environment is a row of the table in
tests/unit/backends/test_remedies.py.
"""

from __future__ import annotations

import os

from cloche.core.enforcement import Level
from cloche.core.record import dataclass

from .host import Host

DOCUMENT = "docs/deploy.md"
AS_ORDINARY_USER = "run Cloche as an ordinary user in it (docker: --user 1000:1000)"
USE_LINUX_5_12 = "use Linux 5.12 or later"
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
# Kernel switches: the value that refuses namespaces, and the value that allows them.
_SWITCHES = (
    (_APPARMOR, "1", "0"),
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
)
_NO_SUCH_CALL = os.strerror(38)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Hold facts about this process's environment. `switches` are the kernel's switches that refuse namespaces, by
    name.

    `apparmor` is the confining profile, empty for none. `is_filtered` says that a seccomp filter is installed,
    `is_masked` that something is mounted over parts of /proc.
    """

    switches: tuple[str, ...] = ()
    apparmor: str = ""
    is_container: bool = False
    is_unit: bool = False
    is_filtered: bool = False
    is_masked: bool = False
    is_gvisor: bool = False


def look_around() -> Surroundings:
    """Read the facts about this process's environment."""
    mounted = [line.split(" ")[4] for line in _read("/proc/self/mountinfo").splitlines()]
    masked = [path for path in mounted if path.startswith("/proc/") and path != "/proc/sys/fs/binfmt_misc"]
    profile = _read("/proc/self/attr/current").strip("\0\n ").partition(" (")[0]
    return Surroundings(
        switches=tuple(
            name for name, refuses, _ in _SWITCHES if _read(f"/proc/sys/{name.replace('.', '/')}").strip() == refuses
        ),
        apparmor="" if profile == "unconfined" else profile,
        is_container=any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
        or "KUBERNETES_SERVICE_HOST" in os.environ,
        is_unit="INVOCATION_ID" in os.environ,
        is_filtered="\nSeccomp:\t2" in _read("/proc/self/status"),
        is_masked=bool(masked),
        is_gvisor=os.path.exists("/proc/sentry-meminfo"),
    )


def why_not_higher(host: Host, around: Surroundings) -> str:
    """Return the kernel's answer that keeps the level below jail; empty at jail. Pure."""
    if host.level() >= Level.JAIL:
        return ""
    refused = f"seccomp filters are refused: {host.seccomp}" if host.seccomp else ""
    refused = refused or (f"namespaces are refused: {host.namespaces}" if host.namespaces else "")
    lacks = [refused] if refused else []
    if not host.landlock_abi:
        lacks.append("this kernel has no Landlock")
    elif _lacks_ids(host):
        lacks.append("this root may not give a guest another id")
    if host.processes:
        lacks.append(f"processes cannot be waited for: {host.processes}")
    reason = "; and ".join(lacks)
    return f"this is gVisor, which lacks features of Linux ({reason})" if around.is_gvisor else reason


def remedy(host: Host, around: Surroundings) -> str:
    """Return the advice for a higher level; empty at jail. Pure."""
    if host.level() >= Level.JAIL:
        return ""
    if around.is_gvisor:
        return (
            "run Cloche outside of gVisor, where Cloche can start gVisor (--backend gvisor, or docker with "
            "--runtime runsc)"
        )
    if host.processes:
        return "use Linux 5.3 or later, and in a container a profile with pidfd_open"
    if host.seccomp:
        return "use a kernel with CONFIG_SECCOMP_FILTER, Linux 5.0 or later, and in a container a profile with seccomp"
    if _lacks_ids(host) or (host.uid == 0 and host.namespaces.startswith("uid_map")):
        return AS_ORDINARY_USER if host.owns_ids else f"root here has no other ids to give; {AS_ORDINARY_USER}"
    if _NO_SUCH_CALL in host.namespaces and not host.namespaces.startswith("clone"):
        return USE_LINUX_5_12
    steps = [*_switched(around.switches), *_unwrapped(host, around)]
    return "; and ".join(steps) or "use a kernel that lets this user create user namespaces (CONFIG_USER_NS)"


def group_remedy(uid: int, *, is_unified: bool) -> str:
    """Return the advice for getting control groups. Pure."""
    if uid == 0:
        return "mount /sys/fs/cgroup writable (docker: a private cgroup namespace and no read-only mount)"
    if is_unified:
        return 'start it with "systemd-run --user --scope -p Delegate=yes", which gives this user a group of its own'
    return "control groups of version 1 are root's; run as root, or boot with systemd.unified_cgroup_hierarchy=1"


def has_unified_groups() -> bool:
    """Tell whether this host has control groups of version 2 only."""
    return os.path.exists("/sys/fs/cgroup/cgroup.controllers")


def _lacks_ids(host: Host) -> bool:
    return host.uid == 0 and not host.can_switch_identity


def _switched(switches: tuple[str, ...]) -> list[str]:
    steps = [
        f"allow user namespaces: sudo sysctl -w {name}={allows}" for name, _, allows in _SWITCHES if name in switches
    ]
    if _APPARMOR in switches:
        steps[0] += f" (AppArmor refuses them, as on Ubuntu 24.04; {DOCUMENT} has a profile for one program)"
    return steps


def _unwrapped(host: Host, around: Surroundings) -> list[str]:
    """Return the advice for a container or systemd unit: the settings to change, as far as they can be seen from
    inside.
    """
    refuses_clone = around.is_filtered and host.namespaces.startswith("clone")
    if not (refuses_clone or around.is_masked or around.apparmor):
        return []
    if around.is_unit and not around.is_container:
        left_out = "RestrictNamespaces=, ProtectKernelTunables=, ProtectProc= and a SystemCallFilter= without @mount"
        return [f"in the systemd unit leave out {left_out} ({DOCUMENT} has a unit)"]
    if not (around.is_container or around.is_masked):
        return ["start Cloche without the seccomp filter, or the AppArmor profile, of this process"]
    # The host's root could change the host through a writable /proc/sys.
    options = ["--user 1000:1000"] if around.is_masked and host.owns_ids else []
    options += ["--security-opt seccomp=FILE"] if refuses_clone else []
    options += ["--security-opt systempaths=unconfined"] if around.is_masked else []
    options += ["--security-opt apparmor=unconfined"] if around.apparmor else []
    file = '"cloche doctor --container-profile FILE" writes the file; ' if refuses_clone else ""
    return [f"start the container with {' '.join(options)} ({file}{DOCUMENT} has this for Kubernetes and compose, too)"]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
