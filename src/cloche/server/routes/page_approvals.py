"""Approvals on the page: what waits for a human, deciding about it, and what was decided."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from cloche.agent.approval import Decision
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
    """Decide about a request; whoever made a critical one asks again then."""
    form = await request.form()
    answer = _ANSWERS.get(str(form.get("decision", "")))
    if answer is None:
        raise InvalidRequest("decision: say approve or deny")
    reason = str(form.get("reason", ""))[:MOST_REASON]
    note = await asyncio.to_thread(_decide, read_number(number), answer, caller, reason)
    if is_fragment(request) or note:
        return await render(request, "waiting.html", caller, **await _waiting(note))
    return RedirectResponse("/approvals", 303)


def _decide(number: int, answer: bool, caller: Caller, reason: str) -> str:
    """Decide, and return what went wrong: a request may have ended meanwhile."""
    try:
        approval_queue().decide(
            number, Decision(is_approved=answer, by=f"browser at {caller.address}", reason=reason)
        )  # fmt: skip
    except InvalidRequest as error:
        return str(error)
    return ""


async def _waiting(note: str = "") -> dict[str, Any]:
    entries = await asyncio.to_thread(lambda: approval_queue().waiting())
    shown = [show_approval(entry) for entry in entries[:MOST_WAITING]]
    have = ",".join(str(one["number"]) for one in shown)
    return {"waiting": shown, "have": have, "left_out": max(0, len(entries) - MOST_WAITING), "note": note}
