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
from .syscalls import P_ALL, POLLIN, WEXITED, WNOHANG, WNOWAIT, attempt, ppoll, socketpair, wait4
from .vitals import Sockets, Vitals, count_unreachable, open_last_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .spec import Spec

SIGKILL = 9
EVERYBODY = -1
ECHILD = 10


class Ward(Minder):
    """Attend to one guest after the other. What the dead of the present one used is summed up until the next."""

    def __init__(self, spec: Spec, process_counter: int = -1):
        """Be given by what the count of processes begins anew, open for writing; -1 where that was refused."""
        super().__init__()
        self.own_places = [spec.workspace, spec.tmp, "/dev/shm"]
        self.ours, self.theirs = socketpair()
        self.sockets = Sockets()
        self.has_left_traces, self.denied = False, 0
        self.leaving, self.listener = 0, -1
        self.vitals: Vitals | None = None
        self.last_pid, self.process_counter = open_last_pid(), process_counter

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
        if self.vitals is not None:
            self.vitals.close()
        if self.process_counter >= 0:  # else a guest's own number tells how many processes there were before it
            posix.pwrite(self.process_counter, b"1", 0)
        self.user_s, self.system_s, self.most_kib, self.vitals = 0.0, 0.0, 0, None
        self.has_left_traces, self.denied = False, 0

    def leave(self) -> int:
        """Undo, in a guest, what only the nursery needs; return the guest's end of the link to it."""
        self.stop()
        posix.close(self.ours)
        return self.theirs

    def receive_made(self, pid: int, *, is_looked_at: bool = True) -> list[int]:
        """Wait until a guest is made, and return what it hands over; nothing if it died before.

        One that is not looked at now has its end waited for, whatever it says.
        """
        while True:
            for fd, _ in ppoll((self.ours, self.woken), None):
                if fd == self.ours:
                    tag, body, given = wire.receive(fd)
                    if tag == "made" and body["holds"] and is_looked_at:
                        self.vitals = Vitals(pid, self.last_pid)
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
            if notify.is_farewell(question, pid) and is_alone() and self._is_last_word():
                self.leaving, self.listener = pid, listener
                return int(notify.exit_code(question) << 8)
            refused = notify.refusal(question, self.own_places, _nobody)
            notify.reply(listener, question, refused)
        except OSError:  # we do not know what it was for
            self.has_left_traces = True
            return None
        self.has_left_traces = notify.leaves_traces(question) or self.has_left_traces
        self.denied += notify.is_denied(question, refused)
        return None

    def _is_last_word(self) -> bool:
        """Tell whether the guest's farewell is the end of all that is its; if so, add what it used.

        It makes no socket any more, so where it has none now, it leaves none.
        """
        if self.vitals is None or self.has_left_traces or not self.sockets.are_all_gone():
            return False
        spent = self.vitals.at_last_word()
        if spent is not None:
            self.add(spent)
        return spent is not None

    def is_worn(self) -> bool:
        """Tell, when nobody is left, whether the namespaces may hold something of the guest's for the next one."""
        return self.has_left_traces or not (self.is_leaving or self.sockets.are_all_gone())

    def count_denied(self, status: int) -> int:
        """Return what the policy was seen to block of a guest that ended so.

        Where no socket was made, nobody can have tried the network; where one was, this guest was the first to.
        """
        return self.denied + (count_unreachable() if status and self.has_left_traces else 0)

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
