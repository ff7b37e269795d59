"""Names of control groups, by which those of dead processes are told from those of the living.

A helper or keeper removes its groups, and a caller those of one that was killed. Where both were killed, empty ones
stay: whoever comes next removes them. What holds a process cannot be removed, so nothing that lives is at risk.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from .containers.owner import namespace, started_at
from .host import Host


def group_name(kind: str) -> str:
    """Return a name for a control group of this process; `kind` says what it is for, in letters."""
    return f"{_maker(os.getpid(), kind)}-{os.urandom(6).hex()}"


@functools.lru_cache(8)
def _maker(pid: int, kind: str) -> str:
    return f"cloche-{pid}-{kind}-{namespace()}-{started_at(pid)}"


def is_left_over(name: str, kind: str) -> bool:
    """Tell whether a group is ours, for such a thing, and who made it is surely dead."""
    words = name.split("-")
    if len(words) != 6 or words[0] != "cloche" or words[2] != kind or not (words[1].isdigit() and words[4].isdigit()):
        return False
    return words[3] == namespace() and started_at(words[1]) != words[4]


def clear_groups(host: Host, kind: str) -> None:
    """Remove the empty groups of dead processes, once per process."""
    _clear_once(os.getpid(), _folders(host), kind)


def remove_groups(host: Host, kind: str) -> list[str]:
    """Remove the empty groups of dead processes now; return the name of each, which it has with every controller."""
    return _remove(_folders(host), kind)


def _folders(host: Host) -> tuple[str, ...]:
    return tuple(sorted(set(host.cgroup_folders.values())))


@functools.lru_cache(64)
def _clear_once(_pid: int, folders: tuple[str, ...], kind: str) -> None:
    _remove(folders, kind)


def _remove(folders: Iterable[str], kind: str) -> list[str]:
    removed = set()
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if not is_left_over(name, kind):
                continue
            try:
                os.rmdir(f"{folder}/{name}")
            except OSError:
                continue  # it is not empty, or somebody else was faster
            removed.add(name)
    return sorted(removed)
