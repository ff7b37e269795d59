"""`/api/sandbox/snapshots` (C10): variables, dependencies, git and settings of a workspace; compare and replicate."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from cloche.records import environment
from cloche.records.replication import render_script, write_script
from cloche.wire.exec_options import SessionId, WireModel

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..workspaces import opened_workspace

router = APIRouter(prefix="/api/sandbox/snapshots", tags=["environment snapshots"], route_class=JsonRoute)
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Session = Annotated[str | None, Query(alias="sessionId", max_length=64)]
Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str | None, Query(max_length=64)]


class NewSnapshot(WireModel):
    """What to record. Without `env`, the variables are those of a guest."""

    workspace_path: Path
    env: dict[str, str] | None = Field(default=None, max_length=2_000)
    own_environment: bool = False
    session_id: SessionId | None = None
    label: Annotated[str, StringConstraints(max_length=200)] | None = None


class Replicate(WireModel):
    """Where to write the script."""

    workspace_path: Path
    overwrite: bool = False


@router.post("", status_code=201, responses=RESPONSES)
async def create(body: NewSnapshot, caller: Runner, service: TheService) -> dict[str, Any]:
    """Record an environment as a snapshot, with secrets masked.

    `ownEnvironment` records the service's own variables, and needs scope admin.
    """
    env = body.env
    if body.own_environment:
        caller.require("admin")
        env = dict(os.environ)
    settings = await service.settings()

    def take() -> dict[str, Any]:
        with opened_workspace(service.options.roots, body.workspace_path, writes=False) as (folder, path):
            return environment.take_snapshot(
                service.database, folder, workspace_path=path, settings=settings, env=env,
                session_id=body.session_id, label=body.label, project=caller.project,
            )  # fmt: skip

    return await service.with_files(take)


@router.get("", responses=RESPONSES)
async def listed(
    caller: Reader, service: TheService, session_id: Session = None, limit: Limit = 50, cursor: Cursor = None
) -> dict[str, Any]:
    """List the snapshots of environments, the newest first."""
    return await asyncio.to_thread(
        environment.list_snapshots, service.database, project=caller.project, session_id=session_id, limit=limit,
        cursor=cursor,
    )  # fmt: skip


@router.get("/compare", responses=RESPONSES)
async def compare(id1: str, id2: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Compare the variables and dependencies of two snapshots."""
    return await asyncio.to_thread(
        environment.compare_snapshots, service.database, id1, id2, project=caller.project
    )  # fmt: skip


@router.get("/{snapshot_id}", responses=RESPONSES)
async def look(snapshot_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return the snapshot of an environment."""
    return await asyncio.to_thread(environment.get_snapshot, service.database, snapshot_id, project=caller.project)


@router.delete("/{snapshot_id}", status_code=204, responses=RESPONSES)
async def delete(snapshot_id: str, caller: Runner, service: TheService) -> None:
    """Delete the snapshot of an environment."""
    await asyncio.to_thread(environment.delete_snapshot, service.database, snapshot_id, project=caller.project)


@router.post("/{snapshot_id}/replicate", responses=RESPONSES)
async def replicate(snapshot_id: str, body: Replicate, caller: Runner, service: TheService) -> dict[str, Any]:
    """Write a script to a workspace that sets the variables of a snapshot. Masked ones are empty placeholders."""

    def write() -> dict[str, Any]:
        snapshot = environment.get_snapshot(service.database, snapshot_id, project=caller.project)
        script = render_script(snapshot)
        with opened_workspace(service.options.roots, body.workspace_path, writes=True) as (folder, path):
            if audit is not None:
                audit.record("replicate", snapshot=snapshot_id, path=path)
            write_script(folder, script, overwrite=body.overwrite)
        return script.as_dict()

    audit = await service.audit()
    return await service.with_files(write)
