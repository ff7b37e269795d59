"""How many live sandboxes this machine carries: a ceiling by memory, processes and open files.

The amounts are those of an idle sandbox of backend `local`, rounded up. A container or a machine takes more, and so
does what runs inside: the ceiling refuses numbers that cannot work, and promises nothing.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress

from cloche.core.errors import InvalidRequest

MEMORY_BYTES, PROCESSES, FILES = 16 << 20, 4, 4  # of one sandbox; files of the worker that holds it
_PIDS, _PROCS = "/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"
_GROUP = "/sys/fs/cgroup"


def check_capacity(count: int) -> None:
    """Raise the soft limit of open files, and raise InvalidRequest if `count` sandboxes exceed this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceilings = ceilings_of(
        memory_bytes=_least(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), f"{_GROUP}/memory.max"),
        processes=_least(_least(1 << 22, _PIDS), _PROCS, f"{_GROUP}/pids.max"),
        files=1 << 20 if hard == resource.RLIM_INFINITY else hard,
    )
    what, ceiling = min(ceilings.items(), key=lambda row: row[1])
    if count > ceiling:
        raise InvalidRequest(f"--sandboxes {count}: this machine carries {ceiling}, by its {what}; give fewer")
    needed = 2 * FILES * count
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def ceilings_of(*, memory_bytes: int, processes: int, files: int) -> Mapping[str, int]:
    """Return the number of sandboxes for which each resource suffices; half of the files are for connections."""
    return {
        "memory": memory_bytes // MEMORY_BYTES, "processes": processes // PROCESSES,
        "open files (ulimit -Hn)": files // (2 * FILES),
    }  # fmt: skip


def _least(amount: int, *paths: str) -> int:
    """Return the least of an amount and the numbers in files; a missing file, or `max` in it, is no bound."""
    for path in paths:
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            amount = min(amount, int(file.read()))
    return amount
