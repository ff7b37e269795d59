"""Pid 1 of a jail that stays: one guest after the other lives in it, each with its own mounts.

Theory of operation: making namespaces and a root costs more than running a small program, so they are kept apart from
the guest, and stay: the namespaces of users, processes, network, host name and control group, and the read-only tree.
New for every guest: its process and all its descendants, its mount namespace with empty /workspace, /tmp and /dev/shm,
its limits, its Landlock domain and its filter.

This process is out of a guest's reach. As root it has an outside id that no guest has. An ordinary user has one id to
give, and there it has the guest's: the kernel then lets no signal from inside end pid 1; as it keeps all capabilities
of its user namespace, no process with fewer may trace, read or slow it down; it is not dumpable, and outside the
guest's Landlock domain; and the filter refuses limits on another process, and all of the above once more.

After each guest every other process in the process namespace is killed and waited for. A network namespace remembers
too much to list (counters, flow labels, memberships, closed connections), so this is not checked: a guest's filter
notifies this process of every network socket that it makes; after the first one the jail ends with its guest. Pairs of
sockets are not notified; if the kernel still counts any when no process is left, the jail ends as well. The namespace
of System V IPC and message queues is treated alike: the filter notifies of every segment, set of semaphores and queue
that is made or opened.

A guest takes its orders from the caller itself, over the *handoff socket*. This process keeps its inner end, for each
guest to inherit, and to close before the program runs. So no process between the caller and the guest has to wake up.
Over that socket this process also reports to the caller how a guest ended. The helper sleeps meanwhile, unless a run
takes long: see `shared_status`.

A prefork jail may serve one sandbox alone, for all its runs: then the above is new for every guest except /workspace:
each guest hands a mount of it on to the next.

`PreforkWatcher` does the work for each guest: receive its descriptors, answer its filter, wait for the dead. A guest
waits for none of that, but its caller does, and all of it is done once for every run: so objects are reused from guest
to guest where possible, and operations that often fail are made cheap to fail.

Early exit notice: the end of a guest is known before the kernel has freed its memory. Its interpreter's last call
notifies this process, which checks that no other process or resource of the guest's is left, reports, and kills it. The
kernel holds the notifying thread: no signal but that one ends its wait. If another process was ever made, if one
outside may hold the guest's descriptors, or in any doubt, the call is answered and the end is waited for, as that of a
guest without a notice.
"""

from __future__ import annotations

import gc
import posix
from time import monotonic

