"""Enter the sandbox: the reaper's set-up, its watch over the guest, and the guest's last steps.

Three processes matter. The *helper* stays outside. The *reaper* is its child: at level jail it is pid 1 of new
namespaces; it builds everything, forks the guest, waits for it, reports the wait status over a link that the guest
never holds, and exits, whereupon the kernel ends whatever is left. The *guest* is the reaper's child, so signals,
exit codes and `abort()` behave as usual; Landlock and seccomp are applied in it alone, which puts the reaper
outside of its Landlock domain: it cannot be signalled from inside even where there is no process namespace.
"""

from __future__ import annotations

import os
import sys
import time

from . import caps, identity, landlock, mounts, rlimits, tree, wire
from .steps import Step, StepFailed, perform
from .syscalls import (
    PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address_of,
    close_range, open_tree, prctl, sethostname,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable

    from .spec import Run, Spec

CANNOT_RUN, NOT_FOUND = 126, 127
SIGKILL = 9


class Descriptors:
    """Name the open descriptors of one run; -1 where there is none."""

    __slots__ = ("stderr", "stdin", "stdout", "value", "workspace")

    def __init__(self, stdin: int, stdout: int, stderr: int, value: int = -1, workspace: int = -1):
        self.stdin, self.stdout, self.stderr, self.value = stdin, stdout, stderr, value
        self.workspace = workspace


class Reaper:
    """Be the guest's parent: set up, fork, wait, report."""

    def __init__(self, spec: Spec, run: Run, link: _socket.socket, fds: Descriptors, private: dict[str, int]):
        self.spec, self.run, self.link, self.fds, self.private = spec, run, link, fds, private
        self.mounts: list[object] = []
        self.kept: list[int] = []

    def live(self) -> Callable[[], None]:
        """Do everything; returns only in the guest, with what it must call. The reaper itself exits in here."""
        try:
            plan = perform(self.jail_steps() if self.spec.level == "jail" else self.plain_steps())
        except StepFailed as error:
            self._fail(error)
        self._report_ready(plan)
        status = 0
        wire.send(self.link, "started", {"at": time.monotonic()})
        for index in range(len(self.run.commands) + (self.run.python is not None)):
            pid = os.fork()
            if pid == 0:
                return Guest(self, index).become
            status = _wait_for(pid)
            if status != 0:
                break
        wire.send(self.link, "ended", {"wait_status": status, **self._observe()})
        os._exit(0)

    def jail_steps(self) -> list[Step]:
        """List the set-up at level jail. The order is the point: see `mounts` and the design's section 4."""
        spec = self.spec
        self.mounts = self._tree()
        sources = [value for value in self.mounts if isinstance(value, mounts.Bind)]
        return [
            Step("offer_to_oom_killer", "make the guest the first choice of the out-of-memory killer", _offer_to_oom_killer),
            Step("open_sources", f"open {len(sources)} bind sources as the caller", lambda: [s.open() for s in sources]),
            Step("switch_identity", f"become uid {spec.inside_id}", self._switch_identity),
            Step("die_with_helper", "die with the helper", _die_with_parent),
            Step("stage_root", "make the root a tmpfs", mounts.stage_root),
            *(Step(type(m).__name__.lower(), m.describe, m.apply) for m in self.mounts),  # type: ignore[attr-defined]
            Step("pivot_root", "make the tree the root, read-only", mounts.pivot),
            Step("keep_workspace", f"keep a copy of the mount of {spec.workspace}", self._keep_workspace),
            Step("hostname", f"call the host {spec.hostname}", lambda: sethostname(spec.hostname.encode())),
            *self._common_steps(),
            Step("capabilities", "drop all capabilities, the bounding set too", caps.drop_all),
            Step("no_new_privs", "forbid new privileges", caps.forbid_new_privileges),
        ]

    def plain_steps(self) -> list[Step]:
        """List the set-up without namespaces."""
        spec = self.spec
        steps = [
            Step("offer_to_oom_killer", "make the guest the first choice of the out-of-memory killer", _offer_to_oom_killer),
            Step("subreaper", "adopt what loses its parent", lambda: prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)),
        ]
        if spec.outside and spec.level != "none":
            steps.append(Step("switch_identity", f"become uid {spec.outside[0]}", self._switch_outside_identity))
        steps += [Step("die_with_helper", "die with the helper", _die_with_parent), *self._common_steps()]
        if spec.level == "confined":
            steps += [Step("no_new_privs", "forbid new privileges", caps.forbid_new_privileges)]
        return steps

    def _common_steps(self) -> list[Step]:
        spec = self.spec
        steps = [
            Step("files", f"write {len(self.run.files)} files into {spec.workspace}", self._write_files),
            Step("limits", "set " + ", ".join(f"{k}={v}" for k, v in spec.rlimits), lambda: rlimits.apply(spec.rlimits)),
        ]
        if spec.cpu_affinity:
            steps.append(Step("affinity", f"use at most {spec.cpu_affinity} processors", self._set_affinity))
        return steps

    def _tree(self) -> list[object]:
        """Return the mounts of this run: the spec's own, then the workspace, new or kept."""
        spec = self.spec
        rows = mounts.from_rows(spec.mounts)
        rows += [mounts.Bind(path, path[1:], fd=self.private.get(path, -1)) for path in self.run.binds]
        workspace = spec.workspace.lstrip("/")
        if self.fds.workspace >= 0:
            rows.append(mounts.Attach(self.fds.workspace, workspace))
        else:
            rows.append(mounts.Tmpfs(workspace, spec.disk_bytes, spec.inodes, "0755"))
        return [*rows, mounts.Proc(spec.masked)]

    def _switch_identity(self) -> None:
        identity.become(self.spec.inside_id, can_set_groups=self.spec.outside is not None)

    def _switch_outside_identity(self) -> None:
        """Take the outside id of a sandbox without namespaces; root only."""
        assert self.spec.outside is not None
        outside_id = self.spec.outside[0]
        os.setgroups([])
        os.setresgid(outside_id, outside_id, outside_id)
        if self.run.keep_read_search:
            caps.become_keeping_read_search(outside_id)
        else:
            os.setresuid(outside_id, outside_id, outside_id)

    def _keep_workspace(self) -> None:
        """Take a detached copy of the workspace's mount: the files outlive this run's namespaces by it."""
        self.kept = [open_tree(self.spec.workspace, recursive=False)]

    def _set_affinity(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[: self.spec.cpu_affinity])

    def _write_files(self) -> None:
        """Write the input files. Earlier runs may have left links: nothing is followed."""
        root = os.open(self.spec.workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path, mode, data in self.run.files:
                _write_below(root, path, mode, data)
        finally:
            os.close(root)
        self.run.files = []
        if self.run.build:
            os.mkdir(self.run.build, 0o700)
        for path, text in self.run.generated.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)

    def _report_ready(self, plan: list[tuple[str, str, float]]) -> None:
        """Hand the helper the plan and, at level jail, a detached copy of the workspace's mount."""
        wire.send(self.link, "ready", {"plan": plan[:200]}, self.kept)
        for fd in self.kept:
            os.close(fd)

    def _fail(self, error: StepFailed) -> None:
        wire.send(self.link, "failed", {"message": str(error), "step": error.step, "index": error.index, "errno": error.errno})
        os._exit(1)

    def _observe(self) -> dict[str, int]:
        """Look around before the kernel clears up: how many tasks are left, and what is full."""
        places = (self.spec.workspace, self.spec.tmp, "/dev/shm") if self.spec.level == "jail" else ()
        full = 0
        for place in places:
            state = os.statvfs(place)
            full += state.f_bfree == 0 or state.f_ffree == 0
        return {"tasks": self._count_tasks(), "full": full}

    def _count_tasks(self) -> int:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if self.spec.level == "jail" else tree.descendants(os.getpid())
        return tree.count_tasks(pids)


