"""Enter the sandbox: the steps that build it, and those by which each process inside gives up what it must not keep.

The order is the point: see `mounts`, and the design's section on set-up. The reaper applies `Entrance.steps`; the
guest, forked before the reaper gave anything up, goes through the lists of identity, limits and powers itself.
"""

from __future__ import annotations

import os

from . import caps, identity, mounts, netns, rlimits, wire
from .steps import Step, StepFailed
from .syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    open_tree,
    prctl,
    sethostname,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence

    from .spec import Run, Spec

SIGKILL = 9


class Descriptors:
    """Name the open descriptors of one run; -1 where there is none."""

    __slots__ = ("stderr", "stdin", "stdout", "value", "workspace")

    def __init__(self, stdin: int, stdout: int, stderr: int, value: int = -1, workspace: int = -1):
        self.stdin, self.stdout, self.stderr, self.value = stdin, stdout, stderr, value
        self.workspace = workspace


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

    def __init__(self, spec: Spec, run: Run, fds: Descriptors, private: dict[str, int]):
        self.spec, self.run, self.fds, self.private = spec, run, fds, private
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
