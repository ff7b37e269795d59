"""Snapshots of an environment (C10): variables, dependencies, git state and settings of a workspace.

A snapshot is a JSON file beside the database and a row. The file is written first: a missing row is restored from it.
Neither contains masked values (`environment_variables.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cloche.config.keys import Settings
from cloche.core.errors import InvalidRequest, NotFound, RecordsFailed
from cloche.core.escape import utf8_safe
from cloche.core.limits import exact_size
from cloche.execution.registry import guest_environment
from cloche.hostfs import make_folder, new_file, open_folder, open_regular

from .database import Database
from .dependencies import Dependency, find_dependencies
from .environment_variables import compare_variables, keep_variables, mask_key
from .git_state import read_git_state
from .ids import check_id, new_id, now
from .lists import FEW_ITEMS, list_page
from .tables import DEFAULT_PROJECT, EnvironmentSnapshot

KIND, FOLDER = "snap", "snapshots"
MOST_LABEL_CHARS, MOST_SESSION_CHARS = 200, 64
_MOST_NOTES, _MOST_FILE_BYTES = 50, 32 << 20
_HASHES = "_hashes"  # only in a row's document
_Named = dict[str | None, dict[str, Any]]  # by version


def take_snapshot(
    database: Database,
    folder: int,
    *,
    workspace_path: str,
    settings: Settings,
    env: Mapping[str, str] | None = None,
    session_id: str | None = None,
    label: str | None = None,
    project: str = DEFAULT_PROJECT,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Take a snapshot of a workspace, an open folder, and return it in the wire's format.

    Without `env`, the variables are those of a guest. `deadline` (of `time.monotonic`) bounds the reading of git state.
    Raises InvalidRequest and RecordsFailed.
    """
    _check_text("sessionId", session_id, MOST_SESSION_CHARS)
    _check_text("label", label, MOST_LABEL_CHARS)
    variables = keep_variables(guest_environment() if env is None else env, mask_key(database.folder))
    dependencies, notes = _dependencies_of(folder)
    snapshot_id = new_id(KIND)
    document: dict[str, Any] = {
        "id": snapshot_id,
        "version": 1,
        "createdAt": now(),
        "sessionId": session_id,
        "label": label,
        "workspacePath": utf8_safe(workspace_path),
        "env": dict(variables.env),
        "maskedKeys": list(variables.masked),
        "skippedEnv": [{"key": key, "reason": reason} for key, reason in variables.skipped],
        "dependencies": [dependency.as_dict() for dependency in dependencies],
        "git": read_git_state(folder, deadline=deadline).as_dict(),
        "sandbox": _sandbox_of(settings),
        "notes": notes,
        "file": f"{snapshot_id}.json",
    }
    _write_file(database, document, project)
    try:
        with database.writing() as session:
            session.add(_row(document, project, variables.hashes))
    except BaseException:
        with suppress(RecordsFailed):  # the first error is raised
            _remove_file(database, snapshot_id)
        raise
    return document


def get_snapshot(database: Database, snapshot_id: str, *, project: str = DEFAULT_PROJECT) -> dict[str, Any]:
    """Return a snapshot. A missing row is restored from its file; a missing file is reported as `"fileMissing": true`.

    Raises InvalidRequest for an invalid id, NotFound, and RecordsFailed.
    """
    return _shown(_load(database, snapshot_id, project), database)


