"""What this process's sandboxes could leave on this host."""

from __future__ import annotations

import os
import tempfile

# Where sandboxes of this process leave their name: `cloche-<pid>-...`, see the local backend's plan.
_PLACES = ("/dev/shm", "/run", "/var/tmp")


def leftovers() -> frozenset[str]:
    """Return a line for every process, mount, control group and folder that is this process's doing."""
    return frozenset([*_descendants(os.getpid()), *_mounts(), *_folders()])


def named_processes(token: str) -> list[int]:
    """Return the processes whose command line holds `token`; those of another process namespace are seen from here."""
    return [pid for pid in _pids() if token.encode() in _read(f"/proc/{pid}/cmdline")]


def status_of(pid: int) -> dict[str, str]:
    """Return the rows of a process's status file, empty when it is gone."""
    rows = (line.split(":", 1) for line in _read(f"/proc/{pid}/status").decode(errors="replace").splitlines())
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def _descendants(root: int) -> list[str]:
    parents = {pid: int(status_of(pid).get("PPid", 0)) for pid in _pids()}
    found: list[int] = []
    queue = [root]
    while queue:
        parent = queue.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        found += children
        queue += children
    return [f"process {pid}: {_read(f'/proc/{pid}/cmdline')[:80]!r}" for pid in found]


def _mounts() -> list[str]:
    lines = _read("/proc/self/mountinfo").decode(errors="replace").splitlines()
    return [f"mount {line}" for line in lines if f"cloche-{os.getpid()}-" in line]


def _folders() -> list[str]:
    prefix = f"cloche-{os.getpid()}-"
    places = {tempfile.gettempdir(), *_PLACES}
    found = [f"{place}/{name}" for place in places for name in _listed(place) if name.startswith(prefix)]
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if name.startswith(prefix)]
    return found


def _listed(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
