"""Write a sandbox's changes to the host's folder: all of them, or none.

Theory of operation: `_Plan` looks at the host and decides the steps. New content is written into a *stage*, a private
folder with a random name inside the host's folder, and synced. The steps are written to a journal in the user's state
folder (`journal.py`). Then each path gets its file by one rename that overwrites nothing: RENAME_NOREPLACE if the path
does not exist, RENAME_EXCHANGE if it does. The file that the exchange moved into the stage is compared with the one
that was planned for. If they differ, another process has changed the path, and all steps are undone (`recover.py`). The
host's old files stay in the stage until all steps are done, synced, and recorded in the journal; only then are they
removed.

A commit is not atomic for concurrent readers, which see some files old and some new. A crash or power loss is undone by
the next commit or by `cloche gc`; once the journal says `done`, the commit is completed instead.

Writes through a descriptor that another process already has open go to the old file, as with every editor that replaces
files. They are detected until the end of the commit, and lost after it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Literal

from cloche import hostfs
from cloche.core.changes import Change, Committed
from cloche.core.errors import InvalidRequest, WorkspaceConflict, WorkspaceFailed
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field, replace

from . import journal as journals
from .host_files import HostTree, facts_of, names_in
from .journal import CommitStep, FileFacts, Journal
from .recover import MOST_SYNCED, kept_sentence, nothing, recover_locked, remove_stage, sync_folders, undo_durably
from .renames import exchange, rename_new, sync_file_system
from .snapshot import Snapshot, SnapshotEntry

Choice = Literal["theirs", "ours"]
NO_CHOICE: Mapping[str, Choice] = MappingProxyType({})
KEPT = "the host's version was kept"
_FOLDER_MODE = 0o755
_TOLD_PATHS = 8
_LATER = "The next commit to this folder, or `cloche gc`, completes or undoes it."
_CHANGED = "it has changed on the host"
_APPEARED = "it has appeared on the host"
_GONE = "it is gone on the host"
_ABOVE = "its parent is not a folder on the host"
_FILLED = "its folder on the host has files that the sandbox has not removed"
log = logging.getLogger("cloche.workspace")
# errno of a rename or lookup when another process has changed the path.
_OVERTAKEN = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY}


def commit(
    folder: int,
    snapshot: Snapshot,
    changes: Sequence[Change],
    *,
    state: str,
    owner: tuple[int, int],
    choose: Mapping[str, Choice] = NO_CHOICE,
    unchanged_since_ns: int | None = None,
    step: Callable[[str], None] = nothing,
) -> Committed:
    """Write changes to an open folder of the host; return the paths that were written and those that were left out.

    `choose` resolves conflicts by path: `ours` writes the sandbox's version, `theirs` keeps the host's. New files get
    `owner` as far as this process may chown. `unchanged_since_ns` is when the comparison began: a host file with that
    change time or a later one is a conflict. `step` is called with the name of each step, for tests.

    Raises WorkspaceConflict, WorkspaceFailed or InvalidRequest; then the folder is unchanged, unless the message says
    otherwise.
    """
    with (
        HostTree(folder) as tree,
        journals.open_records(state) as records_fd,
        journals.locked(records_fd, journals.key_of(tree.facts)) as is_ours,
    ):
        if not is_ours:
            raise WorkspaceFailed("another commit to this folder is under way; try again when it has ended")
        recover_locked(folder, records_fd, step)
        if journals.find(records_fd, tree.facts) is not None:
            raise WorkspaceFailed("an interrupted commit to this folder could not be undone; see the log")
        with _failures():
            plan = _Plan(tree, snapshot, choose, unchanged_since_ns)
            plan.add(changes)
            if plan.is_needed:
                _Commit(tree, snapshot, plan, records_fd, owner, step).run()
    written = sorted({change.path for change in changes} - plan.left_out.keys())
    return Committed(written=tuple(written), left=dict(plan.left_out))


def conflict_of(paths: Mapping[str, str]) -> WorkspaceConflict:
    """Return a WorkspaceConflict for paths and their reasons."""
    listed = "; ".join(f"{escape_name(path)}: {why}" for path, why in list(paths.items())[:_TOLD_PATHS])
    more = f"; and {len(paths) - _TOLD_PATHS} more" if len(paths) > _TOLD_PATHS else ""
    return WorkspaceConflict(
        f"nothing was written, since the host's folder has changed: {listed}{more}. "
        'Choose for each path: "ours" writes the sandbox\'s version, "theirs" keeps the host\'s.',
        paths=paths,
    )


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        names = [
            escape_name(os.fsdecode(filename))
            for filename in (error.filename, error.filename2)
            if isinstance(filename, str)
        ]
        about = f" ({', '.join(names)})" if names else ""
        why = error.strerror or str(error)
        if error.errno == errno.EINVAL:
            why = "its file system cannot exchange two names in one step"
        raise WorkspaceFailed(f"the folder could not be written, and is as it was: {why}{about}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """New content for a path, and the facts of the host's file that it replaces (`old`, None if there is none)."""

    path: str
    kind: str
    mode: int
    old: FileFacts | None
    entry: SnapshotEntry | None = None
    sha256: str = ""
    target: bytes = b""


