"""The helper: a process outside the sandbox that builds it, guards it and clears up after it.

It is a fresh `python -I -S`, or a fork of the fork server. It holds one end of a socket; the caller has the other. End
of file there, for any reason, means that the caller is gone: everything is killed and removed. It enforces the time-out
and sums the memory, and it alone reports why it killed. All its knowledge of the caller comes from the spec. It need
not learn of short runs in a prefork jail: see `shared_status`.
"""

from __future__ import annotations

import gc
import posix

from . import messages, shared_status, user_namespaces
from .cgroups import Cgroup
from .messages import Spec
from .sandbox_state import SandboxState, failure
from .supervisor import PreforkSupervisor, Supervisor
from .syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, ppoll, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .work_folder import WorkFolder

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

SIGINT = 2


def main(fd: int, load_interpreter: Callable[[str], Any]) -> Callable[[], None] | None:
    """Serve the caller at socket `fd`; returns only in a guest, with a function to call, or None at the end.

    `load_interpreter` returns a module of the interpreter's by its name. The first message is in the socket before this
    process starts: the `folders` of the control group that the caller makes meanwhile, and that this process removes.
    """
    _signal.signal(SIGINT, _signal.SIG_DFL)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    posix.umask(0o077)
    gc.freeze()  # present objects are shared with every fork; collecting them would only copy their pages
    gc.enable()
    body = messages.receive(fd)[1]
    cgroup = Cgroup(body["version"], body["folders"]) if body["folders"] else None
    return Helper(fd, cgroup, load_interpreter).serve()


