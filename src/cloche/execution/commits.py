"""What is written to the host's folder: compared, chosen, merged, recorded, and then written. All of this blocks."""

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
from cloche.core.record import dataclass, replace

from .open_folder import MOST_TOLD, OpenFolder, after_now, state_folder

if TYPE_CHECKING:
    from cloche.workspace.snapshot import Entry, Snapshot

log = logging.getLogger("cloche.workspace")
COMMITTED, KNOWN_S = "committed-", 30 * 24 * 3600.0  # what is noted of a sandbox's commits, and how long
MOST_MERGED_BYTES = 16 << 20
MOST_NAMED = 10  # paths of one reason, in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Say which changes are written, and what is said yes to."""

    paths: Collection[str] | None
    dangerous: bool | Collection[str]
    ours: Collection[str]
    theirs: Collection[str]
    merge: Collection[str] = ()

    def check(self, diff: Diff) -> tuple[Change, ...]:
        """Return the changes to be written. Raises InvalidRequest for one that needs a yes of its own."""
        for name in ("paths", "ours", "theirs", "merge"):
            if isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name}: give a list of paths, not one text")
        theirs = set(self.theirs)
        chosen = tuple(one for one in selected(diff.changes, self.paths) if one.path not in theirs)
        known = {one.path for one in diff.changes}
        unknown = sorted({*self.ours, *theirs, *self.merge} - known)
        if unknown:
            raise InvalidRequest(f"no change has the path {unknown[0]!r}; see the diff for those that there are")
        if self.dangerous is not True:
            agreed = set() if self.dangerous is False else set(self.dangerous)
            refused = [one for one in chosen if one.dangers and one.path not in agreed]
            if refused:
                raise InvalidRequest(
                    f"nothing was written: these changes need a yes of their own: {_by_reason(refused, diff)}; look at "
                    "them, then name them (dangerous=[...], --dangerous PATH), or leave them out (paths=[...])"
                )
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOptions:
    """Say which branch changes become, and who has made the commit."""

    name: str
    author: str | None
    message: str | None


def _by_reason(changes: Sequence[Change], diff: Diff) -> str:
    """Name changes by the gravest reason why they are dangerous, with their other ones, as far as anybody reads."""
    parts = []
    for question in diff.questions:
        among = [one for one in changes if one.dangers[0] == question.reason]
        if among:
            told = [f"{one.path!r}" + "".join(f" ({also})" for also in one.dangers[1:]) for one in among[:MOST_NAMED]]
            more = f" and {len(among) - MOST_NAMED} more" if len(among) > MOST_NAMED else ""
            parts.append(f"{question.reason}: {', '.join(told)}{more}")
    return "; ".join(parts)


def selected(
    changes: Sequence[Change], paths: Collection[str] | None, *, with_folders: bool = True
) -> tuple[Change, ...]:
    """Return the changes at some paths, or below them, with those that make the folders that these are in.

    Raises InvalidRequest for a path without any.
    """
    if paths is None:
        return tuple(changes)
    if isinstance(paths, str):
        raise InvalidRequest("paths: give a list of paths, not one text")
    wanted = {path.rstrip("/"): False for path in paths}
    found = []
    for one in changes:
        hits = [path for path in above_of(one.path) if path in wanted]
        for path in hits:
            wanted[path] = True
        if hits:
            found.append(one)
    missing = [path for path, is_met in wanted.items() if not is_met]
    if missing:
        raise InvalidRequest(f"paths: nothing was changed at {missing[0]!r}; see the diff for what was")
    if not with_folders:
        return tuple(found)
    needed = {above for one in found for above in above_of(one.path)}
    parents = [one for one in changes if one.path in needed and one.kind == "directory" and one.what == "added"]
    kept = {one.path for one in (*found, *parents)}
    return tuple(one for one in changes if one.path in kept)


