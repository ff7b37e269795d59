"""What every parent of a guest does: hear of signals, take dead children, and sum up what they used."""

from __future__ import annotations

import posix

from .syscalls import SIGCHLD, WNOHANG, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds


class Minder:
    """Hear, by the pipe `woken`, of children that have ended; sum what the dead used."""

    def __init__(self) -> None:
        self.woken, self.wake = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, _wake)
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0

    def stop(self) -> None:
        """Undo, in a guest, what only its parent needs."""
        _signal.set_wakeup_fd(-1)
        _signal.signal(SIGCHLD, _signal.SIG_DFL)
        posix.close(self.woken)

    def take_dead(self, pid: int) -> int | None:
        """Take every dead child; return the wait status of `pid` when it is among them."""
        self.drain()
        while True:
            try:
                found, status, usage = wait4(-1, WNOHANG)
            except ChildProcessError:
                return None
            if found == 0:
                return None
            self.add(usage)
            if found == pid:
                return status

    def drain(self) -> None:
        """Take note of the signals that came until now."""
        try:
            posix.read(self.woken, 512)
        except BlockingIOError:
            pass  # there were none

    def add(self, usage: tuple[float, float, int]) -> None:
        """Add what one of the dead used."""
        self.user_s += usage[0]
        self.system_s += usage[1]
        self.most_kib = max(self.most_kib, usage[2])

    def spent(self) -> dict[str, float]:
        """Return what the dead used."""
        return {"user_s": self.user_s, "system_s": self.system_s, "most_kib": self.most_kib}


def _wake(number: int, frame: object) -> None:
    """Be the handler without which no signal would reach the wakeup pipe."""