def list_snapshots(
    database: Database,
    *,
    project: str = DEFAULT_PROJECT,
    session_id: str | None = None,
    limit: int = FEW_ITEMS,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Return a page of snapshots, the newest first, without dependencies and the lines of git's status."""
    with database.reading() as session:
        return list_page(
            session, EnvironmentSnapshot, project=project, show=_listed, limit=limit, cursor=cursor,
            session_id=session_id,
        )  # fmt: skip


def compare_snapshots(database: Database, id1: str, id2: str, *, project: str = DEFAULT_PROJECT) -> dict[str, Any]:
    """Return the changes between two snapshots: variables and dependencies. Raises as `get_snapshot`."""
    before, after = (_load(database, snapshot_id, project) for snapshot_id in (id1, id2))
    hashes = (before.get(_HASHES, {}), after.get(_HASHES, {}))
    return {
        "id1": id1,
        "id2": id2,
        "env": compare_variables(before["env"], after["env"], hashes),
        "dependencies": compare_dependencies(before["dependencies"], after["dependencies"]),
    }


def delete_snapshot(database: Database, snapshot_id: str, *, project: str = DEFAULT_PROJECT) -> None:
    """Delete a snapshot's file and row, if they exist. Raises InvalidRequest, NotFound, RecordsFailed."""
    check_id(snapshot_id, KIND)
    # In one write transaction, as `_load` restores a row from a file: neither sees the other half done.
    with database.writing() as session:
        row = session.get(EnvironmentSnapshot, snapshot_id)
        if _owner(database, row, snapshot_id) != project:
            raise _unknown(snapshot_id)
        _remove_file(database, snapshot_id)
        if row is not None:
            session.delete(row)


def compare_dependencies(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the dependencies that were added, removed, and changed in version."""
    old, new = _versions(before), _versions(after)
    differences: dict[str, list[dict[str, Any]]] = {"added": [], "removed": [], "changed": []}
    for ecosystem, name in sorted(old.keys() | new.keys()):
        old_versions, is_now = old.get((ecosystem, name), {}), new.get((ecosystem, name), {})
        removed, come = (
            [present[version] for version in present if version not in absent]
            for present, absent in ((old_versions, is_now), (is_now, old_versions))
        )
        if len(removed) == len(come) == 1:
            versions = {"from": removed[0]["version"], "to": come[0]["version"]}
            differences["changed"].append({"name": name, "ecosystem": ecosystem, **versions})
        else:
            differences["removed"] += removed
            differences["added"] += come
    return differences


def _versions(dependencies: list[dict[str, Any]]) -> dict[tuple[str, str], _Named]:
    versions: dict[tuple[str, str], _Named] = {}
    for dependency in dependencies:
        versions.setdefault((dependency["ecosystem"], dependency["name"]), {}).setdefault(
            dependency["version"], dependency
        )
    return versions


def _dependencies_of(folder: int) -> tuple[tuple[Dependency, ...], list[str]]:
    notes: list[str] = []
    try:
        dependencies = find_dependencies(folder, notes=notes)
    except OSError as error:
        raise InvalidRequest(f"the workspace cannot be read: {error.strerror}; change its owner or mode") from error
    more = [f"and {len(notes) - _MOST_NOTES} more notes"] if len(notes) > _MOST_NOTES else []
    return dependencies, [*notes[:_MOST_NOTES], *more]


def _sandbox_of(settings: Settings) -> dict[str, Any]:
    limits = settings.limits
    return {"runtime": settings.backend, "timeout": limits.timeout_s, "memoryLimit": exact_size(limits.memory_bytes)}


def _check_text(name: str, text: str | None, max_chars: int) -> None:
    if text is not None and (len(text) > max_chars or "\0" in text or utf8_safe(text) != text):
        raise InvalidRequest(f"{name}: it is not text of at most {max_chars} characters")


# rows and files


def _load(database: Database, snapshot_id: str, project: str) -> dict[str, Any]:
    """Return a row's document, after a missing row was restored from its file."""
    check_id(snapshot_id, KIND)
    with database.reading() as session:
        row = session.get(EnvironmentSnapshot, snapshot_id)
    if row is None:
        row = _healed(database, snapshot_id)
    if row is None or row.project != project:
        raise _unknown(snapshot_id)
    return row.document


def _healed(database: Database, snapshot_id: str) -> EnvironmentSnapshot | None:
    if _read_file(database, snapshot_id) is None:
        return None
    with database.writing() as session:
        row = session.get(EnvironmentSnapshot, snapshot_id)
        stored = _read_file(database, snapshot_id)
        if row is None and stored is not None:
            document, project = stored
            row = _row(document, project, {})
            session.add(row)
        return row


def _owner(database: Database, row: EnvironmentSnapshot | None, snapshot_id: str) -> str | None:
    if row is not None:
        return row.project
    stored = _read_file(database, snapshot_id)
    return stored[1] if stored else None


def _row(document: dict[str, Any], project: str, hashes: Mapping[str, str]) -> EnvironmentSnapshot:
    stored = {**document, _HASHES: dict(hashes)}
    return EnvironmentSnapshot(
        id=document["id"], project=project, created_at=document["createdAt"], session_id=document["sessionId"],
        document=stored,
    )  # fmt: skip


def _shown(document: dict[str, Any], database: Database) -> dict[str, Any]:
    shown = {name: value for name, value in document.items() if name != _HASHES}
    with _files(database) as folder:
        is_missing = folder is None or not _exists(folder, shown["file"])
    return {**shown, "fileMissing": True} if is_missing else shown


def _listed(row: EnvironmentSnapshot) -> dict[str, Any]:
    shown = {name: value for name, value in row.document.items() if name not in (_HASHES, "dependencies")}
    return {**shown, "git": {name: value for name, value in shown["git"].items() if name != "status"}}


def _unknown(snapshot_id: str) -> NotFound:
    return NotFound(f"there is no snapshot {snapshot_id}; list the snapshots to see their ids")


@contextmanager
def _files(database: Database, *, makes: bool = False) -> Iterator[int | None]:
    """Yield a descriptor of the folder of files, None if it does not exist. Raises RecordsFailed."""
    folder = None
    try:
        above = open_folder(database.folder, follows_link=True)
        try:
            if makes:
                make_folder(FOLDER, above, 0o700)
            with suppress(FileNotFoundError):
                folder = open_folder(FOLDER, above)
        finally:
            os.close(above)
        yield folder
    except OSError as error:
        raise RecordsFailed(
            f"the files of snapshots cannot be used: {error.strerror}; see {database.folder}"
        ) from error
    finally:
        if folder is not None:
            os.close(folder)


def _write_file(database: Database, document: dict[str, Any], project: str) -> None:
    data = json.dumps({**document, "project": project}, indent=2).encode()
    with _files(database, makes=True) as folder:
        if folder is None:
            raise FileNotFoundError(2, "the folder was removed")
        with new_file(folder, 0o600) as (beside, file):
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, document["file"], src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def _read_file(database: Database, snapshot_id: str) -> tuple[dict[str, Any], str] | None:
    """Return the document of a file and its project, None without a file. Raises RecordsFailed."""
    with _files(database) as folder:
        if folder is None:
            return None
        try:
            fd, _ = open_regular(f"{snapshot_id}.json", folder)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            data = file.read(_MOST_FILE_BYTES)
    try:
        document = json.loads(data)
        project = document.pop("project")
        if document["id"] != snapshot_id or not isinstance(project, str):
            raise ValueError("it belongs to another snapshot")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordsFailed(f"{snapshot_id}.json is damaged: {error}; restore it, or remove it") from error
    return document, project


def _remove_file(database: Database, snapshot_id: str) -> None:
    with _files(database) as folder, suppress(FileNotFoundError):
        if folder is not None:
            os.unlink(f"{snapshot_id}.json", dir_fd=folder)


def _exists(folder: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        return True
    return False
