"""Approvals on the page: what waits for a human, deciding about it, and what was decided."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from cloche.agent.approval import Decision, Risk
from cloche.core.errors import InvalidRequest

from ..auth import Browser
from ..html import PageRoute, is_fragment, render
from ..identities import Caller
from ..pages import approval_queue, read_number, show_approval

router = APIRouter(route_class=PageRoute, include_in_schema=False)
MOST_WAITING, MOST_DECIDED = 50, 50
MOST_REASON = 500
_ANSWERS = {"approve": True, "deny": False}


@router.get("/approvals")
async def approvals(request: Request, caller: Browser) -> HTMLResponse:
    """Show what waits for a decision, and what was decided."""
    entries = await asyncio.to_thread(lambda: approval_queue().entries())
    decided = [show_approval(entry) for entry in entries if entry.state != "waiting"]
    return await render(
        request, "approvals.html", caller, decided=decided[: -MOST_DECIDED - 1 : -1], **await _waiting()
    )


@router.get("/approvals/waiting")
async def waiting(
    request: Request, caller: Browser, have: Annotated[str | None, Query(max_length=2_000)] = None
) -> Response:
    """Show what waits, alone; nothing where that is what the page has already, so that nobody's words are lost."""
    shown = await _waiting()
    if have is not None and have == shown["have"]:
        return Response(status_code=204)
    return await render(request, "waiting.html", caller, **shown)


@router.post("/approvals/{number}")
async def decide(request: Request, number: str, caller: Browser) -> Response:
    """Decide about a request; a critical one is approved when that was said twice."""
    form = await request.form()
    answer = _ANSWERS.get(str(form.get("decision", "")))
    if answer is None:
        raise InvalidRequest("decision: say approve or deny")
    note, again = await asyncio.to_thread(
        _decide, read_number(number), answer, caller, str(form.get("reason", ""))[:MOST_REASON], form.get("sure") == "1"
    )
    if is_fragment(request) or again is not None or note:
        return await render(request, "waiting.html", caller, **await _waiting(note=note, again=again))
    return RedirectResponse("/approvals", 303)


def _decide(number: int, answer: bool, caller: Caller, reason: str, is_sure: bool) -> tuple[str, int | None]:
    """Return what went wrong, and the number of a request that must be approved once more."""
    queue = approval_queue()
    try:
        entry = queue.entry(number)
        if answer and entry.request.risk is Risk.CRITICAL and not is_sure and not entry.request.is_confirmation:
            return "", number
        queue.decide(number, Decision(is_approved=answer, by=f"browser at {caller.address}", reason=reason))
    except InvalidRequest as error:
        return str(error), None
    return "", None


async def _waiting(note: str = "", again: int | None = None) -> dict[str, Any]:
    entries = await asyncio.to_thread(lambda: approval_queue().waiting())
    shown = [show_approval(entry) for entry in entries[:MOST_WAITING]]
    have = ",".join(str(one["number"]) for one in shown)
    return {"waiting": shown, "have": have, "left_out": max(0, len(entries) - MOST_WAITING), "note": note,
            "again": again}  # fmt: skip
