"""The guest's parent, inside the sandbox: fork, build, wait for orders, wait for the end, report.

Three processes matter. The *helper* stays outside. The *reaper* is its child: at level jail it is pid 1 of new
namespaces. It forks the guest at once, builds the sandbox around both, hands the guest its orders when they come,
waits for it, reports the wait status over a link that the guest never holds, and exits, whereupon the kernel ends
all remaining processes. The *guest* is the reaper's child, so signals, exit codes and `abort()` behave as usual. While
the reaper builds, the guest prepares its interpreter, on the other processor; then it takes its identity, gives up all
capabilities, applies the last restrictions, and waits. Landlock and seccomp are applied in the guest alone, which
leaves the reaper outside of its Landlock domain: it cannot be signalled from inside even without a process namespace.

Where guests are built ahead and scopes show that no process of a run is left, the reaper forks the next run's guest,
too. Then it holds nothing of earlier runs: it reads neither orders nor files, and a reaper that has read data of a
guest serves no further run.
"""

from __future__ import annotations

import posix

from . import messages
from .guest import Guest, load_notify, unpack_building
from .messages import Building, Order
from .pid1 import ChildWatcher, Parent
from .steps import OOM_PROC, StepFailed, perform
from .syscalls import CLONE_NEWCGROUP, POLLIN, WNOHANG, ppoll, run_beside, socketpair, unshare, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .messages import Spec

LINGER_S = 1.0  # after which the reaper ends the tree itself; the helper does it at once


