"""The steps of an agent: how its view of the folder differs from one archive to the next.

    saved/steps/00000012.json    when, why, the changed files, and a patch up to a bound

A step is made from two archives on the disk, so the agent's processes are not stopped for it. A file that the earlier
archive does not have is compared with the host's. All text is the guest's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from cloche import hostfs
from cloche.core.changes import Change, FileKind
from cloche.core.record import asdict, dataclass
from cloche.workspace.host_files import HostTree
from cloche.workspace.lines import Work
from cloche.workspace.patch import make_patch
from cloche.workspace.snapshot import Snapshot, SnapshotEntry

from .archives import Archive, archives, read_archive
from .places import AgentPlace

FOLDER, SUFFIX = "steps", ".json"
KEPT, MOST_PATCH_BYTES, MOST_FILES, MOST_LINE_STEPS = 200, 256 << 10, 1000, 300_000
MOST_STEP_BYTES = 4 << 20
_KINDS: dict[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "directory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """Name a file that a step has changed: added, removed, modified, or restored to the host's version."""

    path: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold one step: the time (seconds since 1970), why the archive was saved, the changed files, and their patch.

    `count` is the number of changed files, `files` the first of them. `is_cut`: the patch does not have all.
    """

    number: int
    saved_at: float
    reason: str
    count: int
    files: tuple[StepFile, ...] = ()
    patch: str = ""
    is_cut: bool = False


def note_step(
    place: AgentPlace, archive: Archive, snapshots: tuple[Snapshot | None, Snapshot | None] = (None, None)
) -> Step | None:
    """Write down the changes between the archive before this one and this one; None without changes. Blocks.

    `snapshots` are those of both archives, where the caller has them: they are not read from the disk then. Raises
    InvalidRequest for a damaged archive, OSError.
    """
    with ExitStack() as stack:
        before, after = snapshots
        earlier = None if before is not None else _earlier(place, archive)
        if after is None:
            after = stack.enter_context(_opened(archive))
        if before is None:
            before = stack.enter_context(_opened(earlier)) if earlier is not None else Snapshot()
        step = _compare(archive, before, after)
    if step.count:
        _write(place, step)
    return step if step.count else None


def _earlier(place: AgentPlace, archive: Archive) -> Archive | None:
    earlier = next((found for found in archives(place) if found.number < archive.number), None)
    return earlier if earlier is not None and earlier.folder == archive.folder else None


@contextmanager
def _opened(archive: Archive) -> Iterator[Snapshot]:
    snapshot, _ = read_archive(archive)
    try:
        yield snapshot
    finally:
        snapshot.close()


def steps(place: AgentPlace) -> tuple[Step, ...]:
    """Return the steps of an agent, the oldest first; damaged ones are passed over."""
    folder = f"{place.saved}/{FOLDER}"
    found = []
    for number in _numbers(folder):
        try:
            with open(f"{folder}/{number:08d}{SUFFIX}", "rb") as file:
                row = json.loads(file.read(MOST_STEP_BYTES).decode("utf-8", "surrogateescape"))
            found.append(Step(**{**row, "files": tuple(StepFile(**named) for named in row["files"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return tuple(found)


def _compare(archive: Archive, before: Snapshot, after: Snapshot) -> Step:
    folder_fd = hostfs.open_folder(archive.folder)
    try:
        with HostTree(folder_fd) as tree:
            old = _View(before, tree)
            gone = [*_gone(before, _View(after, tree))]
            changes = [*_changes(old, after), *(change for change in gone if change.what == "removed")]
            patch = make_patch(
                changes[:MOST_FILES], after, cast("HostTree", old), max_bytes=MOST_PATCH_BYTES,
                work=Work(MOST_LINE_STEPS),
            )  # fmt: skip
    finally:
        os.close(folder_fd)
    names = [StepFile(path=change.path, what=change.what) for change in changes]
    names += [StepFile(path=change.path, what="restored") for change in gone if change.what != "removed"]
    return Step(
        number=archive.number, saved_at=archive.saved_at, reason=archive.reason, count=len(names),
        files=tuple(names[:MOST_FILES]), patch=patch.text, is_cut=patch.is_cut or len(changes) > MOST_FILES,
    )  # fmt: skip


class _View:
    """Read files as the sandbox had them at one time: from the archive, else from the host."""

    def __init__(self, snapshot: Snapshot, tree: HostTree):
        self.snapshot, self.tree = snapshot, tree

    def read(self, path: bytes | str) -> Iterator[bytes]:
        entry = self.snapshot.entries.get(os.fsencode(path))
        return self.tree.read(path) if entry is None else self.snapshot.read(entry)

    def facts(self, path: bytes) -> tuple[FileKind | None, int, int, bytes]:
        """Return kind, mode, size and target; the kind is None without a file."""
        entry = self.snapshot.entries.get(path)
        if entry is not None:
            return _kind(entry), entry.mode & 0o777, entry.size, entry.target
        if any(above in self.snapshot.entries and _hides(self.snapshot.entries[above]) for above in _above(path)):
            return None, 0, 0, b""
        try:
            state = self.tree.look(path)
            kind = None if state is None else _KINDS.get(stat.S_IFMT(state.st_mode))
            if state is None or kind is None:
                return None, 0, 0, b""
            target = self.tree.target(path) if kind == "link" else b""
            return kind, state.st_mode & 0o777, state.st_size, target
        except OSError:
            return None, 0, 0, b""


def _above(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def _hides(entry: SnapshotEntry) -> bool:
    return entry.kind in ("removed", "file", "link") or entry.is_opaque


def _kind(entry: SnapshotEntry) -> FileKind | None:
    return cast("FileKind", entry.kind) if entry.kind in _KINDS.values() and not entry.problem else None


def _gone(before: Snapshot, now: _View) -> Iterator[Change]:
    """Yield the files that only the earlier archive has: removed, or modified if the host's version is there again."""
    for path, entry in before.entries.items():
        kind = _kind(entry)
        if path in now.snapshot.entries or kind in (None, "directory") or path.partition(b"/")[0] == b".git":
            continue
        yield Change(
            path=os.fsdecode(path), what="modified" if now.facts(path)[0] else "removed", kind=kind,
            old_mode=entry.mode & 0o777, old_size=entry.size, old_target=os.fsdecode(entry.target),
        )  # fmt: skip


