"""Why a place gives no more, and what to do there: a row for each place, with what was measured in it."""

from __future__ import annotations

import pytest

from cloche.backends.host import Host
from cloche.backends.remedies import Surroundings, remedy, why_not_higher
from cloche.core.enforcement import Level
from cloche.core.record import replace

ROOT = Host(
    uid=0, owns_ids=True, lists_children=True, landlock_abi=7, seccomp="", idmapped="", can_switch_identity=True,
    namespaces="clone: Operation not permitted", processes="", cgroup_version=0,
)  # fmt: skip
USER = replace(ROOT, uid=1000, owns_ids=False, can_switch_identity=False, idmapped="needs root")
DOCKER = Surroundings(is_container=True, is_filtered=True, is_masked=True)
MOUNT_REFUSED = "[Errno 1] mount: Operation not permitted"
WRITES = (
    '"cloche doctor --container-profile FILE" writes the file; docs/deploy.md has this for Kubernetes and compose, too'
)
PROFILE = f"--security-opt seccomp=FILE --security-opt systempaths=unconfined ({WRITES})"
UNMASKED = "--security-opt systempaths=unconfined (docs/deploy.md has this for Kubernetes and compose, too)"
SYSCTL = "allow user namespaces: sudo sysctl -w "
UBUNTU = (
    f"{SYSCTL}kernel.apparmor_restrict_unprivileged_userns=0 (AppArmor refuses them, as on Ubuntu 24.04; "
    "docs/deploy.md has a profile for one program)"
)
UNIT = (
    "in the systemd unit leave out RestrictNamespaces=, ProtectKernelTunables=, ProtectProc= and a "
    "SystemCallFilter= without @mount (docs/deploy.md has a unit)"
)
OUTSIDE = (
    "run Cloche outside of gVisor, where Cloche can start gVisor (--backend gvisor, or docker with --runtime runsc)"
)
GVISOR = (
    "this is gVisor, which lacks features of Linux (seccomp filters are refused: [Errno 22] seccomp: Invalid "
    "argument; and this kernel has no Landlock; and processes cannot be waited for: no child "
    "subreaper: [Errno 22] prctl: Invalid argument)"
)
PLACES = {
    "a plain container, root": (ROOT, DOCKER, f"start the container with --user 1000:1000 {PROFILE}"),
    "a plain container, a user": (USER, DOCKER, f"start the container with {PROFILE}"),
    "a random user with gid 0": (replace(USER, uid=1000650000), DOCKER, f"start the container with {PROFILE}"),
    "a pod, restricted": (USER, DOCKER, f"start the container with {PROFILE}"),
    "a container's root without capabilities": (
        replace(ROOT, can_switch_identity=False), DOCKER,
        "run Cloche as an ordinary user in it (docker: --user 1000:1000)",
    ),
    "such a root where namespaces are allowed": (
        replace(ROOT, can_switch_identity=False, namespaces="uid_map: Operation not permitted"),
        replace(DOCKER, is_filtered=False),
        "run Cloche as an ordinary user in it (docker: --user 1000:1000)",
    ),
    "root of a container of a user's": (
        replace(ROOT, owns_ids=False, namespaces="uid_map: this root may not give the guest another id"),
        replace(DOCKER, is_masked=False),
        "root here has no other ids to give; run Cloche as an ordinary user in it (docker: --user 1000:1000)",
    ),
    "seccomp unconfined": (
        replace(USER, namespaces=MOUNT_REFUSED), replace(DOCKER, is_filtered=False),
        f"start the container with {UNMASKED}",
    ),
    "our profile, /proc masked": (
        replace(USER, namespaces=MOUNT_REFUSED), DOCKER, f"start the container with {UNMASKED}",
    ),
    "/proc unmasked, docker's profile": (
        USER, replace(DOCKER, is_masked=False), f"start the container with --security-opt seccomp=FILE ({WRITES})",
    ),
    "docker on a host with AppArmor": (
        replace(USER, namespaces="[Errno 13] mount: Permission denied"),
        replace(DOCKER, is_masked=False, apparmor="docker-default"),
        f"start the container with {UNMASKED.replace('systempaths', 'apparmor')}",
    ),
    "max_user_namespaces is 0": (
        replace(USER, namespaces="clone: No space left on device"),
        Surroundings(switches=("user.max_user_namespaces",)),
        f"{SYSCTL}user.max_user_namespaces=10000",
    ),
    "unprivileged_userns_clone is 0": (
        USER, Surroundings(switches=("kernel.unprivileged_userns_clone",)),
        f"{SYSCTL}kernel.unprivileged_userns_clone=1",
    ),
    "Ubuntu 24.04": (
        replace(USER, namespaces="[Errno 13] mount: Permission denied"),
        Surroundings(switches=("kernel.apparmor_restrict_unprivileged_userns",)), UBUNTU,
    ),
    "a container on Ubuntu 24.04": (
        USER, replace(DOCKER, switches=("kernel.apparmor_restrict_unprivileged_userns",)),
        f"{UBUNTU}; and start the container with {PROFILE}",
    ),
    "a kernel before 5.12": (
        replace(USER, namespaces="[Errno 38] mount_setattr: Function not implemented"), Surroundings(),
        "use Linux 5.12 or later",
    ),
    "a systemd unit": (
        USER, Surroundings(is_unit=True, is_filtered=True),
        UNIT,
    ),
    "below somebody's filter": (
        USER, Surroundings(is_filtered=True),
        "start Cloche without the seccomp filter, or the AppArmor profile, of this process",
    ),
    "a kernel without namespaces": (
        replace(USER, namespaces="clone: Invalid argument"), Surroundings(),
        "use a kernel that lets this user create user namespaces (CONFIG_USER_NS)",
    ),
    "a kernel before 5.3": (
        replace(USER, processes="pidfd_open: Function not implemented"), Surroundings(),
        "use Linux 5.3 or later, and in a container a profile with pidfd_open",
    ),
    "a kernel without filters": (
        replace(USER, seccomp="[Errno 22] seccomp: Invalid argument"), Surroundings(),
        "use a kernel with CONFIG_SECCOMP_FILTER, Linux 5.0 or later, and in a container a profile with seccomp",
    ),
    "gVisor": (
        replace(
            ROOT, seccomp="[Errno 22] seccomp: Invalid argument", landlock_abi=0, lists_children=False,
            processes="no child subreaper: [Errno 22] prctl: Invalid argument",
            namespaces="[Errno 38] open_tree: Function not implemented",
        ),
        Surroundings(is_container=True, is_gvisor=True),
        OUTSIDE,
    ),
    "a host with all of it": (replace(USER, namespaces=""), DOCKER, ""),
}  # fmt: skip


@pytest.mark.parametrize(("host", "around", "said"), list(PLACES.values()), ids=list(PLACES))
def test_each_place_has_its_remedy(host: Host, around: Surroundings, said: str) -> None:
    """One sentence for each, which names what this place lacks and nothing that it has."""
    assert remedy(host, around) == said
    assert (host.level() is Level.JAIL) == (said == "")


@pytest.mark.parametrize(
    ("place", "level", "why"),
    [
        ("a plain container, root", Level.CONFINED, "namespaces are refused: clone: Operation not permitted"),
        (
            "a container's root without capabilities", Level.PROCESS,
            "namespaces are refused: clone: Operation not permitted; and this root may not give a guest another id",
        ),
        (
            "gVisor", Level.NONE,
            GVISOR,
        ),
        ("a host with all of it", Level.JAIL, ""),
    ],
)  # fmt: skip
def test_each_level_says_why_it_is_no_higher(place: str, level: Level, why: str) -> None:
    """By the kernel's answers, all that keep it there."""
    host, around, _ = PLACES[place]
    assert (host.level(), why_not_higher(host, around)) == (level, why)
