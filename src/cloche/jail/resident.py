"""Pid 1 of a live sandbox, and its supervisor in the helper: one set of namespaces, any number of processes.

Theory of operation: pid 1 builds the tree, then serves the client by the loop of the package `init`, over a socket with
the caller at its other end. Every requested process is a fork of pid 1 that becomes a guest: it takes its identity,
drops its capabilities, applies Landlock and the filter, and runs. Two are forked ahead, and wait for their order with
all of that done: one is taken, and another forked when that one has ended. Pid 1 itself runs no program. It is out of a
guest's reach as that of a prefork jail is (see `prefork`): another outside id where there are two, all capabilities of
its namespace, not dumpable, and no signal from inside ends it.

A process's tree is identified by a mark that it cannot remove: before each fork pid 1 enters a new namespace of the
host name, which only the process and all its descendants share. The filter prevents entering or making one, and hiding
by no longer being dumpable. A process can still hide by a program that may be run and not be read; it belongs to all
trees: it is ended with the first of them.

The helper enforces the limit on memory: it measures the sum, and sends pid 1 the mark of the largest tree. Only the
helper can read the counters that tell whether the kernel has killed for memory.
"""

from __future__ import annotations

import gc
import posix
import sys
from time import monotonic, sleep

from . import host_view, messages, procfs, user_namespaces
from .accounting import IDLE_TICK_S, TICK_S
from .command_guest import REQUESTS, SUDO, CommandGuest, CommandParent, is_own
from .guest import forget_helper, is_ours, load_notify
from .marks import HIDDEN, MARK, jobs_of, mark_of, parent_of, read_whole, state_of
from .messages import Building
from .pid1 import never_freed
from .sudo import SudoListener
from .supervisor import Supervisor
from .syscalls import (
    AT_EMPTY_PATH,
    CLONE_NEWCGROUP,
    CLONE_NEWUTS,
    POLLIN,
    call,
    ppoll,
    socketpair,
    unshare,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .sandbox_state import SandboxState

_signal: Any = __import__("_signal")
SIGKILL, SIGTERM, SIGCHLD, SIGCONT, SIGSTOP = 9, 15, 17, 18, 19
# Of pid 1, added to the caller's: guests share its processors, and its control group bounds both.
NICE, LEAST_NICE = -15, -20
CHILDREN = "/proc/1/task/1/children"
MOST_PARENTS = 32  # that are looked at for the mark of a process which hides its own
OWN_MARKS = -16  # less their pids: marks of programs of ours that share a namespace
ENOSPC = 28
MARKS_KEPT = (
    "a process inside holds namespaces of other processes, so no process can be started; end that process, "
    "or the sandbox"
)
SPARE, SPARE_S = "spare", 0.005  # the clock by which a guest is forked ahead, while another one works
SPARES = 2  # guests that wait: the next one is at hand while we fork another
LEFT = "left"  # the clock that checks once for living orphans
PACE = "pace"  # the clock by which the helper begins to look at the memory
REST, REST_S = "rest", 30.0  # and the one by which it is given up, when nothing runs
MOST_SHELLS, STOPPED_S = 16, 0.1  # that are stopped before others, and how long one may take
EXCEEDED_S = 2.0  # for pid 1 to end the largest tree, after which everything is ended


class ResidentSupervisor(Supervisor):
    """Supervise a live sandbox, as one long run: its memory, its lifetime, its end."""

    def __init__(self, state: SandboxState, load_interpreter: Callable[[str], Any] | None):
        super().__init__(state, load_interpreter)
        self.is_watched = False
        self.nice = posix.getpriority(posix.PRIO_PROCESS, 0)  # the caller's, which guests have
        self.named: dict[int, float] = {}  # marks of the largest trees, and since when pid 1 knows

    def start(
        self, plan_fd: int, private_paths: list[str], owners: dict[str, tuple[int, int]] | None = None
    ) -> Callable[[], None] | None:
        """Start as any supervisor does, and ignore SIGTERM from then on: at a shutdown of the machine all processes get
        it, and what is in the sandbox is still to be saved. The helper ends with its link.
        """
        guest = super().start(plan_fd, private_paths, owners)
        if guest is None:
            _signal.signal(SIGTERM, _signal.SIG_IGN)
        return guest

    def _live(self, registers: dict[str, int], ends: dict[str, int]) -> Callable[[], None]:
        """Live as pid 1; returns only in a guest."""
        init = Resident(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
        init.nice = self.nice
        never_freed.extend((self.state, self, init, ends))
        return init.live()

    def _release(self, go: int) -> None:  # noqa: ARG002 - no guest has been forked that waits for it
        """Map the ids: of many users, or of the guest and of pid 1, which has one that no guest gets if it can."""
        if self.spec.users is not None:
            user_namespaces.write_range(self.reaper, *self.spec.users)
        else:
            self._map_ids(self.state.claim_init_id() if self.spec.outside else None)
        if self.state.cgroup is not None:
            try:
                posix.setpriority(posix.PRIO_PROCESS, self.reaper, max(LEAST_NICE, self.nice + NICE))
            except OSError:
                pass  # it takes root

    def _take(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        if tag == "pace":
            self.is_watched = body["is_watched"]
            self.accounting.tick_s = TICK_S if body["is_busy"] else IDLE_TICK_S
        elif tag == "why":
            self._send(tag, self.state.counters())
        elif tag == "handed out":
            self.state.send(tag, body, tuple(fds))
            for fd in fds:
                posix.close(fd)
        else:
            super()._take(tag, body, fds)

    def _send(self, tag: str, body: dict[str, Any]) -> None:
        try:
            messages.send(self.link, tag, body)
        except OSError:
            pass  # pid 1 is gone, as its link will say

    def _looks_regularly(self) -> bool:
        return self.is_watched and super()._looks_regularly()

    def _check_limits(self) -> None:
        """Keep the lifetime, and have the largest tree ended where the sandbox uses too much memory."""
        run = self.run
        if run.is_over() or not run.deadline or monotonic() >= run.deadline:
            super()._check_limits()
        elif self.is_watched and self.accounting.begin():
            cause = self.accounting.exceeded(self.state, self.reaper, None)
            if not cause:
                self.named.clear()
            elif not self._has_time(cause):
                run.cause = cause
            self.accounting.end()

    def _has_time(self, cause: str) -> bool:
        """Name the largest tree to pid 1, once; tell whether pid 1 may yet end it."""
        mark = self._largest()
        if mark not in self.named:
            self.named[mark] = monotonic()
            self._send("exceeded", {"mark": mark, "cause": cause})
        return monotonic() <= self.named[mark] + EXCEEDED_S

    def _largest(self) -> int:
        """Return the mark of the processes that use most memory together, 0 for none."""
        sums: dict[int, int] = {}
        for pid in procfs.descendants(self.reaper):
            mark = mark_of(pid)
            sums[mark] = sums.get(mark, 0) + procfs.private_bytes([pid])
        return max(sums, key=lambda mark: sums[mark], default=0)


def now() -> float:
    """Return the time of the loop's clock."""
    from time import CLOCK_BOOTTIME, clock_gettime

    return clock_gettime(CLOCK_BOOTTIME)


class Become(BaseException):
    """Leave the loop of init, in a fork that becomes a guest: no frame of the loop stays on its stack."""

    def __init__(self, guest: CommandGuest):
        super().__init__()
        self.guest = guest


class Resident(CommandParent):
    """Be pid 1, and the host of init's loop; see `init.server.Host`."""

    server: Any
    ender: Any = None  # `init.tree` ends what belongs to a process
    sudo_module: Any = None
    sudo: SudoListener | None = None  # with several users
    is_forking_soon = False
    pace: tuple[bool, bool] = (False, False)  # as the helper knows it

    def live(self) -> Callable[[], None]:
        """Do everything; returns only in a guest, with a function to call."""
        from . import load

        posix.close(self.go)
        private = self.await_go()
        if self.spec.level == "jail":
            unshare(CLONE_NEWCGROUP)
        building = Building.of_parts(*messages.unpack(self.plan_fd).values())
        server = load("init.server")
        seconds = self.build(building, private)
        messages.send_retrying(self.link, "ready", {"seconds": seconds})
        load_notify()
        self._prepare()
        interpreter = self.load_interpreter("oneshot") if self.load_interpreter is not None else None
        tag, _, fds = messages.receive(self.link)
        if tag != "order":  # the helper is gone, or needs us no more
            posix._exit(1)
        packed, wire = fds
        order = messages.unpack(packed)
        posix.close(packed)
        if interpreter is not None:
            if "preload" in order:  # before there is any guest, for all of them
                load("interpreter.preload").warm_up(order["preload"])
            interpreter.prepare()
            self.interpreters = {"oneshot": interpreter}
            self.load_interpreter = self.interpreters.__getitem__
            self.terminal, self.serve_files = load("init.terminal"), load("init.files").serve
            self.sudo_module = load("init.sudo") if self.spec.users is not None else None
            self.hidden = {name: module for name, module in sys.modules.items() if is_ours(name)}
            self.privileges = forget_helper(interpreter)  # after which no guest can load anything else of ours
        self.building = building
        self.own_mounts, self.root_steps = order["own_mounts"], order["root_steps"]
        self.asked: list[Callable[[str, int], None]] = []  # callbacks that wait for the cause of a failure
        self.spares: dict[int, ResidentFork] = {}  # guests that wait, by their pids
        self.oom_kills = self.pids_hits = 0
        messages.send(self.link, "started", {"at": monotonic(), "seconds": []})
        try:
            self.server = server.Server(wire, self, order["greeting"])
            never_freed.append(self.server)
            self.server.loop.watch(self.link, POLLIN, self._receive_from_helper)
            if self.sudo_module is not None:
                self.sudo = SudoListener(self, self.sudo_module.listen(), now)
            gc.collect()
            gc.freeze()
            self.server.serve()
        except Become as fork:
            return fork.guest.become
        posix._exit(0)

    def _prepare(self) -> None:
        """Hold a namespace that no guest has been in."""
        self.reserve = posix.open(MARK, posix.O_RDONLY | posix.O_CLOEXEC)

    def _receive_from_helper(self, _: int) -> None:
        tag, body, _fds = messages.receive(self.link)
        self._take_from_helper(tag, body)

    def _take_from_helper(self, tag: str, body: dict[str, Any]) -> None:
        if tag == "exceeded":
            self._end_largest(body["mark"], body["cause"])
        elif tag == "why":
            is_more, self.oom_kills = body.get("oom_kills", 0) > self.oom_kills, body.get("oom_kills", 0)
            hits, self.pids_hits = body.get("pids_hits", 0) - self.pids_hits, body.get("pids_hits", 0)
            pending, self.asked = self.asked, []
            for take in pending:
                take("out_of_memory" if is_more else "", hits)
        elif tag != "go":  # the helper is gone, and so must we be
            posix._exit(1)

    def _end_largest(self, number: int, cause: str) -> None:
        """End the tree with this mark; that of a process which has ended, too, or those who hide theirs."""
        for process in list(self.server.processes.values()):
            if process.mark.number == number:
                process.kill(cause)
                return
        self.server.ender.end(number)

    # The methods of `init.loop.Host`.

    def fork(self, order: dict[str, Any], streams: dict[int, int]) -> ResidentFork:
        """Give the order to a guest that waits, or to a new one."""
        is_session = REQUESTS in streams and order.get("python") is not None
        if is_session:
            self._load_sessions()
        if is_session or order.get("user") is not None:  # for which those that wait are not ready
            return self._fork((order, streams))
        if order.get("terminal"):
            self._give_terminal(streams[0])
        spare = self.spares.pop(next(iter(self.spares))) if self.spares else None
        self.server.loop.cancel(REST)
        if not self.is_forking_soon:
            self._fork_soon(SPARE_S if self.spares else 0.0)
        if spare is not None and not spare.error:
            try:
                spare.wake()
                messages.send(spare.link, "order", {"order": order, "streams": [*streams]}, [*streams.values()])
            except OSError:
                pass  # it was ended by another guest
            else:
                return spare
        if spare is not None:
            spare.mark.close()
        return self._fork((order, streams))

    def _give_terminal(self, slave: int) -> None:
        if self.spec.outside is not None:  # else it is the guest's already
            call("fchownat", slave, b"", self.spec.inside_id, self.spec.inside_id, AT_EMPTY_PATH)

    def _load_sessions(self) -> None:
        """Load the modules of sessions at the first session: this takes longer than all that a command needs."""
        if "session" not in self.interpreters:
            sys.meta_path.insert(0, self.privileges.archive)
            sys.modules.update(self.hidden)
            from . import load

            self.interpreters["session"] = load("interpreter.session")
            forget_helper(self.interpreters["oneshot"])
            gc.freeze()

    def _fork_soon(self, delay_s: float) -> None:
        self.is_forking_soon = True
        self.server.loop.call_at(SPARE, now() + delay_s, self.make_spare)

    def make_spare(self) -> None:
        """Fork a guest ahead, which waits for its order with all restrictions applied; soon another, if one lacks."""
        self.is_forking_soon = False
        try:
            if len(self.spares) < SPARES:
                spare = self._fork(None)
                self.spares[spare.pid] = spare
        except OSError:
            return  # the limit on processes is reached; a requested process will report it
        if len(self.spares) < SPARES:
            self._fork_soon(SPARE_S if self.server.is_busy else 0.0)

    def drop_spares(self) -> None:
        """End the waiting guests: a sandbox that was idle for a while holds no memory for them."""
        for spare in self.spares.values():
            spare.end()

    def _fork(self, early_order: tuple[dict[str, Any], dict[int, int]] | None) -> ResidentFork:
        is_shared = self._enter_mark(early_order is not None and is_own(early_order[0]))
        mark = NamespaceMark(is_shared=is_shared)
        links: tuple[int, ...] = ()
        try:
            ours, theirs = links = socketpair()
            pid = posix.fork()
        except OSError:
            mark.close()
            for link in links:
                posix.close(link)
            raise
        if pid == 0:
            _signal.set_wakeup_fd(-1)
            _signal.signal(SIGCHLD, _signal.SIG_DFL)
            posix.close(ours)
            raise Become(CommandGuest(self, theirs, early_order))
        posix.close(theirs)
        if is_shared:
            mark.number = OWN_MARKS - pid
        return ResidentFork(self, pid, mark, ours)

    def fork_sudo(self, listener: int) -> tuple[int, ResidentFork]:
        """Fork a process that accepts a connection of `sudo` and serves it, as root inside."""
        forked = self._fork(({"op": SUDO, "user": "0", "cwd": "/"}, dict.fromkeys(range(3), listener)))
        return forked.pid, forked

    def _enter_mark(self, is_ours: bool) -> bool:
        """Enter a new namespace of the host name; tell whether none was left, and it is that of our own programs.

        Guests can keep the namespaces of ended commands. A program that reads files starts no process, and can share
        one.
        """
        try:
            unshare(CLONE_NEWUTS)
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            if not is_ours:
                raise OSError(ENOSPC, MARKS_KEPT) from None
            call("setns", self.reserve, CLONE_NEWUTS)
            return True
        return False

    def note_orphan(self, pid: int) -> None:
        """Note the end of a process that was not started by a request: a waiting guest may have been ended.

        Or it was the last process that others have left behind.
        """
        spare = self.spares.pop(pid, None)
        if spare is not None:
            spare.conclude()
            spare.mark.close()
        elif self.sudo is not None and self.sudo.note_end(pid):
            return
        elif not self.server.processes:  # once for all that die together
            self.server.loop.call_at(LEFT, now(), self._note_left)

    def _note_left(self) -> None:
        if not self.server.processes:
            self._report_pace(is_busy=False)

    def look(self) -> Iterator[tuple[int, int]]:
        """Yield all that live but us, the newest first, each with its mark, which may be HIDDEN."""
        known_marks: dict[int, int] = {}
        for name in reversed(posix.listdir("/proc")):
            if name.isdigit() and name != "1":
                yield int(name), self._mark_of(int(name), known_marks)

    def _mark_of(self, pid: int, known_marks: dict[int, int], depth: int = MOST_PARENTS) -> int:
        """Return the mark of a process: that of our own forks is known, and a hidden process has its parent's.

        Marks of other hidden processes are kept in `known_marks` during a look: their parents may hide, too, in a long
        chain.
        """
        if pid not in known_marks:
            known_marks[pid] = self._looked_up(pid, known_marks, depth)
        return known_marks[pid]

    def _looked_up(self, pid: int, known_marks: dict[int, int], depth: int) -> int:
        if pid in self.spares:
            return self.spares[pid].mark.number
        if self.sudo is not None and (number := self.sudo.mark_of(pid)):
            return number
        process = self.server.by_pid.get(pid)
        if process is not None:
            return int(process.mark.number)
        mark = mark_of(pid)
        if mark != HIDDEN or depth <= 0:
            return mark
        parent = parent_of(pid)
        return self._mark_of(parent, known_marks, depth - 1) if parent > 1 else HIDDEN

    def other_pids(self) -> list[int]:
        """Return all that live, but us and the guests that wait."""
        pids = [int(name) for name in posix.listdir("/proc") if name.isdigit() and name != "1"]
        return [pid for pid in pids if pid not in self.spares]

    def signal_others(self, number: int) -> None:
        """Send a signal to all at once: as pid 1, to all processes of this namespace and of those below it."""
        if posix.getpid() != 1:
            return
        if number == SIGCONT:
            self._continue_newest_first()
        elif number == SIGSTOP:
            self._stop_shells()
        elif number == SIGTERM:
            self.drop_spares()  # the signal may end one after it was given an order
        try:
            posix.kill(-1, number)
        except OSError:
            pass  # no other process is left

    def _stop_shells(self) -> None:
        """Stop what may be a shell with jobs before all others, parents first: leaders of process groups on a terminal,
        and parents of processes in other groups of their session.

        A shell that still runs when a job of its is stopped takes the terminal from it, and leaves it stopped.
        """
        facts = {pid: jobs_of(pid) for pid in self._others()}
        shells = {pid for pid, (_, group, _, terminal) in facts.items() if terminal and pid == group}
        shells |= {
            parent for parent, group, session, _ in facts.values()
            if parent in facts and facts[parent][2] == session and facts[parent][1] != group
        }  # fmt: skip
        for pid in sorted(shells)[:MOST_SHELLS]:
            self._signal_one(pid, SIGSTOP)
            until = monotonic() + STOPPED_S
            while monotonic() < until and state_of(pid) not in (b"T", b"Z", b""):
                sleep(STOPPED_S / 100)

    def _continue_newest_first(self) -> None:
        """Let jobs go on before their shells. The kernel sends a signal to all in the order of their creation."""
        for pid in sorted(self._others(), reverse=True):
            self._signal_one(pid, SIGCONT)

    def _others(self) -> list[int]:
        return [int(name) for name in posix.listdir("/proc") if name.isdigit() and name != "1"]

    def _signal_one(self, pid: int, number: int) -> None:
        try:
            posix.kill(pid, number)
        except OSError:
            pass  # it has gone meanwhile

    def hold_others(self) -> bool:
        """Stop all of them by one call."""
        self.signal_others(SIGSTOP)
        return True

    def note_busy(self, *, is_busy: bool) -> None:
        """Have the helper look at the memory, or rest; make ready for the next process when there is time."""
        if is_busy:  # the helper is not woken up for processes that end before that
            self.server.loop.call_at(PACE, now() + TICK_S, lambda: self._report_pace(is_busy=True))
        else:
            self.server.loop.cancel(PACE)
            self._report_pace(is_busy=False)
            self._fork_soon(0.0)
            self.server.loop.call_at(REST, now() + REST_S, self.drop_spares)

    def hand_out(self, channel: int, fd: int) -> bool:
        """Have the helper pass a descriptor on to the caller."""
        messages.send_retrying(self.link, "handed out", {"channel": channel}, [fd])
        return True

    def _report_pace(self, *, is_busy: bool) -> None:
        """Tell the helper how closely to watch the memory: not at all where no process lives but ours."""
        pace = is_busy, is_busy or bool(self.server.processes) or self._has_left()
        if pace != self.pace:
            self.pace = pace
            messages.send(self.link, "pace", {"is_busy": pace[0], "is_watched": pace[1]})

    def _has_left(self) -> bool:
        """Tell whether an orphan of an ended process lives: it is this process's child by now."""
        return any(int(pid) not in self.spares for pid in read_whole(CHILDREN).split())

    def is_full(self) -> bool:
        """Tell whether the writable file system has no room, or no inode, left."""
        state = posix.statvfs(self.spec.workspace)
        return not state.f_bavail or not state.f_favail

    def disk(self) -> tuple[int, int]:
        """Return how many bytes of the writable file system are used, and how many it has."""
        state = posix.statvfs(self.spec.workspace)
        return (state.f_blocks - state.f_bfree) * state.f_frsize, state.f_blocks * state.f_frsize

    def refresh(self, at: bytes, paths: list[bytes], apart: list[bytes], before_ns: int) -> int:
        """Show the host's current files in the views of folders; see `host_view.refresh`."""
        return host_view.refresh(at, paths, apart, before_ns, self.other_pids())

    def why_failed(self, take: Callable[[str, int], None]) -> None:
        """Ask the helper for the counters of its control group."""
        self.asked.append(take)
        messages.send(self.link, "why")


class NamespaceMark:
    """Hold the namespace that marks a process, so that no other one gets its number meanwhile."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.fd = posix.open(MARK, posix.O_RDONLY | posix.O_CLOEXEC) if not is_shared else -1
        self.number = posix.fstat(self.fd).st_ino if not is_shared else 0

    def close(self) -> None:
        """Let it go."""
        if self.fd >= 0:
            posix.close(self.fd)
            self.fd = -1


class ResidentFork:
    """Hold pid 1's state of a process that it forked: its mark, and the link for its failure."""

    reports_program = True  # its link ends when its program begins

    def __init__(self, host: Resident, pid: int, mark: NamespaceMark, link: int):
        self.host, self.pid, self.mark, self.link = host, pid, mark, link
        self.error: dict[str, Any] = {}
        self.denied = 0  # system calls that the policy blocked, of it and its descendants
        self.on_running: Callable[[], None] = _nothing
        posix.set_blocking(link, False)
        host.server.loop.watch(link, POLLIN, self.receive)

    def receive(self, _: int = 0) -> None:
        """Take a message of a process before it is a program: its filter's notification descriptor, or its failure."""
        try:
            tag, body, fds = messages.receive(self.link)
        except BlockingIOError:
            return
        if tag == "listener":
            self._listen(fds[0])
        elif tag == "failed":
            self.error = {"kind": "start", **body}
        elif not tag:
            self._close()

    def signal(self, number: int, group: int = 0) -> None:
        """Send a signal to it, or to a process group. Raises OSError."""
        if group:
            posix.killpg(group, number)
        else:
            posix.kill(self.pid, number)

    def wake(self) -> None:
        """Have it go on, which another guest may have stopped. Raises OSError where it was ended."""
        posix.kill(self.pid, SIGCONT)

    def end(self) -> None:
        """End it, as a guest that waits: until its end is noted, no order is given to it."""
        self.error = {"kind": "start", "message": "it was ended while it waited"}
        posix.kill(self.pid, SIGKILL)

    def conclude(self) -> dict[str, Any]:
        """Return the failure of a process before its program, empty if the program started; the process has ended."""
        while self.link >= 0 and ppoll((self.link,), 0.0):
            self.receive()
        self._close()
        return self.error

    def _close(self) -> None:
        if self.link >= 0:
            self.host.server.loop.ignore(self.link)
            posix.close(self.link)
            self.link = -1
            if not self.error:
                self.on_running()

    def _listen(self, listener: int) -> None:
        loop, own_mounts = self.host.server.loop, self.host.own_mounts

        def answer(events: int) -> None:
            if events & POLLIN:
                self.denied += load_notify().answer(listener, own_mounts, _may_clone)
            else:  # the last process behind this filter is gone
                loop.ignore(listener)
                posix.close(listener)

        loop.watch(listener, POLLIN, answer)


def _nothing() -> None: ...


def _may_clone(_pid: int) -> bool:
    """Tell whether a process may clone itself: only one of a session that has its own helper may."""
    return False
