"""`/api/workspace/snapshots` (C11): the files of a workspace with their hashes; compare and restore."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from cloche.records.workspace import WorkspaceSnapshots
from cloche.wire.exec_options import SessionId, WireModel

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..workspaces import opened_workspace
from .snapshots import Cursor, Limit, Path, Session

router = APIRouter(prefix="/api/workspace/snapshots", tags=["workspace snapshots"], route_class=JsonRoute)
MOST_S = 60.0  # of walking and hashing; the answer says what is missing


class MemoryContext(WireModel):
    """An agent's memory: files with path, size and hash, and sessions with the names of their variables."""

    files: list[dict[str, Any]] = Field(default_factory=list)
    sessions: list[dict[str, Any]] = Field(default_factory=list)


class ToolState(WireModel):
    """An agent's tools, its pending approvals, and the decisions that it remembers."""

    offered: list[dict[str, Any]] = Field(default_factory=list)
    pending_approvals: list[dict[str, Any]] = Field(default_factory=list)
    remembered: list[dict[str, Any]] = Field(default_factory=list)


class NewWorkspaceSnapshot(WireModel):
    """What to record; with `contents` it can be restored. Without `tools` they are this service's."""

    workspace_path: Path
    session_id: SessionId | None = None
    contents: bool = False
    memory: MemoryContext | None = None
    tools: ToolState | None = None


class Restore(WireModel):
    """Where to restore. `prune` removes files that are not in the snapshot; `manifestOnly` restores no file."""

    workspace_path: Path
    prune: bool = False
    manifest_only: bool = False


@router.post("", status_code=201, responses=RESPONSES)
async def create(body: NewWorkspaceSnapshot, caller: Runner, service: TheService) -> dict[str, Any]:
    """Record a snapshot of a workspace: files, git's state, the given memory, and the offered tools."""
    tools = body.tools.model_dump(by_alias=True) if body.tools else await service.tool_state(caller.project)
    memory = body.memory.model_dump(by_alias=True) if body.memory else None

    def take() -> dict[str, Any]:
        with opened_workspace(service.options.roots, body.workspace_path, writes=False) as (folder, path):
            return WorkspaceSnapshots(service.database, project=caller.project).create(
                folder, workspace_path=path, session_id=body.session_id, contents=body.contents, memory=memory,
                tools=tools, deadline=time.monotonic() + MOST_S,
            )  # fmt: skip

    return await service.with_files(take)


@router.get("", responses=RESPONSES)
async def listed(
    caller: Reader, service: TheService, session_id: Session = None, limit: Limit = 50, cursor: Cursor = None
) -> dict[str, Any]:
    """List the snapshots of workspaces, the newest first."""
    snapshots = WorkspaceSnapshots(service.database, project=caller.project)
    return await asyncio.to_thread(snapshots.list, session_id=session_id, limit=limit, cursor=cursor)


@router.get("/diff", responses=RESPONSES)
async def diff(id1: str, id2: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Compare the files of two snapshots of workspaces."""
    snapshots = WorkspaceSnapshots(service.database, project=caller.project)
    return await service.with_files(lambda: snapshots.diff(id1, id2))


@router.get("/{snapshot_id}", responses=RESPONSES)
async def look(snapshot_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return the snapshot of a workspace with all its files."""
    return await asyncio.to_thread(WorkspaceSnapshots(service.database, project=caller.project).get, snapshot_id)


@router.delete("/{snapshot_id}", status_code=204, responses=RESPONSES)
async def delete(snapshot_id: str, caller: Runner, service: TheService) -> None:
    """Delete the snapshot of a workspace, and contents that no other snapshot uses."""
    snapshots = WorkspaceSnapshots(service.database, project=caller.project)
    await service.with_files(lambda: snapshots.delete(snapshot_id))


@router.post("/{snapshot_id}/restore", responses=RESPONSES)
async def restore(snapshot_id: str, body: Restore, caller: Runner, service: TheService) -> dict[str, Any]:
    """Restore the files of a snapshot whose contents are stored. The answer has the outcome of each."""

    def write() -> dict[str, Any]:
        with opened_workspace(service.options.roots, body.workspace_path, writes=True) as (folder, path):
            if audit is not None:
                audit.record("restore", snapshot=snapshot_id, path=path)
            return WorkspaceSnapshots(service.database, project=caller.project).restore(
                snapshot_id, folder, prune=body.prune, manifest_only=body.manifest_only,
                deadline=time.monotonic() + MOST_S,
            )  # fmt: skip

    audit = await service.audit()
    return await service.with_files(write)
