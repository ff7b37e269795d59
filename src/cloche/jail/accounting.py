"""The sums of a tree's memory: what they find, and how often they are made.

A sum takes the longer the more processes there are and the more they share: the kernel walks through the memory of each
of them. So after each one there is a pause that leaves watching a tenth of one processor.
"""

from __future__ import annotations

from time import monotonic, process_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .fork_tree import ForkTree
    from .sandbox_state import SandboxState

PAUSE = 9  # how many times as long as a sum took, in processor time, the pause after it is …
LONGEST_PAUSE_S = 1.0  # … but never longer: memory can grow meanwhile
TICK_S, IDLE_TICK_S = 0.02, 0.5  # how often memory is summed while something runs, and while a session waits


class Accounting:
    """Sum a tree's memory, keep the largest sums, and keep within what watching may cost."""

    def __init__(self) -> None:
        self.tick_s = TICK_S
        self.renew()

    def renew(self) -> None:
        """Begin anew with another run."""
        self.peak_bytes = self.peak_tasks = 0
        self._next_at = self._begun_s = 0.0

    def begin(self) -> bool:
        """Tell whether it is time to look; if so, what is done until `end` is the cost of it."""
        self._begun_s = process_time()
        return monotonic() >= self._next_at

    def end(self) -> None:
        """Take note of what looking took."""
        self._next_at = monotonic() + min(PAUSE * (process_time() - self._begun_s), LONGEST_PAUSE_S)

    def pause_s(self) -> float:
        """Return the seconds until the next look."""
        return max(self.tick_s, self._next_at - monotonic())

    def exceeded(self, state: SandboxState, reaper: int, forks: ForkTree | None) -> str:
        """Return the limit that a run is over, as the cause of its end, "" for none; forks over theirs are killed."""
        if state.spec.accounting and self._is_memory_exceeded(state, reaper, forks):
            return "" if forks is not None and forks.kill_exceeding() else "out_of_memory"
        if state.is_folder_over():
            return "disk_limit"
        if forks is not None:
            forks.check_memory(state.spec.memory_bytes)
        return ""

    def _is_memory_exceeded(self, state: SandboxState, reaper: int, forks: ForkTree | None) -> bool:
        """Sum the memory of all below `reaper`: a cheap figure first, the fair one only when that is over.

        Not where only a sum over several sessions could be had: each of them is looked at by itself.
        """
        spec, cgroup = state.spec, state.cgroup
        if spec.accounting == "cgroup" and cgroup is not None:
            if cgroup.memory_bytes() <= spec.memory_bytes:
                return False
            used = cgroup.anonymous_bytes()
        elif forks is not None and forks.has_forks:
            return False
        else:
            from . import procfs

            pids = procfs.descendants(reaper)
            self.peak_tasks = max(self.peak_tasks, procfs.count_tasks(pids))
            used = procfs.resident_bytes(pids)
            if used > spec.memory_bytes:
                used = procfs.private_bytes(pids)
        self.peak_bytes = max(self.peak_bytes, used)
        return used > spec.memory_bytes
