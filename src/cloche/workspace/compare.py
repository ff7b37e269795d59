"""Compare a sandbox's entries with the host's folder: the changes that a commit would make to each path.

Theory of operation: the snapshot's entries are visited in tree order, and each is looked up in the host's folder. The
host's own files are listed only where the sandbox hides them (a whiteout, an opaque folder, a whole snapshot). An entry
that equals the host's file is no change, even if it was rewritten. Each path has at most one change; a path whose type
changes is `modified`, with the old type in `old_kind`. A removed folder has a `removed` change for itself and each path
below it; if one of those must stay, the folder is left out instead. Changes come in tree order, folders before their
contents. To apply them, carry out the removals first, from the end, and then the others from the start.

If a path is left out, everything below it is left out too, except for folders that stay only because of their contents.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..core.changes import Change, ChangeType, Diff, FileKind, LeftOut, Question
from ..core.languages import is_program_file
from ..core.record import dataclass, field, replace
from .danger_table import GIT as GIT_READS
from .danger_table import RANKED, UNKNOWN, DangerRow
from .danger_table import TWIN as TWIN_ELSEWHERE
from .dangers import dangers_of, may_steer_git
from .host_files import MOST_DEPTH, HostTree, folded, takes_names_for_equal
from .host_links import fold
from .host_names import find_names, reasons_of_link
from .patch import make_patch
from .rows import Rows, StoredValues, place_of
from .snapshot import MODES, Snapshot, SnapshotEntry

MOST_HELD = 20_000  # changes in memory; more are read from disk
MOST_REMOVED = 500_000  # host paths in one comparison
MOST_HASHED_BYTES = 512 << 20  # of removed files, to detect renames
SET_ID = stat.S_ISUID | stat.S_ISGID
KINDS: Mapping[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}

HIDDEN = "it is hidden from the sandbox"
GIT = "it is git's own: commits are transferred by git, not as files"
BYTECODE = "it is Python's bytecode, which may be of other code than its source, and is made anew"
SPECIAL = "it is neither a file, a folder nor a link"
SPECIAL_ON_HOST = "what the host has there is neither a file, a folder nor a link"
TWIN = "the host's file system takes its name and another one, which differ in case or form alone, for the same"
HOLDS_OTHERS = "it contains files that are not part of the changes"
TOO_MANY_REMOVED = f"more than {MOST_REMOVED} paths would be removed"
TOO_DEEP = "it is too deep, or its path is too long, to be looked into"
NO_SET_ID = "its set-user-ID and set-group-ID bits are never transferred"
PARTIAL = "it has more entries than were compared; the rest is missing"
CHANGED = "the host's has changed since the sandbox began"
NEW_ON_HOST = "the sandbox does not have it, and the host has made or changed it since the sandbox began"
GONE = "the host's is gone since the sandbox began"
CHANGED_BELOW = "what the host has in it has changed since the sandbox began"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Changes by path, and the paths that were left out, both in tree order."""

    by_path: Rows[Change] = field(default_factory=lambda: Rows(Change))
    left_out: tuple[LeftOut, ...] = ()

    @property
    def changes(self) -> Sequence[Change]:
        return StoredValues(self.by_path)


