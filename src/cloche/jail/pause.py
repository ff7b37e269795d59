"""Stop the processes of a session while its files are read from outside, and resume them afterwards.

Where the session has a control group of version 2, the kernel does that, and no process inside notices or can undo it.
Else stop signals are sent until all processes found are stopped and no new one appears. Processes that wake each other
can withstand that, so it is tried for a short time only: reading the files has its own bounds, and the pause only keeps
them consistent. Nothing else is done meanwhile, memory is not watched, so every loop whose length a guest decides
checks the time, and processes beyond those that can be stopped in it continue. The freezer of version 1 is not used:
its frozen processes do not even die of SIGKILL, so a helper killed meanwhile would leave processes that no one can end.
"""

from __future__ import annotations

import posix
from time import monotonic

from . import procfs
from .procfs import each_state_of
from .syscalls import ppoll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .cgroups import Cgroup

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

SIGCONT, SIGSTOP = 18, 19
STOP_TIMEOUT_S, POLL_S = 0.1, 0.0002
MOST = 128  # processes: twice the usual limit, stopped in a quarter of that time, each held by a descriptor
STOPPED_STATES = "TtZXD"  # a parent in vfork waits as D until its child goes on, and does not stop before


class _TooMuch(Exception):
    """Report too many processes to stop, or a lack of time."""


class Halt:
    """Stop the processes that `find` yields, parents first; those that were stopped by this are woken, no others.

    `room` says how many may be held at most.
    """

    def __init__(self, find: Callable[[], Iterator[list[int]]], cgroup: Cgroup | None, room: int = MOST):
        self._find, self._cgroup, self._room = find, cgroup, room
        self._stopped: dict[int, int] = {}  # a descriptor of each: a number may be reused
        self._is_frozen = False
        self._deadline = 0.0

    def begin(self) -> None:
        """Stop them, as far as that is done soon; none at all where they are too many."""
        self._deadline = monotonic() + STOP_TIMEOUT_S
        if self._cgroup is not None and self._cgroup.freeze():
            self._is_frozen = True
            while not self._cgroup.is_frozen() and monotonic() < self._deadline:
                ppoll((), POLL_S)
            return
        try:
            self._stop_all()
        except _TooMuch:
            pass  # all stopped processes stay stopped until the end

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

    def held(self) -> int:
        """Return how many descriptors of stopped processes are open."""
        return len(self._stopped)

    def _stop_all(self) -> None:
        before: list[int] = []
        while True:
            pids = self._live_pids()
            running = [pid for pid in pids if self._is_running(pid)]
            if not running and pids == before:
                return
            self._hold([pid for pid in running if pid not in self._stopped])
            for pid in running:
                if pid in self._stopped:
                    _send(self._stopped[pid], SIGSTOP)
            before = [] if running else pids
            posix.sched_yield()

    def _live_pids(self) -> list[int]:
        pids: list[int] = []
        for some in self._find():
            pids += some
            if len(pids) > self._room:
                raise _TooMuch
            self._check_time()
        return pids

    def _is_running(self, pid: int) -> bool:
        stopped_states = STOPPED_STATES if pid in self._stopped else STOPPED_STATES.rstrip("D")
        for state in each_state_of(pid):
            self._check_time()
            if state not in stopped_states:
                return True
        return False

    def _hold(self, pids: list[int]) -> None:
        """Open a descriptor of each process, and keep it if its pid is still found: the pid may have been reused."""
        fresh: dict[int, int] = {}
        live_pids: list[int] = []
        try:
            for pid in pids[: self._room - len(self._stopped)]:
                try:
                    fresh[pid] = posix.pidfd_open(pid)
                except OSError:
                    pass  # it has just ended, or there are too many open: it goes on
            live_pids = self._live_pids() if fresh else []
        finally:
            are_there = set(live_pids)
            for pid, fd in fresh.items():
                if pid in are_there:
                    self._stopped[pid] = fd
                else:
                    posix.close(fd)

    def _check_time(self) -> None:
        if monotonic() >= self._deadline:
            raise _TooMuch


def processes_of(init: int, *, is_first: bool, has_namespace: bool) -> Callable[[], Iterator[list[int]]]:
    """Return a function that finds the processes around an interpreter, except our own pid 1 of the first one."""
    if not has_namespace:  # whoever lost its parent is a child of this process
        return lambda: ([pid for pid in some if pid != init] for some in procfs.descend(posix.getpid()))
    if is_first:
        return lambda: procfs.descend(init)
    return lambda: _with(init)


def _with(init: int) -> Iterator[list[int]]:
    yield [init]
    yield from procfs.descend(init)


def _send(fd: int, number: int) -> None:
    try:
        _signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended
