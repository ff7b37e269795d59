"""Sandboxes on the page: list, processes, files, terminal, end.

These pages call the functions of the routes below `/api/sandboxes`. For a terminal and uploads, a script calls those
routes.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from cloche.core.errors import BackendUnavailable
from cloche.core.escape import escape_name, utf8_safe
from cloche.core.limits import format_size
from cloche.core.processes import FileInfo
from cloche.records.sandboxes import PAUSED, RUNNING
from cloche.wire.at_path import read_path
from cloche.wire.callers import Caller
from cloche.wire.sandboxes import NewSandbox
from cloche.wire.uses import Use, using

from .. import agents
from ..auth import Browser, TheService
from ..html import PageRoute, is_fragment, render
from ..pages import MOST_ROWS, instant, tone
from ..service import Service
from . import sandbox_processes, sandboxes

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PER_PAGE = 50
MOST_SHOWN_BYTES = 256 << 10  # of a file; all of it can be downloaded
HOME = "."  # its workspace, where relative paths begin
Cursor = Annotated[str, Query(max_length=64)]
PathText = Annotated[str, Query(max_length=8192)]
_TONES: Mapping[str, str] = {RUNNING: "good", PAUSED: "warn", "starting": "busy"}


@router.get("/sandboxes")
async def listing(request: Request, caller: Browser, service: TheService, cursor: Cursor = "") -> HTMLResponse:
    """List open sandboxes, and those that ended recently."""
    rows = await _listed(caller, service, cursor)
    has_agents = service.options.has_agents and caller.has("admin")
    living = await asyncio.to_thread(agents.listed) if has_agents else []
    return await render(request, "sandboxes.html", caller, has_agents=has_agents, agents=living, **rows)


@router.get("/sandboxes/list")
async def listed(request: Request, caller: Browser, service: TheService, cursor: Cursor = "") -> HTMLResponse:
    """Show only the list, which the page polls every few seconds."""
    return await render(request, "sandbox_list.html", caller, **await _listed(caller, service, cursor))


async def _listed(caller: Caller, service: Service, cursor: str) -> dict[str, Any]:
    listing = await sandboxes.sandboxes(caller, service, limit=PER_PAGE, cursor=cursor or None)
    rows = [{**row, "tone": _TONES.get(row["state"], "quiet")} for row in listing["items"]]
    return {"rows": rows, "next_cursor": listing["nextCursor"], "cursor": cursor}


@router.post("/sandboxes")
async def create(request: Request, caller: Browser, service: TheService) -> Response:
    """Open a sandbox with the configured settings, and redirect to it."""
    form = await request.form()
    fields = {name: text for name in ("name", "lifetime") if (text := str(form.get(name, "")).strip())}
    try:
        facts = await sandboxes.open_sandbox(NewSandbox.model_validate(fields), caller, service)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
    return RedirectResponse(f"/sandboxes/{facts.id}", 303)


@router.get("/sandboxes/{sandbox_id}")
async def show_sandbox(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show a sandbox: its facts, processes and ports."""
    return await render(request, "sandbox.html", caller, **await _now(caller, service, sandbox_id))


