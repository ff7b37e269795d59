"""Enter the sandbox: the reaper that builds it, and the guest that gets ready meanwhile.

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
import sys
import time

from . import caps, identity, landlock, mounts, netns, notify, rlimits, tree, wire
from .steps import Step, StepFailed, perform
from .syscalls import (
    CLONE_NEWCGROUP,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    close_range,
    open_tree,
    prctl,
    sethostname,
    unshare,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .spec import Run, Spec

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

CANNOT_RUN, NOT_FOUND = 126, 127
SIGKILL, SIGCHLD = 9, 17
RELEASED = b"r"


class Descriptors:
    """Name the open descriptors of one run; -1 where there is none."""

    __slots__ = ("stderr", "stdin", "stdout", "value", "workspace")

    def __init__(self, stdin: int, stdout: int, stderr: int, value: int = -1, workspace: int = -1):
        self.stdin, self.stdout, self.stderr, self.value = stdin, stdout, stderr, value
        self.workspace = workspace


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
        for index in range(max(1, len(self.run.commands) + (self.run.python is not None))):
            pid = os.fork()
            if pid == 0:
                os.close(release)
                return Guest(self, index, waiting, attendance.leave()).become
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
        entrance = Entrance(self)
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


def limit_steps(spec: Spec) -> list[Step]:
    """List the per-process limits."""
    text = "set " + ", ".join(f"{name}={amount}" for name, amount in spec.rlimits)
    steps = [Step("limits", text, lambda: rlimits.apply(spec.rlimits))]
    if spec.cpu_affinity:
        steps.append(
            Step("affinity", f"use at most {spec.cpu_affinity} processors", lambda: _use_processors(spec.cpu_affinity))
        )
    return steps


def power_steps(spec: Spec) -> list[Step]:
    """List the powers to give up for good."""
    steps = []
    if spec.level == "jail":
        steps.append(Step("capabilities", "drop all capabilities, the bounding set too", caps.drop_all))
    if spec.level in ("jail", "confined"):
        steps.append(Step("no_new_privs", "forbid new privileges", caps.forbid_new_privileges))
    return steps


def identity_steps(spec: Spec, run: Run) -> list[Step]:
    """List who to become, and with whom to die; the kernel forgets the latter when the former changes."""
    die = Step("die_with_parent", "die with the parent", _die_with_parent)
    if spec.level == "jail":
        can_set_groups = spec.outside is not None
        text = f"become uid {spec.inside_id}"
        return [
            Step("switch_identity", text, lambda: identity.become(spec.inside_id, can_set_groups=can_set_groups)),
            die,
        ]
    if spec.outside is not None and spec.level == "confined":
        outside_id = spec.outside[0]
        switch = caps.become_keeping_read_search if run.keep_read_search else caps.become
        return [Step("switch_identity", f"become uid {outside_id}", lambda: switch(outside_id)), die]
    return [die]


class Entrance:
    """Build the sandbox."""

    def __init__(self, reaper: Reaper):
        self.spec, self.run, self.fds, self.private = reaper.spec, reaper.run, reaper.fds, reaper.private
        self.kept: list[int] = []

    def steps(self) -> list[Step]:
        """List the set-up. The order is the point: see `mounts` and the design's section 4."""
        first = Step(
            "offer_to_oom_killer", "make the guest the first choice of the out-of-memory killer", _offer_to_oom_killer
        )
        files = Step("files", f"write {len(self.run.files)} files into {self.spec.workspace}", self._write_files)
        identity_first = identity_steps(self.spec, self.run)
        limits, powers = limit_steps(self.spec), power_steps(self.spec)
        if self.spec.level != "jail":
            adopt = Step("subreaper", "adopt what loses its parent", _adopt_orphans)
            return [first, adopt, *identity_first, files, *limits, *powers]
        values = self._tree()
        sources = [value for value in values if isinstance(value, mounts.Bind)]
        return [
            first,
            Step("open_sources", f"open {len(sources)} bind sources as the caller", lambda: _open_all(sources)),
            *identity_first,
            Step("stage_root", "make the root a tmpfs", mounts.stage_root),
            *(Step(type(value).__name__.lower(), value.describe, value.apply) for value in values),
            Step("pivot_root", "make the tree the root, read-only", mounts.pivot),
            Step("keep_workspace", f"keep a copy of the mount of {self.spec.workspace}", self._keep_workspace),
            Step("loopback", "bring the loopback device up", netns.raise_loopback),
            Step("hostname", f"call the host {self.spec.hostname}", lambda: sethostname(self.spec.hostname.encode())),
            files,
            *limits,
            *powers,
        ]

    def _tree(self) -> list[mounts.Mount]:
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

    def _keep_workspace(self) -> None:
        """Take a detached copy of the workspace's mount: the files outlive this run's namespaces by it."""
        self.kept = [open_tree(self.spec.workspace, recursive=False)]

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


