"""One run, watched by its helper from outside: start it, keep the clock and the limits, kill, report.

A run ends by itself, by its clock, by a limit, or by a word of the caller's. Whatever ends it, what is left of it is
killed, and the report says what the kernel says of it. In a prefork jail (`is_nursing`) `Watch` goes on with the next
guest, and need not hear of those that are soon over: see `shared_status`.
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
from .steps import ATTACHED_WORKSPACE, OUTSIDE_ID
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
    from typing import Any

    from .fork_tree import ForkTree
    from .sandbox_state import SandboxState

ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
# The control group's namespace is entered by the reaper, once it is in the group: its root is where its maker is.
CLONED_NAMESPACES = ALL_NAMESPACES & ~CLONE_NEWCGROUP
SETUP_PATIENCE_S, ETIMEDOUT, EPIPE = 60.0, 110, 32
GO = b"g"
FOR_THE_NEXT = ("open", "prepare", "run")  # words that are not about the run that is watched
SIGKILL = 9


class Watch:
    """Watch over one run from the fork of its reaper to the last process's end."""

    def __init__(self, state: SandboxState, load_interpreter: Callable[[str], Any] | None, *, is_nursing: bool = False):
        self.state, self.spec, self.load_interpreter = state, state.spec, load_interpreter
        self.reaper = 0
        self.processors: set[int] = set()
        self.ready: dict[str, Any] | None = None  # what the caller has yet to hear
        self.lent: list[int] = []
        self.cause = ""
        self.timeout_s = 0.0
        self.started_at = 0.0
        self.deadline = 0.0
        self.setup_deadline = monotonic() + SETUP_PATIENCE_S
        self.ended: dict[str, Any] | None = None
        self.said_ended: dict[str, Any] | None = None  # by the caller, which heard it of a prefork jail
        self.failed: dict[str, Any] | None = None
        self.accounting = Accounting()
        self.link, self._reaper_link = socketpair()
        self.pids_before = 0
        self.is_nursing, self.generation = is_nursing, state.generation
        self.timers = (state.timer,) if is_nursing else ()
        self.number = 0
        self.can_go_on = self.is_undecided = self.is_last = False
        self.fork_tree: ForkTree | None = None
        self.later: list[tuple[str, dict[str, Any]]] = []  # what can wait until the fork tree is at rest

    def start(self, plan_fd: int, private_paths: list[str]) -> Callable[[], None] | None:
        """Fork the reaper, give it its identity and limits, and let it go; returns a callable in the guest."""
        is_jail = self.spec.level == "jail"
        cgroup = self.state.cgroup
        waiting, go = posix.pipe()
        is_owner = False
        try:
            self.processors = posix.sched_getaffinity(0)
            if is_jail and self.spec.outside is not None:
                is_owner = user_namespaces.become_owner(self.spec.outside[0])
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # inherited: an undumpable child's id maps belong to root alone
            self.reaper, must_move = clone_into(CLONED_NAMESPACES if is_jail else 0, cgroup)
        except BaseException:
            _become_helper(is_owner=is_owner)
            for fd in (waiting, go, self.link, self._reaper_link):
                posix.close(fd)
            raise
        if self.reaper == 0:
            posix.close(go)
            return self._be_reaper(plan_fd, waiting, must_be_moved=must_move)
        _become_helper(is_owner=is_owner)
        if not self.is_nursing:  # somebody waits for this one
            run_beside(self.reaper, self.processors)
        posix.close(self._reaper_link)
        posix.close(waiting)
        private: list[int] = []
        try:
            if cgroup is not None and must_move:
                cgroup.attach(self.reaper)
            if is_jail:
                self._map_ids()
            if not self.is_nursing:
                posix.write(go, GO)
            private = self._open_private(private_paths)
            messages.send_patiently(self.link, "go", {}, private)
        finally:
            for fd in (go, *private):
                posix.close(fd)
        self._count()
        return None

    def _be_reaper(self, plan_fd: int, waiting: int, *, must_be_moved: bool) -> Callable[[], None]:
        """Enter the control group, and live as the reaper."""
        state = self.state
        posix.close(self.link)
        posix.close(state.caller)
        try:
            registers = {}
            if state.claim is not None:
                registers[OUTSIDE_ID] = state.claim.outside_id
                state.claim.forget()
            if state.keeper is not None:
                state.keeper.forget()
            if state.workspace_fd >= 0:
                registers[ATTACHED_WORKSPACE] = state.workspace_fd
            if state.cgroup is not None and state.cgroup.version == 1:
                state.cgroup.enter()
            ends = {"plan_fd": plan_fd, "link": self._reaper_link, "go": waiting}
            if self.is_nursing:
                from .prefork import PreforkReaper

                said = {"generation": self.generation}
                prefork = PreforkReaper(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
                never_freed.extend((state, self, prefork, ends, said))
                return prefork.live(state.door, state.slate, said)
            reaper = Reaper(self.spec, registers, **ends, load_interpreter=self.load_interpreter)
            return reaper.live(self.processors, must_wait_first=must_be_moved)
        except BaseException as error:  # a fault of ours: it must be told, and nothing of the helper may run on here
            try:
                messages.send(self._reaper_link, "failed", failure(f"{type(error).__name__}: {error}", "reaper"))
            finally:  # also when there is nobody left to tell
                posix._exit(1)

    def _map_ids(self) -> None:
        outside = self.spec.outside
        uid, gid = (outside[0], outside[0]) if outside else (posix.geteuid(), posix.getegid())
        keeper = self.state.claim_keeper() if self.is_nursing and outside else None
        user_namespaces.write_maps(
            self.reaper,
            inside_id=self.spec.inside_id,
            outside_uid=uid,
            outside_gid=gid,
            privileged=outside is not None,
            keeper=keeper,
        )

    def _open_private(self, paths: list[str]) -> list[int]:
        """Open what only root may read through mounts that show it as the outside id's own."""
        if not paths:
            return []
        from .user_namespaces import open_idmapped

        assert self.spec.outside is not None
        return list(open_idmapped(paths, self.spec.outside[0]).values())

    def order(self, body: dict[str, Any], fds: list[int]) -> None:
        """Hand the reaper the orders of its guest; in a prefork jail it has its own. Raises OSError when it is gone."""
        self.spec = self.state.spec  # whose amounts may have changed since the sandbox was built
        if self.is_nursing:
            if self.number != body["number"]:
                self._renew()
            self.cause, self.said_ended = body["cause"], body["ended"]
        self.number, self.timeout_s, self.is_undecided = body["number"], body["timeout_s"], False
        self.is_last = body["is_last"]
        for tag, early, _ in self.state.early:
            if tag == "kill" and early["number"] == self.number:
                self.cause = early["cause"]
        cgroup = self.state.cgroup
        if cgroup is not None and body["again"] and self.spec.cgroup is not None:
            cgroup.renew_quota(self.spec.cgroup["amounts"]["cpus"])
        self.setup_deadline = monotonic() + SETUP_PATIENCE_S
        if not self.is_nursing:
            messages.send_patiently(self.link, "order", {"has_files": body["has_files"]}, fds)

    def attend(self) -> None:
        """Wait for the end, whatever brings it; then report what the kernel says about it."""
        caller = self.state.caller
        is_caller_here = True
        while self.ended is None and self.failed is None:
            while self.later and not self.cause:
                self._obey(*self.later.pop(0))
            if self._is_over_on_slate():
                return
            if self._is_over() or (self.cause and not self._awaits_workspace()):
                break
            more = self.fork_tree.watched() if self.fork_tree is not None else self.timers
            ready = {fd for fd, _ in ppoll((self.link, caller, *more), self._patience_s())}
            if self.fork_tree is not None:
                self.fork_tree.report_ended(ready)
            if not self._hear_what_reaper_said():  # first: whoever has ended is not killed any more
                if self._is_over_on_slate():
                    return
                break
            if self._is_over():
                break
            if caller in ready and not self._hear_caller():
                is_caller_here = False
            if not is_caller_here or (self.cause and not self._awaits_workspace()):
                break
            self._check_limits()
        if self.ended is not None and self.ended["is_alone"] and not self.cause:
            self.can_go_on = self.is_nursing and bool(self.started_at) and not self.ended["is_worn"]
            self._report(None)  # nothing but the reaper is left: its own end need not be waited for
            if self.can_go_on:
                return
            self.kill()
        else:
            usage = self.kill(is_awaited=self.spec.level != "jail" or self._has_forks())
            while not self._is_over() and (not self.reaper or ppoll((self.link,), 0.0)) and self._hear_reaper():
                pass
            self._report(usage)
            self.kill()
        self._let_go()
        posix.close(self.link)

    def _hear_what_reaper_said(self) -> bool:
        """Take all that there is; False when the reaper is gone."""
        while not self._is_over() and ppoll((self.link,), 0.0):
            if not self._hear_reaper():
                return False
        return True

    def _has_forks(self) -> bool:
        return self.fork_tree is not None and len(self.fork_tree.nodes) > 1

    def _is_over(self) -> bool:
        return self.ended is not None or self.failed is not None

    def _awaits_workspace(self) -> bool:
        """Tell whether somebody may just be attaching the only mount of a workspace: killed now, it is lost."""
        return self.state.workspace_fd >= 0 and not self.started_at

    def _renew(self) -> None:
        """Begin the watch over the next guest of a prefork jail."""
        self.cause, self.ended, self.failed, self.can_go_on = "", None, None, False
        self.started_at = self.deadline = 0.0
        self.accounting.renew()
        self._count()

    def _is_over_on_slate(self) -> bool:
        """Look at the shared status. Where the run has ended, we sleep on until the caller tells how, if we must know.

        A timer that has gone off meanwhile was wound for this run, or for the next one, which is not ours to look at.
        """
        if not self.is_nursing:
            return False
        shared_status.unwind(self.state.timer)
        seen = shared_status.State(self.state.slate)
        if seen.started:
            self.state.keep_workspace(-1)  # the first guest has attached it, and handed another mount on
        if not self.started_at and seen.started == self.number:
            self.started_at = seen.started_at
            self.deadline = self.started_at + self.timeout_s
        if self.said_ended is None and seen.ended < self.number and seen.ordered == self.number:
            return False
        if self.said_ended is not None:
            self._hear_what_reaper_said()  # that the guest has failed, perhaps
            self.ended = self.said_ended
            return False
        self.is_undecided = self.can_go_on = True
        return True

    def _count(self) -> None:
        """Take note of what the control group says before the run."""
        cgroup = self.state.cgroup
        self.state.before = cgroup.counters() if cgroup is not None else {}
        self.pids_before = cgroup.most_pids() if cgroup is not None and self.state.has_run else 0

    def last_words(self) -> dict[str, Any] | None:
        """Kill the tree, and return what the reaper said it failed at: our own error may only follow from that."""
        if self.reaper:
            self.kill()
            while self.failed is None and self._hear_reaper():
                pass
            self._lend()
            posix.close(self.link)
        return self.failed

    def kill(self, *, is_awaited: bool = True) -> tuple[float, float, int] | None:
        """Kill the tree, wait until nothing of it is left, and return what it used.

        Where that is not awaited, and takes long, the wait ends when nobody of it can do anything any more.
        """
        if not self.reaper:
            return None
        is_quiet = not self.cause and self.ended is not None and self.ended["is_alone"]  # nobody but the reaper lives
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
        if self.spec.level != "jail":
            from . import procfs

            procfs.kill_descendants(posix.getpid())
        if cgroup is not None and self.spec.cgroup is not None:
            cgroup.renew_quota(self.spec.cgroup["amounts"]["cpus"])
        return usage

    def _patience_s(self) -> float:
        left = max(0.0, (self.deadline or self.setup_deadline) - monotonic())
        is_summing = (self.spec.accounting and self.deadline) or (self.is_nursing and not self.started_at)
        return min(left, self.accounting.pause_s() if is_summing else left) + 0.001

    def _hear_caller(self) -> bool:
        """Take one word of the caller's; False when it is gone."""
        tag, body, fds = messages.receive(self.state.caller)
        is_early = tag in ("kill", "over") and body["number"] > self.number
        if tag in FOR_THE_NEXT or is_early:  # the caller knows of this run's end, which we shall hear of at once
            self.state.early.append((tag, body, fds))
            return True
        if fds:
            body |= messages.unpack(fds[0])
            for fd in fds:
                posix.close(fd)
        if self.fork_tree is not None and self.fork_tree.is_busy and not self.fork_tree.is_urgent(tag, body):
            self.later.append((tag, body))
        else:
            self._obey(tag, body)
        return tag != ""

    def _obey(self, tag: str, body: dict[str, Any]) -> None:
        """Do what the caller says."""
        if tag == "kill" and not self.cause and body["number"] == self.number:  # not a run that is over
            self.cause = body["cause"]
        elif tag == "over":
            self.said_ended = body["ended"] if body["number"] == self.number else self.said_ended
        elif tag == "pace":
            self.accounting.tick_s = TICK_S if body["is_busy"] else IDLE_TICK_S
        elif tag and tag != "kill":
            self._handle_for_forks(tag, body)

    def look_after_others(self, busy_with: int) -> None:
        """Keep the limits, and hear what is urgent, until there is something to be heard at `busy_with`.

        Raises OSError when the run was ended meanwhile, or nobody is there any more to run it for.
        """
        caller = self.state.caller
        while True:
            ready = {fd for fd, _ in ppoll((busy_with, caller), TICK_S)}
            if caller in ready and not self._hear_caller():
                raise OSError(EPIPE, "the caller is gone")
            self._check_limits()
            if self.cause:
                raise OSError(EPIPE, "the session was ended meanwhile")
            if busy_with in ready:
                return

    def _handle_for_forks(self, tag: str, body: dict[str, Any]) -> None:
        """Do what is asked for a session and what was cloned from it."""
        if self.fork_tree is None:
            from .fork_tree import ForkTree

            self.fork_tree = ForkTree(self.state, self.link, self.reaper, self.look_after_others)
        if tag == "interrupt":
            self.fork_tree.interrupt(body["node"])
        else:
            self.fork_tree.handle(tag, body)

    def _hear_reaper(self) -> bool:
        """Take one word of the reaper's; False when it is gone."""
        tag, body, fds = messages.receive(self.link)
        if tag == "ready":
            self.state.keep_workspace(-1)  # the caller has the new one
            self.ready = {**body, "outside": self.spec.outside}
            self.lent += fds
        elif tag == "started":
            self.started_at = body["at"]
            self.deadline = self.started_at + self.timeout_s
            self._lend()
            self.state.tell("started", body)
        elif tag == "ended":
            self.ended = body
        elif tag == "failed":
            if fds:
                self.state.keep_workspace(fds[0])
            for fd in fds[1:]:
                posix.close(fd)
            self.failed = body
        return tag != ""

    def _lend(self) -> None:
        """Tell the caller that the sandbox stands, and hand it the workspace, once.

        Nobody waits for this word alone, and who hears it may take the processor from the guest. At the last run we
        keep the workspace open, too: who lets go of it last takes it down, and nobody waits for us.
        """
        ready, self.ready = self.ready, None
        if ready is not None:
            self.state.tell("ready", ready, tuple(self.lent))
        if not self.is_last:
            self._let_go()

    def _let_go(self) -> None:
        while self.lent:
            posix.close(self.lent.pop())

    def _check_limits(self) -> None:
        if self.ended is not None or self.failed is not None:
            return
        if not self.deadline:
            if monotonic() >= self.setup_deadline:
                said = f"the sandbox was not set up within {SETUP_PATIENCE_S:.0f} s; is a file system stuck?"
                self.failed = failure(said, "helper", ETIMEDOUT)
            return
        if monotonic() >= self.deadline:
            self.cause = "timeout"
        elif self.accounting.begin():
            self._look_at_amounts()
            self.accounting.end()

    def _look_at_amounts(self) -> None:
        if self.spec.accounting and self._is_memory_exceeded():
            if self.fork_tree is None or not self.fork_tree.kill_exceeding():
                self.cause = "out_of_memory"
        elif self._is_folder_over():
            self.cause = "disk_limit"
        elif self.fork_tree is not None:
            self.fork_tree.check_memory(self.spec.memory_bytes)

    def _is_memory_exceeded(self) -> bool:
        """Sum the tree's memory, unless it is one of several: each of them is looked at by itself."""
        cgroup = self.state.cgroup
        if self._has_forks() and (self.spec.accounting != "cgroup" or not cgroup):
            return False
        return self.accounting.is_exceeded(self.spec, cgroup, self.reaper)

    def _is_task_limit_seen(self) -> bool:
        """Tell, without a counter of the kernel's, whether the tree was seen at its limit."""
        left = self.ended["tasks"] if self.ended is not None else 0  # the reaper in place of the guest that ended
        most = max(self.accounting.peak_tasks, left)
        return self.state.cgroup is None and 0 < self.spec.pids <= most

    def _is_folder_over(self, *, at_end: bool = False) -> bool:
        """Tell whether the folders of the host that stand in for the workspace hold more than they may."""
        folder = self.state.folder
        return folder is not None and folder.is_over(self.spec.disk_bytes, self.spec.inodes, is_fresh=at_end)

    def _report(self, usage: tuple[float, float, int] | None) -> None:
        self._lend()
        if not self.started_at and not self.cause:
            self.failed = self.failed or failure("the sandbox ended before the code was started", "reaper")
        if self.failed is not None and not self.cause:
            self.state.tell_failure(self.failed, self.number)
            return
        cgroup = self.state.cgroup
        now = cgroup.counters() if cgroup else {}
        user_s, system_s, most_kib = self._spent(usage)
        body = {
            "number": self.number,
            "generation": self.generation + (not self.can_go_on),
            "cause": self.cause,
            "ended": self.ended,
            "is_quiet": usage is not None and self.reaper > 0,  # it is dying, and nobody of it can write any more
            "wall_s": (self.ended or {}).get("at", monotonic()) - self.started_at if self.started_at else 0.0,
            "cpu_user_s": user_s,
            "cpu_system_s": system_s,
            "peak_bytes": max(self.accounting.peak_bytes, most_kib * 1024),
            "tasks": max(self.accounting.peak_tasks, self._most_pids()),
            "counters": {name: count - self.state.before.get(name, 0) for name, count in now.items()},
            "is_task_limit_seen": self._is_task_limit_seen(),
            "is_folder_over": self._is_folder_over(at_end=True),
        }
        self.state.tell("ended", body)

    def _most_pids(self) -> int:
        """Return the most processes at once; what was reached before this run began is not its own."""
        most = self.state.cgroup.most_pids() if self.state.cgroup is not None else 0
        return most if most > self.pids_before else 0

    def _spent(self, usage: tuple[float, float, int] | None) -> tuple[float, float, int]:
        """Return user and system seconds and the largest process in KiB: by the reaper's count, or by the kernel's."""
        if usage is not None:
            return usage
        ended = self.ended or {}
        return ended.get("user_s", 0.0), ended.get("system_s", 0.0), ended.get("most_kib", 0)


def _become_helper(*, is_owner: bool) -> None:
    """Be who we were before the reaper was made: the helper lives on, and must not be anybody's to look into."""
    if is_owner:
        user_namespaces.become_root()
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
