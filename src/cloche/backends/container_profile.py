"""The seccomp profile of a container in which Cloche runs and makes jails, in the format of docker's profiles.

It allows the calls of guests (`jail.setup.seccomp`), the calls that build a jail, and the calls of a container's other
programs: above all user namespaces, and mounts in them. Loading kernel code, setting clocks, keys, `bpf`, `io_uring`,
`perf_event_open`, `userfaultfd`, swapping and the like are left out, so they fail with EPERM; so do socket families
that containers do not need. The kernel's capability checks remain: without CAP_SYS_ADMIN, a process can mount only
inside a user namespace that it created.

`container-profile.json` is its text, which `cloche doctor --container-profile FILE` copies; a test keeps the two equal.
It names no architecture, so it applies to the machine's own, and 32-bit programs are killed. docker, podman, containerd
and CRI-O (a pod's `localhostProfile`) accept it.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from cloche.jail.setup.seccomp import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, PERSONALITIES
from cloche.jail.setup.syscall_table import ALLOWED
from cloche.jail.syscalls import NUMBERS

FILE = files("cloche.backends") / "container-profile.json"
AF_PACKET, TIOCSTI, TIOCLINUX = 17, 0x5412, 0x541C
# Calls of a container's other programs, besides those of guests and of building jails, as in docker's own profile.
OTHERS = (
    "adjtimex", "arch_prctl", "chroot", "clock_adjtime", "get_thread_area", "io_cancel", "io_destroy", "io_getevents",
    "io_pgetevents", "io_setup", "io_submit", "memfd_secret", "mknod", "modify_ldt", "name_to_handle_at",
    "process_mrelease", "process_vm_readv", "process_vm_writev", "ptrace", "set_thread_area",
)  # fmt: skip
_BY_ARGUMENT = {"socket", "personality", "ioctl"}


def profile() -> dict[str, Any]:
    """Return the profile; calls that it does not name fail with EPERM."""
    tables = (*ALLOWED.values(), *NUMBERS.values())
    plain = sorted({name for table in tables for name in table} | set(OTHERS))
    families = (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET)
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            _allow([name for name in plain if name not in _BY_ARGUMENT]),
            *(_allow(["socket"], _argument(0, family)) for family in families),
            *(_allow(["personality"], _argument(0, value)) for value in PERSONALITIES),
            _allow(["ioctl"], _argument(1, TIOCSTI, "SCMP_CMP_NE"), _argument(1, TIOCLINUX, "SCMP_CMP_NE")),
        ],
    }


def profile_text() -> str:
    """Return the profile as JSON, one rule per line."""
    content = profile()
    rules = ",\n  ".join(json.dumps(rule) for rule in content.pop("syscalls"))
    return f'{json.dumps(content)[:-1]}, "syscalls": [\n  {rules}\n]}}\n'


def _allow(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _argument(index: int, value: int, comparison: str = "SCMP_CMP_EQ") -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": 0, "op": comparison}