class Guest:
    """Be the guest: get ready, wait, close the last doors, run the program."""

    def __init__(self, reaper: Reaper, index: int, waiting: int, asking: _socket.socket):
        self.spec, self.run, self.fds, self.link = reaper.spec, reaper.run, reaper.fds, reaper.link
        self.command = self.run.commands[index] if index < len(self.run.commands) else None
        self.is_first = index == 0
        self.waiting, self.asking = waiting, asking

    def become(self) -> None:
        """Do everything. Returns when a Python guest has run to its end."""
        try:
            perform(self.early_steps())
            if self.command is None and self.run.python is not None:
                sys.modules["interpreter.oneshot"].prepare(self.run.env)
            if os.read(self.waiting, 1) != RELEASED:
                os._exit(1)
            if self.command is None and self.run.python is None:
                os._exit(0)
            perform(self.late_steps())
        except StepFailed as error:
            tell_failure(self.link, error)
            os._exit(1)
        self._close_descriptors()
        if self.command is not None:
            self._exec(self.command)
        self._run_python()

    def early_steps(self) -> list[Step]:
        """List what needs no file of the sandbox's, and so can be done while the reaper builds it."""
        who = identity_steps(self.spec, self.run)
        # The first guest was forked before the reaper gave these up; a later one is born without them.
        return [
            *([*who, *limit_steps(self.spec), *power_steps(self.spec)] if self.is_first else who[-1:]),
            Step("session", "lead a session of its own, without a terminal", os.setsid),
            Step("standard_streams", "take the given standard streams", self._take_streams),
        ]

    def late_steps(self) -> list[Step]:
        """List the last doors to close, once the sandbox stands."""
        spec = self.spec
        steps = [
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
        is_compiling = self.command is not None and self.command is not self.run.commands[-1]
        stdout = self.fds.stderr if is_compiling else self.fds.stdout  # a compiler's words are no output of the program
        for number, fd in enumerate((self.fds.stdin, stdout, self.fds.stderr)):
            os.dup2(fd, number, inheritable=True)

    def _filter_system_calls(self) -> None:
        listener = notify.install(self.spec.seccomp or b"")
        wire.send(self.asking, "listener", fds=[listener])
        os.close(listener)

    def _close_descriptors(self) -> None:
        """Leave exactly the standard streams, and for a Python guest the pipe of its value."""
        self.link.detach()
        self.asking.detach()
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
        settings, value_fd = self.run.python, self.fds.value
        run_guest = sys.modules["interpreter.oneshot"].run
        for name in [name for name in sys.modules if name.partition(".")[0] in ("jail", "interpreter")]:
            del sys.modules[name]
        del sys.meta_path[0]
        run_guest(settings, value_fd)


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


def tell_failure(link: _socket.socket, error: StepFailed, kept: Sequence[int] = ()) -> None:
    """Tell the helper which step failed, and give back the workspace: attaching took it out of the helper's hands."""
    body = {"message": str(error), "step": error.step, "index": error.index, "errno": error.errno}
    wire.send(link, "failed", body, kept)


def _open_all(sources: list[mounts.Bind]) -> None:
    for source in sources:
        source.open()


def _adopt_orphans() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _use_processors(count: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def _die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _offer_to_oom_killer() -> None:
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # an undumpable process's /proc entries belong to root alone
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.write(fd, b"1000")
    os.close(fd)


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
