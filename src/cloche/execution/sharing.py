"""Make a sandbox's view and the host's folder one: what is written, and what the sandbox may let go of.

Theory of operation: after a commit the upper layer still has the written files, and hides later changes of the host's.
Every path of the layer that equals the host's is therefore removed from it (`jail/host_view.py`). A folder that shows
nothing of the host's keeps what is below, as long as a removal below it is held: it would bring the removed files back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cloche.core.changes import Change, Diff, Shared
from cloche.init.names import pack

from .commits import above_of, write_harmless
from .open_folder import OpenFolder

if TYPE_CHECKING:
    from cloche.audit.log import Audit
    from cloche.workspace.snapshot import Snapshot

MOST_PATHS = 2000  # of one request, for which all processes stand still

Names = list[str | dict[str, str]]


def share_changes(
    open_folder: OpenFolder, snapshot: Snapshot, name: str, audit: Audit | None, check: Callable[[], None]
) -> tuple[Shared, set[str], list[tuple[Names, Names]]]:
    """Write the harmless changes of a snapshot; return what became of all, the paths that stay changed inside, and the
    requests that show the host's files.

    Each request has paths that the upper layer may let go of, and folders of it that show nothing of the host's.
    """
    diff, committed = write_harmless(open_folder, snapshot, name, audit, check)
    unwritten = _unwritten(diff, set(committed.written))
    shared = Shared(
        written=committed.written,
        held=tuple(change for change in unwritten if change.dangers),
        conflicts=tuple(change for change in unwritten if change.conflict and not change.dangers),
        left=committed.left,
        refs=committed.refs,
    )
    kept = {path.path for path in diff.left_out} | {path for change in unwritten for path in _paths_of(change)}
    removed = {path for change in unwritten if change.what in ("removed", "renamed") for path in _paths_of(change)}
    return shared, kept, list(_requests(snapshot, kept, removed))


def _unwritten(diff: Diff, written: set[str]) -> list[Change]:
    return [change for change in diff.changes if change.path not in written]


def _paths_of(change: Change) -> Iterator[str]:
    yield change.path
    if change.old_path:
        yield change.old_path


def _requests(snapshot: Snapshot, kept: set[str], removed: set[str]) -> Iterator[tuple[Names, Names]]:
    """Yield requests of at most MOST_PATHS paths; at least one, with no path."""
    closed = {above for path in removed for above in above_of(path)}
    apart: Names = []
    shut: list[str] = []
    paths: Names = []
    for entry in snapshot.entries.values():
        path = entry.path.decode("utf-8", "surrogateescape")
        if path == ".git" or path.startswith((".git/", *shut)) or path in kept:
            continue
        if entry.kind == "directory" and (entry.is_opaque or not entry.is_copied):
            if entry.is_opaque and path in closed:
                shut.append(f"{path}/")
                continue
            apart.append(pack(entry.path))
        paths.append(pack(entry.path))
    for start in range(0, len(paths) or 1, MOST_PATHS):
        yield paths[start : start + MOST_PATHS], apart