@dataclass
class _Plan:
    """Decide the steps for each path from the changes and the host's files. It writes nothing."""

    tree: HostTree
    snapshot: Snapshot
    choose: Mapping[str, Choice]
    since_ns: int | None
    writes: dict[str, Change] = field(default_factory=dict)
    removes: dict[str, Change] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    implied: set[str] = field(default_factory=set)
    puts: list[_Staged] = field(default_factory=list)
    takes: list[CommitStep] = field(default_factory=list)
    first_modes: list[CommitStep] = field(default_factory=list)
    last_modes: list[CommitStep] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        return bool(self.puts or self.takes or self.first_modes or self.last_modes)

    def add(self, changes: Sequence[Change]) -> None:
        self._sort(changes)
        self._plan_removes()
        for path in sorted(self.writes, key=os.fsencode):
            self._plan_folders(path)
            self._plan_write(path, self.writes[path])
        if self.conflicts:
            raise conflict_of(self.conflicts)

    def _sort(self, changes: Sequence[Change]) -> None:
        unknown = self.choose.keys() - {change.path for change in changes}
        if unknown:
            raise InvalidRequest(f"no change has this path: {escape_name(min(unknown))}")
        for change in changes:
            for path in filter(None, (change.path, change.old_path)):
                _check(path)
            chosen = self.choose.get(change.path)
            if chosen == "theirs":
                self.left_out[change.path] = KEPT
                continue
            if change.conflict and chosen != "ours":
                self.conflicts[change.path] = change.conflict
                continue
            if change.path in self.writes or (change.what == "removed" and change.path in self.removes):
                raise InvalidRequest(f"two changes have this path: {escape_name(change.path)}")
            if change.what == "removed":
                self.removes[change.path] = change
            else:
                self.writes[change.path] = change
            if change.what == "renamed":
                self.removes.setdefault(change.old_path, change)

    def _plan_removes(self) -> None:
        """Plan removals, the deepest first. A path that is also written is exchanged instead, and its parents stay."""
        stays = {above for path in self.writes for above in (path, *_above(path))}
        for path in sorted(self.removes, key=lambda path: (-path.count("/"), os.fsencode(path))):
            if path in stays:
                continue
            old = self._facts(path, self.removes[path])
            if old is None:
                continue
            if old.is_folder and (inside := self._stays_inside(path)):
                self.left_out[path] = (
                    f"it has files on the host that the sandbox has not removed ({escape_name(inside)})"
                )
                continue
            self.takes.append(CommitStep(do="take", path=path, was=old))

    def _stays_inside(self, path: str) -> str:
        """Return a name in a host folder that is not planned to be removed, or an empty string."""
        for name in sorted(os.fsdecode(entry_name) for entry_name, _ in self.tree.names(path)):
            if (inside := f"{path}/{name}") not in self.removes or inside in self.left_out:
                return name
        return ""

    def _plan_folders(self, path: str) -> None:
        """Plan the parents of a path that neither the host nor a change has."""
        for above in _above(path):
            if above in self.writes or above in self.conflicts:
                continue
            facts = self.tree.look(above)
            if facts is None:
                self._plan_implied(above)
            elif not stat.S_ISDIR(facts.st_mode):
                self.conflicts[path] = _ABOVE

    def _plan_implied(self, path: str) -> None:
        """Plan a parent folder that no change names, with the mode that the sandbox has for it."""
        if path in self.implied:
            return
        self.implied.add(path)
        entry = self.snapshot.entries.get(os.fsencode(path))
        mode = entry.mode & 0o777 if entry is not None and entry.kind == "directory" else _FOLDER_MODE
        self._put_folder(path, mode, None)

    def _plan_write(self, path: str, change: Change) -> None:
        old = self._facts(path, change)
        if path in self.conflicts:
            return
        if change.kind == "directory":
            self._plan_folder(path, change, old)
            return
        if old is not None and old.is_folder and self._stays_inside(path):
            self.conflicts[path] = _FILLED
            return
        entry = self.snapshot.entries.get(os.fsencode(path))
        mode = change.mode & 0o777
        if change.what == "mode" and change.kind == "file" and old is not None and self._has_one_name(path):
            self._mode_step(path, old, mode)
        elif entry is None or entry.kind != change.kind or entry.problem:
            raise InvalidRequest(f"the snapshot has no content for {escape_name(path)}; make a new diff")
        elif change.kind == "link" and entry.target != os.fsencode(change.target):
            raise InvalidRequest(f"the snapshot has another target for {escape_name(path)}; make a new diff")
        else:
            self.puts.append(
                _Staged(
                    path=path,
                    kind=change.kind,
                    mode=mode,
                    old=old,
                    entry=entry,
                    sha256=change.sha256 or entry.sha256,
                    target=entry.target,
                )
            )

    def _plan_folder(self, path: str, change: Change, old: FileFacts | None) -> None:
        mode = change.mode & 0o777
        if old is None or not old.is_folder:
            self._put_folder(path, mode, old)
        elif change.what != "added" and stat.S_IMODE(old.mode) & 0o777 != mode:
            self._mode_step(path, old, mode)

    def _put_folder(self, path: str, mode: int, old: FileFacts | None) -> None:
        """Plan a new folder. Its owner may write to it until its contents are written."""
        self.puts.append(_Staged(path=path, kind="directory", mode=mode | 0o700, old=old))
        if mode & 0o700 != 0o700:
            self.last_modes.append(CommitStep(do="chmod", path=path, mode=mode))

    def _mode_step(self, path: str, old: FileFacts, mode: int) -> None:
        """Plan new permission bits: those that make a folder writable come first, all others last."""
        planned = CommitStep(do="chmod", path=path, was=old, mode=mode)
        (self.first_modes if old.is_folder and mode & 0o300 == 0o300 else self.last_modes).append(planned)

    def _has_one_name(self, path: str) -> bool:
        stat_result = self.tree.look(path)
        return stat_result is not None and stat_result.st_nlink == 1

    def _facts(self, path: str, change: Change) -> FileFacts | None:
        """Look at the host's path, and note a conflict if it is not the file that the change was based on."""
        stat_result = self.tree.look(path)
        facts = None if stat_result is None else FileFacts.of(stat_result)
        if self.choose.get(change.path) != "ours" and (why := self._differs(path, change, facts)):
            self.conflicts[change.path] = why
        return facts

    def _differs(self, path: str, change: Change, facts: FileFacts | None) -> str:
        is_new = change.what in {"added", "renamed"} and path == change.path
        if facts is None:
            return "" if is_new or change.what == "removed" else _GONE
        if is_new and not (facts.is_folder and change.kind == "directory") and path not in self.removes:
            return _APPEARED
        if change.what in {"removed", "mode"} and facts.is_folder != (change.kind == "directory"):
            return _CHANGED
        if facts.is_folder:
            return ""
        if self.since_ns is not None and facts.ctime_ns >= self.since_ns:
            return _CHANGED
        is_file = stat.S_ISREG(facts.mode) and change.kind == "file" and not is_new
        return _CHANGED if is_file and change.old_size and change.old_size != facts.size else ""