def compare(
    snapshot: Snapshot,
    folder: int,
    *,
    hidden: Collection[str] = (),
    opened_ns: int | Callable[[str], int] | None = None,
    committed: Mapping[str, tuple[int, int]] | None = None,
    stale: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Comparison:
    """Compare a snapshot with an open folder of the host.

    A host file changed at `opened_ns` or later is a conflict, unless `committed` has its inode and change time (ns)
    from an earlier commit; a function gives the time for each path. So is what is at or below a path of `stale`. The
    caller subtracts one clock tick from the time. An exception from `check` ends the comparison.
    """
    with HostTree(folder, check) as tree:
        comparing = _Comparing(snapshot, tree, frozenset(map(os.fsencode, hidden)), opened_ns, committed or {}, stale)
        return comparing.run()


def make_diff(
    snapshot: Snapshot,
    folder: int,
    *,
    hidden: Collection[str] = (),
    opened_ns: int | Callable[[str], int] | None = None,
    committed: Mapping[str, tuple[int, int]] | None = None,
    stale: Collection[str] = (),
    branches: Collection[Change] = (),
    check: Callable[[], None] = lambda: None,
) -> Diff:
    """Compare, and return everything that is shown: changes, patch, dangers, and the hash that identifies the diff.

    `branches` are additional changes for the guest's branches. More than MOST_HELD changes stay in a temporary file.
    """
    comparison = compare(
        snapshot, folder, hidden=hidden, opened_ns=opened_ns, committed=committed, stale=stale, check=check
    )
    rows = comparison.by_path
    with HostTree(folder, check) as tree:
        patch = make_patch(rows.values(), snapshot, tree, check=check)
        judging = _Judging(rows, snapshot, tree, folder, hidden, check) if rows else None
        for path, change in rows.items():
            if judging is not None:
                judged = judging.judged(change, is_text=patch.is_text.get(change.path, change.is_text))
                if judged is not change:
                    rows[path] = judged
    for change in branches:
        rows[os.fsencode(change.path)] = change
    changes = comparison.changes
    if len(changes) <= MOST_HELD:
        changes = tuple(changes)
    return Diff(
        id=identify(changes), changes=changes, left_out=comparison.left_out, patch=patch.text, is_cut=patch.is_cut,
        questions=questions_of(changes),
    )  # fmt: skip


class _Judging:
    def __init__(
        self,
        changes: Rows[Change],
        snapshot: Snapshot,
        tree: HostTree,
        folder: int,
        hidden: Iterable[str],
        check: Callable[[], None],
    ):
        self.snapshot, self.tree, self.check = snapshot, tree, check
        self.names = find_names(folder, changes.values(), check)
        self.hidden = sorted(map(fold, hidden))
        self.twins = self._find_twins(changes)

    def judged(self, change: Change, *, is_text: bool) -> Change:
        """Return a change with its dangers, or the same object if nothing differs, since there may be a million."""
        self.check()
        host_reasons: set[str] = set()
        reached: set[str] = set()

        def rows_by_other_names(path: str) -> Collection[DangerRow]:
            rows = self.names.rows_for(path)
            reached.update(rows.values())
            return rows

        if not self.names.is_complete and (change.kind != "directory" or change.old_kind):
            host_reasons.add(UNKNOWN)
        if change.path in self.twins:
            host_reasons.add(TWIN_ELSEWHERE)
        if self._is_of_repository(change):
            host_reasons.add(GIT_READS)
        if change.kind == "link" and change.what != "removed":
            rows = self.names.rows_for_link(change.path)
            reached.update(rows.values())
            host_reasons.update(row.reason for row in rows)
            host_reasons |= reasons_of_link(change, self.names, self.hidden)
        dangers = dangers_of(change, rows_by_other_names=rows_by_other_names, host_reasons=host_reasons)
        if not dangers and is_text == change.is_text:
            return change
        return replace(change, dangers=dangers, reached_as=tuple(sorted(reached)) if dangers else (), is_text=is_text)

    def _is_of_repository(self, change: Change) -> bool:
        if not may_steer_git(change):
            return False
        above, _, _ = os.fsencode(change.path).rpartition(b"/")
        head = above + b"/HEAD"
        try:
            return not above or head in self.snapshot.entries or self.tree.look(head) is not None
        except OSError:
            return True

    def _find_twins(self, changes: Rows[Change]) -> set[str]:
        """Return new paths that differ from another name only in case or Unicode normal form.

        The first pass hashes all names (8 bytes each); the second compares only names whose hash occurs twice.
        """
        hashes, folders = array("q"), set[bytes]()
        renamed: set[bytes] = set()  # old paths
        for path, change in changes.items():
            self.check()
            if change.what in ("added", "renamed"):
                above, _, name = path.rpartition(b"/")
                folders.add(above)
                hashes.append(_folded_hash(above, name))
            if change.what == "renamed":
                renamed.add(os.fsencode(change.old_path))
        for above, name in self._names_on_host(folders):
            hashes.append(_folded_hash(above, name))
        twice = _twice(hashes)
        if not twice:
            return set()
        new: dict[bytes, set[bytes]] = defaultdict(set)
        on_host: dict[bytes, set[bytes]] = defaultdict(set)
        for path, change in changes.items():
            above, _, name = path.rpartition(b"/")
            if change.what in ("added", "renamed") and _folded_hash(above, name) in twice:
                new[above].add(name)
        for above, name in self._names_on_host(new):
            path = above + b"/" + name if above else name
            if _folded_hash(above, name) in twice and path not in renamed:
                change_there = changes.get(path)
                if change_there is None or change_there.what != "removed":
                    on_host[above].add(name)
        return {
            os.fsdecode(above + b"/" + name if above else name)
            for above, names in new.items()
            for name in find_twins(names, on_host[above])
        }

    def _names_on_host(self, folders: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for above in folders:
            self.check()
            with suppress(OSError):
                yield from ((above, name) for name, _ in self.tree.names(above))


def _folded_hash(above: bytes, name: bytes) -> int:
    return hash((above, folded(name)))


def _twice(hashes: array[int]) -> set[int]:
    """Return the values that occur more than once. Each partition is sorted separately to bound memory."""
    repeated, partitions = set(), 1 + len(hashes) // 200_000
    for partition in range(partitions):
        before = None
        for current in sorted(name_hash for name_hash in hashes if name_hash % partitions == partition):
            if current == before:
                repeated.add(current)
            before = current
    return repeated


def questions_of(changes: Iterable[Change]) -> tuple[Question, ...]:
    """Return the questions to ask about changes: each change once, under its gravest danger."""
    paths: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        if change.dangers:
            paths[change.dangers[0]].append(change.path)
    order = (
        *(reason for reason in paths if reason not in RANKED),
        *RANKED,
    )  # reasons without a rank come from git's commits
    return tuple(Question(reason=reason, paths=tuple(paths[reason])) for reason in order if reason in paths)


def identify(changes: Iterable[Change]) -> str:
    """Return a SHA-256 over paths, kinds, modes and contents of changes in tree order."""
    digest = hashlib.sha256()
    for change in changes:
        hashed_fields = (
            change.path, change.what, change.kind, str(change.mode), change.sha256, change.target, change.old_path,
        )  # fmt: skip
        for text in map(os.fsencode, hashed_fields):
            digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


def is_git(name: bytes) -> bool:
    """Tell whether a name is `.git` to a case-insensitive file system, or to one that drops trailing dots and
    blanks.
    """
    return name.rstrip(b". ").lower() == b".git"


def is_bytecode(path: bytes) -> bool:
    """Tell whether Python may run the file at a path in place of the source beside it, which a reviewer reads."""
    name = path.rpartition(b"/")[2].lower()
    return name == b"__pycache__" or name.endswith((b".pyc", b".pyo"))


class _Comparing:
    def __init__(
        self,
        snapshot: Snapshot,
        tree: HostTree,
        hidden: frozenset[bytes],
        opened_ns: int | Callable[[str], int] | None,
        committed: Mapping[str, tuple[int, int]],
        stale: Collection[str],
    ):
        self.snapshot, self.tree, self.hidden = snapshot, tree, hidden
        self.opened_ns, self.committed, self.stale = opened_ns, committed, stale
        self.changes = Rows(Change)
        self.left_out: dict[bytes, str] = {}
        self.blocked: set[bytes] = set()  # left out with everything below
        self.free: set[bytes] = set()  # folders known not to be blocked
        self.to_sweep = [b""] if snapshot.is_whole else []  # folders whose missing files count as removed
        self.swept: set[bytes] = set()
        self.to_remove = MOST_REMOVED

    def run(self) -> Comparison:
        twins = self._find_twins(self.snapshot.entries)
        for path, entry in self.snapshot.entries.items():
            if is_program_file(os.fsdecode(path)) or self._is_blocked(path):
                continue
            if path in twins:
                self._block(path, TWIN)
                continue
            try:
                self._compare(path, entry)
            except OSError as error:
                self._block(path, f"the host's cannot be read: {error.strerror}")
        for path in self.to_sweep:
            self._sweep(path)
        if self.snapshot.is_partial:
            self.left_out[b"."] = PARTIAL
        self._find_renamed()
        return Comparison(
            by_path=self.changes,
            left_out=tuple(
                LeftOut(path=os.fsdecode(path), reason=reason)
                for path, reason in sorted(self.left_out.items(), key=_in_order)
            ),
        )

    # Paths that are never part of the changes.

    def _block(self, path: bytes, reason: str) -> None:
        self.left_out[path] = reason
        self.blocked.add(path)
        self.free.discard(path)

    def _is_blocked(self, path: bytes) -> bool:
        """Tell whether a path may not be changed; the topmost such path is left out with a reason."""
        above, _, name = path.rpartition(b"/")
        if above and above not in self.free:
            if above in self.blocked or self._is_blocked(above):
                return True
            self.free.add(above)
        if path in self.blocked:
            return True
        reason = GIT if is_git(name) else HIDDEN if path in self.hidden else ""
        if reason:
            self._block(path, reason)
        return bool(reason)

    def _find_twins(self, paths: Iterable[bytes]) -> set[bytes]:
        """Return the paths that the host's file system cannot tell from others."""
        folders = {path.rpartition(b"/")[0] for path in paths}
        by_folder: dict[bytes, set[bytes]] = {above: set() for above in folders if self._takes_for_equal(above)}
        for path in paths if by_folder else ():
            above, _, name = path.rpartition(b"/")
            if above in by_folder:
                by_folder[above].add(name)
        twins: set[bytes] = set()
        for above, names in by_folder.items():
            try:
                on_host = {name for name, _ in self.tree.names(above)}
            except OSError:
                continue  # comparing each of its paths raises the same error
            prefix = above + b"/" if above else b""
            twins.update(prefix + name for name in find_twins(names, on_host))
        return twins

    def _takes_for_equal(self, folder: bytes) -> bool:
        try:
            return takes_names_for_equal(self.tree.nearest_folder(os.fsdecode(folder).split("/") if folder else ()))
        except OSError:
            return False

    # One path.

    def _compare(self, path: bytes, entry: SnapshotEntry) -> None:
        if entry.problem:
            self._block(path, entry.problem)
            return
        if entry.kind == "other":
            self._block(path, SPECIAL)
            return
        if entry.kind == "unchanged":
            return
        if entry.kind != "removed" and is_bytecode(path):
            self._block(path, BYTECODE)
            return
        host = self.tree.look(path)
        if entry.kind == "removed":
            if host is not None:
                self._remove(path, host)
            return
        kind: FileKind = entry.kind
        if host is None:
            self._add(path, kind, entry)
        elif stat.S_IFMT(host.st_mode) not in KINDS:
            self._block(path, SPECIAL_ON_HOST)
            return
        elif KINDS[stat.S_IFMT(host.st_mode)] != kind:
            self._replace(path, kind, entry, host)
        elif kind == "directory":
            self._compare_folder(path, entry, host)
        elif kind == "link":
            self._compare_link(path, entry, host)
        else:
            self._compare_file(path, entry, host)
        self._check_set_id(path, entry, host)

    def _add(self, path: bytes, kind: FileKind, entry: SnapshotEntry) -> None:
        is_gone = entry.is_copied and not self.snapshot.is_whole and self._may_be_gone(path)
        conflict = GONE if is_gone or (self.stale and os.fsdecode(path) in self.stale) else ""
        self._change(path, "added", kind, entry, conflict=conflict)

    def _may_be_gone(self, path: bytes) -> bool:
        """Tell whether the host may have removed this file. A file that was moved inside also begins as a copy, but its
        new path never existed on the host.
        """
        since = self._since(path)
        return (
            since is not None
            and os.fstat(self.tree.nearest_folder(os.fsdecode(path).split("/")[:-1])).st_ctime_ns >= since
        )

    def _since(self, path: bytes) -> int | None:
        """Return the time from which on a change of the host's is a conflict."""
        return self.opened_ns(os.fsdecode(path)) if callable(self.opened_ns) else self.opened_ns

    def _replace(self, path: bytes, kind: FileKind, entry: SnapshotEntry, host: os.stat_result) -> None:
        old_kind = KINDS[stat.S_IFMT(host.st_mode)]
        conflict = self._conflict(path, host)
        if old_kind == "directory":
            is_whole, has_changed = self._remove_below(path)
            if not is_whole:
                self._block(path, HOLDS_OTHERS)
                return
            conflict = conflict or (CHANGED_BELOW if has_changed else "")
        self._change(path, "modified", kind, entry, old_kind=old_kind, conflict=conflict, **self._old(path, host))

    def _compare_folder(self, path: bytes, entry: SnapshotEntry, host: os.stat_result) -> None:
        is_as_copied = self.snapshot.is_whole and entry.is_copied
        if not is_as_copied and entry.mode & 0o777 != host.st_mode & 0o777:
            # Any new or removed entry updates a folder's change time, so it cannot show that the mode has changed.
            self._change(path, "mode", "directory", entry, **self._old(path, host))
        if entry.is_opaque:
            self.to_sweep.append(path)

    def _compare_link(self, path: bytes, entry: SnapshotEntry, host: os.stat_result) -> None:
        old = self._old(path, host)
        if old["old_target"] != os.fsdecode(entry.target):
            self._change(path, "modified", "link", entry, conflict=self._conflict(path, host), **old)

    def _compare_file(self, path: bytes, entry: SnapshotEntry, host: os.stat_result) -> None:
        is_equal = entry.size == host.st_size and self._hash(path) == entry.sha256
        if is_equal and entry.mode & 0o777 == host.st_mode & 0o777:
            return
        change_type: ChangeType = "mode" if is_equal else "modified"
        self._change(path, change_type, "file", entry, conflict=self._conflict(path, host), **self._old(path, host))

    def _check_set_id(self, path: bytes, entry: SnapshotEntry, host: os.stat_result | None) -> None:
        """Note set-ID bits that the sandbox added. A new folder is excepted: it inherits set-group-ID from its
        parent.
        """
        if entry.kind == "link" or (entry.kind == "directory" and host is None) or path in self.left_out:
            return
        if entry.mode & SET_ID & ~(host.st_mode if host is not None else 0):
            self.left_out[path] = NO_SET_ID

    def _change(self, path: bytes, change_type: ChangeType, kind: FileKind, entry: SnapshotEntry, **more: Any) -> None:  # noqa: ANN401
        self.changes[path] = Change(
            path=os.fsdecode(path),
            what=change_type,
            kind=kind,
            mode=0 if kind == "link" else MODES[entry.mode & 0o777],
            size=entry.size,
            sha256=entry.sha256,
            target=os.fsdecode(entry.target),
            is_text=entry.is_text,
            **more,
        )

    def _old(self, path: bytes, host: os.stat_result) -> dict[str, Any]:
        is_link, is_file = stat.S_ISLNK(host.st_mode), stat.S_ISREG(host.st_mode)
        return {
            "old_mode": 0 if is_link else MODES[host.st_mode & 0o777],
            "old_size": host.st_size if is_file else 0,
            "old_target": os.fsdecode(self.tree.target(path)) if is_link else "",
        }

    def _hash(self, path: bytes) -> str:
        digest = hashlib.sha256()
        for piece in self.tree.read(path):
            digest.update(piece)
        return digest.hexdigest()

    def _conflict(self, path: bytes, host: os.stat_result) -> str:
        since = self._since(path)
        if not self._is_stale(os.fsdecode(path)) and (since is None or host.st_ctime_ns < since):
            return ""
        return "" if self.committed.get(os.fsdecode(path)) == (host.st_ino, host.st_ctime_ns) else CHANGED

    def _is_stale(self, path: str) -> bool:
        while self.stale and path:
            if path in self.stale:
                return True
            path = path.rpartition("/")[0]
        return False

    # Host paths that the sandbox lacks.

    def _sweep(self, folder: bytes) -> None:
        """Remove host paths that the sandbox lacks, in a folder that shows nothing of the host's."""
        if folder in self.swept:
            return
        self.swept.add(folder)
        try:
            names = self.tree.names(folder)
        except OSError as error:
            self._block(folder or b".", f"the host's cannot be read: {error.strerror}")
            return
        for name, is_folder in names:
            path = folder + b"/" + name if folder else name
            entry = self.snapshot.entries.get(path)
            if is_git(name) or path in self.hidden or path in self.blocked:
                continue  # the sandbox cannot see it
            if entry is None:
                if not self.snapshot.is_partial:
                    self._remove_missing(path)
            elif entry.kind == "directory" and is_folder and path.count(b"/") < MOST_DEPTH:
                self._sweep(path)

    def _remove_missing(self, path: bytes) -> None:
        try:
            host = self.tree.look(path)
            if host is not None:
                self._remove(path, host)
        except OSError as error:
            self._block(path, f"the host's cannot be read: {error.strerror}")

    def _remove(self, path: bytes, host: os.stat_result) -> tuple[bool, bool]:
        """Note the removal of a host path and everything below; tell whether it is complete, and whether any path
        conflicts.
        """
        kind = KINDS.get(stat.S_IFMT(host.st_mode))
        self.to_remove -= 1
        if kind is None or self.to_remove < 0:
            self._block(path, SPECIAL_ON_HOST if kind is None else TOO_MANY_REMOVED)
            return False, False
        conflict = self._conflict(path, host)
        if conflict and self.snapshot.is_whole and kind != "directory":
            self.left_out[path] = NEW_ON_HOST  # most likely it was created after the copy
            return False, True
        if kind == "directory":
            is_whole, has_changed = self._remove_below(path)
            if not is_whole:
                self.left_out.setdefault(path, HOLDS_OTHERS)
                return False, has_changed
            conflict = conflict or (CHANGED_BELOW if has_changed else "")
        self.changes[path] = Change(
            path=os.fsdecode(path), what="removed", kind=kind, conflict=conflict, **self._old(path, host)
        )
        return True, bool(conflict)

    def _remove_below(self, folder: bytes) -> tuple[bool, bool]:
        is_whole, has_changed = True, False
        if folder.count(b"/") >= MOST_DEPTH - 1:
            self._block(folder, TOO_DEEP)
            return False, False
        try:
            names = self.tree.names(folder)
        except OSError as error:
            self._block(folder, f"the host's cannot be read: {error.strerror}")
            return False, False
        for name, _ in names:
            path = folder + b"/" + name
            if is_git(name) or path in self.hidden:
                self._block(path, GIT if is_git(name) else HIDDEN)
                is_whole = False
                continue
            if self.to_remove < 0:
                return False, has_changed
            try:
                host = self.tree.look(path)
            except OSError as error:  # EXDEV: a mount point
                self._block(path, f"the host's cannot be read: {error.strerror}")
                is_whole = False
                continue
            if host is not None:
                goes, changed = self._remove(path, host)
                is_whole, has_changed = is_whole and goes, has_changed or changed
        return is_whole, has_changed

    def _find_renamed(self) -> None:
        """Join an added and a removed file with the same content into one `renamed` change."""
        removed = [
            path
            for path, change in self.changes.items()
            if change.what == "removed" and change.kind == "file" and change.old_size
        ]
        sizes = {self.changes[path].old_size for path in removed}
        added = [
            path
            for path, change in (self.changes.items() if sizes else ())
            if change.what == "added" and change.kind == "file" and change.size in sizes
        ]
        sizes = {self.changes[path].size for path in added}
        bytes_to_hash = MOST_HASHED_BYTES
        by_content: dict[str, list[bytes]] = defaultdict(list)
        for path in removed:
            if (size := self.changes[path].old_size) not in sizes:
                continue
            bytes_to_hash -= size
            if bytes_to_hash < 0:
                break
            try:
                by_content[self._hash(path)].append(path)
            except OSError:
                continue
        for path in sorted(added):
            olds = by_content.get(self.changes[path].sha256)
            if olds:
                name = path.rpartition(b"/")[2]
                old = next((old_path for old_path in olds if old_path.rpartition(b"/")[2] == name), olds[0])
                olds.remove(old)
                self._rename(path, old)

    def _rename(self, path: bytes, old_path: bytes) -> None:
        old = self.changes.pop(old_path)
        self.changes[path] = replace(
            self.changes[path],
            what="renamed",
            old_path=old.path,
            old_mode=old.old_mode,
            old_size=old.old_size,
            conflict=old.conflict,
        )


def _in_order(item: tuple[bytes, object]) -> bytes:
    return place_of(item[0])


def find_twins(names: Collection[bytes], on_host: Collection[bytes]) -> set[bytes]:
    """Return the members of `names` that differ from another member, or from a host name, only in case or Unicode
    form.
    """
    forms: dict[str, set[bytes]] = defaultdict(set)
    for name in (*names, *on_host):
        forms[folded(name)].add(name)
    return {name for name in names if len(forms[folded(name)]) > 1}
