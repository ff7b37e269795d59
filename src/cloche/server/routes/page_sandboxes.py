"""Sandboxes that live on the page: which there are, what goes on in one, its files, a terminal, its end.

All of it is done by what answers below `/api/sandboxes`; a terminal and what is written there go to these routes
themselves, by a script.
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

from cloche.core.escape import escape_name, utf8_safe
from cloche.core.limits import format_size
from cloche.core.processes import FileInfo
from cloche.records.sandboxes import PAUSED, RUNNING

from ..auth import Browser, TheService
from ..html import PageRoute, is_fragment, render
from ..identities import Caller
from ..pages import MOST_ROWS, instant, tone
from ..sandbox_use import Use, using
from ..service import Service
from . import sandbox_processes, sandboxes
from .sandbox_files import read_path

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PER_PAGE = 50
MOST_SHOWN_BYTES = 256 << 10  # of a file; all of it can be downloaded
HOME = "."  # its workspace, where relative paths begin
Cursor = Annotated[str, Query(max_length=64)]
PathText = Annotated[str, Query(max_length=8192)]
_TONES: Mapping[str, str] = {RUNNING: "good", PAUSED: "warn", "starting": "busy"}


@router.get("/sandboxes")
async def listing(request: Request, caller: Browser, service: TheService, cursor: Cursor = "") -> HTMLResponse:
    """List the sandboxes that live, and those that ended a while ago."""
    return await render(request, "sandboxes.html", caller, **await _listed(caller, service, cursor))


@router.get("/sandboxes/list")
async def listed(request: Request, caller: Browser, service: TheService, cursor: Cursor = "") -> HTMLResponse:
    """Show the list alone: the page asks for it every few seconds."""
    return await render(request, "sandbox_list.html", caller, **await _listed(caller, service, cursor))


async def _listed(caller: Caller, service: Service, cursor: str) -> dict[str, Any]:
    found = await sandboxes.sandboxes(caller, service, limit=PER_PAGE, cursor=cursor or None)
    rows = [{**one, "tone": _TONES.get(one["state"], "quiet")} for one in found["items"]]
    return {"rows": rows, "next_cursor": found["nextCursor"], "cursor": cursor}


@router.post("/sandboxes")
async def create(request: Request, caller: Browser, service: TheService) -> Response:
    """Open one, with what holds for runs, and lead to it."""
    form = await request.form()
    asked = {name: text for name in ("name", "lifetime") if (text := str(form.get(name, "")).strip())}
    try:
        made = await sandboxes.open_sandbox(sandboxes.NewSandbox.model_validate(asked), caller, service)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
    return RedirectResponse(f"/sandboxes/{made.id}", 303)


@router.get("/sandboxes/{sandbox_id}")
async def one(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show one: its facts, processes and ports."""
    return await render(request, "sandbox.html", caller, **await _now(caller, service, sandbox_id))


