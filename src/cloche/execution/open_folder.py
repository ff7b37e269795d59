"""Open the host folder of a sandbox: checked before it is shown, and reopened for a kept sandbox.

`cloche.workspace` may refuse the folder, and hides some of its files. Everything here blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cloche.config.state import state_file
from cloche.core.changes import HostFolder
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.limits import parse_size
from cloche.core.record import dataclass, replace

if TYPE_CHECKING:
    from cloche.workspace.allowed import AllowedFolder
    from cloche.workspace.git_folder import GitFolder
    from cloche.workspace.hidden import Hidden

DISK_BYTES = 2 << 30
MASK_BYTES = 64 << 20  # of memory for the mask of a read-only folder
MOST_TOLD = 100  # hidden paths listed in a result
TICK_S, MOST_BEHIND_S = 0.001, 0.5
REALTIME_COARSE = 5  # CLOCK_REALTIME_COARSE (linux/time.h), from which file systems take times


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """The host folder to show, its path inside, the bytes that may be written, and further hidden patterns.

    `read` are additional folders, shown read-only at their own paths. `hidden` are paths that are hidden in any case.
    """

    path: str
    read: tuple[str, ...] = ()
    at: str | None = None
    disk_bytes: int = DISK_BYTES
    hide: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def read_folder(
    workspace: str | PathLike[str] | None,
    workspace_at: str | None,
    disk: int | str | None,
    hide: Sequence[str] | None,
    read: Sequence[str | PathLike[str]] | None,
) -> FolderOptions | None:
    """Read the folder arguments of a sandbox; None if it gets no folder. Raises InvalidRequest."""
    if workspace is None:
        for argument, value in (
            ("workspace_at", workspace_at),
            ("workspace_disk", disk),
            ("workspace_hide", hide),
            ("workspace_read", read),
        ):
            if value is not None:
                raise InvalidRequest(f"{argument} needs a folder of the host; name one: workspace=...")
        return None
    for argument, value in (("workspace_hide", hide), ("workspace_read", read)):
        if isinstance(value, str | PathLike):
            raise InvalidRequest(f"{argument}: {value!r} must be a list")
    disk_bytes = DISK_BYTES if disk is None else parse_size(disk, name="workspace_disk")
    further = tuple(os.fspath(path) for path in read or ())
    return FolderOptions(
        path=os.fspath(workspace), at=workspace_at, disk_bytes=disk_bytes, hide=tuple(hide or ()), read=further
    )


@dataclass(slots=True, kw_only=True)
class OpenFolder:
    """The host's folder, open by descriptor, and how the sandbox sees it."""

    folder: HostFolder
    fd: int
    notes: Mapping[str, Any]
    further: tuple[OpenFolder, ...] = ()
    committed: dict[str, tuple[int, int]] | None = None  # set for a fork; others read it from a file
    git: GitFolder | None = None  # of a worktree or submodule, while the sandbox is being opened

    def add(self, further: OpenFolder) -> None:
        """Add a read-only folder. Raises InvalidRequest if one folder lies in the other."""
        self.further += (further,)
        for existing in (self.folder, *self.folder.read_only):
            if f"{existing.at}/".startswith(f"{further.folder.at}/") or f"{further.folder.at}/".startswith(
                f"{existing.at}/"
            ):
                raise InvalidRequest(
                    f"workspace_read: {escape_name(further.folder.path)} and {escape_name(existing.path)} lie in "
                    "each other, or are the same; name folders apart"
                )
        self.folder = replace(self.folder, read_only=(*self.folder.read_only, further.folder))
        notes = [*self.notes.get("read_only", ()), dict(further.notes)]
        self.notes = {**self.notes, "read_only": notes}

    def close(self) -> None:
        """Close all descriptors."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        git, self.git = self.git, None
        if git is not None:
            git.close()
        for folder in self.further:
            folder.close()


def state_folder() -> str:
    """Return the folder where commits are recorded. Raises InvalidRequest for a user without a home."""
    folder = state_file("workspaces")
    if folder is None:
        raise InvalidRequest("workspace: this user has no home folder, where commits are recorded; set XDG_STATE_HOME")
    return folder


def after_now() -> int:
    """Return a time in ns that is later than the time of every file changed so far, and not later than that of any
    later change.

    The kernel's coarse clock, from which files get their times, advances in ticks. Since Linux 6.13 (multigrain
    timestamps) a file may have the fine-grained time instead, which is ahead of the coarse clock. So this waits until
    the coarse clock has passed the fine one, at most MOST_BEHIND_S in case the clock is set back.
    """
    began, until = time.time_ns(), time.monotonic() + MOST_BEHIND_S
    while (now := time.clock_gettime_ns(REALTIME_COARSE)) <= began and time.monotonic() < until:
        time.sleep(TICK_S)
    return now


def open_new(options: FolderOptions, *, is_read_only: bool = False) -> OpenFolder:
    """Check a folder before it is shown: whether it is allowed, whether a commit must be recovered, and which paths are
    hidden.

    With `is_read_only`, a worktree's repository is not shown.
    """
    from cloche.workspace.allowed import at_for, check_folder
    from cloche.workspace.git_identity import author_config
    from cloche.workspace.hidden import find_hidden, mask_rows
    from cloche.workspace.recover import recover
    from cloche.workspace.tracked import nearest

    allowed = check_folder(options.path)
    try:
        if os.path.isdir(state_folder()):
            recover(allowed.fd, state_folder())
        hidden = find_hidden(allowed.fd, patterns=options.hide)
        if options.hidden:
            hidden = replace(hidden, paths=tuple(sorted({*hidden.paths, *options.hidden})))
        mask = mask_rows(allowed.fd, hidden)
        tracked = [(nearest(path, hidden.repositories) or "", path) for path in hidden.tracked]
        state = os.fstat(allowed.fd)
        folder = HostFolder(
            path=allowed.path,
            # The path may have another folder by then; only root can open /proc/PID/fd from another user namespace.
            opened_as=f"/proc/{os.getpid()}/fd/{allowed.fd}" if os.geteuid() == 0 else "",
            at=at_for(allowed.path) if options.at is None else at_for(allowed.path, options.at),
            hidden=mask.whiteouts,
            masked_folders=tuple((masked.path, masked.mode, masked.mtime_ns) for masked in mask.folders),
            owner=(state.st_uid, state.st_gid),
            mode=state.st_mode & 0o777,
            identity=(state.st_dev, state.st_ino),
            disk_bytes=options.disk_bytes,
            opened_ns=after_now(),
            tracked=tuple(
                (repository, path)
                for repository, path in tracked
                if f"{repository}/.git".lstrip("/") not in hidden.paths
            ),
            git_config=author_config(allowed.fd),
        )
    except BaseException:
        os.close(allowed.fd)
        raise
    open_folder = OpenFolder(folder=folder, fd=allowed.fd, notes=_notes(folder, hidden))
    try:
        if not is_read_only and ".git" not in hidden.paths:
            _add_git(open_folder, allowed, hidden)
        for path in options.read:
            further = replace(options, path=path, at=None, read=(), disk_bytes=MASK_BYTES, hidden=())
            open_folder.add(open_new(further, is_read_only=True))
    except BaseException:
        open_folder.close()
        raise
    return open_folder


def _add_git(open_folder: OpenFolder, allowed: AllowedFolder, hidden: Hidden) -> None:
    """Show the repository of a worktree or submodule if it belongs to this folder and is allowed; otherwise add a
    warning.

    Raises OSError if it cannot be read.
    """
    from cloche.workspace.allowed import check_folder
    from cloche.workspace.git_folder import find_git_folder, hidden_of, named_outside
    from cloche.workspace.hidden import mask_rows

    try:
        git = open_folder.git = find_git_folder(allowed.fd)
        if git is None:
            return
        same = check_folder(git.path, is_git=True)
        os.close(same.fd)
        if (same.dev, same.ino) != git.identity:
            raise InvalidRequest(f"Git does not work inside: {escape_name(git.path)} was replaced.")
        inner, mask = hidden_of(git)
    except InvalidRequest as error:
        open_folder.notes = {**open_folder.notes, "warnings": [*open_folder.notes.get("warnings", ()), str(error)]}
        if open_folder.git is not None:
            open_folder.git.close()
            open_folder.git = None
        return
    state, folder = os.fstat(git.fd), open_folder.folder
    shown = replace(
        folder, path=git.path, at=f"{folder.at}/.git", owner=(state.st_uid, state.st_gid), mode=state.st_mode & 0o777,
        opened_as=f"/proc/{os.getpid()}/fd/{git.fd}" if folder.opened_as else "", identity=git.identity,
        hidden=mask.whiteouts, tracked=(), git_config="",
        masked_folders=tuple((masked.path, masked.mode, masked.mtime_ns) for masked in mask.folders),
    )  # fmt: skip
    # A `.git` file naming a missing repository would make each `git status` fail.
    outside = named_outside(allowed.fd, hidden.repositories)
    outer = mask_rows(
        allowed.fd, replace(hidden, paths=(*hidden.paths, *(f"{submodule}/.git" for submodule in outside)))
    )
    open_folder.folder = replace(
        folder, git=shown, hidden=outer.whiteouts,
        masked_folders=tuple((masked.path, masked.mode, masked.mtime_ns) for masked in outer.folders),
    )  # fmt: skip
    paths = [*open_folder.notes["hidden"], *(f"{submodule}/.git" for submodule in outside), *inner.paths][:MOST_TOLD]
    warnings = [*open_folder.notes.get("warnings", ()), *inner.warnings]
    if outside:
        listed = ", ".join(map(escape_name, outside[:5])) + (" and others" if outside[5:] else "")
        warnings.append(f"Git does not work inside in {listed}: the repository is not in the folder.")
    open_folder.notes = {**open_folder.notes, "hidden": paths, **({"warnings": warnings} if warnings else {})}


def _notes(folder: HostFolder, hidden: Hidden) -> dict[str, Any]:
    notes: dict[str, Any] = {"path": folder.path, "at": folder.at, "hidden": list(hidden.paths[:MOST_TOLD])}
    if len(hidden.paths) > MOST_TOLD:
        notes["hidden_count"] = len(hidden.paths)
    if hidden.tracked:
        notes["hidden_but_tracked"] = list(hidden.tracked[:MOST_TOLD])
    if hidden.warnings:
        notes["warnings"] = list(hidden.warnings)
    return notes


def open_again(folder: HostFolder) -> OpenFolder:
    """Reopen the folder of a kept sandbox. Raises InvalidRequest if its path now has another folder."""
    try:
        fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"workspace: cannot open {folder.path!r}: {error.strerror}") from error
    state = os.fstat(fd)
    if (state.st_dev, state.st_ino) != folder.identity:
        os.close(fd)
        raise InvalidRequest(
            f"workspace: {folder.path!r} is no longer the folder that this sandbox was opened with; move the folder "
            "back"
        )
    return OpenFolder(folder=folder, fd=fd, notes={"path": folder.path, "at": folder.at, "hidden": list(folder.hidden)})
