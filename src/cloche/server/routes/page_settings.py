"""Hosts and settings on the page: enforceable controls, backends, keys, secrets, and each setting with its source."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from cloche.config.keys import Settings
from cloche.config.spellings import NAMES
from cloche.core.debugging import NAMESPACES
from cloche.core.errors import BackendUnavailable, Conflict, InvalidRequest, PolicyDenied
from cloche.core.limits import REQUESTED_LIMITS
from cloche.execution.doctor import diagnose
from cloche.records.debugging import read_switches
from cloche.records.keys import SCOPES, create_key, list_keys, revoke_key, rotate_key
from cloche.records.settings import StoredSettings, read_stored
from cloche.wire.callers import Caller

from ..auth import Browser, TheService
from ..html import PageRoute, render
from ..service import Service
from .debug import switch
from .sandbox import change_config, list_backends, shown_values
from .secrets import NewSecret, put, take_away

router = APIRouter(route_class=PageRoute, include_in_schema=False)
DAY_S = 86_400.0
# Settings of the form, by the wire's name: label, and choices if there are few.
FIELDS: Sequence[tuple[str, str, Sequence[str]]] = (
    ("runtime", "Backend or runtime", ()), *((row.wire, row.title, ()) for row in REQUESTED_LIMITS),
    ("network", "Network", ("off", "allowlist", "open")),
    ("networkAllow", "Hosts that may be reached", ()), ("networkDeny", "Hosts that may not be reached", ()),
    ("languages", "Languages", ()), ("packages", "Packages", ()), ("require", "Required level or controls", ()),
    ("screen", "Screen", ("off", "warn", "block")), ("users", "Several users", ("true", "false")),
)  # fmt: skip
LIFETIMES = {"": None, "1": DAY_S, "30": 30 * DAY_S, "365": 365 * DAY_S}
_examining = asyncio.Lock()  # one at a time: it starts programs


@router.get("/hosts")
async def hosts(
    request: Request, caller: Browser, service: TheService, doctor: Annotated[bool, Query()] = False
) -> HTMLResponse:
    """Show the backends and, with `doctor`, the controls that this host can enforce."""
    backends = await list_backends(await service.settings())
    diagnosis = await _diagnosis() if doctor else None
    return await render(request, "hosts.html", caller, backends=backends, found=diagnosis)


@router.get("/hosts/doctor")
async def doctor(request: Request, caller: Browser) -> HTMLResponse:
    """Measure and show the controls that this host can enforce."""
    return await render(request, "doctor.html", caller, found=await _diagnosis())


async def _diagnosis() -> dict[str, Any]:
    async with _examining:
        diagnosis = (await asyncio.to_thread(diagnose)).as_dict()
    return {**diagnosis, "controls": [{"name": name, **measure} for name, measure in diagnosis["controls"].items()]}


@router.get("/settings")
async def settings(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Show the keys and the settings of runs."""
    return await _settings(request, caller, service)


async def _settings(
    request: Request, caller: Caller, service: Service, *, made: dict[str, Any] | None = None, problem: str = "",
    filled: Mapping[str, str] | None = None, changed: Sequence[str] = (), not_stored: str = "",
) -> HTMLResponse:  # fmt: skip
    keys = await asyncio.to_thread(list_keys, service.database, project=caller.project)
    settings = await service.settings()
    fields = _shown_fields(settings, await service.read(read_stored), filled or {})
    shown = [{**key.as_dict(), "isValid": key.is_valid} for key in reversed(keys)]
    debug = service.debugging.use(await service.read(read_switches)).as_dict()
    secrets = await service.secret_store.list(caller.project)
    return await render(
        request, "settings.html", caller, status_code=422 if problem or not_stored else 200, keys=shown,
        rows=settings.as_rows(), fields=fields, scopes=SCOPES, made=made, debug=debug, about=NAMESPACES,
        problem=problem, changed=changed, secrets=secrets, can_store=service.secret_store.can_store,
        not_stored=not_stored,
    )  # fmt: skip


