"""Approvals on the page: waiting requests, decisions, and past decisions."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from cloche.core.errors import InvalidRequest, NotFound
from cloche.records import approvals as records
from cloche.wire.problems import Refused

from ..auth import Browser, TheService
from ..html import PageRoute, is_fragment, render
from ..pages import read_number, show_approval
from ..service import Service
from .approvals import OF_HOSTS, Word, decide

router = APIRouter(route_class=PageRoute, include_in_schema=False)
MOST_WAITING, MOST_DECIDED = 50, 50
MOST_REASON = 500
# Button -> whether it approves, and whether it is the confirmation.
_ANSWERS = {"approve": (True, False), "confirm": (True, True), "deny": (False, False)}


@router.get("/approvals")
async def approvals(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Show waiting requests and past decisions."""
    shown = {**await _waiting(service, caller.project), **await _decided(service, caller.project)}
    return await render(request, "approvals.html", caller, **shown)


@router.get("/approvals/count")
async def count(request: Request, caller: Browser, service: TheService, have: Annotated[int, Query()] = -1) -> Response:
    """Show the number of waiting requests, for the menu of every page; 204 if the page already has it."""
    open_count = await service.read(partial(records.count_open, project=caller.project))
    if open_count == have:
        return Response(status_code=204)
    return await render(request, "waits.html", None, waits=open_count)


@router.get("/approvals/decided")
async def decided(
    request: Request, caller: Browser, service: TheService, have: Annotated[str, Query(max_length=64)] = ""
) -> Response:
    """Show only the past decisions; 204 if the page already has them."""
    if have and have == await service.read(partial(records.last_change, project=caller.project)):
        return Response(status_code=204)
    return await render(request, "decided.html", caller, **await _decided(service, caller.project))


@router.get("/approvals/waiting")
async def waiting(
    request: Request, caller: Browser, service: TheService, have: Annotated[str | None, Query(max_length=4_000)] = None
) -> Response:
    """Show only the waiting requests; 204 if the page already has them, so that typed text is not lost."""
    shown = await _waiting(service, caller.project)
    if have is not None and have == shown["have"]:
        return Response(status_code=204)
    return await render(request, "waiting.html", caller, **shown)


@router.post("/approvals/{number}")
async def answer(request: Request, number: str, caller: Browser, service: TheService) -> Response:
    """Decide about a request. A critical one that is approved needs a confirmation."""
    form = await request.form()
    verdict = _ANSWERS.get(str(form.get("decision", "")))
    if verdict is None:
        raise InvalidRequest("decision: say approve, confirm or deny")
    is_remembered = verdict[0] and form.get("remember") == "1"
    kinds = {kind: True for kind in OF_HOSTS if verdict[0] and form.get(kind) == "1"}
    note, remark = "", Word(reason=str(form.get("reason", ""))[:MOST_REASON], remember=is_remembered)
    try:
        await decide(
            service, caller, read_number(number), remark, is_approved=verdict[0], is_confirming=verdict[1], kinds=kinds
        )  # fmt: skip
    except (Refused, NotFound) as error:  # it may have ended meanwhile: shown beside the waiting requests
        note = str(error)
    if is_fragment(request) or note:
        return await render(request, "waiting.html", caller, **await _waiting(service, caller.project, note))
    return RedirectResponse("/approvals", 303)


async def _decided(service: Service, project: str) -> dict[str, Any]:
    def read(session: Session) -> dict[str, Any]:
        last_change = records.last_change(session, project=project)
        items = records.list_approvals(session, project=project, limit=MOST_WAITING + MOST_DECIDED)["items"]
        return {"seen": last_change, "decided": [item for item in items if item["status"] != "waiting"][:MOST_DECIDED]}

    return await service.read(read)


async def _waiting(service: Service, project: str, note: str = "") -> dict[str, Any]:
    def read(session: Session) -> list[Any]:
        return list(records.waiting(session, limit=MOST_WAITING + 1, project=project))

    entries = await service.read(read)
    shown = await asyncio.to_thread(lambda: [show_approval(entry) for entry in entries[:MOST_WAITING]])
    have = ",".join(f"{approval['number']}.{approval['version']}" for approval in shown)
    return {"waiting": shown, "have": have, "has_more": len(entries) > MOST_WAITING, "note": note}
