"""Write changes to the host's folder: compare, select, merge, record, write. Everything here blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from cloche import hostfs
from cloche.audit.log import Audit, acting_as
from cloche.config.state import state_file
from cloche.core.changes import Change, Committed, Diff, HostFolder
from cloche.core.errors import BackendUnavailable, InvalidRequest, WorkspaceConflict, WorkspaceFailed
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field, replace

from .open_folder import MOST_TOLD, OpenFolder, after_now, state_folder

if TYPE_CHECKING:
    from cloche.workspace.snapshot import Snapshot, SnapshotEntry

log = logging.getLogger("cloche.workspace")
# Files that record what a sandbox has committed, or what was restored in it; and for how long.
COMMITTED, RESTORED, SHARED, KNOWN_S = "committed-", "restored-", "shared-", 30 * 24 * 3600.0
MOST_MERGED_BYTES = 16 << 20
MOST_NAMED = 10  # paths per danger in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitChoice:
    """The paths to write, and the dangers and conflicts that the caller has decided."""

    paths: Collection[str] | None
    dangerous: bool | Collection[str]
    ours: Collection[str]
    theirs: Collection[str]
    merge: Collection[str] = ()
    hunks: Mapping[str, Collection[str]] = field(default_factory=dict)

    def check(self, diff: Diff) -> tuple[Change, ...]:
        """Return the changes to write. Raises InvalidRequest for a dangerous change that was not approved."""
        for name in ("paths", "ours", "theirs", "merge"):
            if isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name}: give a list of paths, not a string")
        theirs = set(self.theirs)
        chosen = tuple(change for change in selected(diff.changes, self.paths) if change.path not in theirs)
        changed_paths = {change.path for change in diff.changes}
        unknown = sorted({*self.ours, *theirs, *self.merge, *self.hunks} - changed_paths)
        if unknown:
            raise InvalidRequest(f"no change has the path {unknown[0]!r}; the diff lists the changed paths")
        if self.dangerous is not True:
            agreed = set() if self.dangerous is False else set(self.dangerous)
            refused = [change for change in chosen if change.dangers and change.path not in agreed]
            if refused:
                raise InvalidRequest(
                    f"nothing was written: these changes need their own confirmation: {_by_reason(refused, diff)}; "
                    "look at them, then name them (dangerous=[...], --dangerous PATH), or leave them out (paths=[...])"
                )
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOptions:
    """The new branch for the changes, and the commit's author and message.

    `as_user`: author and signature are those of the caller's git configuration, if it has them.
    """

    name: str
    author: str | None
    message: str | None
    as_user: bool = False


def _by_reason(changes: Sequence[Change], diff: Diff) -> str:
    """Return a list of paths, grouped by their gravest danger, with their other dangers; at most MOST_NAMED per
    danger.
    """
    sentences = []
    for question in diff.questions:
        among = [change for change in changes if change.dangers[0] == question.reason]
        if among:
            listed = [
                f"{change.path!r}" + "".join(f" ({also})" for also in change.dangers[1:])
                for change in among[:MOST_NAMED]
            ]
            more = f" and {len(among) - MOST_NAMED} more" if len(among) > MOST_NAMED else ""
            sentences.append(f"{question.reason}: {', '.join(listed)}{more}")
    return "; ".join(sentences)


def selected(
    changes: Sequence[Change], paths: Collection[str] | None, *, with_folders: bool = True
) -> tuple[Change, ...]:
    """Return the changes at or below some paths, with those that create their parent folders.

    Raises InvalidRequest for a path without changes.
    """
    if paths is None:
        return tuple(changes)
    if isinstance(paths, str):
        raise InvalidRequest("paths: give a list of paths, not a string")
    is_met_by_path = {path.rstrip("/"): False for path in paths}
    matching = []
    for change in changes:
        hits = [path for path in above_of(change.path) if path in is_met_by_path]
        for path in hits:
            is_met_by_path[path] = True
        if hits:
            matching.append(change)
    missing = [path for path, is_met in is_met_by_path.items() if not is_met]
    if missing:
        raise InvalidRequest(f"paths: there is no change at {missing[0]!r}; the diff lists the changed paths")
    if not with_folders:
        return tuple(matching)
    needed = {above for change in matching for above in above_of(change.path)}
    parents = [
        change for change in changes if change.path in needed and change.kind == "directory" and change.what == "added"
    ]
    selected_paths = {change.path for change in (*matching, *parents)}
    return tuple(change for change in changes if change.path in selected_paths)


def above_of(path: str) -> Iterator[str]:
    """Yield a path and the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def name_for(name: str | None) -> str:
    """Return the sandbox's name for references and records."""
    return name if name is not None else f"sandbox-{os.urandom(4).hex()}"


