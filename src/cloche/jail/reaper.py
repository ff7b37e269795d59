"""The guest's parent, inside the sandbox: fork, build, wait, report.

Three processes matter. The *helper* stays outside. The *reaper* is its child: at level jail it is pid 1 of new
namespaces. It forks the guest at once, builds the sandbox around both, waits for the guest, reports the wait status
over a link that the guest never holds, and exits, whereupon the kernel ends whatever is left. The *guest* is the
reaper's child, so signals, exit codes and `abort()` behave as usual. While the reaper builds, a Python guest puts its
interpreter in order, on the other processor; then it takes its identity, gives up every power, and runs the program.
Landlock and seccomp are applied in the guest alone, which leaves the reaper outside of its Landlock domain: it cannot
be signalled from inside even where there is no process namespace.
"""

from __future__ import annotations

import _socket
import os
import resource  # os.wait4 imports it when it is called, when the reaper may have no files left to import it from
import select
import time

from . import notify, tree, wire
from .enter import Entrance, tell_failure
from .guest import RELEASED, Guest
from .steps import StepFailed, perform
from .syscalls import CLONE_NEWCGROUP, unshare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .enter import Descriptors
    from .spec import Run, Spec

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds
SIGCHLD = 17


class Reaper:
    """Be the guest's parent: fork, build, wait, report."""

    def __init__(self, spec: Spec, run: Run, link: _socket.socket, fds: Descriptors, private: dict[str, int]):
        self.spec, self.run, self.link, self.fds, self.private = spec, run, link, fds, private

    def live(self) -> Callable[[], None]:
        """Do everything; returns only in a guest, with what it must call. The reaper itself exits in here."""
        if self.spec.level == "jail":
            unshare(CLONE_NEWCGROUP)
        waiting, release = os.pipe()
        status = 0
        attendance = Attendance(self.spec)
        guests = max(1, len(self.run.commands) + (self.run.python is not None))
        for index in range(guests):
            pid = os.fork()
            if pid == 0:
                os.close(release)
                return Guest(self, index, waiting, attendance.leave()).become
            if index == guests - 1:
                self._close_streams()
            if index == 0:
                self._build()
                os.write(release, RELEASED)
            status = attendance.wait_for(pid)
            if status != 0:
                break
            os.write(release, RELEASED)
        wire.send(self.link, "ended", {"wait_status": status, **attendance.conclude(), **self._observe(status)})
        os._exit(0)

    def _build(self) -> None:
        """Build the sandbox and hand the helper the plan and the workspace."""
        entrance = Entrance(self.spec, self.run, self.fds, self.private)
        try:
            plan = perform(entrance.steps())
        except StepFailed as error:
            tell_failure(self.link, error, entrance.kept)
            os._exit(1)
        self._check_helper()
        wire.send(self.link, "ready", {"plan": plan[:200]}, entrance.kept)
        while entrance.kept:
            os.close(entrance.kept.pop())
        wire.send(self.link, "started", {"at": time.monotonic()})

    def _close_streams(self) -> None:
        """Let go of the guest's streams, so that they end with it."""
        for fd in {self.fds.stdin, self.fds.stdout, self.fds.stderr, self.fds.value}:
            os.close(fd)

    def _check_helper(self) -> None:
        """Make sure that the helper did not die before its death could reach us."""
        try:
            if not self.link.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT):
                os._exit(1)
        except BlockingIOError:
            pass  # it is there, and silent, as it should be

    def _observe(self, status: int) -> dict[str, int]:
        """Look around before the kernel clears up: what is full, and after a failure how many tasks are left."""
        places = (self.spec.workspace, self.spec.tmp, "/dev/shm") if self.spec.level == "jail" else ()
        full = 0
        for place in places:
            state = os.statvfs(place)
            full += state.f_bfree == 0 or state.f_ffree == 0
        return {"tasks": self._count_tasks() if status else 0, "full": full}

    def _count_tasks(self) -> int:
        if self.spec.level != "jail":
            return tree.count_tasks([os.getpid(), *tree.descendants(os.getpid())])
        return tree.count_tasks([int(name) for name in os.listdir("/proc") if name.isdigit()])


class Attendance:
    """Attend to the guest while it lives: take dead children, and answer what its filter asks."""

    def __init__(self, spec: Spec):
        self.own_places = [spec.workspace, spec.tmp, *(["/dev/shm"] if spec.level == "jail" else [])]
        self.ours, self.theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
        self.woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, _wake)
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0
        self.poll = select.poll()
        for fd in (self.woken, self.ours.fileno()):
            self.poll.register(fd, select.POLLIN)

    def leave(self) -> _socket.socket:
        """Undo, in a guest, what only the reaper needs; return the guest's end to send its listener on."""
        _signal.set_wakeup_fd(-1)
        _signal.signal(SIGCHLD, _signal.SIG_DFL)
        self.ours.close()
        os.close(self.woken)
        return self.theirs

    def wait_for(self, pid: int) -> int:
        """Wait until `pid` has ended, and return its wait status."""
        while True:
            for fd, event in self.poll.poll():
                if fd == self.woken:
                    status = self._take_dead(pid)
                    if status is not None:
                        return status
                elif fd == self.ours.fileno():
                    for listener in wire.receive(self.ours)[2]:
                        self.poll.register(listener, select.POLLIN)
                elif event & select.POLLIN:
                    notify.answer(fd, self.own_places)
                else:  # the last process behind this filter is gone
                    self.poll.unregister(fd)
                    os.close(fd)

    def _take_dead(self, pid: int) -> int | None:
        """Take every dead child; return the wait status of `pid` when it is among them."""
        os.read(self.woken, 512)
        while True:
            try:
                found, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if found == 0:
                return None
            self._add(usage)
            if found == pid:
                return status

    def _add(self, usage: resource.struct_rusage) -> None:
        self.user_s += usage.ru_utime
        self.system_s += usage.ru_stime
        self.most_kib = max(self.most_kib, usage.ru_maxrss)

    def conclude(self) -> dict[str, Any]:
        """Return what the dead used, and whether nothing else is left alive."""
        try:
            os.waitpid(-1, os.WNOHANG)
            is_alone = False
        except ChildProcessError:
            is_alone = True
        return {"is_alone": is_alone, "user_s": self.user_s, "system_s": self.system_s, "most_kib": self.most_kib}


def _wake(number: int, frame: object) -> None:
    """Be the handler without which no signal would reach the wakeup pipe."""
