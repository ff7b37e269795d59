"""Whose a thing outside of our processes is, and whether that process is surely dead."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

HOSTS_OWN = "4026531836"  # the number that the kernel gives to its first process namespace


@functools.cache
def _host() -> tuple[str, str]:
    """Name this host and its boot, as containers may do, without giving either away."""

    def hashed(path: str) -> str:
        try:
            text = Path(path).read_bytes()
        except OSError:
            text = b""
        return hashlib.sha256(b"cloche" + text).hexdigest()[:12]

    return hashed("/etc/machine-id"), hashed("/proc/sys/kernel/random/boot_id")


def owner() -> str:
    """Name this process so that another one can tell whether it still lives."""
    return ":".join([*_host(), namespace(), str(os.getpid()), started_at(os.getpid())])


def is_dead(name: str) -> bool:
    """Tell whether the process that `owner` named is surely gone: of this host, and seen from here.

    That a host has booted since says so of its own processes alone. An image gives one machine-id, or none, to all of
    its containers, so a caller in one may live on another host, whose boot is another one, too.
    """
    words = name.split(":")
    if len(words) != 5 or words[0] != _host()[0]:
        return False
    if words[1] != _host()[1]:
        return words[2] == namespace() == HOSTS_OWN
    return words[2] == namespace() and started_at(words[3]) != words[4]


def namespace() -> str:
    """Return the number of this process's own process namespace; empty where that cannot be known."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def started_at(pid: int | str) -> str:
    """Return when a process started, in the kernel's ticks; empty when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return line[line.rindex(")") + 2 :].split()[19]