class _Commit:
    def __init__(
        self,
        tree: HostTree,
        snapshot: Snapshot,
        plan: _Plan,
        records_fd: int,
        owner: tuple[int, int],
        step: Callable[[str], None],
    ):
        self.tree, self.snapshot, self.plan = tree, snapshot, plan
        self.records_fd, self.owner, self.step = records_fd, owner, step
        self.key = journals.key_of(tree.facts)
        self.has_stage = False
        self.moved: set[int] = set()  # inodes whose change time this commit has updated
        self.journal = Journal(
            state="intent",
            path=os.readlink(f"/proc/self/fd/{tree.fd}"),
            dev=tree.facts.st_dev,
            ino=tree.facts.st_ino,
            boot=journals.boot_id(),
            stage=f".cloche-{os.urandom(16).hex()}",
        )

    def run(self) -> None:
        """Carry out all steps. If it raises, the folder is unchanged, unless the message says otherwise."""
        try:
            self._write("intent")
            stage = self._make_stage()
        except BaseException:
            if self.has_stage:
                with suppress(OSError):
                    os.rmdir(self.journal.stage, dir_fd=self.tree.fd)
            journals.remove(self.records_fd, self.key)
            raise
        try:
            self._run(stage)
        finally:
            os.close(stage)

    def _run(self, stage: int) -> None:
        try:
            steps = self._stage_all(stage)
            self._write("applying", steps=steps)
        except BaseException:
            self._clear(stage)
            raise
        try:
            self._apply(stage, steps)
        except BaseException as error:
            self._undo(stage, error)
            raise
        try:
            self._write("done", steps=())
        except OSError as error:
            raise WorkspaceFailed(
                f"all files were written, but the journal was not updated: {error.strerror}. {_LATER}"
            ) from error
        try:
            self._clear(stage)
        except OSError as error:
            log.warning("all files were written; %s is removed later: %s", self.journal.stage, error)

    def _undo(self, stage: int, error: BaseException) -> None:
        """Undo all steps after an error, and add a note to it if some host files could not be restored."""
        try:
            not_restored = undo_durably(self.tree, stage, self.records_fd, self.key, self.journal, self.step)
        except OSError as failed:
            why = f"the commit failed, and could not be undone now ({failed.strerror}). {_LATER}"
            raise WorkspaceFailed(why) from error
        if not_restored:
            error.add_note(f"{self.journal.stage} stays in the folder, {kept_sentence(not_restored)}")
        else:
            self._clear(stage)

    def _write(self, state: journals.State, **changes: object) -> None:
        self.step(f"write {state}")
        self.journal = journals.advanced(self.journal, state, **changes)
        journals.write(self.records_fd, self.key, self.journal)
        self.step(f"written {state}")

    def _make_stage(self) -> int:
        name = self.journal.stage
        os.mkdir(name, 0o700, dir_fd=self.tree.fd)
        self.has_stage = True
        self.step("stage")
        fd = hostfs.open_folder(name, self.tree.fd)
        try:
            stage_facts = os.fstat(fd)
            if stage_facts.st_uid != os.geteuid() or os.listdir(fd):
                raise WorkspaceFailed(f"{name} is not the folder that Cloche created")
            os.fchmod(fd, 0o700)
            self._write("staging", stage_ino=stage_facts.st_ino)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _clear(self, stage: int) -> None:
        if not remove_stage(self.tree, stage, self.journal.stage, self.step):
            log.warning("%s stays in the folder, since not all of it could be removed", self.journal.stage)
        self.step("cleared")
        journals.remove(self.records_fd, self.key)

    # The stage.

    def _stage_all(self, stage: int) -> tuple[CommitStep, ...]:
        """Write new content into the stage, sync it, and return the steps with the facts of the staged files."""
        puts = [self._stage(stage, number, staged) for number, staged in enumerate(self.plan.puts)]
        self.step("staged")
        if len(puts) > MOST_SYNCED:
            sync_file_system(stage)
        os.fsync(stage)
        self.step("synced")
        first = len(puts)
        takes = [replace(planned, slot=f"n{number}") for number, planned in enumerate(self.plan.takes, first)]
        new_facts = {put.path: put.new for put in puts}
        modes = [replace(planned, was=planned.was or new_facts.get(planned.path)) for planned in self.plan.last_modes]
        return (*self.plan.first_modes, *takes, *puts, *modes)

    def _stage(self, stage: int, number: int, staged: _Staged) -> CommitStep:
        slot = f"n{number}"
        if staged.kind == "directory":
            os.mkdir(slot, 0o700, dir_fd=stage)
            fd = hostfs.open_folder(slot, stage)
            try:
                self._own(fd, staged.mode)
            finally:
                os.close(fd)
        elif staged.kind == "link":
            os.symlink(staged.target, slot, dir_fd=stage)
            self._give(slot, stage)
        else:
            self._stage_file(stage, slot, staged)
        self.step(f"stage {slot}")
        return CommitStep(do="put", path=staged.path, slot=slot, was=staged.old, new=facts_of(slot, stage))

    def _stage_file(self, stage: int, slot: str, staged: _Staged) -> None:
        if staged.entry is None:
            raise WorkspaceFailed(f"no content is known for {escape_name(staged.path)}")
        digest = hashlib.sha256()
        with hostfs.new_file(stage, 0o600, name=slot) as (_, file), file:
            for piece in self.snapshot.read(staged.entry):
                digest.update(piece)
                file.write(piece)
            file.flush()
            if digest.hexdigest() != staged.sha256:
                raise InvalidRequest(f"{escape_name(staged.path)} has changed since the comparison; compare again")
            self._own(file.fileno(), staged.mode)
            if len(self.plan.puts) <= MOST_SYNCED:
                os.fsync(file.fileno())

    def _own(self, fd: int, mode: int) -> None:
        """Set owner and permission bits of a staged file; set-user-ID and set-group-ID bits are never set."""
        self._give(fd, None)
        os.fchmod(fd, mode & 0o777)

    def _give(self, target: int | str, dir_fd: int | None) -> None:
        uid, gid = self.owner
        if self.owner == (os.geteuid(), os.getegid()):
            return  # new files have this owner already
        if os.geteuid() == 0:
            os.chown(target, uid, gid, dir_fd=dir_fd, follow_symlinks=dir_fd is None)
        else:
            with suppress(
                PermissionError
            ):  # chown(2): an unprivileged owner may only choose a group that it is a member of
                os.chown(target, -1, gid, dir_fd=dir_fd, follow_symlinks=dir_fd is None)

    # The host's files.

    def _apply(self, stage: int, steps: tuple[CommitStep, ...]) -> None:
        for number, planned in enumerate(steps):
            self.step(f"before {number}")
            try:
                self._do(stage, planned)
            except OSError as error:
                if error.errno in _OVERTAKEN:
                    raise conflict_of({planned.path: _CHANGED}) from error
                raise
            self.step(f"after {number}")
        for planned in steps:
            if planned.do != "chmod":
                _check_out(stage, planned)
        sync_folders(self.tree, steps)
        os.fsync(stage)
        self.step("folders synced")

    def _do(self, stage: int, planned: CommitStep) -> None:
        if planned.do == "chmod":
            self._chmod(planned)
            return
        parent_fd, name = self.tree.parent(planned.path)
        self._check_in(planned, facts_of(name, parent_fd))
        self.step(f"between {planned.path}")
        if planned.do == "take":
            rename_new(name, parent_fd, planned.slot, stage)
        elif planned.was is None:
            rename_new(planned.slot, stage, name, parent_fd)
        else:
            exchange(planned.slot, stage, name, parent_fd)
        if planned.new is not None and (now := facts_of(name, parent_fd)) is not None and now.ino != planned.new.ino:
            raise conflict_of({planned.path: _CHANGED})
        _check_out(stage, planned)
        if planned.was is not None:
            self.moved.add(planned.was.ino)

    def _check_in(self, planned: CommitStep, present: FileFacts | None) -> None:
        """Raise WorkspaceConflict unless the path still has the file that the plan saw."""
        if planned.was is None:
            if present is not None:
                raise conflict_of({planned.path: _APPEARED})
        elif not planned.was.is_same(present, with_ctime=planned.was.ino not in self.moved):
            raise conflict_of({planned.path: _GONE if present is None else _CHANGED})

    def _chmod(self, planned: CommitStep) -> None:
        stat_result = self.tree.look(planned.path)
        present = None if stat_result is None else FileFacts.of(stat_result)
        self._check_in(planned, present)
        if present is None or not self.tree.set_mode(planned.path, present.ino, planned.mode):
            raise conflict_of({planned.path: _CHANGED})
        self.moved.add(present.ino)


def _check_out(stage: int, planned: CommitStep) -> None:
    """Raise WorkspaceConflict unless the file that the rename moved into the stage is the planned one, and
    unmodified.
    """
    displaced = facts_of(planned.slot, stage)
    if planned.was is None:
        is_same = displaced is None
    else:
        is_same = planned.was.is_same(displaced, with_ctime=False)
        if is_same and planned.was.is_folder:
            is_same = not names_in(planned.slot, stage)
    if not is_same:
        raise conflict_of({planned.path: _CHANGED})


def _above(path: str) -> Iterator[str]:
    names = path.split("/")
    for depth in range(1, len(names)):
        yield "/".join(names[:depth])


def _check(path: str) -> None:
    """Refuse a path that could leave the folder, and git's own files, which only `git.py` writes."""
    try:
        names = journals.names_of(path)
    except ValueError as error:
        raise InvalidRequest(f"not a path in a workspace: {escape_name(path)}") from error
    if any(name.lower() == ".git" for name in names):
        raise InvalidRequest(f"files of git's own are never written: {escape_name(path)}")