class Helper(SandboxState):
    """Serve one sandbox after the other: open it, build in it, run in it, close it.

    The helper alone holds the objects that outlive a run: the control group, the outside id. A jail, with all its
    processes, mounts and files, is used by one run (by the runs of one sandbox, its workspace).
    """

    def __init__(self, caller: int, cgroup: Cgroup | None, load_interpreter: Callable[[str], Any]):
        super().__init__(caller, cgroup)
        self.load_interpreter = load_interpreter
        self.is_open = False
        self.supervisor: Supervisor | None = None
        self.failed: dict[str, Any] | None = None
        self.plan_fd = -1
        self.concluded = 0  # the number of the run that was reported last
        self.used: list[WorkFolder] = []  # folders of runs before, until the caller is through with them
        self.spare: WorkFolder | None = None  # one of them, which is as new
        self.is_folder_used = False  # the present one, by a run

    def serve(self) -> Callable[[], None] | None:
        while True:
            tag, body, fds = self._next_message()
            guest = None
            if tag == "open":
                self.spec = Spec(**messages.unpack(fds[0]))
                self._take_claim(fds)
            elif tag == "drop":
                self._remove_used()
            elif tag == "prepare":
                self.keep_network_link(fds.pop() if body.get("has_network") else -1)
                self.keep_workspace(fds.pop() if body["has_workspace"] else -1)
                self._change_handoff(fds[1:], body["generation"])
                guest = self._prepare(body, fds[0])
                fds = []
            elif tag in ("run", "clock", "kill", "over"):
                run = body if tag == "run" else self._ordered(tag, body)
                if run is not None:
                    guest = self._serve_run(run, fds)
                    fds, body = [], run
            if guest is not None:
                return guest
            for fd in fds:
                posix.close(fd)
            if tag == "" or body.get("is_last"):
                self._clear_up()
                posix._exit(0)

    def _next_message(self) -> tuple[str, dict[str, Any], list[int]]:
        """Return the caller's next message; or "clock" when the timer of the shared status has gone off."""
        while not self.early:
            ready = {fd for fd, _ in ppoll((self.caller, *((self.timer,) if self.timer >= 0 else ())), None)}
            if self.caller in ready:
                return messages.receive(self.caller)
            if ready:
                shared_status.clear_timer(self.timer)
                return "clock", {}, []
        return self.early.pop(0)

    def _ordered(self, tag: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the due action for the run in the shared status, or None.

        A timer of a run that is over has no effect; nor have messages about another run.
        """
        if self.status < 0:
            return None
        state = shared_status.PreforkState(self.status)
        is_meant = state.ended != state.ordered if tag == "clock" else state.ordered == body["number"]
        if state.ordered <= self.concluded or not is_meant:
            return None
        run: dict[str, Any] = {"number": state.ordered, "timeout_s": state.timeout_s, "rebuilds": state.rebuilds}
        run |= {"again": True, "is_last": False, "cause": body["cause"] if tag == "kill" else ""}
        return run | {"ended": body["ended"] if tag == "over" else None}

    def _serve_run(self, body: dict[str, Any], fds: list[int]) -> Callable[[], None] | None:
        """Supervise a run to its end, and build anew if requested; returns a callable in a guest."""
        self._run(body, fds)
        if self.spec.is_ahead:
            self._go_on(is_under_load=body.get("is_under_load", False))
        elif body["rebuilds"] and self.supervisor is None:
            self.generation += 1
            return self._prepare(self.prepared, self.plan_fd)
        return None

    def _go_on(self, *, is_under_load: bool) -> None:
        """Have the reaper that a run has left, if it has, go on with another guest.

        We have read the names of the run's files, so no other reaper may be forked from here.
        """
        supervisor = self.supervisor
        if supervisor is None:
            return
        try:
            self._open()
            supervisor.go_on(is_under_load=is_under_load)
        except OSError as error:
            self._discard()
            self.failed = failure(f"cannot set up the sandbox: {error}", "helper", error.errno or 0)

    def _prepare(self, body: dict[str, Any], plan_fd: int) -> Callable[[], None] | None:
        """Start to build; the helper's own error is kept and reported when the run comes that this was for."""
        self._discard()
        if plan_fd != self.plan_fd and self.plan_fd >= 0:
            posix.close(self.plan_fd)
        self.plan_fd, self.prepared, self.failed = plan_fd, body, None
        supervisor = None
        try:
            self._open()
            loader = self.load_interpreter if body["wants_python"] else None
            supervisor = _supervisor_for(body, self.spec)(self, loader)
            guest = supervisor.start(plan_fd, body["private"], body.get("owners"))
            if guest is not None:
                return guest
            self.supervisor = supervisor
        except OSError as error:
            theirs = supervisor.abandon() if supervisor is not None else None
            ours = failure(f"cannot set up the sandbox: {error}", "helper", error.errno or 0)
            self.failed = theirs or ours
        return None

    def _run(self, body: dict[str, Any], fds: list[int]) -> None:
        """Supervise a run in the prepared sandbox, and report it, unless the caller has yet to say how it ended.

        The helper's own errors must neither free the guest nor go unreported.
        """
        supervisor, self.supervisor = self.supervisor, None
        self.has_run = True
        if body.get("folder"):
            supervisor = self._name_folder(supervisor, body["folder"])
        try:
            if supervisor is not None:
                supervisor.order(body, fds)
        except OSError:
            pass  # the reaper has ended; `attend` reads its last messages
        for fd in fds:  # before any other fork: only this run's guest may hold them
            posix.close(fd)
        if supervisor is None:
            self.concluded = body["number"]
            failed = self.failed or failure("no sandbox was prepared for the run", "helper")
            self.send_failure(failed, body["number"])
            return
        try:
            supervisor.attend()
        except Exception as error:
            self.concluded = body["number"]
            try:
                supervisor.kill()
            finally:  # if even that fails, the caller gets the first error
                self.send("lost", failure(f"{type(error).__name__}: {error}", "helper"))
            return
        if supervisor.run.is_undecided:
            self.early.append(("clock", {}, []))  # it may have gone off for the next run
        else:
            self.concluded = body["number"]
        if supervisor.run.can_go_on and body["again"]:
            self.supervisor = supervisor
        else:
            supervisor.kill()

    def _name_folder(self, supervisor: Supervisor | None, name: str) -> Supervisor | None:
        """Rename the folder that was made ahead to the run's name for it; the next jail makes another one."""
        if supervisor is None or self.folder is None:
            return None
        self.failed = supervisor.await_guest()
        if self.failed is not None:
            return None
        try:
            self.folder.rename(name)
        except OSError as error:
            theirs = supervisor.abandon()
            self.failed = theirs or failure(f"cannot rename the work folder: {error}", "helper", error.errno or 0)
            return None
        self.is_folder_used = True
        return supervisor

    def _remove_used(self) -> None:
        """Remove the folders of runs that the caller has finished, or keep one for another run."""
        while self.used:
            folder = self.used.pop()
            if self.spare is None and folder.renew(self.spec.folder):
                self.spare = folder
            else:
                folder.remove()

    def _change_handoff(self, ends: list[int], generation: int) -> None:
        """Hold the handoff socket of a prefork jail, where guests take orders, and its shared status; or nothing."""
        for fd in (self.handoff, self.status, self.timer):
            if fd >= 0:
                posix.close(fd)
        self.handoff, self.status, self.timer = ends or (-1, -1, -1)
        self.generation = generation

    def _take_claim(self, fds: list[int]) -> None:
        """Take over the outside id from the message, else keep the helper's own, if it has one."""
        if len(fds) > 1 and self.spec.outside is not None:
            if self.claim is not None:
                self.claim.forget()
            self.claim, self.is_claim_own = user_namespaces.Claim(self.spec.outside[0], fds.pop()), False
        if self.claim is not None:
            self.spec.outside = (self.claim.outside_id, 1)

    def _discard(self) -> None:
        if self.supervisor is not None:
            self.supervisor.kill()
            posix.close(self.supervisor.link)
            self.supervisor = None

    def _open(self) -> None:
        """Make everything that lives as long as the sandbox, once."""
        spec = self.spec
        if self.is_open:
            if self.is_folder_used and self.folder is not None:
                self.used.append(self.folder)
                self._make_folder(self.folder)
            elif self.folder is not None and not spec.shares_folder:
                self.folder.renew_tmp()
            return
        if spec.outside is not None and spec.level in ("jail", "confined"):
            if self.claim is None:
                self.claim = user_namespaces.claim_outside_id(*spec.outside, spec.ids[2])
                self.is_claim_own = True
            spec.outside = (self.claim.outside_id, 1)
        if spec.level != "jail":
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._make_folder()
        self.is_open = True

    def _make_folder(self, before: WorkFolder | None = None) -> None:
        """Make the folders that replace mounts, or lock those of the sandbox that this helper is part of."""
        from .work_folder import WorkFolder

        spec, self.is_folder_used = self.spec, False
        owner = spec.outside[0] if spec.outside is not None and self.claim else None
        spare, self.spare = self.spare, None
        if spare is not None and before is not None and spare.owner == owner:
            spare.rename(spec.folder)
            if spec.startup:
                spare.take_startup(before)
            self.folder = spare
            return
        if spare is not None:
            spare.remove()
        self.folder = WorkFolder(spec.folder, spec.workspace, spec.tmp, owner)
        if spec.shares_folder:
            self.folder.hold()
            return
        self.folder.create(spec.modules, spec.startup, before)
        if spec.is_ahead:
            self.folder.note_new()

    def _clear_up(self) -> None:
        self._discard()
        if self.cgroup is not None:
            self.cgroup.remove()
        if self.folder is not None and not self.spec.shares_folder:
            self.folder.remove()
        for folder in (*self.used, *([self.spare] if self.spare else ())):
            folder.remove()


def _supervisor_for(body: dict[str, Any], spec: Spec) -> type[Supervisor]:
    """Return the supervisor's class for a jail to build."""
    if body.get("is_resident"):
        from .resident import ResidentSupervisor

        if spec.level != "jail":
            from .confined_resident import ConfinedSupervisor

            return ConfinedSupervisor
        return ResidentSupervisor
    return PreforkSupervisor if body["is_prefork"] else Supervisor
