"""What the kernel counts for a container, as its first process can see it."""

from __future__ import annotations

import os

CHUNK = 65_536
WORKSPACE, TMP, SHM = "/workspace", "/tmp", "/dev/shm"
# Of either version of control groups.
PLACES = {
    "stat": ("memory/memory.stat", "memory.stat"),
    "oom": ("memory/memory.oom_control", "memory.events"),
    "pids": ("pids/pids.events", "pids.events"),
    "peak": ("memory/memory.max_usage_in_bytes", "memory.peak"),
}
ROUTES = {"ipv4": "/proc/net/snmp", "ipv6": "/proc/net/snmp6"}  # what the network namespace counts


class Counters:
    """Read the container's control groups, of either version, where they can be seen."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}
        for name, places in PLACES.items():
            for place in places:
                try:
                    self.fds[name] = os.open(f"/sys/fs/cgroup/{place}", os.O_RDONLY | os.O_CLOEXEC)
                    break
                except OSError:
                    continue
        for name, place in ROUTES.items():
            try:
                self.fds[name] = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue

    @property
    def counts_processes(self) -> bool:
        return "pids" in self.fds

    def read(self, name: str) -> str:
        try:
            return os.pread(self.fds[name], CHUNK, 0).decode("ascii", "replace")
        except (KeyError, OSError):
            return ""

    def row(self, name: str, *keys: str) -> int:
        """Return the first of `keys` that a file of rows has, else 0."""
        rows = dict(line.split(None, 1) for line in self.read(name).splitlines() if " " in line)
        return next((int(rows[key]) for key in keys if key in rows), 0)

    def hits(self) -> tuple[int, int]:
        return self.row("oom", "oom_kill"), self.row("pids", "max")

    def unreachable(self) -> int:
        """Return how often there was no route to what was to be reached, since the container began."""
        rows = [row.split() for row in self.read("ipv4").splitlines() if row.startswith("Ip:")]
        table = dict(zip(*rows, strict=False)) if len(rows) == len(("names", "figures")) else {}
        return int(table.get("OutNoRoutes", 0)) + self.row("ipv6", "Ip6OutNoRoutes")

    def held(self) -> tuple[int, int]:
        """Return the bytes of private memory, and of shared memory with all files of a tmpfs."""
        text = self.read("stat")
        rows = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
        return (
            int(rows.get("total_rss", rows.get("anon", 0))),
            int(rows.get("total_shmem", rows.get("shmem", 0))),
        )


def stored() -> int:
    """Return the bytes in the container's own file systems."""
    total = 0
    for place in (WORKSPACE, TMP, SHM):
        try:
            state = os.statvfs(place)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            total += (state.f_blocks - state.f_bfree) * state.f_frsize
    return total


def is_full() -> bool:
    """Tell whether the workspace has no room left."""
    state = os.statvfs(WORKSPACE)
    return state.f_bfree == 0 or state.f_ffree == 0
