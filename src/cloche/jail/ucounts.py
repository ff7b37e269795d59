"""What the kernel counts per user and user namespace (`ucounts`): how much of each one sandbox may have.

What is used in a user namespace is charged there, and to the owner of the namespace in each one above it. A limit of
`/proc/sys/user` belongs to the namespace of who opens the file, so a jail's own first process lowers its own, while
it has its capabilities; they cannot be raised by who has none. The limits of a namespace bind each id in it by itself,
and a guest has one.
"""

from __future__ import annotations

import functools
import os

from .calls import ENOENT, make
from .syscalls import AT_FDCWD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .calls import Call

FOLDER = "/proc/sys/user"
# A guest gets at most this part of what a user of the host may have: as an ordinary user all share that one's.
PART = 8
INOTIFY_INSTANCES, INOTIFY_WATCHES = 16, 8192
# Seccomp refuses the calls that make these; here they are refused once more.
NEVER = ("fanotify_groups", "fanotify_marks", "cgroup_namespaces", "time_namespaces")
# What a clone of a live session is born with, besides mounts.
NESTED = ("user_namespaces", "pid_namespaces", "net_namespaces", "ipc_namespaces", "uts_namespaces")
MOST_NESTED = 1024


def amounts(*, is_forkable: bool, is_nursery: bool = False) -> dict[str, int]:
    """Return how much of each a sandbox may have, by the kernel's names."""
    # Each guest of a nursery has a mount namespace of its own, made before it gives its powers up.
    mounts = MOST_NESTED if is_forkable or is_nursery else 0
    return {
        **dict.fromkeys(NEVER, 0),
        **dict.fromkeys(NESTED, MOST_NESTED if is_forkable else 0),
        "mnt_namespaces": mounts,
        "inotify_instances": min(INOTIFY_INSTANCES, _share("inotify_instances")),
        "inotify_watches": min(INOTIFY_WATCHES, _share("inotify_watches")),
    }


def opening(limits: Mapping[str, int]) -> list[Call]:
    """Open the files of the limits while the host's /proc is there; a kernel may not know one, and then has none."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    return [
        make("openat", AT_FDCWD, os.fsencode(f"{FOLDER}/max_{name}"), flags, 0, keep=f"max {name}", excuse=(ENOENT,))
        for name in limits
    ]


def setting(limits: Mapping[str, int]) -> list[Call]:
    """Write the limits. A mount that is held while it is attached nowhere counts as a mount namespace, too."""
    calls = []
    for name, amount in limits.items():
        calls += [make("write", f"max {name}", str(amount).encode()), make("close", f"max {name}")]
    return calls


@functools.cache
def _share(name: str) -> int:
    """Return what one guest may have of what the caller's user may have."""
    try:
        with open(f"{FOLDER}/max_{name}", encoding="ascii") as file:
            return max(1, int(file.read()) // PART)
    except (OSError, ValueError):
        return max(INOTIFY_INSTANCES, INOTIFY_WATCHES)