def _changes(old: _View, after: Snapshot) -> Iterator[Change]:
    """Yield the changed files and links, and removed folders; git's own files are left out."""
    for path, entry in after.entries.items():
        was = old.snapshot.entries.get(path)
        if path.partition(b"/")[0] == b".git" or (was is not None and _same(was, entry)):
            continue
        kind, name = _kind(entry), os.fsdecode(path)
        old_kind, old_mode, old_size, old_target = old.facts(path)
        before: dict[str, Any] = {"old_mode": old_mode, "old_size": old_size, "old_target": os.fsdecode(old_target)}
        is_gone = kind is None or (kind == "directory" and (old_kind != "directory" or entry.is_opaque))
        if is_gone and old_kind is not None:
            yield Change(path=name, what="removed", kind=old_kind, **before)
        if kind is not None and kind != "directory":
            yield Change(
                path=name, what="modified" if old_kind else "added", kind=kind, mode=entry.mode & 0o777,
                size=entry.size, target=os.fsdecode(entry.target),
                old_kind=old_kind if old_kind and old_kind != kind else "", **before,
            )  # fmt: skip


def _same(was: SnapshotEntry, now: SnapshotEntry) -> bool:
    facts = ((entry.kind, entry.mode, entry.sha256, entry.target, entry.is_opaque) for entry in (was, now))
    return len(set(facts)) == 1


def _write(place: AgentPlace, step: Step) -> None:
    folder = f"{place.saved}/{FOLDER}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    row: dict[str, Any] = asdict(step)
    folder_fd = hostfs.open_folder(folder)
    try:
        data = json.dumps(row, ensure_ascii=True).encode()
        hostfs.replace(folder_fd, f"{step.number:08d}{SUFFIX}", data, mode=0o600, permissions=0o600)
        for number in _numbers(folder)[:-KEPT]:
            os.unlink(f"{number:08d}{SUFFIX}", dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _numbers(folder: str) -> list[int]:
    try:
        names = [name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())