@router.get("/sandboxes/{sandbox_id}/now")
async def now(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show what goes on in it, alone: the page asks for it every few seconds."""
    return await render(request, "sandbox_now.html", caller, **await _now(caller, service, sandbox_id))


async def _now(caller: Caller, service: Service, sandbox_id: str) -> dict[str, Any]:
    box = await service.sandboxes.describe(sandbox_id, caller.project)
    shown: dict[str, Any] = {"box": box, "tone": _TONES.get(box["state"], "quiet"), "processes": [], "ports": []}
    if box["state"] == RUNNING:
        async with using(service, caller, sandbox_id) as use:
            found = await sandbox_processes.processes(use)
            ports = await sandboxes.ports(use)
        shown["processes"] = [
            {**row, "tone": "busy" if row["exitCode"] is None else tone(row["status"])}
            for row in islice(reversed(found["items"]), MOST_ROWS)
        ]
        shown["ports"] = ports["items"][:MOST_ROWS]
        shown["ports_left_out"] = max(0, len(ports["items"]) - MOST_ROWS)
    return shown


@router.post("/sandboxes/{sandbox_id}/resume")
async def resume(sandbox_id: str, caller: Browser, service: TheService) -> Response:
    """Let the processes of one that was paused go on."""
    async with using(service, caller, sandbox_id) as use:
        await sandboxes.resume(use)
    return RedirectResponse(f"/sandboxes/{sandbox_id}", 303)


@router.post("/sandboxes/{sandbox_id}/end")
async def end(sandbox_id: str, caller: Browser, service: TheService) -> Response:
    """End it with all that is in it."""
    await sandboxes.end(sandbox_id, caller, service)
    return RedirectResponse("/sandboxes", 303)


@router.get("/sandboxes/{sandbox_id}/processes/{process_id}")
async def process(
    request: Request, sandbox_id: str, process_id: str, caller: Browser, service: TheService
) -> HTMLResponse:
    """Show a process, with the last of its output that nobody has read, which stays there."""
    async with using(service, caller, sandbox_id) as use:
        found = await sandbox_processes.look(process_id, use)
    running = found["exitCode"] is None
    return await render(
        request, "sandbox_process.html", caller, box_id=sandbox_id, one=found, is_running=running,
        tone="busy" if running else tone(found["status"]),
    )  # fmt: skip


@router.post("/sandboxes/{sandbox_id}/processes/{process_id}/kill")
async def kill(request: Request, sandbox_id: str, process_id: str, caller: Browser, service: TheService) -> Response:
    """Kill a process with all that it started."""
    async with using(service, caller, sandbox_id) as use:
        await sandbox_processes.kill(process_id, use)
    if is_fragment(request):
        return await render(request, "sandbox_now.html", caller, **await _now(caller, service, sandbox_id))
    return RedirectResponse(f"/sandboxes/{sandbox_id}", 303)


@router.get("/sandboxes/{sandbox_id}/terminal")
async def terminal(request: Request, sandbox_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show a terminal, which a script opens."""
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
    at = read_path(path or HOME, path_base64 or None)
    shown: dict[str, Any] = {"box_id": sandbox_id, "named": _shown(at), "where": _query(at), "above": _above(at)}
    async with using(service, caller, sandbox_id) as use:
        info = await use.sandbox.stat(at)
        if info.is_directory:
            return await render(request, "sandbox_folder.html", caller, **shown, **await _folder(use, at))
        text = await _beginning(use, at) if "file" in (info.type, info.leads_to) else b""
    is_text = b"\0" not in text
    return await render(
        request, "sandbox_file.html", caller, **shown, size=format_size(info.size), kind=info.leads_to or info.type,
        text=text.decode(errors="replace") if is_text else None, is_cut=len(text) >= MOST_SHOWN_BYTES,
    )  # fmt: skip


async def _folder(use: Use, at: str) -> dict[str, Any]:
    async with use.service.sandboxes.listings:
        found = await use.sandbox.list_dir(at)
        rows = await asyncio.to_thread(_rows, at, found)
    return {"rows": rows, "left_out": len(found) - len(rows), "folder": at if utf8_safe(at) == at else ""}


def _rows(at: str, found: Sequence[FileInfo]) -> list[dict[str, str]]:
    """Return a line for each file, folders first."""
    return [
        {
            "name": _shown(info.name) + ("/" if info.is_directory else ""),
            "where": _query(f"{at.rstrip('/')}/{info.name}"),
            "kind": f"link to {_shown(info.target)}" if info.type == "link" else info.type,
            "size": format_size(info.size) if info.type == "file" else "", "mode": f"{info.mode:04o}",
            "changed": instant(info.mtime),
        }
        for info in sorted(found, key=lambda info: not info.is_directory)[:MOST_ROWS]
    ]  # fmt: skip


async def _beginning(use: Use, at: str) -> bytes:
    found = b""
    async for piece in use.held.live.read_stream(at, count=MOST_SHOWN_BYTES):
        found += piece
    return found


def _query(path: str) -> str:
    """Return how an address names a path: as text, or in base64 where it is no UTF-8."""
    try:
        return urlencode({"path": path.encode().decode()})
    except UnicodeEncodeError:
        return urlencode({"pathBase64": base64.b64encode(path.encode("utf-8", "surrogateescape")).decode()})


def _shown(name: str) -> str:
    return utf8_safe(escape_name(name))


def _above(path: str) -> list[tuple[str, str]]:
    """Return the folders above a path and itself: what each is called, and how an address names it."""
    top, label = ("", "/") if path.startswith("/") else (HOME, "workspace")
    found = [(label, _query(top or "/"))]
    for name in path.split("/"):
        if name not in ("", "."):
            top = f"{top}/{name}"
            found.append((_shown(name), _query(top)))
    return found
