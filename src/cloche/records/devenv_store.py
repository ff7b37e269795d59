"""Stored manifests of development environments: the newest one for each workspace of a project."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from cloche.core.errors import NotFound
from cloche.core.escape import escape_name

from .database import Database
from .devenv import DevEnvManifest, parse_manifest
from .ids import new_id, now
from .lists import FEW_ITEMS, list_page
from .tables import DEFAULT_PROJECT, Manifest


def save_manifest(
    database: Database, manifest: DevEnvManifest, workspace_path: str, *, project: str = DEFAULT_PROJECT
) -> dict[str, Any]:
    """Store the manifest of a host folder, replacing an earlier one; return its row of the list."""
    with database.writing() as session:
        query = select(Manifest).where(Manifest.project == project, Manifest.workspace_path == workspace_path)
        row = session.scalars(query).first()
        if row is None:
            row = Manifest(id=new_id("env"), project=project, created_at=now(), workspace_path=workspace_path)
            session.add(row)
        row.name, row.document = manifest.name, manifest.as_dict()
        return _shown(row)


def stored_manifest(database: Database, workspace_path: str, *, project: str = DEFAULT_PROJECT) -> DevEnvManifest:
    """Return the stored manifest of a host folder. Raises NotFound."""
    with database.reading() as session:
        query = select(Manifest).where(Manifest.project == project, Manifest.workspace_path == workspace_path)
        row = session.scalars(query).first()
    if row is None:
        raise NotFound(
            f"no manifest is stored for {escape_name(workspace_path)}; generate one, or list the stored ones"
        )
    return parse_manifest(row.document)


def list_manifests(
    database: Database, *, project: str = DEFAULT_PROJECT, limit: int = FEW_ITEMS, cursor: str | None = None
) -> dict[str, Any]:
    """Return one page of stored manifests: `id`, the host's `workspacePath`, and the manifest."""
    with database.reading() as session:
        return list_page(session, Manifest, project=project, show=_shown, limit=limit, cursor=cursor)


def _shown(row: Manifest) -> dict[str, Any]:
    return {
        "id": row.id, "name": row.name, "workspacePath": row.workspace_path, "createdAt": row.created_at,
        "manifest": row.document,
    }  # fmt: skip