class Guest:
    """Be the guest: the last steps, then its program."""

    def __init__(self, reaper: Reaper, index: int):
        self.spec, self.run, self.fds, self.link = reaper.spec, reaper.run, reaper.fds, reaper.link
        self.command = self.run.commands[index] if index < len(self.run.commands) else None

    def become(self) -> None:
        """Close the last doors and run the program. Returns when a Python guest has run to its end."""
        try:
            perform(self.steps())
        except StepFailed as error:
            body = {"message": str(error), "step": error.step, "index": error.index, "errno": error.errno}
            wire.send(self.link, "failed", body)
            os._exit(1)
        self._close_descriptors()
        if self.command is not None:
            self._exec(self.command)
        self._run_python()

    def steps(self) -> list[Step]:
        """List what only the guest itself must not be able to do."""
        spec = self.spec
        steps = [
            Step("session", "lead a session of its own, without a terminal", os.setsid),
            Step("standard_streams", "take the given standard streams", self._take_streams),
            Step("directory", f"work in {spec.workspace}", lambda: os.chdir(spec.workspace)),
            Step("dumpable", "own its /proc entries", lambda: prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)),
        ]
        if spec.landlock is not None:
            rules = [*spec.landlock, *self.run.readable]
            steps.append(Step("landlock", f"restrict files to {len(rules)} trees", lambda: landlock.restrict(rules)))
        if spec.seccomp is not None:
            steps.append(Step("seccomp", "filter system calls", self._filter_system_calls))
        return steps

    def _take_streams(self) -> None:
        os.umask(0o022)
        for number, fd in enumerate((self.fds.stdin, self.fds.stdout, self.fds.stderr)):
            os.dup2(fd, number, inheritable=True)

    def _filter_system_calls(self) -> None:
        program = self.spec.seccomp or b""
        header = (len(program) // 8).to_bytes(8, "little") + address_of(program)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)

    def _close_descriptors(self) -> None:
        """Leave exactly the standard streams, and for a Python guest the pipe of its value."""
        self.link.detach()
        keep = self.fds.value if self.command is None else -1
        if keep > 3:
            close_range(3, keep - 1)
        close_range(max(keep + 1, 3))

    def _exec(self, command: list[str]) -> None:
        try:
            os.execvpe(command[0], command, self.run.env)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            os.write(2, f"cloche: cannot run {command[0]!r}: {os.strerror(error.errno or 0)}\n".encode())
            os._exit(NOT_FOUND if missing else CANNOT_RUN)

    def _run_python(self) -> None:
        """Let the interpreter forget the helper and become the guest's."""
        assert self.run.python is not None
        settings, env, value_fd = self.run.python, self.run.env, self.fds.value
        run_guest = sys.modules["interpreter.oneshot"].run
        for name in [name for name in sys.modules if name.partition(".")[0] in ("jail", "interpreter")]:
            del sys.modules[name]
        run_guest(settings, env, value_fd)


def _wait_for(pid: int) -> int:
    """Take every dead child until `pid` is among them, and return its wait status."""
    while True:
        found, status = os.waitpid(-1, 0)
        if found == pid:
            return status


def _die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _offer_to_oom_killer() -> None:
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _write_below(root: int, path: str, mode: int, data: bytes) -> None:
    """Create or replace a file below the directory `root`, making folders, following no link."""
    *folders, name = path.split("/")
    here = os.dup(root)
    try:
        for folder in folders:
            here = _descend(here, folder)
        try:
            os.unlink(name, dir_fd=here)
        except FileNotFoundError:
            pass
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=here)
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, mode)
    finally:
        os.close(here)


def _descend(here: int, folder: str) -> int:
    try:
        os.mkdir(folder, 0o755, dir_fd=here)
    except FileExistsError:
        pass
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    os.close(here)
    return there