@router.get("/sandboxes/{sandbox_id}/now")
async def now(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show only the processes and ports, which the page polls every few seconds."""
    return await render(request, "sandbox_now.html", caller, **await _now(caller, service, sandbox_id))


async def _now(caller: Caller, service: Service, sandbox_id: str) -> dict[str, Any]:
    box = await service.sandboxes.describe(sandbox_id, caller.project)
    shown: dict[str, Any] = {"box": box, "tone": _TONES.get(box["state"], "quiet"), "processes": [], "ports": []}
    if box["state"] == RUNNING:
        async with using(service, caller, sandbox_id) as use:
            listing = await sandbox_processes.processes(use)
            try:
                ports = await sandboxes.ports(use)
            except BackendUnavailable:  # level confined has no servers
                ports = {"items": []}
        shown["processes"] = [
            {**row, "tone": "busy" if row["exitCode"] is None else tone(row["status"])}
            for row in islice(reversed(listing["items"]), MOST_ROWS)
        ]
        shown["ports"] = ports["items"][:MOST_ROWS]
        shown["ports_left_out"] = max(0, len(ports["items"]) - MOST_ROWS)
    return shown


@router.post("/sandboxes/{sandbox_id}/resume")
async def resume(sandbox_id: str, caller: Browser, service: TheService) -> Response:
    """Resume the processes of a paused sandbox."""
    async with using(service, caller, sandbox_id) as use:
        await sandboxes.resume(use)
    return RedirectResponse(f"/sandboxes/{sandbox_id}", 303)


@router.post("/sandboxes/{sandbox_id}/end")
async def end(sandbox_id: str, caller: Browser, service: TheService) -> Response:
    """End a sandbox and everything in it."""
    await sandboxes.end(sandbox_id, caller, service)
    return RedirectResponse("/sandboxes", 303)


@router.get("/sandboxes/{sandbox_id}/processes/{process_id}")
async def process(
    request: Request, sandbox_id: str, process_id: str, caller: Browser, service: TheService
) -> HTMLResponse:
    """Show a process with its last unread output, which stays unread."""
    async with using(service, caller, sandbox_id) as use:
        process = await sandbox_processes.look(process_id, use)
    running = process["exitCode"] is None
    return await render(
        request, "sandbox_process.html", caller, box_id=sandbox_id, one=process, is_running=running,
        tone="busy" if running else tone(process["status"]),
    )  # fmt: skip


@router.post("/sandboxes/{sandbox_id}/processes/{process_id}/kill")
async def kill(request: Request, sandbox_id: str, process_id: str, caller: Browser, service: TheService) -> Response:
    """Kill a process and all that it started."""
    async with using(service, caller, sandbox_id) as use:
        await sandbox_processes.kill(process_id, use)
    if is_fragment(request):
        return await render(request, "sandbox_now.html", caller, **await _now(caller, service, sandbox_id))
    return RedirectResponse(f"/sandboxes/{sandbox_id}", 303)


@router.get("/sandboxes/{sandbox_id}/terminal")
async def terminal(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show a terminal, opened by a script."""
    box = await service.sandboxes.describe(sandbox_id, caller.project)
    return await render(request, "sandbox_terminal.html", caller, box=box)


@router.get("/sandboxes/{sandbox_id}/files")
async def files(
    request: Request,
    sandbox_id: str,
    caller: Browser,
    service: TheService,
    path: PathText = "",
    path_base64: Annotated[str, Query(alias="pathBase64", max_length=8192)] = "",
) -> HTMLResponse:
    """List a folder, or show the beginning of a file."""
    target = read_path(path or HOME, path_base64 or None)
    shown: dict[str, Any] = {
        "box_id": sandbox_id,
        "named": _shown(target),
        "where": _query(target),
        "above": _above(target),
    }
    async with using(service, caller, sandbox_id) as use:
        info = await use.sandbox.stat(target)
        if info.is_directory:
            return await render(request, "sandbox_folder.html", caller, **shown, **await _folder(use, target))
        text = await _beginning(use, target) if "file" in (info.type, info.leads_to) else b""
    is_text = b"\0" not in text
    return await render(
        request, "sandbox_file.html", caller, **shown, size=format_size(info.size), kind=info.leads_to or info.type,
        text=text.decode(errors="replace") if is_text else None, is_cut=len(text) >= MOST_SHOWN_BYTES,
    )  # fmt: skip


async def _folder(use: Use, folder: str) -> dict[str, Any]:
    async with use.service.sandboxes.listings:
        entries = await use.sandbox.list_dir(folder)
        rows = await asyncio.to_thread(_rows, folder, entries)
    return {"rows": rows, "left_out": len(entries) - len(rows), "folder": folder if utf8_safe(folder) == folder else ""}


def _rows(folder: str, entries: Sequence[FileInfo]) -> list[dict[str, str]]:
    return [
        {
            "name": _shown(info.name) + ("/" if info.is_directory else ""),
            "where": _query(f"{folder.rstrip('/')}/{info.name}"),
            "kind": f"link to {_shown(info.target)}" if info.type == "link" else info.type,
            "size": format_size(info.size) if info.type == "file" else "", "mode": f"{info.mode:04o}",
            "changed": instant(info.mtime),
        }
        for info in sorted(entries, key=lambda info: not info.is_directory)[:MOST_ROWS]
    ]  # fmt: skip


async def _beginning(use: Use, path: str) -> bytes:
    data = b""
    async for piece in use.held.live.read_stream(path, count=MOST_SHOWN_BYTES):
        data += piece
    return data


def _query(path: str) -> str:
    """Return the query that names a path: as text, or in base64 if it is not UTF-8."""
    try:
        return urlencode({"path": path.encode().decode()})
    except UnicodeEncodeError:
        return urlencode({"pathBase64": base64.b64encode(path.encode("utf-8", "surrogateescape")).decode()})


def _shown(name: str) -> str:
    return utf8_safe(escape_name(name))


def _above(path: str) -> list[tuple[str, str]]:
    """Return a path's folders and itself: each label and query."""
    top, label = ("", "/") if path.startswith("/") else (HOME, "workspace")
    folders = [(label, _query(top or "/"))]
    for name in path.split("/"):
        if name not in ("", "."):
            top = f"{top}/{name}"
            folders.append((_shown(name), _query(top)))
    return folders
