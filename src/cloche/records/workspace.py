"""Snapshots of workspaces: their files with hashes, git's state, memory and tools (C11).

A workspace is an open folder here; the caller decides which folders are allowed. Calls block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session, undefer

from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.escape import utf8_safe, utf8_safe_data

from .blobs import Blobs
from .database import Database
from .git_state import MOST_SECONDS as MOST_GIT_SECONDS
from .git_state import read_git_state
from .ids import check_id, new_id, now
from .lists import FEW_ITEMS, list_page
from .tables import DEFAULT_PROJECT, KeptContent, WorkspaceSnapshot
from .workspace_entries import RESTORE_MANIFEST, Entry, check_path, entries_of, listed, named, path_of
from .workspace_restore import Restoration, prefixes, restore
from .workspace_tree import BOUNDS, ENDED_BY, WalkBounds, WorkspaceTree, read_tree

KIND = "ws"
MOST_SESSION_CHARACTERS = 64
Document = dict[str, Any]


class WorkspaceSnapshots:
    """The workspace snapshots of a project in a database. Their contents are blobs beside it."""

    def __init__(self, database: Database, *, project: str = DEFAULT_PROJECT):
        self._database, self._project = database, project
        self._blobs = Blobs(database.folder)

    def create(
        self,
        folder: int,
        *,
        workspace_path: str,
        session_id: str | None = None,
        contents: bool = False,
        memory: Mapping[str, Any] | None = None,
        tools: Mapping[str, Any] | None = None,
        bounds: WalkBounds = BOUNDS,
        deadline: float | None = None,
    ) -> Document:
        """Record an open folder and return the document; with `contents`, store the files' contents.

        `deadline` is of `time.monotonic`. Files not read by then are left out, as `partialReasons` says. Raises
        InvalidRequest, RecordsFailed.
        """
        about = {
            "sessionId": _checked_session(session_id), "workspacePath": utf8_safe(workspace_path),
            "contents": contents, "git": _git_of(folder, deadline),
            "memory": utf8_safe_data(memory or {"files": [], "sessions": []}),
            "tools": utf8_safe_data(tools or {"offered": [], "pendingApprovals": [], "remembered": []}),
        }  # fmt: skip
        if not contents:
            return self._insert(_document(about, _read(folder, bounds, deadline, None)))
        with self._blobs.held() as blobs:  # until the row refers to them
            tree = _read(folder, bounds, deadline, blobs.store)
            blobs.sync()
            return self._insert(_document(about, tree))

    def get(self, id_: str) -> Document:
        """Return the document of a snapshot. Raises NotFound, and InvalidRequest for an invalid id."""
        with self._database.reading() as session:
            return _full_document(self._row(session, id_))

    def list(
        self, *, session_id: str | None = None, limit: int = FEW_ITEMS, cursor: str | None = None
    ) -> dict[str, Any]:
        """Return a page of snapshots, the newest first, without `files` and `excluded`. Raises InvalidRequest."""
        with self._database.reading() as session:
            return list_page(
                session, WorkspaceSnapshot, project=self._project, show=lambda row: row.document, limit=limit,
                cursor=cursor, session_id=session_id,
            )  # fmt: skip

    def delete(self, id_: str) -> int | None:
        """Delete a snapshot, and contents that no other snapshot refers to; return the number of those contents.

        None means that contents are in use; the next deletion removes them. Raises NotFound.
        """
        with self._database.writing() as session:
            session.execute(delete(KeptContent).where(KeptContent.snapshot_id == self._row(session, id_).id))
            session.execute(delete(WorkspaceSnapshot).where(WorkspaceSnapshot.id == id_))
        return self._blobs.remove_unnamed(self._named)

    def diff(self, id1: str, id2: str) -> Document:
        """Return the changes between two snapshots (`compare`). Raises NotFound."""
        return compare(self.get(id1), self.get(id2))

    def restore(
        self,
        id_: str,
        folder: int,
        *,
        prune: bool = False,
        manifest_only: bool = False,
        deadline: float | None = None,
    ) -> Document:
        """Restore the files with stored contents into an open folder: `{"manifest", "results"}`.

        Raises NotFound, RecordsFailed, and InvalidRequest for a document with paths out of the folder, and for `prune`
        with an incomplete snapshot.
        """
        document = self.get(id_)
        is_pruned = _may_prune(document, prune, manifest_only)
        entries = entries_of(document["files"])
        excluded = [check_path(path_of(item)) for item in document["excluded"]]
        with self._blobs.held() as blobs:
            restoration = Restoration(
                snapshot=id_, root=folder, entries=entries, excluded=excluded,
                blobs=blobs if document["contents"] else None, is_pruned=is_pruned, is_manifest_only=manifest_only,
                deadline=deadline,
            )  # fmt: skip
            return {"manifest": RESTORE_MANIFEST, "results": restore(restoration)}

    def _row(self, session: Session, id_: str) -> WorkspaceSnapshot:
        row = session.get(WorkspaceSnapshot, check_id(id_, KIND), options=[undefer(WorkspaceSnapshot.tree)])
        if row is None or row.project != self._project:
            raise NotFound(f"there is no snapshot {id_}; list the snapshots to see their ids")
        return row

    def _insert(self, document: Document) -> Document:
        tree = {name: document[name] for name in ("files", "excluded")}
        row = WorkspaceSnapshot(
            id=document["id"], project=self._project, created_at=document["createdAt"],
            session_id=document["sessionId"], tree=tree,
            document={name: value for name, value in document.items() if name not in tree},
        )  # fmt: skip
        hashes = _kept_hashes(document)
        with self._database.writing() as session:
            session.add(row)
            session.flush()
            if hashes:
                session.execute(insert(KeptContent), [{"sha256": sha256, "snapshot_id": row.id} for sha256 in hashes])
        return document

    def _named(self, prefix: str) -> set[str]:
        """Return the hashes with these first digits that a snapshot of any project refers to."""
        with self._database.reading() as session:
            query = select(KeptContent.sha256).where(KeptContent.sha256.between(prefix, f"{prefix}g"))
            return set(session.scalars(query))


def compare(before: Document, after: Document) -> Document:
    """Return paths that were `added` and `removed`, `modified` and `modeChanged` with `from` and `to`, and `unknown`.

    A path is unknown if one of the snapshots skipped or did not reach it. For a link, `from` and `to` are `link:` and
    its target.
    """
    old, new = ({entry.path: entry for entry in entries_of(document["files"])} for document in (before, after))
    paths = sorted(old.keys() | new.keys())
    unknown = _unknown(paths, (old, before), (new, after))
    known_paths = [path for path in paths if path not in unknown]
    both = [(old[path], new[path]) for path in known_paths if path in old and path in new]
    return {
        "added": [listed(path) for path in known_paths if path not in old],
        "removed": [listed(path) for path in known_paths if path not in new],
        "modified": [
            _change(old_entry, _value(old_entry), _value(new_entry))
            for old_entry, new_entry in both
            if _value(old_entry) != _value(new_entry)
        ],
        "modeChanged": [
            _change(old_entry, f"{old_entry.mode:04o}", f"{new_entry.mode:04o}")
            for old_entry, new_entry in both
            if old_entry.mode is not None and new_entry.mode is not None and old_entry.mode != new_entry.mode
        ],
        "unknown": [listed(path) for path in paths if path in unknown],
    }


def _document(about: Mapping[str, Any], tree: WorkspaceTree) -> Document:
    return {
        "id": new_id(KIND), "createdAt": now(), **about,
        "files": [entry.as_dict() for entry in sorted(tree.entries, key=lambda entry: entry.path)],
        "excluded": [listed(path) for path in sorted(tree.excluded)],
        "totals": {"files": len(tree.entries), "bytes": tree.bytes},
        "isPartial": bool(tree.partial), "partialReasons": sorted(tree.partial),
    }  # fmt: skip


def _unknown(paths: Iterable[bytes], *sides: tuple[Mapping[bytes, Entry], Document]) -> set[bytes]:
    skipped = {path for entries, _ in sides for path, entry in entries.items() if entry.skipped is not None}
    unended = [entries for entries, document in sides if not ENDED_BY.isdisjoint(document["partialReasons"])]
    return {
        path
        for path in paths
        if not skipped.isdisjoint(prefixes(path)) or any(path not in entries for entries in unended)
    }


def _change(entry: Entry, before: str, after: str) -> dict[str, str]:
    return {**named(entry.path), "from": before, "to": after}


def _value(entry: Entry) -> str:
    if entry.link is not None:
        return f"link:{entry.link.decode('utf-8', 'backslashreplace')}"
    return entry.sha256 or ""


def _read(
    folder: int, bounds: WalkBounds, deadline: float | None, keep: Callable[[bytes, str], object] | None
) -> WorkspaceTree:
    try:
        return read_tree(folder, bounds=bounds, deadline=deadline, keep=keep)
    except OSError as error:
        raise InvalidRequest(f"the workspace cannot be read: {error.strerror}; check its owner and mode") from error


def _git_of(folder: int, deadline: float | None) -> dict[str, Any]:
    """Return git's state, with a share of the time. Nothing of the workspace is executed."""
    git_deadline = monotonic() + MOST_GIT_SECONDS
    return read_git_state(folder, deadline=git_deadline if deadline is None else min(git_deadline, deadline)).as_dict()


def _kept_hashes(document: Document) -> Sequence[str]:
    if not document["contents"]:
        return []
    return sorted({item["sha256"] for item in document["files"] if "mode" in item})


def _full_document(row: WorkspaceSnapshot) -> Document:
    return {**row.document, **row.tree}


def _may_prune(document: Document, prune: bool, manifest_only: bool) -> bool:
    """Return whether to prune. Raises InvalidRequest for contradictory options, and if it would remove too much."""
    if prune and manifest_only:
        raise InvalidRequest("prune: a manifest-only restore removes nothing; leave out one of the two")
    if prune and not ENDED_BY.isdisjoint(document["partialReasons"]):
        why = ", ".join(document["partialReasons"])
        raise InvalidRequest(f"prune: the snapshot does not list all files ({why}); restore without it")
    return prune


def _checked_session(session_id: str | None) -> str | None:
    if session_id is not None and (not 1 <= len(session_id) <= MOST_SESSION_CHARACTERS or "\0" in session_id):
        raise InvalidRequest(f"sessionId: a label has 1 to {MOST_SESSION_CHARACTERS} characters, and no NUL")
    return None if session_id is None else utf8_safe(session_id)
