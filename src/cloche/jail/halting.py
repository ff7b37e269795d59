"""Have what runs in a session stand still while its files are looked at from outside, and go on afterwards.

Where the session has a control group of version 2, the kernel does that, and nobody inside notices or can undo it.
Else stop signals are sent until all that is found stands still and nothing new appears. Processes that wake each other
can withstand that, so it is tried for a short time only: a look at the files has bounds of its own, and this is what
makes it find things where they are. Version 1 has a freezer too, which is not used: what it holds does not even die of
SIGKILL, so a helper that is killed meanwhile would leave processes that nobody ends.
"""

from __future__ import annotations

import posix
from time import monotonic

from . import tree
from .inspection import states_of
from .syscalls import ppoll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .cgroups import Cgroup

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

SIGCONT, SIGSTOP = 18, 19
PATIENCE_S, NAP_S = 0.25, 0.0002
STANDING = "TtZXD"  # a parent in vfork waits as D until its child goes on, and does not stop before


class Halt:
    """Stop the processes that `find` returns, parents first; those that were stopped by this are woken, no others."""

    def __init__(self, find: Callable[[], list[int]], cgroup: Cgroup | None):
        self._find, self._cgroup = find, cgroup
        self._stopped: dict[int, int] = {}  # a descriptor of each: a number may be anybody's later
        self._is_frozen = False

    def begin(self) -> None:
        """Stop them, as far as that is done soon."""
        deadline = monotonic() + PATIENCE_S
        if self._cgroup is not None and self._cgroup.freeze():
            self._is_frozen = True
            while not self._cgroup.is_frozen() and monotonic() < deadline:
                ppoll((), NAP_S)
            return
        before: list[int] = []
        while monotonic() < deadline:
            found = self._find()
            moving = [pid for pid in found if self._is_moving(pid)]
            if not moving and found == before:
                return
            for pid in moving:
                self._stop(pid)
            before = [] if moving else found
            posix.sched_yield()

    def end(self) -> None:
        """Wake those that were stopped, children first: no parent shall see a child that is stopped."""
        if self._is_frozen and self._cgroup is not None:
            try:
                self._cgroup.thaw()
            except OSError:
                pass  # the group was removed meanwhile, and all that was in it is dead
        for fd in reversed(self._stopped.values()):
            _send(fd, SIGCONT)
            posix.close(fd)
        self._stopped.clear()

    def _is_moving(self, pid: int) -> bool:
        standing = STANDING if pid in self._stopped else STANDING.rstrip("D")
        return any(state not in standing for state in states_of(pid))

    def _stop(self, pid: int) -> None:
        if pid not in self._stopped:
            try:
                held = posix.pidfd_open(pid)
            except OSError:
                return  # it has just ended, or there are too many to be held: they go on
            if pid not in self._find():  # the number may be anybody's by now
                posix.close(held)
                return
            self._stopped[pid] = held
        _send(self._stopped[pid], SIGSTOP)


def processes_of(init: int, *, is_first: bool, has_namespace: bool) -> Callable[[], list[int]]:
    """Return what finds the processes around an interpreter: pid 1 of the first one is ours, and must go on."""
    if not has_namespace:  # whoever lost its parent is a child of this process
        return lambda: [pid for pid in tree.descendants(posix.getpid()) if pid != init]
    if is_first:
        return lambda: tree.descendants(init)
    return lambda: [init, *tree.descendants(init)]


def _send(fd: int, number: int) -> None:
    try:
        _signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended
