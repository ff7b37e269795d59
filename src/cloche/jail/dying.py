"""Processes that were killed and that the kernel is not through with: whether they can still do anything.

A process on its way out gives up its memory before it is gone, which takes seconds where much is mapped. What it can
still do ends before: the kernel marks it, then writes for it what others shall find in their memory (its robust
futexes), parts it from that memory, and only then takes the memory apart. So who is marked and has none runs no
program, is in no call, and writes nothing any more.
"""

from __future__ import annotations

import posix

from .inspection import text_of
from .syscalls import ppoll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .cgroups import Cgroup

PATIENCE_S, NAP_S = 0.1, 0.02  # for the kernel to be through, and between looks after that
PF_EXITING = 4
TICKS_PER_S = posix.sysconf("SC_CLK_TCK")
_FLAGS, _TIMES, _MEMORY = 6, slice(11, 15), 20  # in a line of /proc/PID/stat, counted from the state


class Death:
    """Wait for the death of a reaper that is about to be killed; `spent` is what it and its dead had used by then."""

    def __init__(self, reaper: int, cgroup: Cgroup):
        self._reaper, self._cgroup = reaper, cgroup
        user, system, user_below, system_below = (int(word) for word in _stat(reaper)[_TIMES] or (0, 0, 0, 0))
        most_kib = (text_of(f"/proc/{reaper}/status").partition("\nVmHWM:")[2].split(None, 1) or ["0"])[0]
        self.spent = (user + user_below) / TICKS_PER_S, (system + system_below) / TICKS_PER_S, int(most_kib)

    def wait(self) -> bool:
        """Return True when it is gone with all below it.

        False where the kernel takes long, and by now nobody in the group can do anything any more.
        """
        ended, nap_s = posix.pidfd_open(self._reaper), PATIENCE_S
        try:
            while not ppoll((ended,), nap_s):
                if is_done(self._cgroup):
                    return False
                nap_s = NAP_S
            return True
        finally:
            posix.close(ended)


def is_done(cgroup: Cgroup) -> bool:
    """Tell whether nobody in a group can do anything any more.

    Looked at twice: while the first look lasts, somebody may have made another and ended. At the second there is
    nobody but those who were seen to be past that.
    """
    first = cgroup.tasks()
    return all(_is_past_work(task) for task in first) and set(cgroup.tasks()) <= set(first)


def _is_past_work(task: int) -> bool:
    rows = _stat(task)
    return not rows or rows[0] in "ZX" or (int(rows[_FLAGS]) & PF_EXITING > 0 and rows[_MEMORY] == "0")


def _stat(task: int) -> list[str]:
    return text_of(f"/proc/{task}/stat").rpartition(")")[2].split()