def _shown_fields(settings: Settings, stored: StoredSettings, filled: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the fields of the form: the stored or filled value, the effective value, and its source."""
    held, fields = shown_values(settings), []
    for name, label, choices in FIELDS:
        value = _as_text(stored.values.get(NAMES[name]))
        origin = str(settings.origins.get(NAMES[name], "default"))
        offered = [*choices, *([value] if choices and value and value not in choices else [])]
        fields.append({
            "name": name, "label": label, "stored": value, "value": filled.get(name, value), "choices": offered,
            "held": _as_text(held[name]) or "none", "origin": "set here" if origin.startswith("stored") else origin,
        })  # fmt: skip
    return fields


def _as_text(value: Any) -> str:  # noqa: ANN401 - plain data
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@router.post("/settings/values")
async def change_values(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Store the settings that the form changed. An empty field resets a setting to the files."""
    form = await request.form()
    filled = {name: str(form.get(name, "")).strip() for name, _, _ in FIELDS}
    changed_values = {name: text or None for name, text in filled.items() if text != str(form.get(f"{name}-was", ""))}
    try:
        await change_config(caller, service, changed_values)
    except (InvalidRequest, PolicyDenied) as error:
        return await _settings(request, caller, service, problem=str(error), filled=filled)
    return await _settings(request, caller, service, changed=list(changed_values))


@router.post("/settings/debug")
async def change_debug(request: Request, caller: Browser, service: TheService) -> Response:
    """Switch the checked debug namespaces on, and all others off."""
    chosen = {str(namespace) for namespace in (await request.form()).getlist("namespace")}
    if unknown := chosen - set(NAMESPACES):
        raise InvalidRequest(f"namespace: there are {', '.join(NAMESPACES)}, and {len(unknown)} names are unknown")
    await switch(service, {name: name in chosen for name in NAMESPACES}, by=caller.name)
    return RedirectResponse("/settings", 303)


@router.post("/settings/secrets")
async def store_secret(request: Request, caller: Browser, service: TheService) -> Response:
    """Store a secret. Its value is not shown again, whatever is wrong with it."""
    form = await request.form()
    hosts = [host for host in str(form.get("hosts", "")).replace(",", " ").split() if host]
    try:
        body = NewSecret.model_validate({"value": str(form.get("value", "")).strip(), "hosts": hosts})
        await put(service, caller, str(form.get("secret", "")).strip(), body)
    except ValidationError:
        return await _settings(request, caller, service, not_stored="The value or a host is too long")
    except (InvalidRequest, Conflict, BackendUnavailable) as error:
        return await _settings(request, caller, service, not_stored=str(error).rstrip("."))
    return RedirectResponse("/settings#secrets", 303)


@router.post("/settings/secrets/{name}/remove")
async def remove_secret(name: str, caller: Browser, service: TheService) -> Response:
    """Remove a secret."""
    await take_away(service, caller, name)
    return RedirectResponse("/settings#secrets", 303)


@router.post("/settings/keys")
async def make_key(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Create a key, and show its text once."""
    form = await request.form()
    lifetime = str(form.get("days", ""))
    if lifetime not in LIFETIMES:
        raise InvalidRequest("days: choose one of the offered values")
    scopes = [str(scope) for scope in form.getlist("scope")]
    key, text = await asyncio.to_thread(
        create_key, service.database, name=str(form.get("name", "")), scopes=scopes,
        lifetime_s=LIFETIMES[lifetime], project=caller.project, audit=await service.audit(),
    )  # fmt: skip
    return await _settings(request, caller, service, made={"name": key.name, "text": text})


@router.post("/settings/keys/{key_id}/rotate")
async def rotate(request: Request, key_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Replace a key by a new one, and show its text once."""
    rotate_it = partial(rotate_key, service.database, key_id, project=caller.project, audit=await service.audit())
    key, text = await asyncio.to_thread(rotate_it)
    service.identities.forget()
    return await _settings(request, caller, service, made={"name": key.name, "text": text})


@router.post("/settings/keys/{key_id}/revoke")
async def revoke(key_id: str, caller: Browser, service: TheService) -> Response:
    """Revoke a key."""
    revoke_it = partial(revoke_key, service.database, key_id, project=caller.project, audit=await service.audit())
    await asyncio.to_thread(revoke_it)
    service.identities.forget()
    return RedirectResponse("/settings", 303)
