"""One run, supervised by its helper from outside: start it, keep the clock and the limits, kill, report.

A run ends by itself, by its clock, by a limit, or by a message of the caller's. After any of these, all its remaining
processes are killed, and the report has the kernel's figures.

`Supervisor` is for a jail that one run uses. `PreforkSupervisor` is for a prefork jail: it goes on with the next guest,
need not receive anything of those that are soon over (see `shared_status`), and differs in pid 1 (`_live`, `_release`),
in the beginning of a run (`_begin`), and in reading the shared status (`_look_at_status`).
"""

from __future__ import annotations

import posix
from time import monotonic

from . import messages, shared_status, user_namespaces
from .accounting import IDLE_TICK_S, TICK_S, Accounting
from .cgroups import clone_into
from .pid1 import never_freed
from .reaper import Reaper
from .sandbox_state import failure
from .steps import ATTACHED_WORKSPACE, NETWORK_LINK, OUTSIDE_ID
from .syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    ppoll,
    prctl,
    run_beside,
    socketpair,
    wait4,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from .cgroups import Cgroup
    from .fork_tree import ForkTreeServer
    from .sandbox_state import SandboxState

    Usage: TypeAlias = tuple[float, float, int]  # seconds as user and as system, the largest process in KiB

ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
# The control group's namespace is entered by the reaper, once it is in the group: its root is where its maker is.
CLONED_NAMESPACES = ALL_NAMESPACES & ~CLONE_NEWCGROUP
SETUP_TIMEOUT_S, ETIMEDOUT, EPIPE = 60.0, 110, 32
GO = b"g"
FOR_THE_NEXT = ("open", "prepare", "run")  # messages that are not about the run that is supervised
SIGKILL = 9


class RunState:
    """Hold the state of the present run: the order, why it is killed, its start, its end.

    `deadline` is `timeout_s` after the program's start; both times are 0.0 until then. `ended` is pid 1's report of the
    end, `failed` an error before or instead; the caller's forwarded message of a prefork jail's pid 1 is first
    `forwarded`. It is `is_undecided` when it has ended and the caller has yet to say how. Whether the jail `can_go_on`
    with another guest is known at the end.
    """

    def __init__(self, number: int = 0, timeout_s: float = 0.0, *, is_last: bool = False):
        self.number, self.timeout_s, self.is_last = number, timeout_s, is_last
        self.cause = ""
        self.started_at = self.deadline = 0.0
        self.ended: dict[str, Any] | None = None
        self.failed: dict[str, Any] | None = None
        self.forwarded: dict[str, Any] | None = None
        self.is_undecided = self.can_go_on = False

    def is_over(self) -> bool:
        """Tell whether nothing more is to be waited for."""
        return self.ended is not None or self.failed is not None

    def note_start(self, started_at: float) -> None:
        """Note the program's start, when its clock begins."""
        self.started_at, self.deadline = started_at, started_at + self.timeout_s


