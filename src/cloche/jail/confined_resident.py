"""Init of a live sandbox without namespaces, its supervisor, and the reaper of each of its processes.

Theory of operation: without a process namespace no pid 1 is protected from signals, and no host name marks the
processes of a tree. Init forks a *reaper* for each requested process, and the reaper forks the guest. A reaper is a
subreaper: all descendants of the guest stay below it, and when it has no child left (ECHILD), the tree has ended. It
answers the guest's filter, sends the signals, reports the guest's end to init, and continues for processes that the
guest has left behind. It ends all below it on init's order, or when init's end of the link is closed.

Protection: init and the reapers are outside of every guest's Landlock domain, not dumpable, and hold no descriptor of a
guest's. Each guest's domain limits its signals to its own descendants, from Landlock's ABI 6. As root they have real
and saved ids that no guest has, besides, so that no guest's signal reaches them on older kernels either; their
effective id is the guests'. An ordinary user has one id, and no such sandbox on an older kernel.

The end of a tree: the reaper is alone in a domain that has only scopes, and the guest's is below it, so one
`kill(-1, SIGKILL)` of the reaper reaches exactly this tree, and a fork bomb does not outrun it. Without scopes the
reaper walks its descendants, which are stopped first.
"""

from __future__ import annotations

import posix
import sys
from time import monotonic

from . import messages, procfs
from .command_guest import CommandGuest
from .ending import PATIENCE_S, end_by_walk, enter_scope
from .guest import load_notify
from .marks import parent_of
from .pid1 import ChildWatcher, never_freed
from .pss import PssSum
from .resident import (
    LEFT,
    SIGCHLD,
    SIGKILL,
    SIGSTOP,
    Become,
    Resident,
    ResidentFork,
    ResidentSupervisor,
    now,
)
from .steps import INIT_ID, OUTSIDE_ID
from .syscalls import MACHINE, NUMBERS, PR_SET_CHILD_SUBREAPER, WNOHANG, close_range, ppoll, prctl, socketpair, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


_signal: Any = __import__("_signal")
EPERM, ESRCH, EIO = 1, 3, 5
POLLIN = 1
FORK_S = 30.0  # for a reaper to fork its guest, and to answer that it has sent a signal
AGAIN_S = 0.002  # between two looks whether all that was killed is gone
END_S = 2.0  # for the reapers to end their trees when init is gone, after which the helper does it
MOST_DEEP = 4096  # parents above a process, that are looked at for its reaper
WORKSPACE, TMP = "/workspace", "/tmp"  # as callers call them; here they are folders of the host
ONE_USER = "a sandbox at level confined has one user; leave user out, or use a host with level jail"


