"""Hosts and settings on the page: what this machine can enforce, its backends, keys, and what holds from where."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from cloche.core.debugging import NAMESPACES
from cloche.core.errors import InvalidRequest
from cloche.execution.doctor import diagnose
from cloche.records.debugging import read_switches
from cloche.records.keys import SCOPES, create_key, list_keys, revoke_key, rotate_key

from ..auth import Browser, TheService
from ..html import PageRoute, render
from ..identities import Caller
from ..service import Service
from .debug import switch
from .sandbox import list_backends

router = APIRouter(route_class=PageRoute, include_in_schema=False)
DAY_S = 86_400.0
LIFETIMES = {"": None, "1": DAY_S, "30": 30 * DAY_S, "365": 365 * DAY_S}
_examining = asyncio.Lock()  # one at a time: it starts programs


@router.get("/hosts")
async def hosts(
    request: Request, caller: Browser, service: TheService, doctor: Annotated[bool, Query()] = False
) -> HTMLResponse:
    """Show the backends, and, where that is asked for, what this host can enforce."""
    backends = await list_backends(await service.settings())
    found = await _diagnosis() if doctor else None
    return await render(request, "hosts.html", caller, backends=backends, found=found)


@router.get("/hosts/doctor")
async def doctor(request: Request, caller: Browser) -> HTMLResponse:
    """Show what this host can enforce: it is measured now."""
    return await render(request, "doctor.html", caller, found=await _diagnosis())


async def _diagnosis() -> dict[str, Any]:
    async with _examining:
        found = (await asyncio.to_thread(diagnose)).as_dict()
    return {**found, "controls": [{"name": name, **measure} for name, measure in found["controls"].items()]}


@router.get("/settings")
async def settings(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Show keys, and what holds for runs."""
    return await _settings(request, caller, service)


async def _settings(
    request: Request, caller: Caller, service: Service, *, made: dict[str, Any] | None = None
) -> HTMLResponse:
    keys = await asyncio.to_thread(list_keys, service.database, project=caller.project)
    rows = (await service.settings()).as_rows()
    shown = [{**key.as_dict(), "isValid": key.is_valid} for key in reversed(keys)]
    debug = service.debugging.use(await service.read(read_switches)).as_dict()
    return await render(
        request, "settings.html", caller, keys=shown, rows=rows, scopes=SCOPES, made=made, debug=debug, about=NAMESPACES
    )


@router.post("/settings/debug")
async def change_debug(request: Request, caller: Browser, service: TheService) -> Response:
    """Switch the debug namespaces to those that are checked."""
    chosen = {str(one) for one in (await request.form()).getlist("namespace")}
    if unknown := chosen - set(NAMESPACES):
        raise InvalidRequest(f"namespace: there are {', '.join(NAMESPACES)}, and no {len(unknown)} others")
    await switch(service, {name: name in chosen for name in NAMESPACES}, by=caller.name)
    return RedirectResponse("/settings", 303)


@router.post("/settings/keys")
async def make_key(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Make a key, and show its text this once."""
    form = await request.form()
    lifetime = str(form.get("days", ""))
    if lifetime not in LIFETIMES:
        raise InvalidRequest("days: choose one of those offered")
    scopes = [str(one) for one in form.getlist("scope")]
    made, text = await asyncio.to_thread(
        create_key, service.database, name=str(form.get("name", "")), scopes=scopes,
        lifetime_s=LIFETIMES[lifetime], project=caller.project,
    )  # fmt: skip
    return await _settings(request, caller, service, made={"name": made.name, "text": text})


@router.post("/settings/keys/{key_id}/rotate")
async def rotate(request: Request, key_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Replace a key by a new one, and show its text this once."""
    made, text = await asyncio.to_thread(rotate_key, service.database, key_id, project=caller.project)
    service.identities.forget()
    return await _settings(request, caller, service, made={"name": made.name, "text": text})


@router.post("/settings/keys/{key_id}/revoke")
async def revoke(key_id: str, caller: Browser, service: TheService) -> Response:
    """Let a key hold no more."""
    await asyncio.to_thread(revoke_key, service.database, key_id, project=caller.project)
    service.identities.forget()
    return RedirectResponse("/settings", 303)