class ReadyMessage:
    """Keep the message that the sandbox stands, with the mounts of the workspace for the caller, until it is sent."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.mounts: list[int] = []

    def send(self, state: SandboxState, *, keeps_mounts: bool) -> None:
        """Send it, once.

        No process waits for this message alone, and its receiver may take the processor from the guest. At the last run
        the helper keeps the workspace open, too: the last close unmounts it, and nothing waits for the helper.
        """
        body, self.body = self.body, None
        if body is not None:
            state.send("ready", body, tuple(self.mounts))
        if not keeps_mounts:
            self.close()

    def close(self) -> None:
        """Close the mounts."""
        while self.mounts:
            posix.close(self.mounts.pop())


class Supervisor:
    """Supervise one run from the clone of its reaper to the last process's end."""

    def __init__(self, state: SandboxState, load_interpreter: Callable[[str], Any] | None):
        self.state, self.spec, self.load_interpreter = state, state.spec, load_interpreter
        self.generation = state.generation
        self.reaper = 0
        self.processors: set[int] = set()
        self.must_move = False  # the reaper, by its pid, into the control group
        self.link, self._reaper_link = socketpair()
        self.timers: tuple[int, ...] = ()  # that end a wait, too
        self.setup_deadline = monotonic() + SETUP_TIMEOUT_S
        self.run, self.ready = RunState(), ReadyMessage()
        self.accounting = Accounting(self._ask_for_sum if self.spec.level == "confined" else None)
        self.is_guest_waiting = False
        self.fork_tree: ForkTreeServer | None = None
        self.later: list[tuple[str, dict[str, Any]]] = []  # messages that can wait until the fork tree is at rest

    def start(
        self, plan_fd: int, private_paths: list[str], owners: dict[str, tuple[int, int]] | None = None
    ) -> Callable[[], None] | None:
        """Clone the reaper, give it its identity and limits, and let it go on; returns a callable in the guest.

        `owners` are of those private paths whose files are not root's.
        """
        is_jail = self.spec.level == "jail"
        cgroup = self.state.cgroup
        waiting, go = posix.pipe()
        is_owner = False
        try:
            self.processors = posix.sched_getaffinity(0)
            if is_jail and self.spec.outside is not None:
                is_owner = user_namespaces.become_owner(self.spec.outside[0])
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # inherited: an undumpable child's id maps belong to root alone
            self.reaper, self.must_move = clone_into(CLONED_NAMESPACES if is_jail else 0, cgroup)
        except BaseException:
            user_namespaces.become_helper(is_owner=is_owner)
            for fd in (waiting, go, self.link, self._reaper_link):
                posix.close(fd)
            raise
        if self.reaper == 0:
            posix.close(go)
            return self._be_reaper(plan_fd, waiting)
        user_namespaces.become_helper(is_owner=is_owner)
        posix.close(self._reaper_link)
        posix.close(waiting)
        private: list[int] = []
        try:
            if cgroup is not None and self.must_move:
                cgroup.attach(self.reaper)
            self._release(go)
            private = self._open_private(private_paths, owners)
            messages.send_retrying(self.link, "go", {}, private)
        finally:
            for fd in (go, *private):
                posix.close(fd)
        self.state.begin_counting()
        return None

    def _be_reaper(self, plan_fd: int, waiting: int) -> Callable[[], None]:
        """Enter the control group, and live as pid 1."""
        state = self.state
        posix.close(self.link)
        posix.close(state.caller)
        try:
            registers = {}
            if state.claim is not None:
                registers[OUTSIDE_ID] = state.claim.outside_id
                state.claim.forget()
            if state.init_claim is not None:
                state.init_claim.forget()
            if state.workspace_fd >= 0:
                registers[ATTACHED_WORKSPACE] = state.workspace_fd
            if state.network_link >= 0:
                registers[NETWORK_LINK] = state.network_link
            if state.cgroup is not None and state.cgroup.version == 1:
                state.cgroup.enter()
            ends = {"plan_fd": plan_fd, "link": self._reaper_link, "go": waiting}
            return self._live(registers, ends)
        except BaseException as error:  # a fault of ours: it is reported, and nothing of the helper may run on here
            try:
                messages.send(self._reaper_link, "failed", failure(f"{type(error).__name__}: {error}", "reaper"))
            finally:  # also if the caller cannot be told any more
                posix._exit(1)

    def _live(self, registers: dict[str, int], ends: dict[str, int]) -> Callable[[], None]:
        """Live as pid 1 of one run; returns only in a guest."""
        reaper = Reaper(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
        return reaper.live(self.processors, must_wait_first=self.must_move)

    def _release(self, go: int) -> None:
        """Map the ids of a new pid 1 and of the guest that it forks at once, because a run waits for it."""
        run_beside(self.reaper, self.processors)
        self._map_ids()
        posix.write(go, GO)

    def _map_ids(self, init_id: int | None = None) -> None:
        """Map the ids of a jail; pid 1 has the outside id `init_id` if it differs from the guest's."""
        if self.spec.level != "jail":
            return
        outside = self.spec.outside
        uid, gid = (outside[0], outside[0]) if outside else (posix.geteuid(), posix.getegid())
        user_namespaces.write_maps(
            self.reaper,
            inside_id=self.spec.inside_id,
            outside_uid=uid,
            outside_gid=gid,
            privileged=outside is not None,
            init_id=init_id,
        )

    def _open_private(self, paths: list[str], owners: dict[str, tuple[int, int]] | None) -> list[int]:
        """Open files that only their owner may read, through mounts that show them as the outside id's own."""
        if not paths:
            return []
        from .user_namespaces import open_idmapped

        assert self.spec.outside is not None
        users = self.spec.users
        outside_id = users[0] + self.spec.inside_id if users else self.spec.outside[0]
        return list(open_idmapped(paths, outside_id, owners).values())

    def await_guest(self) -> dict[str, Any] | None:
        """Wait until the guest of a sandbox that is built ahead waits for its order; return the failure, if any."""
        while not self.is_guest_waiting:
            is_there = ppoll((self.link,), SETUP_TIMEOUT_S) and self._receive_from_reaper()
            if not is_there or self.run.failed is not None:
                return self.abandon() or failure("the sandbox ended before the code was started", "reaper")
        return None

    def order(self, body: dict[str, Any], fds: list[int]) -> None:
        """Begin a run, and send the reaper the order for its guest, with `fds`. Raises OSError when it is gone.

        Without descriptors, the guest has its order from the caller.
        """
        self.spec = self.state.spec  # whose amounts may have changed since the sandbox was built
        self._begin(body)
        if self.spec.memory_stat:
            self.accounting.note_before(self.spec.memory_stat)
        for tag, early, _ in self.state.early:
            if tag == "kill" and early["number"] == self.run.number:
                self.run.cause = early["cause"]
        cgroup = self.state.cgroup
        if cgroup is not None and body["again"] and self.spec.cgroup is not None:
            cgroup.renew_quota(self.spec.cgroup["amounts"]["cpus"])
        self.setup_deadline = monotonic() + SETUP_TIMEOUT_S
        if fds:
            messages.send_retrying(self.link, "order", {"folder": "", "is_single": False, **body}, fds)
            self.accounting.begin_later()

    def go_on(self, *, is_under_load: bool) -> None:
        """Have the reaper fork a guest for another run, whose folder was made anew. Raises OSError."""
        self.ready.close()
        self.run, self.is_guest_waiting = RunState(), False
        self.accounting.renew()
        messages.send(self.link, "again", {"is_under_load": is_under_load})
        self.state.begin_counting()

    def _begin(self, body: dict[str, Any]) -> None:
        """Forget the run before, if there was one."""
        self.run = RunState(body["number"], body["timeout_s"], is_last=body["is_last"])

    def attend(self) -> None:
        """Wait for the end of the run, for any reason; then report the kernel's figures.

        The order of checks decides: a guest that has ended, by the shared status or the reaper, is not killed any more;
        and a guest that the caller kills meets no limit.
        """
        while not self.run.is_over():
            while self.later and not self.run.cause:
                self._handle(*self.later.pop(0))
            if self._look_at_status():  # 1. the shared status
                return
            if self.run.is_over() or self._must_kill():
                break
            ready = self._wait()
            if not self._receive_all_from_reaper():  # 2. the end
                if self._look_at_status():
                    return
                break
            if self.run.is_over():
                break
            if self.state.caller in ready and not self._receive_from_caller():  # 3. the caller
                break
            if self._must_kill():
                break
            self._check_limits()  # 4. the limits
        self._conclude()

    def _look_at_status(self) -> bool:
        """Read the news of the shared status; True when the run has ended, and only the caller knows how.

        A jail for one run has no such status: the reaper sends all messages.
        """
        return False

    def _must_kill(self) -> bool:
        """Tell whether there is a cause, and killing loses nothing.

        The guest may just be attaching the only mount of a workspace: killed then, it would lose it.
        """
        return bool(self.run.cause) and (self.state.workspace_fd < 0 or bool(self.run.started_at))

    def _wait(self) -> set[int]:
        """Wait for a message, for the end of a fork, or for the next check; return the readable descriptors."""
        more = self.fork_tree.watched() if self.fork_tree is not None else self.timers
        ready = {fd for fd, _ in ppoll((self.link, self.state.caller, *more), self._timeout_s())}
        if self.fork_tree is not None:
            self.fork_tree.report_ended(ready)
        return ready

    def _timeout_s(self) -> float:
        left_s = max(0.0, (self.run.deadline or self.setup_deadline) - monotonic())
        return min(left_s, self.accounting.pause_s() if self._looks_regularly() else left_s) + 0.001

    def _looks_regularly(self) -> bool:
        """Tell whether a limit must be polled, because no message reports it."""
        return bool(self.spec.accounting and self.run.deadline)

    def _conclude(self) -> None:
        """Report the run, and kill the remaining processes, unless a jail is left that can go on."""
        run = self.run
        if run.ended is not None and run.ended["is_alone"] and not run.cause:
            run.can_go_on = run.can_go_on or run.ended.get("goes_on", False)
            self._report(None)  # nothing but the reaper is left: its own end need not be waited for
            if run.can_go_on:
                return
            self.kill()
        else:
            usage = self.kill(is_awaited=self.spec.level != "jail" or self._has_forks())
            while not run.is_over() and (not self.reaper or ppoll((self.link,), 0.0)) and self._receive_from_reaper():
                pass
            self._report(usage)
            self.kill()
        self.ready.close()
        posix.close(self.link)

    def _report(self, usage: Usage | None) -> None:
        """Send the run's end or failure; `usage` is that of a reaper that was killed."""
        run = self.run
        self._send_ready()
        if not run.started_at and not run.cause:
            run.failed = run.failed or failure("the sandbox ended before the code was started", "reaper")
        if run.failed is not None and not run.cause:
            self.state.send_failure(run.failed, run.number)
            return
        is_dying = usage is not None and self.reaper > 0  # and none of its processes can write any more
        generation = self.generation + (not run.can_go_on)
        self.state.send(
            "ended",
            make_report(run, self.state, self.accounting, usage, generation=generation, is_dying=is_dying),
        )

    def _has_forks(self) -> bool:
        return self.fork_tree is not None and self.fork_tree.has_forks

    def abandon(self) -> dict[str, Any] | None:
        """Kill the tree, and return the reaper's failure: our own error may only follow from that."""
        if self.reaper:
            self.kill()
            while self.run.failed is None and self._receive_from_reaper():
                pass
            if self.ready.mounts:  # else the caller would open the work folder, which may not have its name yet
                self._send_ready()
            posix.close(self.link)
        return self.run.failed

    def kill(self, *, is_awaited: bool = True) -> Usage | None:
        """Kill the tree, wait for the end of all its processes, and return their usage.

        If that is not awaited, and takes long, the wait ends when none of them can do anything any more.
        """
        if not self.reaper:
            return None
        ended = self.run.ended
        is_quiet = not self.run.cause and ended is not None and ended["is_alone"]  # only the reaper lives
        if self.spec.level != "jail":
            return self._end_without_namespaces(is_quiet=is_quiet)
        cgroup, death = (None if is_quiet else self.state.cgroup), None
        if cgroup is not None and not is_awaited:
            from .procfs import Death

            death = Death(self.reaper, cgroup)
        posix.kill(self.reaper, SIGKILL)
        for throttled in (cgroup, self.fork_tree):
            if throttled is not None:
                throttled.lift_quota()
        if death is not None and not death.wait():
            return death.spent
        _, _, usage = wait4(self.reaper, 0)
        self.reaper = 0
        if self.fork_tree is not None:
            self.fork_tree.clear_up()
        self._renew_quota(cgroup)
        return usage

    def _end_without_namespaces(self, *, is_quiet: bool) -> Usage:
        from . import ending

        cgroup = None if is_quiet else self.state.cgroup
        if cgroup is not None:
            cgroup.lift_quota()
        usage = ending.end(
            self.reaper,
            self.link,
            is_alone=is_quiet,
            is_scoped=self.spec.scope_abi > 0,
            kill_by_id=self._kill_by_id,
        )
        self.reaper = 0
        self._renew_quota(cgroup)
        return usage

    def _kill_by_id(self) -> bool:
        """Kill all processes with the outside id, if it is this helper's alone; False if that is not possible."""
        from .ending import kill_by_id

        state = self.state
        if state.claim is None or not state.is_claim_own:
            return False
        try:
            kill_by_id(state.claim.outside_id, state.claim_init_id())
        except OSError:
            return False
        return True

    def _renew_quota(self, cgroup: Cgroup | None) -> None:
        if cgroup is not None and self.spec.cgroup is not None:
            cgroup.renew_quota(self.spec.cgroup["amounts"]["cpus"])

    def _receive_all_from_reaper(self) -> bool:
        """Handle all waiting messages of the reaper, up to the end of the run; False when it has ended."""
        while not self.run.is_over() and ppoll((self.link,), 0.0):
            if not self._receive_from_reaper():
                return False
        return True

    def _receive_from_reaper(self) -> bool:
        """Handle one message of the reaper; False when it has ended."""
        tag, body, fds = messages.receive(self.link)
        self._take(tag, body, fds)
        return tag != ""

    def _take(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        if tag == "ready":
            self.state.keep_workspace(-1)  # the caller has the new one
            self.ready.body = {**body, "outside": self.spec.outside}
            self.ready.mounts += fds
        elif tag == "started":
            self.run.note_start(body["at"])
            self._send_ready()
            self.state.send("started", body)
        elif tag == "waiting":
            self.is_guest_waiting = True
        elif tag == "ended":
            self.run.ended = body
        elif tag == "summed":
            if self.accounting.take(body, self.spec.memory_bytes) and not self.run.is_over():
                self.run.cause = self.run.cause or "out_of_memory"
        elif tag == "failed":
            if fds:
                self.state.keep_workspace(fds[0])
            for fd in fds[1:]:
                posix.close(fd)
            self.run.failed = body

    def _ask_for_sum(self, limit_bytes: int) -> None:
        try:
            messages.send(self.link, "sum", {"limit_bytes": limit_bytes})
        except OSError:
            pass  # it is gone, which we are about to see

    def _send_ready(self) -> None:
        self.ready.send(self.state, keeps_mounts=self.run.is_last)

    def _receive_from_caller(self) -> bool:
        """Handle one message of the caller; False when it has ended."""
        tag, body, fds = messages.receive(self.state.caller)
        is_early = tag in ("kill", "over") and body["number"] > self.run.number
        if tag in FOR_THE_NEXT or is_early:  # the caller knows of this run's end, which we shall receive at once
            self.state.early.append((tag, body, fds))
            return True
        if fds:
            body |= messages.unpack(fds[0])
            for fd in fds:
                posix.close(fd)
        if self.fork_tree is not None and self.fork_tree.is_busy and not self.fork_tree.is_urgent(tag, body):
            self.later.append((tag, body))
        else:
            self._handle(tag, body)
        return tag != ""

    def _handle(self, tag: str, body: dict[str, Any]) -> None:
        run = self.run
        if tag in ("kill", "over"):
            if body["number"] != run.number:  # about a run that is over
                return
            if tag == "over":
                run.forwarded = body["ended"]
            elif not run.cause:
                run.cause = body["cause"]
        elif tag == "pace":
            self.accounting.tick_s = TICK_S if body["is_busy"] else IDLE_TICK_S
        elif tag:
            self._handle_for_forks(tag, body)

    def look_after_others(self, busy_with: int) -> None:
        """Enforce the limits, and handle urgent messages, until `busy_with` can be read.

        Raises OSError when the run was ended meanwhile, or the caller has ended.
        """
        caller = self.state.caller
        while True:
            ready = {fd for fd, _ in ppoll((busy_with, caller), TICK_S)}
            if caller in ready and not self._receive_from_caller():
                raise OSError(EPIPE, "the caller is gone")
            self._check_limits()
            if self.run.cause:
                raise OSError(EPIPE, "the session was ended meanwhile")
            if busy_with in ready:
                return

    def _handle_for_forks(self, tag: str, body: dict[str, Any]) -> None:
        """Handle a request for a session or one of its clones."""
        if self.fork_tree is None:
            from .fork_tree import ForkTreeServer

            self.fork_tree = ForkTreeServer(self.state, self.link, self.reaper, self.look_after_others)
        if tag == "interrupt":
            self.fork_tree.interrupt(body["node"])
        else:
            self.fork_tree.handle(tag, body)

    def _check_limits(self) -> None:
        run = self.run
        if run.is_over():
            return
        if not run.deadline:
            if monotonic() >= self.setup_deadline:
                message = f"the sandbox was not set up within {SETUP_TIMEOUT_S:.0f} s; is a file system stuck?"
                run.failed = failure(message, "helper", ETIMEDOUT)
            return
        if monotonic() >= run.deadline:
            run.cause = "timeout"
        elif self.accounting.begin():
            run.cause = self.accounting.exceeded(self.state, self.reaper, self.fork_tree) or run.cause
            self.accounting.end()


class PreforkSupervisor(Supervisor):
    """Supervise one run after the other in a prefork jail, from the clone of its pid 1 to the last process's end.

    A guest takes its order from the caller itself, and pid 1 reports to the caller. Urgent facts are in the shared
    status; the caller forwards the others, if it cannot complete the report by itself.
    """

    def __init__(self, state: SandboxState, load_interpreter: Callable[[str], Any] | None):
        super().__init__(state, load_interpreter)
        self.timers = (state.timer,)

    def _live(self, registers: dict[str, int], ends: dict[str, int]) -> Callable[[], None]:
        """Live as pid 1 of one guest after the other; it forks them all after it has its identity."""
        from .prefork import PreforkReaper

        common = {"generation": self.generation}
        reaper = PreforkReaper(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
        never_freed.extend((self.state, self, reaper, ends, common))
        return reaper.live(self.state.handoff, self.state.status, common)

    def _release(self, go: int) -> None:  # noqa: ARG002 - no guest has been forked that waits for it
        """Map the ids of a new pid 1; no run waits for it."""
        self._map_ids(self.state.claim_init_id() if self.spec.outside else None)

    def _begin(self, body: dict[str, Any]) -> None:
        """Forget the run before, or continue the same one if the caller has said so meanwhile."""
        if self.run.number != body["number"]:
            super()._begin(body)
            self.accounting.renew()
            self.state.begin_counting()
        self.run.cause, self.run.forwarded, self.run.is_undecided = body["cause"], body["ended"], False

    def _look_at_status(self) -> bool:
        """Take start and end from the shared status; where the caller has yet to forward how it ended, we sleep on.

        A timer that has gone off meanwhile was wound for this run, or for the next one, which is not ours to look at.
        """
        run, state = self.run, self.state
        shared_status.clear_timer(state.timer)
        read_state = shared_status.PreforkState(state.status)
        if read_state.started:
            state.keep_workspace(-1)  # the first guest has attached it, and handed another mount on
        if not run.started_at and read_state.started == run.number:
            run.note_start(read_state.started_at)
        if run.forwarded is not None:
            self._receive_all_from_reaper()  # that the guest has failed, perhaps
            run.ended = run.forwarded
            run.can_go_on = not run.cause and bool(run.started_at) and not run.ended["is_worn"]
        elif read_state.ended >= run.number or read_state.ordered != run.number:
            run.is_undecided = run.can_go_on = True
        return run.is_undecided

    def _looks_regularly(self) -> bool:
        """Also poll until the program has started, which only the shared status shows."""
        return not self.run.started_at or super()._looks_regularly()


def make_report(
    run: RunState,
    state: SandboxState,
    accounting: Accounting,
    usage: Usage | None,
    *,
    generation: int,
    is_dying: bool,
) -> dict[str, Any]:
    """Return all that the helper knows of a run that has ended, or that was killed and has used `usage`."""
    ended = run.ended or {}
    counted = ended.get("user_s", 0.0), ended.get("system_s", 0.0), ended.get("most_kib", 0)  # by the reaper
    user_s, system_s, most_kib = usage or counted
    peak_tasks = max(accounting.peak_tasks, ended.get("tasks", 0))  # the reaper in place of the guest that ended
    return {
        "number": run.number,
        "generation": generation,
        "cause": run.cause,
        "ended": run.ended,
        "is_quiet": is_dying,
        "goes_on": run.can_go_on,
        "wall_s": ended.get("at", monotonic()) - run.started_at if run.started_at else 0.0,
        "cpu_user_s": user_s,
        "cpu_system_s": system_s,
        "peak_bytes": max(accounting.peak_bytes, most_kib * 1024),
        "tasks": max(accounting.peak_tasks, state.most_pids()),
        "counters": state.counters(),
        "is_task_limit_seen": state.cgroup is None and 0 < state.spec.pids <= peak_tasks,
        "is_folder_over": state.is_folder_over(at_end=True),
        "entries": state.folder.entries if state.folder is not None else 0,
    }
