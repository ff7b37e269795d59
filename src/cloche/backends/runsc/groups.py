"""Names of control groups, by which those of dead processes are told from those of the living.

A keeper removes its groups, and a caller those of a keeper that was killed. Where both were killed, empty ones stay:
whoever comes next removes them. What holds a process cannot be removed, so nothing that lives is at risk.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Iterable

from ..containers.owner import namespace, started_at
from ..host import Host

# The number of the process, of its process namespace, its start, and something that nobody else has.
_NAME = re.compile(r"cloche-(\d+)-gvisor-(\d*)-(\d+)-[0-9a-f]+")


def group_name() -> str:
    """Return a name for a control group of this process."""
    pid = os.getpid()
    return f"cloche-{pid}-gvisor-{namespace()}-{started_at(pid)}-{secrets.token_hex(6)}"


def is_left_over(name: str) -> bool:
    """Tell whether a group is ours, and who made it is surely dead."""
    found = _NAME.fullmatch(name)
    return found is not None and found[2] == namespace() and started_at(found[1]) != found[3]


def clear_groups(host: Host) -> None:
    """Remove the empty groups of dead processes, once per process."""
    _clear_once(os.getpid(), _folders(host))


def remove_groups(host: Host) -> list[str]:
    """Remove the empty groups of dead processes now; return the name of each, which it has with every controller."""
    return _remove(_folders(host))


def _folders(host: Host) -> tuple[str, ...]:
    return tuple(sorted(set(host.cgroup_folders.values())))


@functools.cache
def _clear_once(_pid: int, folders: tuple[str, ...]) -> None:
    _remove(folders)


def _remove(folders: Iterable[str]) -> list[str]:
    removed = set()
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in filter(is_left_over, names):
            try:
                os.rmdir(f"{folder}/{name}")
            except OSError:
                continue  # it is not empty, or somebody else was faster
            removed.add(name)
    return sorted(removed)
