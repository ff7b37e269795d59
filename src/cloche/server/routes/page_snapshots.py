"""Snapshots of environments and workspaces on the page: list, show, compare, replicate, restore, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.datastructures import FormData

from cloche.records import environment
from cloche.records.replication import SCRIPT, render_script, write_script
from cloche.records.workspace import WorkspaceSnapshots
from cloche.wire.callers import Caller

from ..auth import Browser, TheService
from ..html import PageRoute, render
from ..pages import MOST_ROWS, flat, show_comparison, show_files
from ..service import Service
from ..workspaces import opened_workspace

router = APIRouter(route_class=PageRoute, include_in_schema=False)
T = TypeVar("T")
PER_PAGE = 25
MOST_SECONDS = 120.0
Label = Annotated[str, Query(max_length=64)]


@router.get("/snapshots")
async def snapshots(
    request: Request, caller: Browser, service: TheService, session: Label = "", cursor: Label = "", files: Label = ""
) -> HTMLResponse:
    """List both kinds. `cursor` pages through environments, `files` through workspaces."""
    environments, workspaces = await asyncio.gather(
        asyncio.to_thread(
            environment.list_snapshots,
            service.database,
            project=caller.project,
            cursor=cursor or None,
            session_id=session or None,
            limit=PER_PAGE,
        ),
        asyncio.to_thread(
            _workspaces(service, caller).list, session_id=session or None, limit=PER_PAGE, cursor=files or None
        ),
    )
    roots = [{"path": root.path, "is_writable": root.is_writable} for root in service.options.roots]
    return await render(
        request, "snapshots.html", caller, environments=environments, workspaces=workspaces, session=session,
        cursor=cursor, files=files, roots=roots,
    )  # fmt: skip


@router.post("/snapshots")
async def take(request: Request, caller: Browser, service: TheService) -> Response:
    """Take a snapshot of a workspace: its environment, or its files."""
    form = await request.form()
    session, label = _text(form, "sessionId"), _text(form, "label")
    path, settings = str(form.get("workspacePath", "")), await service.settings()

    def take_environment(folder: int, path: str) -> Mapping[str, Any]:
        return environment.take_snapshot(
            service.database, folder, workspace_path=path, settings=settings, session_id=session, label=label,
            project=caller.project, deadline=monotonic() + MOST_SECONDS,
        )  # fmt: skip

    tools = await service.tool_state(caller.project)

    def take_files(folder: int, path: str) -> Mapping[str, Any]:
        return _workspaces(service, caller).create(
            folder, workspace_path=path, session_id=session, contents=form.get("contents") == "1", tools=tools,
            deadline=monotonic() + MOST_SECONDS,
        )  # fmt: skip

    snapshot = await _in_folder(service, path, take_files if form.get("kind") == "workspace" else take_environment)
    return RedirectResponse(f"/snapshots/{snapshot['id']}", 303)


@router.get("/snapshots/compare")
async def compare(
    request: Request, caller: Browser, service: TheService, id1: Label = "", id2: Label = ""
) -> HTMLResponse:
    """Show the differences between two snapshots of the same kind."""
    is_files = id1.startswith("ws_")
    if is_files:
        comparison = await service.with_files(lambda: _workspaces(service, caller).diff(id1, id2))
    else:
        comparison = await asyncio.to_thread(
            environment.compare_snapshots, service.database, id1, id2, project=caller.project
        )
    groups = await asyncio.to_thread(show_comparison, comparison, is_files=is_files)
    return await render(request, "comparison.html", caller, groups=groups, id1=id1, id2=id2)


@router.get("/snapshots/{snapshot_id}")
async def show_snapshot(request: Request, snapshot_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show a snapshot and its actions."""
    return await _snapshot_page(request, snapshot_id, caller, service)