def above_of(path: str) -> Iterator[str]:
    """Yield a path and those of the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def name_for(name: str | None) -> str:
    """Return what a sandbox is called in references and records."""
    return name if name is not None else f"sandbox-{os.urandom(4).hex()}"


def compare(found: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> Diff:
    """Compare a snapshot with the host's folder; `check` raises where nobody waits any more."""
    from cloche.workspace.compare import make_diff

    folder = found.folder
    return make_diff(
        snapshot, found.fd, hidden={*folder.hidden, *folder.left_out}, opened_ns=folder.opened_ns,
        committed=read_known(found), branches=_dangerous_branches(found, snapshot, check), check=check,
    )  # fmt: skip


def is_of_git(change: Change) -> bool:
    """Tell whether a change is of a branch, which comes by git: it is never written as a file."""
    return change.path.startswith(".git/")


def _dangerous_branches(found: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> tuple[Change, ...]:
    """Return a change for each of the guest's branches with commits that touch a hidden file.

    Where git refuses them, none is fetched either.
    """
    from cloche.workspace.git import touched_files

    if not found.folder.tracked_here or b".git" not in snapshot.entries:
        return ()
    try:
        touched = touched_files(found.fd, snapshot, found.folder.tracked_here, check)
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


def write_changes(
    found: OpenFolder,
    snapshot: Snapshot,
    wanted: str | None,
    name: str,
    choice: Choice,
    branch: BranchOptions | None,
    audit: Audit | None,
    check: Callable[[], None],
) -> Committed:
    """Write the chosen changes of a snapshot, and return what was written; see `HostFolderOperations.commit`."""
    from cloche.workspace.commit import KEPT, commit
    from cloche.workspace.git import commit_to_branch

    compared_ns = after_now()
    diff = compare(found, snapshot, check)
    check()
    if snapshot.is_partial:
        raise InvalidRequest(
            "nothing was written: the sandbox has changed more than can be looked at; remove what it has made"
        )
    if wanted is not None and diff.id != wanted:
        raise InvalidRequest(
            "nothing was written: the sandbox, or the host, has changed since this diff was made; look at it anew"
        )
    chosen = choice.check(diff)
    if audit is not None:
        audit.record(
            "commit", folder=found.folder.path, sandbox=acting_as("sandbox", name), diff=diff.id, paths=len(chosen),
            dangerous=[one.path for one in chosen if one.dangers][:MOST_TOLD], branch=branch.name if branch else None,
        )  # fmt: skip
    kept = {path: KEPT for path in choice.theirs if not path.startswith(".git/")}
    agreed = {one.path.removeprefix(".git/").removeprefix("refs/heads/") for one in chosen if is_of_git(one)}
    chosen = tuple(one for one in chosen if not is_of_git(one))
    if branch is not None:
        made = commit_to_branch(
            found.fd, snapshot, chosen, branch.name, author=branch.author or "Cloche <cloche@localhost>",
            message=branch.message or f"Changes of {name}",
        )  # fmt: skip
        refs, left = _fetched(found, snapshot, name, agreed)
        return Committed(refs={**refs, **made}, left={**kept, **left})
    snapshot, chosen = _merged(found, snapshot, chosen, choice.merge)
    choose: dict[str, Literal["theirs", "ours"]] = dict.fromkeys((*choice.ours, *choice.merge), "ours")
    done = commit(
        found.fd, snapshot, chosen, state=state_folder(), owner=found.folder.owner, choose=choose,
        unchanged_since_ns=compared_ns,
        # What is staged is not the folder's yet; from then on it is done to its end.
        step=lambda word: check() if word.startswith("stage ") else None,
    )  # fmt: skip
    _note_known(found, done.written)
    refs, left = _fetched(found, snapshot, name, agreed)
    # Nobody has been told of these but who has looked at the diff.
    left_out = {one.path: one.reason for one in diff.left_out if one.path.partition("/")[0] != ".git"}
    return replace(done, refs=refs, left={**left_out, **kept, **done.left, **left})


def _merged(
    found: OpenFolder, snapshot: Snapshot, changes: tuple[Change, ...], merge: Collection[str]
) -> tuple[Snapshot, tuple[Change, ...]]:
    """Return them with the changes of both sides in the files that are to be merged. Raises WorkspaceConflict."""
    if not merge:
        return snapshot, changes
    from cloche.workspace.git import base_of, merge_text

    wanted, refused, done = set(merge), {}, []
    entries: ChainMap[bytes, Entry] = ChainMap({}, cast("dict[bytes, Entry]", snapshot.entries))
    for one in changes:
        entry = entries.get(os.fsencode(one.path))
        if one.path not in wanted or not one.conflict or entry is None:
            done.append(one)
            continue
        base, theirs = base_of(found.fd, one.path), _text_of(found.fd, one.path)
        text = None
        if base is not None and theirs is not None and one.kind == "file" and one.size <= MOST_MERGED_BYTES:
            text = merge_text(base, b"".join(snapshot.read(entry)), theirs)
        if text is None:
            refused[one.path] = "cannot be merged: " + (
                "git has no text of it" if base is None or theirs is None else "both have changed the same lines"
            )
            continue
        entry, sha256 = snapshot.add(entry, text)
        entries[entry.path] = entry
        done.append(replace(one, size=len(text), sha256=sha256))
    if refused:
        told = "; ".join(f"{escape_name(path)} {why}" for path, why in list(refused.items())[:10])
        raise WorkspaceConflict(f"nothing was written: {told}", paths=refused)
    return replace(snapshot, entries=entries), tuple(done)


def _text_of(folder: int, path: str) -> bytes | None:
    """Return a file of the host's that is to be merged; None where it is none, or is too large."""
    from cloche.workspace.host_files import Tree

    try:
        with Tree(folder) as tree, open(tree.open_regular(path)[0], "rb") as file:
            data = file.read(MOST_MERGED_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MOST_MERGED_BYTES else None


def _fetched(
    found: OpenFolder, snapshot: Snapshot, name: str, agreed: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the references that were made of the guest's commits, and why there are none of those that git refuses."""
    from cloche.workspace.git import fetch_commits

    if b".git" not in snapshot.entries:
        return {}, {}
    try:
        refs, left = fetch_commits(found.fd, snapshot, name, hidden=found.folder.tracked_here, agreed=agreed)
        return refs, {_file_of(branch): f"its commits are not fetched: {why}" for branch, why in left.items()}
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed) as error:
        return {}, {".git": f"commits that were made inside are not fetched: {error}"}


def recovered() -> list[str]:
    """Complete or undo what interrupted commits left, in all folders; return a sentence for each.

    What was noted of sandboxes that have long ended is removed.
    """
    from cloche.workspace.recover import recover_all

    state = state_file("workspaces")
    if state is None or not os.path.isdir(state):
        return []
    for entry in os.scandir(state):
        if entry.name.startswith(COMMITTED) and entry.stat(follow_symlinks=False).st_mtime < time.time() - KNOWN_S:
            os.unlink(entry.path)
    return recover_all(state)


# What a sandbox has committed has changed on the host since it was opened, and is no conflict for that.


def _known_file(folder: HostFolder) -> str:
    return os.path.join(state_folder(), f"{COMMITTED}{folder.opened_ns}-{folder.identity[0]}-{folder.identity[1]}.json")


def read_known(found: OpenFolder) -> dict[str, tuple[int, int]]:
    """Return, by path, inode and change time of what this sandbox has committed."""
    if found.known is not None:
        return found.known
    try:
        with open(_known_file(found.folder), "rb") as file:
            return {str(path): (int(row[0]), int(row[1])) for path, row in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("what was committed before is not known, so it may count as a conflict: %s", error)
        return {}


def _note_known(found: OpenFolder, written: Sequence[str]) -> None:
    from cloche.workspace.host_files import Tree

    known = read_known(found)
    with Tree(found.fd) as tree:
        for path in written:
            try:
                state = tree.look(path)
            except OSError:
                state = None
            known[path] = (state.st_ino, state.st_ctime_ns) if state is not None else (0, 0)
    if found.known is not None:
        return
    try:
        folder, name = os.path.split(_known_file(found.folder))
        at = hostfs.open_folder(folder)
        try:
            hostfs.replace(at, name, json.dumps(known).encode(), mode=0o600, permissions=0o600)
        finally:
            os.close(at)
    except OSError as error:
        log.warning("what was committed cannot be noted, so it will count as a conflict: %s", error)