class ConfinedSupervisor(ResidentSupervisor):
    """Supervise such a sandbox: init's identity, its limits by the reapers' trees, and the end of all of it."""

    init_id = 0

    def start(
        self, plan_fd: int, private_paths: list[str], owners: dict[str, tuple[int, int]] | None = None
    ) -> Callable[[], None] | None:
        """Fork init, with a separate id if root can give one."""
        if self.spec.outside is not None:
            self.init_id = self.state.claim_init_id()
        return super().start(plan_fd, private_paths, owners)

    def _live(self, registers: dict[str, int], ends: dict[str, int]) -> Callable[[], None]:
        if self.init_id:
            registers[INIT_ID] = self.init_id
        init = ConfinedResident(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
        init.nice = self.nice
        never_freed.extend((self.state, self, init, ends))
        return init.live()

    def _release(self, go: int) -> None:
        """Map no ids: there are no namespaces."""

    def _has_time(self, cause: str) -> bool:
        """End all trees if the folders exceed their limit; the present files are then exempt from it, to be removed."""
        if cause != "disk_limit" or self.state.folder is None:
            return super()._has_time(cause)
        self._send("exceeded", {"mark": 0, "cause": cause})
        self.state.folder.excuse()
        return True

    def _take(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        if tag != "summed":
            super()._take(tag, body, fds)
        elif self.accounting.take(body, self.spec.memory_bytes) and not self.run.is_over():
            self._has_time("out_of_memory")

    def _largest(self) -> int:
        """Return the reaper with the most memory below it, 0 for none."""
        sums = {pid: procfs.own_bytes(procfs.descendants(pid)) for pid in procfs.children(self.reaper)}
        return max(sums, key=lambda pid: sums[pid], default=0)

    def kill(self, *, is_awaited: bool = True) -> Any:  # noqa: ANN401, ARG002 - as `Supervisor.kill`
        """Kill init, upon which each reaper ends its tree; wait until all processes have ended."""
        if not self.reaper:
            return None
        cgroup = self.state.cgroup
        posix.kill(self.reaper, SIGKILL)
        if cgroup is not None:
            cgroup.lift_quota()
        _, _, usage = wait4(self.reaper, 0)
        self.reaper = 0
        until = monotonic() + END_S
        while not _reap():
            if monotonic() >= until:
                end_by_walk()
            else:
                ppoll((), AGAIN_S)
        return usage


def _reap() -> bool:
    """Reap all dead children; tell whether no child is left."""
    while True:
        try:
            if not wait4(-1, WNOHANG)[0]:
                return False
        except ChildProcessError:
            return True


class ConfinedResident(Resident):
    """Be init, and the host of its loop; reapers do the work that takes a guest's uid."""

    count = 0

    def _prepare(self) -> None:
        """Load the modules of reapers while modules can be loaded, and be the object that ends trees."""
        from . import answered_calls, kill_calls, task_count  # noqa: F401 - the latter may be asked for by reapers

        answered_calls.load(self.spec)
        self.sum: PssSum | None = None
        self.ender = self
        self.forks: dict[int, ConfinedForked] = {}  # whose reapers live, by their marks
        self.by_reaper: dict[int, ConfinedForked] = {}

    def _receive_from_helper(self, _: int) -> None:
        """Handle a request of the helper's; sum the memory of all descendants, which takes a guest's uid."""
        tag, body, _fds = messages.receive(self.link)
        if tag == "sum":
            self.sum = PssSum(posix.getpid(), body["limit_bytes"])
            self._go_on_summing()
        else:
            self._take_from_helper(tag, body)

    def _go_on_summing(self) -> None:
        """Measure one more process in each turn of the loop."""
        if self.sum is not None and self.sum.step():
            result, self.sum = self.sum.result(), None
            messages.send(self.link, "summed", result)
        elif self.sum is not None:
            self.server.loop.call_at("sum", now(), self._go_on_summing)

    def _give_terminal(self, slave: int) -> None:
        """Do nothing: the guests' effective id has made it."""

    def _fork(self, early_order: tuple[dict[str, Any], dict[int, int]] | None) -> ResidentFork:
        ours, theirs = socketpair()
        try:
            pid = posix.fork()
        except OSError:
            posix.close(ours)
            posix.close(theirs)
            raise
        if pid == 0:
            _signal.set_wakeup_fd(-1)
            _signal.signal(SIGCHLD, _signal.SIG_DFL)
            posix.close(ours)
            guest: Any = CommandReaper(self, theirs, early_order)
            raise Become(guest)
        posix.close(theirs)
        self.count += 1
        return ConfinedForked(self, pid, self.count, ours)

    def note_orphan(self, pid: int) -> None:
        """Note the end of a reaper: all processes of its guest have ended."""
        forked = self.by_reaper.pop(pid, None)
        if forked is None:
            return
        self.spares.pop(forked.pid, None)
        self.forks.pop(forked.mark.number, None)
        forked.note_gone()
        if not self.server.processes:
            self.server.loop.call_at(LEFT, now(), self._note_left)

    def look(self) -> Iterator[tuple[int, int]]:
        """Yield nothing: each reaper knows its tree."""
        return iter(())

    def other_pids(self) -> list[int]:
        """Return all that live below the reapers, but the guests that wait."""
        busy = [forked for forked in self.forks.values() if forked.pid not in self.spares]
        return [pid for forked in busy for pid in procfs.descendants(forked.reaper)]

    def signal_others(self, number: int) -> None:
        """Send a signal to all but the waiting guests; after SIGSTOP, return when they are stopped."""
        busy = [forked for forked in self.forks.values() if forked.pid not in self.spares]
        if number == SIGKILL:
            for busy_fork in self.forks.values():
                busy_fork.end()
            return
        for busy_fork in busy:
            busy_fork.send("signal", {"number": number, "to": "tree", "answer": number == SIGSTOP})
        if number == SIGSTOP:
            for busy_fork in busy:
                busy_fork.await_tag("sent")

    def hold_others(self) -> bool:
        """Stop nothing: trees are not searched for here."""
        return False

    def end(self, mark: int, on_end: Callable[[], None] = lambda: None) -> None:
        """Have the reaper end all that has this mark, and then call `done`."""
        forked = self.forks.get(mark)
        if forked is None:
            on_end()
        else:
            forked.on_end.append(on_end)
            forked.end()

    def signal(self, mark: int, number: int) -> None:
        """Send a signal once to all that has this mark."""
        if mark in self.forks:
            self.forks[mark].send("signal", {"number": number, "to": "tree"})

    def kill(self, asker: int, body: dict[str, Any]) -> None:
        """Have a signal sent that a guest below this reaper's mark may not send itself, or refuse it."""
        owner = self._owner(abs(body["pid"]))
        if owner is not None and owner.send("signal", {**body, "to": "pid"}):
            owner.askers.append(asker)
        else:
            self.answer_kill(asker, EPERM)

    def answer_kill(self, asker: int, refusal: int) -> None:
        """Say how it went to the reaper that has asked, if it is still there."""
        if asker in self.forks:
            self.forks[asker].send("killed", {"errno": refusal})

    def _owner(self, pid: int) -> ConfinedForked | None:
        """Return the command whose reaper is above a process, except our own programs and waiting guests."""
        for _ in range(MOST_DEEP):
            parent = parent_of(pid)
            if parent in self.by_reaper:
                forked = self.by_reaper[parent]
                process = self.server.by_pid.get(forked.pid)
                is_ours = forked.pid in self.spares or (process is not None and process.is_hidden)
                return None if is_ours else forked
            if parent <= 1:
                break
            pid = parent
        return None

    def _end_largest(self, number: int, cause: str) -> None:
        """End the tree below this reaper; without one, all trees."""
        for forked in list(self.forks.values()):
            if number not in (0, forked.reaper) or forked.pid in self.spares:
                continue
            process = self.server.by_pid.get(forked.pid)
            if process is not None and not (process.is_hidden and number == 0):
                process.kill(cause)
            elif process is None:
                forked.end()

    def _has_left(self) -> bool:
        return any(forked.pid not in self.spares for forked in self.forks.values())

    def is_full(self) -> bool:
        """Return False: the helper sums the contents of the folders."""
        return False

    def disk(self) -> tuple[int, int]:
        """Return zeros, for the same reason."""
        return 0, 0


class _Mark:
    """Stand for one tree; its number is never reused."""

    def __init__(self, number: int):
        self.number = number

    def close(self) -> None:
        """Hold nothing."""


class _Usage:
    """Hold the usage of a process, by the names of `os.wait4`."""

    def __init__(self, user_s: float, system_s: float, most_kib: int):
        self.ru_utime, self.ru_stime, self.ru_maxrss = user_s, system_s, most_kib


class ConfinedForked(ResidentFork):
    """Hold init's state of a guest: its reaper, and the link to that."""

    reports_program = False
    host: ConfinedResident

    def __init__(self, host: ConfinedResident, reaper: int, number: int, link: int):
        """Wait until the reaper has forked its guest. Raises OSError where there may be no more processes."""
        self.reaper, self.last_tag = reaper, ""
        self.on_end: list[Callable[[], None]] = []
        self.askers: list[int] = []  # marks of the reapers that wait to hear how a signal went, in turn
        self.ended: dict[str, Any] | None = None
        self.fork_error = 0
        super().__init__(host, 0, _Mark(number), link)  # type: ignore[arg-type]
        self.await_tag("forked")
        if not self.pid:
            self._close()
            raise OSError(self.fork_error or EIO, posix.strerror(self.fork_error or EIO))
        host.forks[number] = host.by_reaper[reaper] = self

    def await_tag(self, tag: str) -> None:
        """Wait until the reaper has said this, or nothing more will come of it."""
        until = monotonic() + FORK_S
        self.last_tag = ""
        while self.last_tag != tag and self.link >= 0 and monotonic() < until:
            if ppoll((self.link,), until - monotonic()):  # else a signal came in between
                self.receive()

    def receive(self, _: int = 0) -> None:
        """Take one message of the reaper's."""
        try:
            tag, body, _fds = messages.receive(self.link)
        except BlockingIOError:
            return
        self.last_tag = tag
        if tag == "forked":
            self.pid, self.fork_error = body["pid"], body.get("errno", 0)
        elif tag == "failed":
            self.error = {"kind": "start", **body}
        elif tag == "ended":
            self.denied = body["denied"]
            self._note_exit(body["wait_status"], _Usage(*body["usage"]))
        elif tag == "kill":
            self.host.kill(self.mark.number, body)
        elif tag == "killed" and self.askers:
            self.host.answer_kill(self.askers.pop(0), body["errno"])
        elif not tag:
            self._close()

    def _note_exit(self, status: int, usage: _Usage) -> None:
        process = self.host.server.by_pid.pop(self.pid, None)
        if process is not None:
            process.note_exit(status, usage)

    def note_gone(self) -> None:
        """Take the reaper's last messages; a guest without a reported end by then was killed."""
        while self.link >= 0 and ppoll((self.link,), 0.0):
            self.receive()
        self._close()
        self._note_exit(SIGKILL, _Usage(0.0, 0.0, 0))
        askers, self.askers = self.askers, []
        for asker in askers:
            self.host.answer_kill(asker, ESRCH)
        callbacks, self.on_end = self.on_end, []
        for call in callbacks:
            call()

    def conclude(self) -> dict[str, Any]:
        """Return the guest's failure before its program; its reaper may live on."""
        return self.error

    def send(self, tag: str, body: dict[str, Any]) -> bool:
        """Have the reaper do something; False for one that is gone, and has nothing left to do it to."""
        if self.link < 0:
            return False
        try:
            messages.send(self.link, tag, body)
        except OSError:
            return False
        return True

    def signal(self, number: int, group: int = 0) -> None:
        """Send a signal to the guest, or to a process group of its."""
        self.send("signal", {"number": number, "to": "group" if group else "process", "group": group})

    def wake(self) -> None:
        """Do nothing: no other guest reaches it."""

    def end(self) -> None:
        """End all processes below its reaper; other guests may delay the end (see `ending.end`)."""
        self.send("end", {})
        self.host.server.loop.call_at(("held", self.mark.number), now() + PATIENCE_S, self._end_held)

    def _end_held(self) -> None:
        """Kill the processes below the reaper until it has ended."""
        if self.mark.number not in self.host.forks:
            return
        for pid in procfs.descendants(self.reaper):
            try:
                posix.kill(pid, SIGKILL)
            except OSError:
                pass  # it has gone meanwhile
        self.host.server.loop.call_at(("held", self.mark.number), now() + PATIENCE_S, self._end_held)


class ConfinedGuest(CommandGuest):
    """Be a process that a client asks for, by the one id that guests have here."""

    def _become_user(self) -> bool:
        if self.early_order is not None and self.early_order[0].get("user") is not None:
            raise OSError(EPERM, ONE_USER)
        self.number = self.registers.get(OUTSIDE_ID, posix.getuid())
        return False

    def _restrict(self, *, holds: bool) -> None:  # noqa: ARG002 - `kill` is asked for in any case, and must be made once
        super()._restrict(holds=True)

    def _enter(self, folder: str | None) -> None:
        for name, own in ((WORKSPACE, self.spec.workspace), (TMP, self.spec.tmp)):
            is_named = folder is not None and (folder == name or folder.startswith(f"{name}/"))
            if folder is not None and is_named and not folder.startswith(self.spec.folder):
                folder = own + folder[len(name) :]
                break
        super()._enter(folder)


class CommandReaper:
    """Be the parent of one guest, and the subreaper of its orphans."""

    def __init__(self, host: ConfinedResident, link: int, early_order: tuple[dict[str, Any], dict[int, int]] | None):
        self.host, self.link, self.early_order = host, link, early_order
        self.pid, self.is_scoped, self.has_ended = 0, False, False
        self.denied = 0
        self.kills: Any = None
        self.answerers: dict[int, Any] | None = None

    def become(self) -> None:
        """Do everything; returns only in a guest that has run to its end. The reaper itself exits in here."""
        try:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._confine()
            self.ours, theirs = socketpair()
            self.watcher = ChildWatcher()
            self.pid = posix.fork()
        except OSError as error:
            number = error.errno or 0
            messages.send(self.link, "forked", {"pid": 0, "errno": number})
            posix._exit(1)
        if self.pid == 0:
            self.watcher.stop()
            posix.close(self.ours)
            posix.close(self.link)
            ConfinedGuest(self.host, theirs, self.early_order).become()
            return
        try:
            messages.send(self.link, "forked", {"pid": self.pid})
            self._close_descriptors()
            self.watched = [self.watcher.woken, self.link, self.ours]
            while True:
                self._serve()
        finally:
            try:
                self._end_all()
            finally:
                posix._exit(1)

    def _confine(self) -> None:
        """Enter our own domain, whose scopes limit a signal to all to the processes below."""
        if self.host.spec.scope_abi:
            enter_scope(self.host.spec.scope_abi)
            self.is_scoped = True

    def _close_descriptors(self) -> None:
        """Close all descriptors whose end of file another process waits for."""
        first = 3
        network = (self.host.spec.network or {}).get("link", self.link)
        for fd in sorted({self.link, self.ours, self.watcher.woken, self.watcher.wake, network}):
            if fd > first:
                close_range(first, fd - 1)
            first = fd + 1
        close_range(first)

    def _serve(self) -> None:
        for fd, event in ppoll(self.watched, None):
            if fd == self.watcher.woken:
                self.watcher.drain()
                if self._take_dead():
                    posix._exit(0)
            elif fd == self.link:
                self._receive_from_init()
            elif fd == self.ours:
                self._receive_from_guest()
            elif event & POLLIN:
                self._answer(fd)
            else:  # the last process behind this filter is gone
                self.watched.remove(fd)
                posix.close(fd)

    def _take_dead(self) -> bool:
        """Reap all dead children, and report the guest's end; tell whether no child is left."""
        while True:
            try:
                pid, status, usage = wait4(-1, WNOHANG)
            except ChildProcessError:
                return True
            if not pid:
                return False
            if pid == self.pid and not self.has_ended:
                self.has_ended = True
                while self.ours in self.watched and ppoll((self.ours,), 0.0):
                    self._receive_from_guest()
                body = {"wait_status": status, "usage": [*usage], "denied": self.denied}
                messages.send_retrying(self.link, "ended", body)

    def _receive_from_init(self) -> None:
        tag, body, fds = messages.receive(self.link)
        if tag == "order":
            try:
                messages.send_retrying(self.ours, tag, body, fds)
            except OSError:
                pass  # it was killed, as its end will say
            for fd in fds:
                posix.close(fd)
        elif tag == "signal" and body["to"] == "pid":
            self._signal_for_another(body)
        elif tag == "signal":
            self._signal(body)
        elif tag == "killed" and self.kills is not None:
            self.kills.take(body["errno"])
        else:  # it is to be ended, or init is gone
            self._end_all()
            posix._exit(0)

    def _signal(self, body: dict[str, Any]) -> None:
        number = body["number"]
        try:
            if body["to"] == "tree":
                self._signal_tree(number)
            elif body["to"] == "group":
                posix.killpg(body["group"], number)
            elif not self.has_ended:
                posix.kill(self.pid, number)
        except OSError:
            pass  # no such process, or not yet such a group
        if body.get("answer"):
            messages.send(self.link, "sent", {})

    def _signal_for_another(self, body: dict[str, Any]) -> None:
        """Send a signal for another command; the kernel refuses it for processes that are not below us."""
        refusal = 0
        try:
            posix.kill(body["pid"], body["number"])
        except OSError as error:
            refusal = error.errno or EPERM
        messages.send_retrying(self.link, "killed", {"errno": refusal})

    def _signal_tree(self, number: int) -> None:
        """Send a signal to all processes below: by one call if Landlock's scopes limit it to them."""
        if self.is_scoped:
            posix.kill(-1, number)
            return
        for pid in procfs.descendants(posix.getpid()):
            try:
                posix.kill(pid, number)
            except OSError:
                pass  # it has gone meanwhile

    def _end_all(self) -> None:
        """Kill all processes below, repeatedly until none is left."""
        while True:
            for number in (SIGKILL,) if self.is_scoped else (SIGSTOP, SIGKILL):
                try:
                    self._signal_tree(number)
                except OSError:
                    pass  # no process is left
            try:
                if self._take_dead():
                    return
            except OSError:  # init has ended, and needs no report
                pass
            ppoll((self.watcher.woken,), AGAIN_S)
            self.watcher.drain()

    def _receive_from_guest(self) -> None:
        """Take one message of a guest before its program."""
        tag, body, fds = messages.receive(self.ours)
        if tag == "listener":
            self.watched += fds
        elif tag == "failed":
            messages.send(self.link, tag, body)
        elif not tag:
            self.watched.remove(self.ours)
            posix.close(self.ours)

    def _answer(self, listener: int) -> None:
        if self.answerers is None:
            host = self.host
            sys.meta_path.insert(0, host.privileges.archive)  # which only guests must do without
            sys.modules.update(host.hidden)
            from .answered_calls import answering, load
            from .kill_calls import Kills
            from .task_count import TaskCount

            TaskCount.is_one_of_many = True
            self.kills = Kills(self.link)
            self.answerers = {**load(host.spec), NUMBERS[MACHINE]["kill"]: answering(self.kills.answer)}
        self.denied += load_notify().answer(listener, self.host.own_mounts, _may_clone, self.answerers)


def _may_clone(_pid: int) -> bool:
    """Refuse: no process may clone itself here."""
    return False
