"""`/api/sandboxes`: open, list, inspect, pause and end sandboxes; run code in them; ports and network."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from cloche.records import sandboxes as records
from cloche.records.lists import list_page
from cloche.records.tables import StoredSandbox
from cloche.records.templates import DEFAULT_TAG
from cloche.wire import sandboxes as sandboxes_inside
from cloche.wire.callers import Caller
from cloche.wire.exec_options import read_files

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..sandbox_use import RESULT_OR_EVENTS, Reading, Running, answer_call
from ..service import Service
from ..workspaces import opened_workspace

router = APIRouter(prefix="/api/sandboxes", tags=["sandboxes"], route_class=JsonRoute)


@router.post("", status_code=201, responses=RESPONSES)
async def create(
    body: sandboxes_inside.NewSandbox, caller: Runner, service: TheService, response: Response
) -> dict[str, Any]:
    """Open a sandbox. For keys below scope admin, limits, network, users and time are bounded as for runs."""
    facts = await open_sandbox(body, caller, service)
    response.headers["Location"] = f"/api/sandboxes/{facts.id}"
    return facts.as_dict()


async def open_sandbox(body: sandboxes_inside.NewSandbox, caller: Caller, service: Service) -> records.SandboxFacts:
    """Open a sandbox, if the caller may. Raises PolicyDenied, InvalidRequest, Refused, AuditFailed."""
    options = await service.allowed_options(caller, body.options())
    if body.snapshot is not None:
        template, build = await service.templates.find(body.snapshot, DEFAULT_TAG, caller.project)
        options["snapshot"] = await service.templates.archive(build)
        await service.templates.note_spawn(template.id)
    terms = sandboxes_inside.terms_of(body, caller)
    create = partial(
        service.sandboxes.create, project=caller.project, api_key=caller.key_id, terms=terms,
        document=sandboxes_inside.document_of(body, terms),
        files=await read_files(body.files),
    )  # fmt: skip
    folder = body.workspace
    if folder is None:
        return await create(options=options)
    holding = opened_workspace(service.options.roots, folder.path, writes=False)
    descriptor, _ = await asyncio.to_thread(holding.__enter__)
    try:
        # By the descriptor, since another folder may have the path by now.
        workspace_options = {
            "workspace": f"/proc/self/fd/{descriptor}",
            "workspace_disk": folder.disk,
            "workspace_hide": folder.hide,
        }
        return await create(options={**options, **workspace_options})
    finally:
        holding.__exit__(None, None, None)


@router.get("", responses=RESPONSES)
async def sandboxes(
    caller: Reader,
    service: TheService,
    label: Annotated[list[str] | None, Query(max_length=8, description="key=value; a sandbox must match each")] = None,
    state: Annotated[list[str] | None, Query(max_length=4)] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List sandboxes, the newest first, including those that ended within the last hour."""
    where = records.conditions(
        sandboxes_inside.read_labels(label or ()), sandboxes_inside.read_states(state or ()), name
    )
    await service.sandboxes.compare()
    return await service.read(
        lambda session: list_page(
            session, StoredSandbox, project=caller.project, show=lambda row: records.facts(row).as_dict(), limit=limit,
            cursor=cursor, where=where,
        )
    )  # fmt: skip


@router.get("/{sandbox_id}", responses=RESPONSES)
async def look(sandbox_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return one sandbox: its state, labels, limits, and remaining seconds."""
    return await service.sandboxes.describe(sandbox_id, caller.project)


@router.delete("/{sandbox_id}", responses=RESPONSES)
async def end(sandbox_id: str, caller: Runner, service: TheService) -> dict[str, Any]:
    """End a sandbox and everything in it. The answer comes when nothing of it is left."""
    return (await service.sandboxes.end(sandbox_id, caller.project)).as_dict()


@router.post("/{sandbox_id}/pause", responses=RESPONSES)
async def pause(use: Running, body: sandboxes_inside.Pause | None = None) -> dict[str, Any]:
    """Pause a sandbox: stop its processes and all its clocks, so that it does not end by time until it is resumed.

    With `memory` false its processes end, and the files alone are kept.
    """
    return await sandboxes_inside.pause(use, body)


@router.post("/{sandbox_id}/resume", responses=RESPONSES)
async def resume(use: Running, body: sandboxes_inside.Pause | None = None) -> dict[str, Any]:
    """Resume a paused sandbox. If it was paused since its lifetime was over, that begins anew."""
    return await sandboxes_inside.resume(use, body)


@router.post("/{sandbox_id}/lifetime", responses=RESPONSES)
async def set_lifetime(use: Running, body: sandboxes_inside.Lifetime) -> dict[str, Any]:
    """Set how much time a sandbox has left from now on, and what happens at its end (`atEnd`)."""
    return await sandboxes_inside.set_lifetime(use, body)


@router.post("/{sandbox_id}/exec", responses={**RESPONSES, **RESULT_OR_EVENTS})
async def execute(request: Request, use: Running, body: sandboxes_inside.SandboxExec, stream: bool = False) -> Response:
    """Run code or a command to its end, and answer with the whole result.

    With `?stream=1` the answer is server-sent events: first `call` with an id, finally `result` or `error`. A
    disconnect cancels the call.
    """
    return await answer_call(request, use, await sandboxes_inside.exec_work(use, body), stream=stream)


@router.get("/{sandbox_id}/exec", responses=RESPONSES)
async def calls(use: Reading) -> dict[str, Any]:
    """List the commands, code and cells that are running in a sandbox, by id."""
    return {"items": [{"id": call_id} for call_id in use.held.calls], "nextCursor": None}


@router.delete("/{sandbox_id}/exec/{call_id}", responses=RESPONSES)
async def cancel(call_id: str, use: Running) -> dict[str, Any]:
    """End a running command or code with all that it started. The cell of a session is interrupted."""
    live = use.held.call(call_id)
    live.cancel()
    return {"id": live.id, "status": "cancelled"}


@router.get("/{sandbox_id}/ports", responses=RESPONSES)
async def ports(use: Reading) -> dict[str, Any]:
    """List the TCP ports on which a server listens inside. A web socket to `…/ports/{port}` connects to one."""
    return await sandboxes_inside.ports(use)


@router.get("/{sandbox_id}/network", responses=RESPONSES)
async def network(use: Reading) -> dict[str, Any]:
    """Return the network rules of a sandbox, and its last allowed and refused connections."""
    return await sandboxes_inside.network(use)


@router.put("/{sandbox_id}/network", responses=RESPONSES)
async def replace_rules(use: Running, body: sandboxes_inside.NewRules) -> dict[str, Any]:
    """Replace all rules, within the settings or their ceilings, and close the connections that they do not allow."""
    return await sandboxes_inside.replace_rules(use, body)


@router.post("/{sandbox_id}/network/allow", responses=RESPONSES)
async def allow(use: Running, body: sandboxes_inside.NetworkRules) -> dict[str, Any]:
    """Allow more hosts, within the settings or their ceilings. Rules that other clients add meanwhile are kept."""
    return await sandboxes_inside.allow(use, body)


@router.post("/{sandbox_id}/network/deny", responses=RESPONSES)
async def deny(use: Running, body: sandboxes_inside.NetworkRules) -> dict[str, Any]:
    """Deny hosts, and close their connections. Rules that other clients add meanwhile are kept."""
    return await sandboxes_inside.deny(use, body)
