"""The memory of a tree of processes as proportional set size (PSS): shared memory counts once, in equal parts.

Theory of operation: a resident size counts memory shared by forks in each of them, and files that are merely mapped. So
a measurement goes from cheap to expensive sources, and continues only while the sum is over the limit: resident sizes;
anonymous and shared memory by `/proc/PID/status`; the same by `smaps_rollup`. For the last the kernel walks through a
process's memory, and it needs the process's own uid or SYS_PTRACE. At level `confined` only the reaper has that uid:
the helper asks it over their link, and it does its other work between two steps of a sum.

If `smaps_rollup` cannot be read, no process shall end for pages that are counted twice: then the tree's memory is the
growth of the container's own anonymous and shared memory since the run began, if that is less.
"""

from __future__ import annotations

from time import monotonic, process_time

from . import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MOST_S = 0.5  # for one sum: processes that are left by then count by the cheaper figure
# Anonymous memory and shared memory, in `memory.stat`: of version 1 with the groups below it, and of version 2.
_GROUP_ROWS = (("total_rss", "total_shmem"), ("rss", "shmem"), ("anon", "shmem"))


class PssSum:
    """Sum the anonymous and shared memory of all below `root`, in steps of one process each.

    The sum ends as soon as it is over `limit_bytes`. Processes that have ended meanwhile do not count: their share of
    shared memory may have moved to others.
    """

    def __init__(self, root: int, limit_bytes: int):
        self._walk, self._limit_bytes = procfs.descend(root), limit_bytes
        self._queue: list[int] = []
        self._shares: dict[int, int] = {}  # of their PSS …
        self._refused: dict[int, int] = {}  # the full figures of unreadable processes
        self._total_bytes = 0  # of the shares
        self._begun_s, self._ends_at = process_time(), monotonic() + MOST_S
        self._is_whole = True

    def step(self) -> bool:
        """Look at one more process; tell whether the sum is made."""
        if monotonic() >= self._ends_at:
            self._is_whole = False
            return True
        if not self._queue:
            below = next(self._walk, None)
            if below is None:
                self._forget_ended()
                return True
            self._queue += below
            return False
        pid = self._queue.pop()
        share = procfs.share_of(pid)
        if share is None:
            self._refused[pid] = procfs.own_bytes([pid])
            return False
        self._shares[pid] = share
        self._total_bytes += share
        if self._is_over():
            self._forget_ended()
        return self._is_over()

    def result(self) -> dict[str, Any]:
        """Return the sum's bytes, whether all of it is PSS or enough to be over the limit, and its processor time.

        The bytes are absent (None) if time was too short.
        """
        is_exact = self._is_over() or (self._is_whole and not self._refused)
        total = self._total_bytes + sum(self._refused.values())
        sum_bytes = total if is_exact or self._is_whole else None
        return {"bytes": sum_bytes, "is_exact": is_exact, "spent_s": process_time() - self._begun_s}

    def _is_over(self) -> bool:
        return self._total_bytes > self._limit_bytes

    def _forget_ended(self) -> None:
        for bytes_by_pid in (self._shares, self._refused):
            for pid in [pid for pid in bytes_by_pid if not procfs.has_memory(pid)]:
                del bytes_by_pid[pid]
        self._total_bytes = sum(self._shares.values())


def sum_now(root: int, limit_bytes: int) -> dict[str, Any]:
    """Return the result of a whole sum at once, in a process that may read all of it."""
    pss_sum = PssSum(root, limit_bytes)
    while not pss_sum.step():
        pass
    return pss_sum.result()


def decide(result: dict[str, Any] | None, own_bytes: int, grown_bytes: int | None) -> int:
    """Return a tree's memory in bytes, from a sum's result or None, its cheaper figure, and its container's growth."""
    used, summed = own_bytes, None if result is None else result["bytes"]
    if result is not None and summed is not None:
        used = min(used, int(summed))
        if result["is_exact"]:
            return used
    return used if grown_bytes is None else min(used, grown_bytes)


def growth_bytes(before: bytes, now: bytes) -> int | None:
    """Return by how much a group's anonymous and shared memory has grown between two texts of its `memory.stat`."""
    then, later = _rows(before), _rows(now)
    for names in _GROUP_ROWS:
        if _has(then, names) and _has(later, names):
            return max(0, sum(later[name] - then[name] for name in names))
    return None


def _rows(text: bytes) -> dict[str, int]:
    pairs = (line.split() for line in text.decode("ascii", "replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _has(rows: dict[str, int], names: Sequence[str]) -> bool:
    return all(name in rows for name in names)