class Reaper(Parent):
    """Be the parent of one program's guests: fork, build, wait for orders, wait for the end, report."""

    def live(self, processors: set[int], *, must_wait_first: bool) -> Callable[[], None]:
        """Do everything; returns only in a guest, with a function to call. The reaper itself exits in here.

        Guests may run on all `processors`, even if the helper changes this process's affinity meanwhile.
        """
        self.processors, self.folder, self.is_under_load = processors, self.spec.folder, False
        self.watcher = GuestWatcher(self.spec)
        private = self.await_go() if must_wait_first else []
        if self.spec.level == "jail":
            unshare(CLONE_NEWCGROUP)
        if self.spec.scope_abi:
            from .ending import enter_scope

            enter_scope(self.spec.scope_abi)
        self.registers[OOM_PROC] = posix.open("/proc", posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
        pid = posix.fork()
        if pid == 0:
            return self._guest(0)
        run_beside(pid, processors)
        if not must_wait_first:
            private = self.await_go()
        seconds = self.build(Building.of_parts(messages.unpack(self.plan_fd)["reapers"]), private)
        while True:
            self._hand_over(seconds)
            self._release_guest()
            if self.spec.is_ahead:
                self._await_guest(pid)
            order, body, fds = self._take_order(pid)
            status = 0
            if order.is_session or self.spec.level == "confined":
                self.watcher.listen_to(self.link)
            for index in range(order.guests):
                if index > 0:
                    pid = posix.fork()
                    if pid == 0:
                        return self._guest(index)
                    self._release_guest()
                messages.send_retrying(self.watcher.ours, "order", body, fds)
                if index == order.guests - 1:
                    for fd in set(fds):  # so that the streams end with the guest
                        posix.close(fd)
                status = self.watcher.wait_for(pid)
                if status != 0:
                    break
            if not self._report(status, may_go_on=bool(body)):
                ppoll((self.link,), LINGER_S)  # the helper has yet to report: our end would keep the processor from it
                posix._exit(0)
            self._renew()
            pid = posix.fork()
            if pid == 0:
                return self._guest(0, is_of_later_run=True)

    def _guest(self, index: int, *, is_of_later_run: bool = False) -> Callable[[], None]:
        asking = self.watcher.leave()
        guest = Guest(self, index, asking, self.processors, is_of_later_run=is_of_later_run)
        guest.is_under_load = self.is_under_load
        return guest.become

    def _report(self, status: int, *, may_go_on: bool) -> bool:
        """End the remaining processes, report the run's end, and tell whether another guest may be forked from here.

        It may if no process is left, and this process has read no data of a guest: the next one would find traces of
        that in its memory.
        """
        observed = self._observe(status)
        self.watcher.end_scope()
        ended = {"wait_status": status, **self.watcher.conclude(), **observed}
        ended["denied"] = self.watcher.denied + (self._count_unreachable() if status else 0)
        ended["goes_on"] = may_go_on and ended["is_alone"] and not self.watcher.has_read
        messages.send(self.link, "ended", ended)
        return bool(ended["goes_on"])

    def _renew(self) -> None:
        """Wait until a folder was made for another run, by the first one's name; forget the run before."""
        tag, body, _ = messages.receive(self.link)
        if tag != "again":  # the helper is gone, or needs us no more
            posix._exit(0)
        self.is_under_load = body["is_under_load"]
        self.watcher.close()
        self.spec.move(self.folder)
        self.watcher = GuestWatcher(self.spec)
        if self.building_of_guests is None:  # the rest is the same for all of them from now on
            self.building_of_guests = unpack_building(self.plan_fd)
            if self.load_interpreter is not None:
                self.load_interpreter("oneshot").prepare()

    def _hand_over(self, seconds: list[float]) -> None:
        """Report the building's times to the helper, and hand it the workspace."""
        workspace = self.take_workspace()
        messages.send_retrying(self.link, "ready", {"seconds": seconds}, workspace)
        for fd in workspace:
            posix.close(fd)

    def _release_guest(self) -> None:
        try:
            messages.send(self.watcher.ours, "built")
        except OSError:
            pass  # it failed, and has reported the step

    def _await_guest(self, guest: int) -> None:
        """Report when the guest is in its folder for good: from then on that may be renamed. Exit if the guest died."""
        if self.watcher.await_listener(guest, self.link):
            messages.send(self.link, "waiting")

    def _take_order(self, guest: int) -> tuple[Order, dict[str, Any], list[int]]:
        """Wait for orders, write the input files; return the orders, the message for the guest, and its descriptors.

        A reaper that is alone in its scope, and can serve another run, reads nothing of this run: the guest writes its
        files, and the returned order is empty.
        """
        tag, body, fds = messages.receive(self.link)
        if tag != "order":  # the helper is gone, or needs us no more
            self.watcher.end_scope()
            posix._exit(1)
        if body["folder"]:
            self.spec.move(body["folder"])
            self.watcher.own_mounts = [self.spec.workspace, self.spec.tmp]
        is_unread = self.spec.is_ahead and self.spec.scope_abi > 0 and body["is_single"]
        if body["has_files"] and not is_unread:
            files = fds.pop(1)
            try:
                perform(messages.unpack(files)["steps"], self.registers)
            except StepFailed as error:
                self.fail(error)
            posix.close(files)
        if wait4(guest, WNOHANG)[0]:  # it died while it waited, and not of the program
            posix._exit(1)
        if is_unread:
            return Order(), {"has_files": body["has_files"]}, fds
        return Order(**messages.unpack(fds[0])), {}, fds

    def _observe(self, status: int) -> dict[str, int]:
        """Measure before the kernel clears up: the number of full mounts, and after a failure that of tasks."""
        mount_points = (self.spec.workspace, self.spec.tmp, "/dev/shm") if self.spec.level == "jail" else ()
        full = 0
        for mount_point in mount_points:
            state = posix.statvfs(mount_point)
            full += state.f_bfree == 0 or state.f_ffree == 0
        return {"tasks": self._count_tasks() if status else 0, "full": full}

    def _count_unreachable(self) -> int:
        from .procfs import count_unreachable

        return count_unreachable() if self.spec.level == "jail" else 0

    def _count_tasks(self) -> int:
        from . import procfs

        if self.spec.level != "jail":
            return procfs.count_tasks([posix.getpid(), *procfs.descendants(posix.getpid())])
        return procfs.count_tasks([int(name) for name in posix.listdir("/proc") if name.isdigit()])


class GuestWatcher(ChildWatcher):
    """Attend to the guest while it lives: reap children, and answer its filter."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.answerers: dict[int, Any] | None = None if spec.answered else {}
        self.own_mounts = [spec.workspace, spec.tmp, *(["/dev/shm"] if spec.level == "jail" else [])]
        self.ours, self.theirs = socketpair()
        self.watched = [self.woken, self.ours]
        self.helper_link = self.armed = -1
        self.denied = 0
        self.must_stay = False
        self.has_read = False  # something that was a guest's
        self.sum: Any = None  # of the guests' memory, while it is made

    def listen_to(self, helper_link: int) -> None:
        """Take the helper's messages while the guest lives: those of a session, and those of level `confined`."""
        self.helper_link = helper_link
        self.watched.append(helper_link)

    def _receive_from_helper(self) -> None:
        tag, body, _ = messages.receive(self.helper_link)
        self.has_read = True  # or is about to
        if tag == "arm":
            self.armed = body["pid"]
        elif tag == "stay":
            self.must_stay = body["is_on"]
        elif tag == "sum":
            from .pss import PssSum

            self.sum = PssSum(posix.getpid(), body["limit_bytes"])
        else:  # the helper is gone, or wants the end; and so must we be
            self.end_scope()
            posix._exit(1)

    def _receive_all_from_helper(self) -> None:
        while self.helper_link >= 0 and ppoll((self.helper_link,), 0.0):
            self._receive_from_helper()

    def may_fork(self, pid: int) -> bool:
        """Tell whether this process may clone itself, this once: the helper has allowed it before."""
        self._receive_all_from_helper()
        if pid != self.armed:  # the question of another process does not use it up: a clone that is being made, say
            return False
        self.armed = -1
        return True

    def leave(self) -> int:
        """Undo, in a guest, the reaper's own settings; return the guest's end of the link to it."""
        self.stop()
        posix.close(self.ours)
        return self.theirs

    def await_listener(self, guest: int, helper_link: int) -> bool:
        """Wait until `guest` has restricted itself; False if the helper has sent something. Exit if the guest died.

        A helper that has an order waits until one of these is known, so this process must not wait for the order first.
        """
        watched_before = len(self.watched)
        while len(self.watched) == watched_before:
            ready = {fd for fd, _ in ppoll((self.woken, self.ours, helper_link), None)}
            if helper_link in ready:
                return False
            if self.ours in ready:
                self._receive_from_guest()
            elif self.take_dead(guest) is not None:  # a guest that was stopped wakes this process up, too
                posix._exit(1)
        return True

    def wait_for(self, pid: int) -> int:
        """Wait until `pid` has ended, and return its wait status."""
        while True:
            if self.sum is not None and self.sum.step():
                messages.send(self.helper_link, "summed", self.sum.result())
                self.sum = None
            for fd, event in ppoll(self.watched, None if self.sum is None else 0.0):
                if fd == self.woken:
                    status = self.take_dead(pid)
                    self._receive_all_from_helper()  # the helper may have said that this death is not the end
                    if status is not None and not self.must_stay:
                        return status
                elif fd == self.helper_link:
                    self._receive_all_from_helper()  # which may be nothing: it was received in this round already
                elif fd == self.ours:
                    self._receive_from_guest()
                elif event & POLLIN:
                    self._answer(fd)
                else:  # the last process behind this filter is gone, or taken apart
                    self.watched.remove(fd)
                    posix.close(fd)

    def _answer(self, listener: int) -> None:
        """Answer one question, by the call's answerer if it has one."""
        self.has_read = True
        if self.answerers is None:
            from .answered_calls import load

            self.answerers = load(self.spec)
        self.denied += load_notify().answer(listener, self.own_mounts, self.may_fork, self.answerers)

    def _receive_from_guest(self) -> None:
        """Take one message of a guest that is not the program's yet."""
        tag, _, listeners = messages.receive(self.ours)
        self.watched += listeners
        if not tag:
            self.watched.remove(self.ours)

    def close(self) -> None:
        """Close the descriptors that were opened for this guest."""
        for fd in {self.wake, self.theirs, self.ours, *self.watched} - {self.helper_link}:
            posix.close(fd)

    def end_scope(self) -> None:
        """End all other processes of this scope; without scopes the helper does it."""
        if self.spec.scope_abi:
            from .ending import end_scope

            end_scope(self.add)

    def conclude(self) -> dict[str, Any]:
        """Return the usage of the dead, and whether no other process is left alive."""
        try:
            wait4(-1, WNOHANG)
            is_alone = False
        except ChildProcessError:
            is_alone = True
        return {"is_alone": is_alone, **self.spent()}
