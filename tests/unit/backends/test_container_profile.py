"""The seccomp profile of a container in which jails can be made: its file, what it allows, what it refuses."""

from __future__ import annotations

import json

from cloche.backends.container_profile import FILE, profile_text
from cloche.jail.setup.seccomp import ALLOWED
from cloche.jail.syscalls import NUMBERS

# What docker's own profile refuses to a container without capabilities, and jails have no use for.
REFUSED = {
    "acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kexec_file_load", "kexec_load",
    "keyctl",
    "open_by_handle_at", "perf_event_open", "quotactl", "reboot", "request_key", "settimeofday", "swapoff", "swapon",
    "syslog", "userfaultfd",
}  # fmt: skip


def test_the_file_is_what_the_tables_make() -> None:
    """A call that guests or the making of jails need is in the file that users are given."""
    assert FILE.read_text(encoding="utf-8") == profile_text()
    rules = json.loads(profile_text())["syscalls"]
    allowed = {name for rule in rules for name in rule["names"]}
    assert {name for table in (*ALLOWED.values(), *NUMBERS.values()) for name in table} <= allowed
    assert not allowed & REFUSED


def test_sockets_are_of_a_containers_families() -> None:
    """Unix, IP, netlink, packet; the kernel's ciphers and virtual machines' sockets are not reached."""
    rules = json.loads(profile_text())["syscalls"]
    assert [rule["args"][0]["value"] for rule in rules if rule["names"] == ["socket"]] == [1, 2, 10, 16, 17]
