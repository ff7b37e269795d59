"""The sums of a tree's memory: their results, and how often they are made.

A sum takes longer the more processes there are and the more memory they share: the kernel walks through the memory of
each. So each sum is followed by a pause that limits watching to a tenth of one processor. Where only the reaper may
read the guest's memory, it makes the expensive part (see `pss`), and its answer is used when it arrives.
"""

from __future__ import annotations

import posix
from time import monotonic, process_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .fork_tree import ForkTreeServer
    from .messages import Spec
    from .sandbox_state import SandboxState

PAUSE = 9  # how many times as long as a sum took, in processor time, the pause after it is …
LONGEST_PAUSE_S = 1.0  # … but never longer: memory can grow meanwhile
ANSWER_S = 2.0  # for the reaper's answer, which may first answer others; then it is decided without
TICK_S, IDLE_TICK_S = 0.02, 0.5  # how often memory is summed while something runs, and while a session waits


class Accounting:
    """Sum a tree's memory, keep the largest sums, and limit the cost of watching.

    Where another process must make the expensive sum, `ask` sends it the limit, and `take` receives its answer.
    """

    def __init__(self, ask: Callable[[int], None] | None = None) -> None:
        self.tick_s, self._ask = TICK_S, ask
        self._memory_stat, self._before = "", b""
        self.renew()

    def renew(self) -> None:
        """Begin anew with another run."""
        self.peak_bytes = self.peak_tasks = 0
        self._next_at = self._begun_s = self._asked_at = 0.0
        self._own_bytes = 0

    def note_before(self, memory_stat: str) -> None:
        """Note our container's own memory before a run, by this file, which may not exist."""
        self._memory_stat, self._before = memory_stat, _text_of(memory_stat)

    def begin_later(self) -> None:
        """Look for the first time when the run has lasted for a while: most are over by then."""
        self._next_at = monotonic() + self.tick_s

    def begin(self) -> bool:
        """Tell whether a sum is due; if so, the time until `end` counts as its cost."""
        self._begun_s = process_time()
        return monotonic() >= self._next_at

    def end(self) -> None:
        """Note the cost of a look."""
        self._next_at = monotonic() + min(PAUSE * (process_time() - self._begun_s), LONGEST_PAUSE_S)

    def pause_s(self) -> float:
        """Return the seconds until the next look."""
        return max(self.tick_s, self._next_at - monotonic())

    def exceeded(self, state: SandboxState, reaper: int, forks: ForkTreeServer | None) -> str:
        """Return the limit that a run is over, as the cause of its end, "" for none; forks over theirs are killed."""
        if state.spec.accounting and self._is_memory_exceeded(state, reaper, forks):
            return "" if forks is not None and forks.kill_exceeding() else "out_of_memory"
        if state.is_folder_over():
            return "disk_limit"
        if forks is not None:
            forks.check_memory(state.spec.memory_bytes)
        return ""

    def _is_memory_exceeded(self, state: SandboxState, reaper: int, forks: ForkTreeServer | None) -> bool:
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
                used = procfs.private_bytes(pids) if spec.level == "jail" else self._look_closer(spec, pids, reaper)
        self.peak_bytes = max(self.peak_bytes, used)
        return used > spec.memory_bytes

    def _look_closer(self, spec: Spec, pids: list[int], reaper: int) -> int:
        """Return the bytes in memory without merely mapped files; 0 while the answer is pending."""
        from . import procfs, pss

        own_bytes = procfs.own_bytes(pids)
        if own_bytes <= spec.memory_bytes:
            return own_bytes
        self._own_bytes = own_bytes
        if self._ask is None:
            return self._decide(pss.sum_now(reaper, spec.memory_bytes))
        if not self._asked_at:
            self._asked_at = monotonic()
            self._ask(spec.memory_bytes)
        elif monotonic() - self._asked_at > ANSWER_S:
            return self._decide(None)
        return 0

    def take(self, result: dict[str, Any], limit_bytes: int) -> bool:
        """Take the requested sum; tell whether the run is over its memory limit."""
        self._asked_at = 0.0
        self._next_at = max(self._next_at, monotonic() + min(PAUSE * result["spent_s"], LONGEST_PAUSE_S))
        used = self._decide(result)
        self.peak_bytes = max(self.peak_bytes, used)
        return used > limit_bytes

    def _decide(self, result: dict[str, Any] | None) -> int:
        from . import pss

        growth = pss.growth_bytes(self._before, _text_of(self._memory_stat))
        return pss.decide(result, self._own_bytes, growth)


def _text_of(path: str) -> bytes:
    """Return the contents of a small file, empty if it cannot be read."""
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return posix.read(fd, 1 << 16)
    except OSError:
        return b""
    finally:
        posix.close(fd)