def compare(open_folder: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> Diff:
    """Compare a snapshot with the host's folder. `check` raises if the caller was cancelled."""
    from cloche.workspace.compare import make_diff

    folder, shared = open_folder.folder, read_shared(open_folder)
    return make_diff(
        snapshot, open_folder.fd, hidden={*folder.hidden, *folder.left_out}, committed=read_committed(open_folder),
        opened_ns=lambda path: shared.earlier.get(path, shared.at_ns), stale=read_restored(open_folder),
        branches=_dangerous_branches(open_folder, snapshot, check), check=check,
    )  # fmt: skip


def is_of_git(change: Change) -> bool:
    """Tell whether a change stands for a branch. Such a change is imported by git, never written as a file."""
    return change.path.startswith(".git/")


def _dangerous_branches(open_folder: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> tuple[Change, ...]:
    """Return a change for each of the guest's branches whose commits touch a hidden file.

    If git refuses them, the result is empty, and none is fetched either.
    """
    from cloche.workspace.git import touched_files

    if not open_folder.folder.tracked_here or b".git" not in snapshot.entries:
        return ()
    try:
        touched = touched_files(open_folder.fd, snapshot, open_folder.folder.tracked_here, check)
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed):
        return ()
    return tuple(
        Change(
            path=_file_of(branch), what="modified", kind="file", mode=0o644, old_mode=0o644,
            sha256=hashlib.sha256(f"{commit}\n".encode()).hexdigest(), dangers=reasons,
        )
        for branch, (commit, reasons) in sorted(touched.items())
    )  # fmt: skip


def _file_of(branch: str) -> str:
    return ".git/HEAD" if branch == "HEAD" else f".git/refs/heads/{branch}"


def choose(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    expected_id: str | None,
    choice: CommitChoice,
    check: Callable[[], None],
) -> tuple[Snapshot, Diff, tuple[Change, ...]]:
    """Return the chosen changes of a snapshot, the diff that has them, and the snapshot with files of chosen hunks.

    Raises InvalidRequest if the diff is not the expected one, or a dangerous change was not agreed to.
    """
    diff = _compared(open_folder, snapshot, check)
    if expected_id is not None and diff.id != expected_id:
        raise InvalidRequest(
            "nothing was written: the sandbox, or the host, has changed since this diff was made; make a new diff"
        )
    snapshot, chosen = _split(open_folder, snapshot, diff, choice.check(diff), choice.hunks)
    return snapshot, diff, chosen


def _compared(open_folder: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> Diff:
    """Return all changes of a snapshot. Raises InvalidRequest for an incomplete one."""
    diff = compare(open_folder, snapshot, check)
    check()
    if snapshot.is_partial:
        raise InvalidRequest(
            "nothing was written: the sandbox has more changes than can be compared; remove some of its files"
        )
    return diff


def write_changes(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    expected_id: str | None,
    name: str,
    choice: CommitChoice,
    branch: BranchOptions | None,
    audit: Audit | None,
    check: Callable[[], None],
) -> Committed:
    """Write the selected changes of a snapshot; see `HostFolderOperations.commit`."""
    compared_ns = after_now()
    snapshot, diff, chosen = choose(open_folder, snapshot, expected_id, choice, check)
    return _write(open_folder, snapshot, diff, chosen, compared_ns, name, choice, branch, audit, check)


def write_harmless(
    open_folder: OpenFolder, snapshot: Snapshot, name: str, audit: Audit | None, check: Callable[[], None]
) -> tuple[Diff, Committed, frozenset[str]]:
    """Write the changes of a snapshot that need no one's decision; return all changes, what was written, and the
    topmost paths that git ignores: what is there stays in the sandbox, as the host's user would not see it.
    """
    from cloche.workspace.git_ignored import ignored_roots

    compared_ns, choice = after_now(), CommitChoice(paths=None, dangerous=(), ours=(), theirs=())
    diff = _compared(open_folder, snapshot, check)
    chosen = harmless(diff.changes)
    kinds = {os.fsencode(change.path): change.kind == "directory" for change in chosen}
    ignored = frozenset(map(os.fsdecode, ignored_roots(open_folder.fd, kinds, check)))
    chosen = tuple(change for change in chosen if ignored.isdisjoint(above_of(change.path)))
    if not chosen and not _has_references(snapshot):
        return diff, Committed(), ignored
    try:
        committed = _write(open_folder, snapshot, diff, chosen, compared_ns, name, choice, None, audit, check)
    except WorkspaceConflict as error:  # with a change of the host's during the commit
        committed = Committed(left=dict.fromkeys(error.paths, "the host has just changed it, too"))
    return diff, committed, ignored


def harmless(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes that are neither dangerous nor conflicts, and stand without those that are."""
    held = {path for change in changes if not _is_harmless(change) for path in (change.path, change.old_path) if path}
    above_held = {above for path in held for above in above_of(path)}
    return tuple(
        change
        for change in changes
        if _is_harmless(change)
        and not (change.path in above_held and (change.what == "removed" or change.old_kind))
        and held.isdisjoint(above_of(change.path))
    )


def _is_harmless(change: Change) -> bool:
    return not (change.dangers or change.conflict or is_of_git(change))


def _has_references(snapshot: Snapshot) -> bool:
    """Tell whether the guest has written a reference of its repository."""
    return any(path in snapshot.entries for path in (b".git/refs/heads", b".git/packed-refs", b".git/HEAD"))


def _write(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    diff: Diff,
    chosen: tuple[Change, ...],
    compared_ns: int,
    name: str,
    choice: CommitChoice,
    branch: BranchOptions | None,
    audit: Audit | None,
    check: Callable[[], None],
) -> Committed:
    """Record and write chosen changes, on a branch or in the folder, and fetch the guest's commits."""
    from cloche.workspace.commit import KEPT, commit
    from cloche.workspace.git_branch import commit_to_branch
    from cloche.workspace.git_identity import author_of, user_settings

    if audit is not None:
        audit.record(
            "commit", folder=open_folder.folder.path, sandbox=acting_as("sandbox", name), diff=diff.id,
            paths=len(chosen), dangerous=[change.path for change in chosen if change.dangers][:MOST_TOLD],
            branch=branch.name if branch else None,
        )  # fmt: skip
    host_kept = {path: KEPT for path in choice.theirs if not path.startswith(".git/")}
    agreed = {change.path.removeprefix(".git/").removeprefix("refs/heads/") for change in chosen if is_of_git(change)}
    chosen = tuple(change for change in chosen if not is_of_git(change))
    if branch is not None:
        settings = user_settings(open_folder.fd) if branch.as_user else {}
        branch_refs = commit_to_branch(
            open_folder.fd, snapshot, chosen, branch.name, settings=settings,
            author=branch.author or author_of(settings) or "Cloche <cloche@localhost>",
            message=branch.message or f"Changes of {name}",
        )  # fmt: skip
        refs, not_fetched = _fetched(open_folder, snapshot, name, agreed)
        return Committed(refs={**refs, **branch_refs}, left={**host_kept, **not_fetched})
    snapshot, chosen = _merged(open_folder, snapshot, chosen, choice.merge)
    versions: dict[str, Literal["theirs", "ours"]] = dict.fromkeys((*choice.ours, *choice.merge), "ours")
    committed = commit(
        open_folder.fd, snapshot, chosen, state=state_folder(), owner=open_folder.folder.owner, choose=versions,
        unchanged_since_ns=compared_ns,
        # Cancellation stops the commit while it stages files; once it changes the folder, it runs to its end.
        step=lambda step_name: check() if step_name.startswith("stage ") else None,
    )  # fmt: skip
    _note_committed(open_folder, committed.written)
    refs, not_fetched = _fetched(open_folder, snapshot, name, agreed)
    # The caller may not have seen the diff, so its left-out paths are reported here too.
    left_out = {item.path: item.reason for item in diff.left_out if item.path.partition("/")[0] != ".git"}
    return replace(committed, refs=refs, left={**left_out, **host_kept, **committed.left, **not_fetched})


def _merged(
    open_folder: OpenFolder, snapshot: Snapshot, changes: tuple[Change, ...], merge: Collection[str]
) -> tuple[Snapshot, tuple[Change, ...]]:
    """Return snapshot and changes with the files of `merge` merged. Raises WorkspaceConflict."""
    if not merge:
        return snapshot, changes
    from cloche.workspace.git import base_of, merge_text

    to_merge, refused, texts = set(merge), {}, {}
    for change in changes:
        entry = snapshot.entries.get(os.fsencode(change.path))
        if change.path not in to_merge or not change.conflict or entry is None:
            continue
        base, theirs = base_of(open_folder.fd, change.path), _text_of(open_folder.fd, change.path)
        text = None
        if base is not None and theirs is not None and change.kind == "file" and change.size <= MOST_MERGED_BYTES:
            text = merge_text(base, b"".join(snapshot.read(entry)), theirs)
        if text is not None:
            texts[change.path] = text
            continue
        refused[change.path] = "cannot be merged: " + (
            "git has no text version of it" if base is None or theirs is None else "both have changed the same lines"
        )
    if refused:
        listed = "; ".join(f"{escape_name(path)} {why}" for path, why in list(refused.items())[:10])
        raise WorkspaceConflict(f"nothing was written: {listed}", paths=refused)
    return _with_texts(snapshot, changes, texts)


def _split(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    diff: Diff,
    changes: tuple[Change, ...],
    hunks: Mapping[str, Collection[str]],
) -> tuple[Snapshot, tuple[Change, ...]]:
    """Return snapshot and changes where a file of `hunks` has these hunks alone, and its permissions stay.

    Raises InvalidRequest for a change that has no hunks, or not these.
    """
    if not hunks:
        return snapshot, changes
    from cloche.workspace.hunks import apply, chosen_hunks, file_diffs, may_be_split

    by_path, parts, texts = {change.path: change for change in changes}, file_diffs(diff), {}
    for path, ids in hunks.items():
        change, text = by_path.get(path), _text_of(open_folder.fd, path)
        if change is None or not may_be_split(change) or text is None:
            raise InvalidRequest(f"hunks: {escape_name(path)} can be written only as a whole, or not at all")
        try:
            texts[path] = apply(text.decode(), chosen_hunks(parts, path, ids)).encode()
        except (ValueError, LookupError) as error:
            raise InvalidRequest(
                f"nothing was written: {escape_name(path)} has not these hunks; make a new diff"
            ) from error
        by_path[path] = replace(change, mode=change.old_mode)
    return _with_texts(snapshot, tuple(by_path.values()), texts)


def _with_texts(
    snapshot: Snapshot, changes: tuple[Change, ...], texts: Mapping[str, bytes]
) -> tuple[Snapshot, tuple[Change, ...]]:
    """Return snapshot and changes where some files have another text."""
    entries: ChainMap[bytes, SnapshotEntry] = ChainMap({}, cast("dict[bytes, SnapshotEntry]", snapshot.entries))
    hashes: dict[str, str] = {}
    for path, text in texts.items():
        entry, hashes[path] = snapshot.add(entries[os.fsencode(path)], text)
        entries[entry.path] = entry
    with_texts = tuple(
        replace(change, size=len(texts[change.path]), sha256=hashes[change.path]) if change.path in texts else change
        for change in changes
    )
    return replace(snapshot, entries=entries), with_texts


def _text_of(folder: int, path: str) -> bytes | None:
    """Return a host file to merge; None if it is not a regular file, or too large."""
    from cloche.workspace.host_files import HostTree

    try:
        with HostTree(folder) as tree, open(tree.open_regular(path)[0], "rb") as file:
            data = file.read(MOST_MERGED_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MOST_MERGED_BYTES else None


def _fetched(
    open_folder: OpenFolder, snapshot: Snapshot, name: str, agreed: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the references for the guest's commits, and for refused ones the reason."""
    from cloche.workspace.git import fetch_commits

    if b".git" not in snapshot.entries:
        return {}, {}
    try:
        refs, refused = fetch_commits(
            open_folder.fd, snapshot, name, hidden=open_folder.folder.tracked_here, agreed=agreed
        )
        return refs, {_file_of(branch): f"its commits are not fetched: {why}" for branch, why in refused.items()}
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed) as error:
        return {}, {".git": f"commits that were made inside are not fetched: {error}"}


def take_commits(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    source: str,
    branch: str,
    name: str,
    tip: str | None,
    *,
    as_user: bool,
) -> Mapping[str, str]:
    """Make a branch with a guest's commits; see `TrialOperations.take_commits`."""
    from cloche.workspace.git_commits import take_branch
    from cloche.workspace.git_identity import user_settings

    return take_branch(
        open_folder.fd, snapshot, source, branch, name=name, tip=tip, hidden=open_folder.folder.tracked_here,
        settings=user_settings(open_folder.fd) if as_user else {},
    )  # fmt: skip


def recovered() -> list[str]:
    """Complete or undo interrupted commits in all folders; return a sentence for each.

    Notes about the commits of old sandboxes are removed.
    """
    from cloche.workspace.recover import recover_all

    state = state_file("workspaces")
    if state is None or not os.path.isdir(state):
        return []
    for entry in os.scandir(state):
        if (
            entry.name.startswith((COMMITTED, RESTORED, SHARED))
            and entry.stat(follow_symlinks=False).st_mtime < time.time() - KNOWN_S
        ):
            os.unlink(entry.path)
    return recover_all(state)


# Files that the sandbox has committed have changed on the host since it was opened, but are no conflicts.


def _record(folder: HostFolder, kind: str) -> str:
    return os.path.join(state_folder(), f"{kind}{folder.opened_ns}-{folder.identity[0]}-{folder.identity[1]}.json")


def read_committed(open_folder: OpenFolder) -> dict[str, tuple[int, int]]:
    """Return inode and change time (ns) of the files that this sandbox has committed, by path."""
    if open_folder.committed is not None:
        return open_folder.committed
    try:
        with open(_record(open_folder.folder, COMMITTED), "rb") as file:
            return {str(path): (int(row[0]), int(row[1])) for path, row in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("the record of earlier commits cannot be read, so their changes may count as conflicts: %s", error)
        return {}


def _note_committed(open_folder: OpenFolder, written: Sequence[str]) -> None:
    from cloche.workspace.host_files import HostTree

    committed = read_committed(open_folder)
    with HostTree(open_folder.fd) as tree:
        for path in written:
            try:
                state = tree.look(path)
            except OSError:
                state = None
            committed[path] = (state.st_ino, state.st_ctime_ns) if state is not None else (0, 0)
    if open_folder.committed is not None:
        return
    try:
        _keep_record(open_folder, COMMITTED, committed)
    except OSError as error:
        log.warning("this commit cannot be recorded, so its changes will count as conflicts next time: %s", error)


def _keep_record(open_folder: OpenFolder, kind: str, document: object) -> None:
    folder, name = os.path.split(_record(open_folder.folder, kind))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    folder_fd = hostfs.open_folder(folder)
    try:
        hostfs.replace(folder_fd, name, json.dumps(document).encode(), mode=0o600, permissions=0o600)
    finally:
        os.close(folder_fd)


# A sandbox sees the host's files as they were when they were last shared, but those that it had changed itself then.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRecord:
    """Say when a sandbox was shown the host's files (ns), when at other paths, and where the host's branch was then.

    `ignored` are the topmost paths that git ignores and that the sandbox has written to.
    """

    at_ns: int
    earlier: Mapping[str, int] = field(default_factory=dict)
    branch: str = ""
    ignored: Sequence[str] = ()


def read_shared(open_folder: OpenFolder) -> SharedRecord:
    """Return what is noted of the last time; without that, the sandbox was opened then."""
    opened = SharedRecord(at_ns=open_folder.folder.opened_ns)
    if open_folder.committed is not None:
        return opened
    try:
        with open(_record(open_folder.folder, SHARED), "rb") as file:
            return SharedRecord(**json.load(file))
    except FileNotFoundError:
        return opened
    except (OSError, ValueError, TypeError) as error:
        log.warning(
            "the record of what was shared cannot be read, so changes of the host count as conflicts: %s", error
        )
        return opened


def note_shared(
    open_folder: OpenFolder, at_ns: int, changed: Collection[str], branch: str, ignored: Collection[str]
) -> None:
    """Record that the host's files were shown inside, but at the paths that are changed there. Raises OSError."""
    before = read_shared(open_folder)
    below = {path: ns for path, ns in before.earlier.items() if not set(ignored).isdisjoint(above_of(path))}
    earlier = {path: before.earlier.get(path, before.at_ns) for path in changed}
    record = {"at_ns": at_ns, "earlier": {**below, **earlier}, "branch": branch, "ignored": sorted(ignored)}
    _keep_record(open_folder, SHARED, record)


# Files that were restored from an archive and that the host has changed since it was saved are conflicts, although the
# sandbox is newer than they are.


def read_restored(open_folder: OpenFolder) -> frozenset[str]:
    """Return the paths where the sandbox has a file of an earlier sandbox, and the host has changed its own since."""
    try:
        with open(_record(open_folder.folder, RESTORED), "rb") as file:
            return frozenset(map(str, json.load(file)))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(f"workspace: the record of what was restored cannot be read: {error}") from error


def note_restored(open_folder: OpenFolder, paths: Collection[str]) -> None:
    """Record such paths. Raises OSError: a commit would write over the host's changes without asking."""
    if paths:
        _keep_record(open_folder, RESTORED, sorted(paths))