async def _snapshot_page(
    request: Request,
    snapshot_id: str,
    caller: Caller,
    service: Service,
    **template_data: Any,  # noqa: ANN401 - for a template
) -> HTMLResponse:
    shown = {"said": "", "results": [], **template_data}
    if snapshot_id.startswith("ws_"):
        snapshot = await asyncio.to_thread(_workspaces(service, caller).get, snapshot_id)
        files = await asyncio.to_thread(show_files, snapshot)
        return await render(
            request, "workspace_snapshot.html", caller, one=snapshot, files=files, git=flat(snapshot["git"]), **shown
        )
    snapshot = await asyncio.to_thread(environment.get_snapshot, service.database, snapshot_id, project=caller.project)
    return await render(
        request, "environment_snapshot.html", caller, one=snapshot, git=flat(snapshot["git"]),
        sandbox=flat(snapshot["sandbox"]),
        most=MOST_ROWS, **shown,
    )  # fmt: skip


@router.post("/snapshots/{snapshot_id}/replicate")
async def replicate(request: Request, snapshot_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Write the script that sets a snapshot's variables."""
    form = await request.form()
    snapshot = await asyncio.to_thread(environment.get_snapshot, service.database, snapshot_id, project=caller.project)
    script = await asyncio.to_thread(render_script, snapshot)
    path, is_over = str(form.get("workspacePath", "")), form.get("overwrite") == "1"
    audit = await service.audit()

    def work(folder: int, named: str) -> None:
        if audit is not None:
            audit.record("replicate", snapshot=snapshot_id, path=named)
        write_script(folder, script, overwrite=is_over)

    await _in_folder(service, path, work, writes=True)
    placeholders = f"; fill in {', '.join(script.placeholders)}" if script.placeholders else ""
    outcome = f"{SCRIPT} is written, with {script.variables} variables{placeholders}"
    return await _snapshot_page(request, snapshot_id, caller, service, said=outcome)


@router.post("/snapshots/{snapshot_id}/restore")
async def restore(request: Request, snapshot_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Restore the files with stored contents."""
    form = await request.form()
    records = _workspaces(service, caller)

    audit = await service.audit()

    def work(folder: int, named: str) -> Mapping[str, Any]:
        if audit is not None:
            audit.record("restore", snapshot=snapshot_id, path=named)
        return records.restore(
            snapshot_id, folder, prune=form.get("prune") == "1", manifest_only=form.get("manifestOnly") == "1",
            deadline=monotonic() + MOST_SECONDS,
        )  # fmt: skip

    path = str(form.get("workspacePath", ""))
    restoration = await _in_folder(service, path, work, writes=True)
    results = await asyncio.to_thread(show_files, {"files": restoration["results"]})
    outcome = f"{len(restoration['results'])} files were processed; {restoration['manifest']} lists the results"
    return await _snapshot_page(request, snapshot_id, caller, service, said=outcome, results=results)


@router.post("/snapshots/{snapshot_id}/delete")
async def delete(snapshot_id: str, caller: Browser, service: TheService) -> Response:
    """Delete a snapshot."""
    if snapshot_id.startswith("ws_"):
        await service.with_files(lambda: _workspaces(service, caller).delete(snapshot_id))
    else:
        await asyncio.to_thread(environment.delete_snapshot, service.database, snapshot_id, project=caller.project)
    return RedirectResponse("/snapshots", 303)


def _workspaces(service: Service, caller: Caller) -> WorkspaceSnapshots:
    return WorkspaceSnapshots(service.database, project=caller.project)


async def _in_folder(service: Service, path: str, work: Callable[[int, str], T], *, writes: bool = False) -> T:
    """Run work in a folder below a root, in a thread. Raises PolicyDenied, InvalidRequest."""

    def do() -> T:
        with opened_workspace(service.options.roots, path, writes=writes) as (folder, named):
            return work(folder, named)

    return await service.with_files(do)


def _text(form: FormData, name: str) -> str | None:
    return str(form.get(name, "")).strip() or None
