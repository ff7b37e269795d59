"""What a nursery does for one guest after the other: hear that it is made, answer its filter, take the dead.

A guest waits for nothing that is done here, but its caller does, and all of it is done once for every run: so what can
be kept from guest to guest is kept, and nothing that often fails is done in a way that makes failing dear.
"""

from __future__ import annotations

import posix

from . import wire
from .guest import load_notify
from .syscalls import P_ALL, WEXITED, WNOHANG, WNOWAIT, attempt, ppoll, socketpair, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .spec import Spec

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds
SIGCHLD, SIGKILL = 17, 9
POLLIN = 1
EVERYBODY = -1
ECHILD = 10


class Ward:
    """Attend to one guest after the other. What the dead of the present one used is summed in `used`."""

    def __init__(self, spec: Spec):
        self.own_places = [spec.workspace, spec.tmp, "/dev/shm"]
        self.ours, self.theirs = socketpair()
        self.woken, self.wake = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, _wake)
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0
        self.has_left_traces = False

    def begin(self) -> None:
        """Forget the guest before: nobody of it lives, and its end has been heard of."""
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0
        self.has_left_traces = False

    def leave(self) -> int:
        """Undo, in a guest, what only the nursery needs; return the guest's end of the link to it."""
        _signal.set_wakeup_fd(-1)
        _signal.signal(SIGCHLD, _signal.SIG_DFL)
        posix.close(self.ours)
        posix.close(self.woken)
        return self.theirs

    def receive_made(self, pid: int) -> list[int]:
        """Wait until a guest is made, and return what it hands over; nothing if it died before."""
        while True:
            for fd, _ in ppoll((self.ours, self.woken), None):
                if fd == self.ours:
                    tag, _, given = wire.receive(fd)
                    return given if tag == "made" else []
                if self._take_dead(pid) is not None:
                    return []

    def see_to_end(self, pid: int, listener: int, on_quiet: Callable[[], None]) -> int:
        """Attend to a guest until it has ended, and return its wait status.

        All that can ask lives behind its filter. When nobody does any more, all of it is on its way out, no program
        runs, `on_quiet` is called, and nothing else is worth waking up for.
        """
        while True:
            for fd, event in ppoll((listener, self.woken), None):
                if fd == self.woken:
                    status = self._take_dead(pid)
                    if status is not None:
                        posix.close(listener)
                        return status
                elif event & POLLIN:
                    leaves_traces = load_notify().answer(fd, self.own_places, _nobody)
                    self.has_left_traces = leaves_traces or self.has_left_traces
                else:  # the last process behind this filter is gone, or taken apart
                    posix.close(listener)
                    on_quiet()
                    _, status, usage = wait4(pid, 0)
                    self._add(usage)
                    self._drain()
                    return status

    def end_everybody(self) -> None:
        """Kill all that is left in this process namespace but us, and wait until nothing is.

        Whoever is left descends from us. So where we have no child, dead or alive, there is nobody, and the kernel
        need not look through all processes of the host for whom to kill.
        """
        if attempt("waitid", P_ALL, 0, None, WEXITED | WNOHANG | WNOWAIT) == -ECHILD:
            return
        try:
            posix.kill(EVERYBODY, SIGKILL)
        except ProcessLookupError:
            pass  # the last one has gone meanwhile
        try:
            while True:
                self._add(wait4(-1, 0)[2])
        except ChildProcessError:
            self._drain()

    def _take_dead(self, pid: int) -> int | None:
        """Take every dead child; return the wait status of `pid` when it is among them."""
        self._drain()
        while True:
            try:
                found, status, usage = wait4(-1, WNOHANG)
            except ChildProcessError:
                return None
            if found == 0:
                return None
            self._add(usage)
            if found == pid:
                return status

    def _drain(self) -> None:
        """Take note of the signals that came until now."""
        try:
            posix.read(self.woken, 512)
        except BlockingIOError:
            pass  # somebody has

    def _add(self, usage: tuple[float, float, int]) -> None:
        self.user_s += usage[0]
        self.system_s += usage[1]
        self.most_kib = max(self.most_kib, usage[2])

    def spent(self) -> dict[str, float]:
        """Return what the dead used."""
        return {"user_s": self.user_s, "system_s": self.system_s, "most_kib": self.most_kib}


def _nobody(_pid: int) -> bool:
    """Tell whether a process may clone itself: only one of a session may, and a session has a reaper of its own."""
    return False


def _wake(number: int, frame: object) -> None:
    """Be the handler without which no signal would reach the wakeup pipe."""
