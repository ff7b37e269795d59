"""What a nursery does for one guest after the other: hear that it is made, answer its filter, take the dead.

A guest waits for nothing that is done here, but its caller does, and all of it is done once for every run: so what can
be kept from guest to guest is kept, and nothing that often fails is done in a way that makes failing dear.

The end of a guest is known before the kernel has taken its memory apart, where it says farewell: its interpreter's last
call asks this process, which looks whether that is the end of all that is the guest's, tells, and kills it. Who asks is
held by the kernel: no signal but that one ends its waiting. Where anybody else was ever made, where anybody outside may
hold what it held, or anything is in doubt, the farewell is answered and the end is waited for, as that of those who say
none.
"""

from __future__ import annotations

import posix

from . import wire
from .guest import load_notify
from .minding import Minder
from .syscalls import P_ALL, POLLIN, WEXITED, WNOHANG, WNOWAIT, attempt, call, fresh, ppoll, socketpair, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .spec import Spec

SIGKILL = 9
EVERYBODY = -1
MANY_TICKS_S = 0.1  # of processor time: with less, the kernel's own division into two is one by chance
_USER, _SYSTEM = 11, 12  # in a line of /proc/PID/stat, counted from the state
ECHILD = 10


class Ward(Minder):
    """Attend to one guest after the other. What the dead of the present one used is summed up until the next."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.own_places = [spec.workspace, spec.tmp, "/dev/shm"]
        self.ours, self.theirs = socketpair()
        self.has_left_traces = self.holds = False
        self.leaving, self.listener = 0, -1
        self.vitals: list[int] = []  # what is open until the next guest: its time, its memory, its first program
        self.last_pid = _open("/proc/sys/kernel/ns_last_pid")

    @property
    def is_leaving(self) -> bool:
        """Tell whether the guest's end is known although the kernel is not through with it."""
        return self.leaving > 0

    def let_go(self) -> None:
        """Kill a guest whose end was told: one that was only answered could be brought back by a signal.

        Some kernels let a signal that is there before it wakes up undo its call, though the answer was to go on.
        """
        if self.leaving:
            try:
                posix.kill(self.leaving, SIGKILL)
            except ProcessLookupError:
                pass  # it was killed meanwhile

    def begin(self) -> None:
        """Forget the guest before: its end has been heard of, and nobody of it lives when this returns."""
        if self.leaving:
            wait4(self.leaving, 0)
            self.drain()
            posix.close(self.listener)
            self.leaving = 0
        for fd in self.vitals:
            if fd >= 0:
                posix.close(fd)
        self.user_s, self.system_s, self.most_kib, self.vitals = 0.0, 0.0, 0, []
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
                    tag, body, given = wire.receive(fd)
                    self.holds = tag == "made" and body["holds"] and self.last_pid >= 0
                    if self.holds:
                        self.vitals = [_open(f"/proc/{pid}/{name}") for name in ("schedstat", "status", "environ")]
                    return given if tag == "made" else []
                if self.take_dead(pid) is not None:
                    return []

    def see_to_end(self, pid: int, listener: int, on_quiet: Callable[[], None], is_alone: Callable[[], bool]) -> int:
        """Attend to a guest until it has ended, and return its wait status.

        `is_alone` tells whether nobody outside works in its files.

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
                    status = self._answer(listener, pid, is_alone)
                    if status is not None:
                        on_quiet()
                        return status
                else:  # the last process behind this filter is gone, or taken apart
                    posix.close(listener)
                    on_quiet()
                    _, status, usage = wait4(pid, 0)
                    self.add(usage)
                    self.drain()
                    return status

    def _answer(self, listener: int, pid: int, is_alone: Callable[[], bool]) -> int | None:
        """Answer one question; return the guest's wait status where it was its farewell, which needs no answer."""
        notify = load_notify()
        try:
            question = notify.receive(listener)
            if notify.is_farewell(question, pid) and is_alone() and self._is_last_word(pid):
                self.leaving, self.listener = pid, listener
                status: int = notify.exit_code(question) << 8
                return status
            notify.reply(listener, question, notify.refusal(question, self.own_places, _nobody))
        except OSError:  # we do not know what it was for
            self.has_left_traces = True
            return None
        self.has_left_traces = notify.leaves_traces(question) or self.has_left_traces
        return None

    def _is_last_word(self, pid: int) -> bool:
        """Tell whether a farewell is the end of all that is a guest's; if so, add what it used.

        It is held in its last call, from which it does not return, and where no process or thread was made after it
        none is left. What the kernel writes for it when it is gone (its robust futexes) is none where it keeps no list
        of any. Its largest memory is that of one program: after `execve` the first one's is forgotten.
        """
        try:
            if not self.holds or self.has_left_traces or int(posix.pread(self.last_pid, 32, 0)) != pid:
                return False
            futexes = fresh(8)
            call("get_robust_list", pid, futexes, fresh(8))
            if any(futexes) or not posix.pread(self.vitals[2], 1, 0):
                return False
            seconds = int(posix.pread(self.vitals[0], 64, 0).partition(b" ")[0]) / 1e9
            most_kib = int(posix.pread(self.vitals[1], 1 << 13, 0).partition(b"\nVmHWM:")[2].split(None, 1)[0])
            share = _user_share(pid) if seconds > MANY_TICKS_S else 1.0
        except (OSError, ValueError, IndexError):
            return False  # a kernel that keeps none of this
        is_told = seconds > 0 and most_kib > 0
        if is_told:
            self.add((seconds * share, seconds * (1 - share), most_kib))
        return is_told

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


def _user_share(pid: int) -> float:
    """Return which part of a process's time was its own and not the kernel's, as far as ticks tell."""
    file = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        rows = posix.read(file, 1 << 12).rpartition(b")")[2].split()
    finally:
        posix.close(file)
    user, system = int(rows[_USER]), int(rows[_SYSTEM])
    return user / (user + system) if user + system else 1.0


def _open(path: str) -> int:
    try:
        return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return -1


def _nobody(_pid: int) -> bool:
    """Tell whether a process may clone itself: only one of a session may, and a session has a reaper of its own."""
    return False
