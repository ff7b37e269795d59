"""The seccomp profile of a container in which jails can be made: its file, what it allows, what it refuses."""

from __future__ import annotations

import json

from cloche.backends.container_profile import FILE, profile_text
from cloche.jail.setup.seccomp import ALLOWED
from cloche.jail.syscalls import NUMBERS

# What docker's own profile of 2025 refuses to a container without capabilities, on x86-64: what jails need of it …
BEYOND_DOCKERS = {
    "namespaces": {"clone3", "setns", "unshare", "sethostname"},  # and `clone`, which docker allows without them
    "mounts": {
        "fsconfig",
        "fsmount",
        "fsopen",
        "mount",
        "mount_setattr",
        "move_mount",
        "open_tree",
        "pivot_root",
        "umount2",
    },
    "a process's own memory": {"get_mempolicy", "set_mempolicy", "map_shadow_stack", "process_madvise"},
    "younger than that profile": {"fchmodat2", "futex_requeue", "futex_wait", "futex_wake"},
}
# … and the rest, of which they need nothing.
REFUSED = {
    "acct", "add_key", "bpf", "clock_settime", "create_module", "delete_module", "fanotify_init", "finit_module",
    "fspick", "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie",
    "mbind", "migrate_pages", "move_pages", "open_by_handle_at", "perf_event_open", "pidfd_getfd", "query_module",
    "quotactl", "quotactl_fd", "reboot", "request_key", "set_mempolicy_home_node", "setdomainname", "settimeofday",
    "swapoff", "swapon", "sysfs", "syslog", "uselib", "userfaultfd", "ustat", "vhangup",
}  # fmt: skip
REFUSED_HERE_ALONE = {"fanotify_mark", "io_uring_enter", "io_uring_register", "io_uring_setup"}


def test_the_file_is_what_the_tables_make() -> None:
    """A call that guests or the making of jails need is in it; beyond docker's own profile nothing else is."""
    assert FILE.read_text(encoding="utf-8") == profile_text()
    rules = json.loads(profile_text())["syscalls"]
    allowed = {name for rule in rules for name in rule["names"]}
    assert {name for table in (*ALLOWED.values(), *NUMBERS.values()) for name in table} <= allowed
    beyond = set[str]().union(*BEYOND_DOCKERS.values())
    assert allowed & (beyond | REFUSED | REFUSED_HERE_ALONE) == beyond


def test_sockets_are_of_a_containers_families() -> None:
    """Unix, IP, netlink, packet; the kernel's ciphers and virtual machines' sockets are not reached."""
    rules = json.loads(profile_text())["syscalls"]
    assert [rule["args"][0]["value"] for rule in rules if rule["names"] == ["socket"]] == [1, 2, 10, 16, 17]
