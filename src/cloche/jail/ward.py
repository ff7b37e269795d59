"""What a nursery does for one guest after the other: hear that it is made, answer its filter, take the dead.

A guest waits for nothing that is done here, but its caller does, and all of it is done once for every run: so what can
be kept from guest to guest is kept, and nothing that often fails is done in a way that makes failing dear.
"""

from __future__ import annotations

import posix

from . import wire
from .guest import load_notify
from .minding import Minder
from .syscalls import P_ALL, POLLIN, WEXITED, WNOHANG, WNOWAIT, attempt, ppoll, socketpair, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .spec import Spec

SIGKILL = 9
EVERYBODY = -1
ECHILD = 10


class Ward(Minder):
    """Attend to one guest after the other. What the dead of the present one used is summed up until the next."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.own_places = [spec.workspace, spec.tmp, "/dev/shm"]
        self.ours, self.theirs = socketpair()
        self.has_left_traces = False

    def begin(self) -> None:
        """Forget the guest before: nobody of it lives, and its end has been heard of."""
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0
        self.has_left_traces = False

    def leave(self) -> int:
        """Undo, in a guest, what only the nursery needs; return the guest's end of the link to it."""
        self.stop()
        posix.close(self.ours)
        return self.theirs

    def receive_made(self, pid: int) -> list[int]:
        """Wait until a guest is made, and return what it hands over; nothing if it died before."""
        while True:
            for fd, _ in ppoll((self.ours, self.woken), None):
                if fd == self.ours:
                    tag, _, given = wire.receive(fd)
                    return given if tag == "made" else []
                if self.take_dead(pid) is not None:
                    return []

    def see_to_end(self, pid: int, listener: int, on_quiet: Callable[[], None]) -> int:
        """Attend to a guest until it has ended, and return its wait status.

        All that can ask lives behind its filter. When nobody does any more, all of it is on its way out, no program
        runs, `on_quiet` is called, and nothing else is worth waking up for.
        """
        while True:
            for fd, event in ppoll((listener, self.woken), None):
                if fd == self.woken:
                    status = self.take_dead(pid)
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
                    self.add(usage)
                    self.drain()
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
                self.add(wait4(-1, 0)[2])
        except ChildProcessError:
            self.drain()


def _nobody(_pid: int) -> bool:
    """Tell whether a process may clone itself: only one of a session may, and a session has a reaper of its own."""
    return False