from . import messages, procfs, shared_status
from .guest import Guest, forget_helper, load_notify
from .messages import FILTER, Building, Order
from .pid1 import ChildWatcher, Parent, never_freed
from .procfs import ProcessStats, Sockets, count_unreachable, open_last_pid
from .steps import (
    ATTACHED_WORKSPACE,
    CALLERS_WORKSPACE,
    MOUNT_NAMESPACE,
    NEXT_WORKSPACE,
    OWN_MOUNTS,
    OWN_WORKSPACE,
    PROCESS_COUNTER,
    SHOWN_WORKSPACE,
    StepFailed,
    perform,
)
from .syscalls import (
    CLONE_NEWCGROUP,
    P_ALL,
    POLLIN,
    WEXITED,
    WNOHANG,
    WNOWAIT,
    attempt,
    ppoll,
    socketpair,
    unshare,
    wait4,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .messages import Spec

SIGKILL = 9
EVERYBODY = -1
ECHILD, EBUSY = 10, 16


class PreforkWatcher(ChildWatcher):
    """Attend to one guest after the other. Usage of the dead is summed per guest."""

    def __init__(self, spec: Spec, process_counter: int = -1):
        """Take the file that resets the namespace's pid counter, open for writing; -1 where opening was refused."""
        super().__init__()
        self.own_mounts = [spec.workspace, spec.tmp, "/dev/shm"]
        self.ours, self.theirs = socketpair()
        self.sockets = Sockets()
        self.has_left_traces, self.denied = False, 0
        self.exiting, self.listener = 0, -1
        self.stats: ProcessStats | None = None
        self.last_pid, self.process_counter = open_last_pid(), process_counter

    @property
    def is_exiting(self) -> bool:
        """Tell whether the guest's end is known although the kernel is not through with it."""
        return self.exiting > 0

    def kill_exiting(self) -> None:
        """Kill a guest whose end was reported: one that was only answered could be brought back by a signal.

        Some kernels let a signal that is there before it wakes up undo its call, though the answer was to go on.
        """
        if self.exiting:
            try:
                posix.kill(self.exiting, SIGKILL)
            except ProcessLookupError:
                pass  # it was killed meanwhile

    def renew(self) -> None:
        """Forget the guest before: its end is known, and all its processes are dead when this returns."""
        if self.exiting:
            wait4(self.exiting, 0)
            self.drain()
            posix.close(self.listener)
            self.exiting = 0
        if self.stats is not None:
            self.stats.close()
        if self.process_counter >= 0:  # else a guest's own number tells how many processes there were before it
            posix.pwrite(self.process_counter, b"1", 0)
        self.user_s, self.system_s, self.most_kib, self.stats = 0.0, 0.0, 0, None
        self.has_left_traces, self.denied = False, 0

    def leave(self) -> int:
        """Undo, in a guest, pid 1's own settings; return the guest's end of the link to it."""
        self.stop()
        posix.close(self.ours)
        return self.theirs

    def receive_made(self, pid: int, *, is_looked_at: bool = True) -> list[int]:
        """Wait until a guest is made, and return the descriptors that it hands over; none if it died before.

        The exit notice of a guest that is not looked at now is not used; its end is waited for.
        """
        while True:
            for fd, _ in ppoll((self.ours, self.woken), None):
                if fd == self.ours:
                    tag, body, received_fds = messages.receive(fd)
                    if tag == "made" and body["holds"] and is_looked_at:
                        self.stats = ProcessStats(pid, self.last_pid)
                    return received_fds if tag == "made" else []
                if self.take_dead(pid) is not None:
                    return []

    def wait_for(self, pid: int, listener: int, on_exit: Callable[[], None], is_alone: Callable[[], bool]) -> int:
        """Wait until a guest has ended, answer its filter meanwhile, and return its wait status.

        `is_alone` tells whether no process outside works in its files.

        Only processes behind the filter can send questions. When the filter has no process left, all of them are dying,
        no program runs, `on_exit` is called, and no other event is worth waking up for.
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
                        on_exit()
                        return status
                else:  # the last process behind this filter is gone, or taken apart
                    posix.close(listener)
                    on_exit()
                    _, status, usage = wait4(pid, 0)
                    self.add(usage)
                    self.drain()
                    return status

    def _answer(self, listener: int, pid: int, is_alone: Callable[[], bool]) -> int | None:
        """Answer one question; return the guest's wait status if it was an early exit notice, which is not answered."""
        notify = load_notify()
        try:
            question = notify.receive(listener)
            if notify.is_exit_notice(question, pid) and is_alone() and self._ends_all():
                self.exiting, self.listener = pid, listener
                return int(notify.exit_code(question) << 8)
            refused = notify.refusal(question, self.own_mounts, _may_clone)
            notify.reply(listener, question, refused)
        except OSError:  # the question is unknown
            self.has_left_traces = True
            return None
        self.has_left_traces = notify.leaves_traces(question) or self.has_left_traces
        self.denied += notify.is_denied(question, refused)
        return None

    def _ends_all(self) -> bool:
        """Tell whether the guest's early exit notice is the end of all its processes and sockets; if so, add its usage.

        It makes no socket any more, so if it holds no socket now, it leaves none.
        """
        if self.stats is None or self.has_left_traces or not self.sockets.are_all_gone():
            return False
        spent = self.stats.at_exit_notice()
        if spent is not None:
            self.add(spent)
        return spent is not None

    def is_worn(self) -> bool:
        """Tell, when all processes are dead, whether the namespaces may hold traces of the guest for the next one."""
        return self.has_left_traces or not (self.is_exiting or self.sockets.are_all_gone())

    def count_denied(self, status: int) -> int:
        """Return how many blocked attempts of a guest that ended with this status were seen.

        Without a socket it cannot have tried the network; the first guest with one is the last of this jail.
        """
        return self.denied + (count_unreachable() if status and self.has_left_traces else 0)

    def end_everybody(self) -> None:
        """Kill all other processes in this process namespace, and wait until none is left.

        All of them descend from this process. So if it has no child, dead or alive, none is left, and the kernel need
        not search all processes of the host for targets.
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


def _may_clone(_pid: int) -> bool:
    """Tell whether a process may clone itself: only one of a session may, and a session has its own reaper."""
    return False


class PreforkGuest(Guest):
    """Be a guest of a prefork jail: make its own mounts, and take the order from the caller, over `handoff`.

    `file` is that of the shared status, `ready` the report to the caller. If it `is_under_load`, other processes wait
    for the processor, and no order will come soon. If the kernel `can_copy` memory ahead, later guests need the list of
    pages.
    """

    can_copy = False
    device = 0  # of its workspace, by which the caller knows whether it holds the right one

    def __init__(self, parent: Parent, asking: int, building: Building, handoff: int, file: int, ready: dict[str, Any]):
        super().__init__(parent, 0, asking)
        self.building, self.handoff, self.file, self.ready = building, handoff, file, ready

    def _build(self) -> None:
        """Get ready, make the guest's mounts, and take its identity for good."""
        self._get_ready()
        self.seconds = perform(self.building.first, self.registers)
        self._restrict(holds=True)
        if self.building.seccomp is not None and self.listener < 0:
            error = OSError(EBUSY, "somebody outside listens already, so nobody would hear of a socket")
            raise StepFailed(FILTER, 0, 1, error)

    def _hand_over(self) -> None:
        """Give pid 1 the descriptors to check and unmount at the end, and the caller a mount of the workspace."""
        registers = self.registers
        handed_fds = [registers[name] for name in (*OWN_MOUNTS.values(), MOUNT_NAMESPACE)]
        further = NEXT_WORKSPACE if NEXT_WORKSPACE in registers else SHOWN_WORKSPACE
        further_fds = [registers[further]] if further in registers else []
        self.device = posix.fstat(registers[OWN_WORKSPACE]).st_dev
        messages.send_retrying(self.asking, "made", {"holds": self.holds}, [*handed_fds, self.listener, *further_fds])
        if self.listener >= 0:
            posix.close(self.listener)
        messages.send_retrying(self.handoff, "ready", self.ready, self._for_caller())

    def _for_caller(self) -> list[int]:
        """Return the mounts of the workspace for the caller; it has that of a kept one since the first guest."""
        registers = self.registers
        shown = [registers[SHOWN_WORKSPACE]] if SHOWN_WORKSPACE in registers else []
        if CALLERS_WORKSPACE in registers:
            return [registers[CALLERS_WORKSPACE], *shown]
        return [] if NEXT_WORKSPACE in registers else [registers[OWN_WORKSPACE], *shown]

    def _take_order(self) -> tuple[Order, list[int]]:
        """Wait for an order that is meant for this prefork jail: a guest that was killed may not have read its own.

        It includes the steps that write the input files: pid 1 may have another id. A caller that must learn at once of
        the program's start gets a message; others can read it in the shared status.
        """
        if not self.is_under_load and self._has_time(self.handoff):
            self._warm_up()
            self._note_dirty_pages()
        generation = self.ready["generation"]
        while True:
            tag, body, fds = messages.receive(self.handoff)
            if tag != "order":  # the jail is not needed any more
                posix._exit(1)
            if body["generation"] == generation:
                break
            for fd in fds:
                posix.close(fd)
        number = body["number"]
        shared_status.note_taken(self.file, number)
        perform(body["steps"], self.registers)
        shared_status.note_start(self.file, number, monotonic(), self.device)
        self.gives_exit_notice = body["gives_exit_notice"]
        if body["is_awaited"]:
            messages.send(self.handoff, "started", {"number": number, "generation": generation})
        return Order(**body["order"]), fds

    def _note_dirty_pages(self) -> None:
        """Write, unless it was done, the list of this process's own pages: later guests will have the same."""
        if self.can_copy and not shared_status.dirty_pages(self.file):
            try:
                shared_status.note_dirty_pages(self.file, shared_status.find_dirty_pages())
            except OSError:
                pass  # a host may keep it from us


FEW_BLOCKS = 64  # that a guest's files may still hold for a moment when the next one is made


class PreforkReaper(Parent):
    """Be pid 1 for one guest after the other. Failures are reported to the helper, on `link`."""

    def live(self, handoff: int, file: int, common: dict[str, Any]) -> Callable[[], None]:
        """Do everything; returns only in a guest, with a function to call. Messages to the caller contain `common`.

        `handoff` is the socket that guests take orders from, `file` that of the shared status.
        """
        posix.close(self.go)  # our guests are forked when we have our identity
        private = self.await_go()
        unshare(CLONE_NEWCGROUP)
        building = Building.of_parts(*messages.unpack(self.plan_fd).values())
        ready = {**common, "seconds": self.build(building, private)}
        self._forget_helper()
        gc.freeze()  # present objects are no garbage, and no program shall find them through `gc`
        watcher = PreforkWatcher(self.spec, self.registers.get(PROCESS_COUNTER, -1))
        can_copy = shared_status.is_possible()
        unclosed_fds: list[int] = []
        dirty_pages = None
        while True:
            watcher.renew()
            before, is_under_load = shared_status.read_taken(file), shared_status.is_under_load(file)
            if dirty_pages is None:
                dirty_pages = shared_status.read_dirty_pages(shared_status.dirty_pages(file))
            shared_status.copying.wanted = dirty_pages
            pid = posix.fork()
            if pid == 0:
                _close(unclosed_fds)
                never_freed.extend((watcher, private))
                guest = PreforkGuest(self, watcher.leave(), building, handoff, file, ready)
                guest.is_under_load, guest.can_copy = is_under_load, can_copy
                return guest.become
            received_fds = watcher.receive_made(pid, is_looked_at=not is_under_load)
            mount_fds = self._receive_mounts(received_fds, keeps_workspace=bool(building.later))
            _close(unclosed_fds)  # unmounting waits for the kernel; no run waits now
            ended, unclosed_fds = self._attend(pid, watcher, mount_fds, file, before, common)
            ready = common  # the building's times were reported with the first guest
            building.first = building.later or building.first
            messages.send(handoff, "ended", ended)
            watcher.kill_exiting()
            if shared_status.rebuilds(
                file
            ):  # else the caller's next run may be for our next guest, which is yet to be made
                posix.sched_yield()  # else a woken process often waits behind us, though the other processor is idle
            shared_status.note_end(
                file, ended["number"]
            )  # after it was sent: the helper asks no process about a noted end
            if ended["is_worn"] or not shared_status.start_of(file, ended["number"])[0]:
                posix._exit(0)  # no next guest may attach the mount of one that failed

    def _forget_helper(self) -> None:
        """Remove the finder of Cloche's modules, once for all guests; all needed modules are loaded by now."""
        load_notify()
        if self.load_interpreter is not None:
            interpreter = self.load_interpreter("oneshot")
            self.privileges = forget_helper(interpreter)
            self.load_interpreter = {"oneshot": interpreter}.__getitem__  # no other can be loaded any more

    def _receive_mounts(self, received_fds: list[int], *, keeps_workspace: bool) -> list[int]:
        """Return the descriptors that a new guest hands over: its mounts, its filter's descriptor, its mount namespace.

        The last may be the mount that shows the caller its workspace. The last process to close it waits for the
        kernel.
        """
        if not received_fds:  # it failed, and has reported the step; or it was killed
            posix._exit(1)
        *mounts, namespace, listener = received_fds[: len(OWN_MOUNTS) + 2]
        further = received_fds[len(OWN_MOUNTS) + 2 :]
        if further and keeps_workspace:
            self._replace_workspace(further.pop())
        return [*mounts, listener, namespace, *further]

    def _attend(
        self, pid: int, watcher: PreforkWatcher, mount_fds: list[int], file: int, before: int, common: dict[str, Any]
    ) -> tuple[dict[str, Any], list[int]]:
        """Attend to one guest until it has ended; return the report, and those of its mounts that are yet to be closed.

        `before` is the number of the run whose order was taken before it was forked; `common` is part of any report.
        """
        mounts, listener, unclosed_fds = (
            mount_fds[: len(OWN_MOUNTS)],
            mount_fds[len(OWN_MOUNTS)],
            mount_fds[len(OWN_MOUNTS) + 1 :],
        )
        last: list[int] = []

        def look_around() -> None:
            """Check things that no program can change any more, while the kernel frees the guest's memory."""
            if not last:
                last.extend((shared_status.read_taken(file), *_count_full(mounts)))

        status = watcher.wait_for(pid, listener, look_around, lambda: not shared_status.shares_workspace(file))
        look_around()
        number, full, stored = last
        if number == before:  # it failed, or was killed while it waited
            posix._exit(1)
        tasks = 0
        if not watcher.is_exiting:
            tasks = _count_tasks() if status else 0
            watcher.end_everybody()
        ended = {
            **common,
            "number": number,
            "wait_status": status,
            "tasks": tasks,
            "full": full,
            "is_alone": True,
            "is_quiet": watcher.is_exiting,
            **watcher.spent(),
            "is_worn": watcher.is_worn(),
            "denied": watcher.count_denied(status),
            "at": monotonic(),
        }
        if stored > FEW_BLOCKS:
            _close(unclosed_fds)
        return ended, unclosed_fds

    def _replace_workspace(self, workspace: int) -> None:
        """Hold the mount of the workspace for the next guest, instead of the one before."""
        if ATTACHED_WORKSPACE in self.registers:
            posix.close(self.registers[ATTACHED_WORKSPACE])
        self.registers[ATTACHED_WORKSPACE] = workspace


def _close(fds: list[int]) -> None:
    while fds:
        posix.close(fds.pop())


def _count_full(mounts: list[int]) -> tuple[int, int]:
    """Return the number of full mounts, and the blocks in all of them; close them."""
    full = stored = 0
    for mount in mounts:
        state = posix.fstatvfs(mount)
        full += state.f_bfree == 0 or state.f_ffree == 0
        stored += state.f_blocks - state.f_bfree
        posix.close(mount)
    return full, stored


def _count_tasks() -> int:
    return procfs.count_tasks([int(name) for name in posix.listdir("/proc") if name.isdigit()])
