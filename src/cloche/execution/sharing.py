"""Make a sandbox's view and the host's folder one: what is written, and what the sandbox may let go of.

Theory of operation: after a commit the upper layer still has the written files, and hides later changes of the host's.
Every path of the layer that equals the host's is therefore removed from it (`jail/host_view.py`). A folder that shows
nothing of the host's keeps what is below, as long as a removal below it is held: it would bring back the removed files.
What git has written inside stays until the host's own branch moves: the sandbox's commits are references there by then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cloche.core.changes import Change, Diff, Shared
from cloche.core.record import dataclass
from cloche.init.names import pack

from .commits import above_of, read_shared, write_harmless
from .open_folder import OpenFolder

if TYPE_CHECKING:
    from cloche.audit.log import Audit
    from cloche.workspace.snapshot import Snapshot

MOST_GIT_BYTES = 16 << 20  # of a file that names commits
MOST_PATHS = 2000  # of one request, for which all processes stand still

Names = list[str | dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlan:
    """Say what became of a sandbox's changes, which paths stay changed inside, and where the host's branch is.

    Each request has paths that the upper layer may let go of, and folders of it that show nothing of the host's.
    """

    shared: Shared
    kept: set[str]
    branch: str
    ignored: frozenset[str]
    requests: list[tuple[Names, Names]]


def still_ignored(open_folder: OpenFolder) -> list[str]:
    """Return the topmost ignored paths as of the last time that git ignores now, too; they need not be read again."""
    from cloche.workspace.git_ignored import ignored_roots

    paths = read_shared(open_folder).ignored
    found = ignored_roots(open_folder.fd, dict.fromkeys(map(os.fsencode, paths), True))
    return [path for path in paths if os.fsencode(path) in found]


def share_changes(
    open_folder: OpenFolder,
    snapshot: Snapshot,
    skipped: Sequence[str],
    name: str,
    audit: Audit | None,
    check: Callable[[], None],
) -> SharePlan:
    """Write the harmless changes of a snapshot, and plan how the host's files are shown.

    The snapshot has nothing of the paths of `skipped`, which git ignores.
    """
    diff, committed, ignored = write_harmless(open_folder, snapshot, name, audit, check)
    ignored |= set(skipped)
    unwritten = _unwritten(diff, set(committed.written))
    branch, known = _branch(open_folder), read_shared(open_folder).branch
    is_renewed = (
        bool(known) and branch != known and b".git" in snapshot.entries and open_folder.folder.git is None
    ) and not any(path == ".git" or path.startswith(".git/") for path in committed.left)
    shared = Shared(
        written=committed.written,
        held=tuple(change for change in unwritten if change.dangers),
        conflicts=tuple(change for change in unwritten if change.conflict and not change.dangers),
        left=committed.left,
        refs=committed.refs,
        is_git_renewed=is_renewed,
        ignored=tuple(sorted(ignored)),
    )
    kept = {path.path for path in diff.left_out} | {path for change in unwritten for path in _paths_of(change)}
    removed = {path for change in unwritten if change.what in ("removed", "renamed") for path in _paths_of(change)}
    requests = list(_requests(snapshot, kept, removed, with_git=is_renewed))
    return SharePlan(shared=shared, kept=kept, branch=branch, ignored=ignored, requests=requests)


def _branch(open_folder: OpenFolder) -> str:
    """Return the host's checked-out branch with its commit, as git's files have it; empty without a repository."""
    head = _git_text(open_folder, "HEAD")
    name = head.removeprefix("ref: ").strip()
    if name == head.strip():
        return name
    commit = _git_text(open_folder, name).strip()
    packed = [line for line in _git_text(open_folder, "packed-refs").splitlines() if line.endswith(f" {name}")]
    return f"{name} {commit or ''.join(packed[:1])}"


def _git_text(open_folder: OpenFolder, name: str) -> str:
    from cloche.workspace.host_files import HostTree

    try:
        with HostTree(open_folder.fd) as tree, open(tree.open_regular(f".git/{name}")[0], "rb") as file:
            return file.read(MOST_GIT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _unwritten(diff: Diff, written: set[str]) -> list[Change]:
    return [change for change in diff.changes if change.path not in written]


def _paths_of(change: Change) -> Iterator[str]:
    yield change.path
    if change.old_path:
        yield change.old_path


def _requests(
    snapshot: Snapshot, kept: set[str], removed: set[str], *, with_git: bool
) -> Iterator[tuple[Names, Names]]:
    """Yield requests of at most MOST_PATHS paths; at least one, with no path."""
    closed = {above for path in removed for above in above_of(path)}
    apart: Names = []
    shut: list[str] = []
    paths: Names = []
    for entry in snapshot.entries.values():
        path = entry.path.decode("utf-8", "surrogateescape")
        is_git = path == ".git" or path.startswith(".git/")
        if (is_git and not with_git) or path in kept or path.startswith(tuple(shut)):
            continue
        if entry.kind == "directory" and (entry.is_opaque or not entry.is_copied):
            if entry.is_opaque and path in closed:
                shut.append(f"{path}/")
                continue
            apart.append(pack(entry.path))
        paths.append(pack(entry.path))
    for start in range(0, len(paths) or 1, MOST_PATHS):
        yield paths[start : start + MOST_PATHS], apart
