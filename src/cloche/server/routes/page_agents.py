"""Agents on the page: list, changes by file, commit, discard. Only with `cloche serve --agents`, and scope admin."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData

from cloche.core.errors import InvalidRequest
from cloche.wire.callers import Caller

from .. import agents
from ..auth import Browser, TheService
from ..html import PageRoute, render

router = APIRouter(route_class=PageRoute, include_in_schema=False)
Name = Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")]
_ID = re.compile(r"[0-9a-f]{64}")
_HUNK = re.compile(r"(\d{1,6})\.([0-9a-f]{1,64})")


async def _admin(caller: Browser) -> Caller:
    caller.require("admin")
    return caller


Operator = Annotated[Caller, Depends(_admin)]


@router.get("/agents/list")
async def listed(request: Request, caller: Operator) -> HTMLResponse:
    """Show the list of living agents, which the page of sandboxes polls."""
    return await render(request, "agent_list.html", caller, agents=await asyncio.to_thread(agents.listed))


@router.get("/agents/{name}")
async def show_agent(request: Request, name: Name, caller: Operator, service: TheService) -> HTMLResponse:
    """Show an agent and what it has changed."""
    return await _page(request, name, caller, service)


@router.post("/agents/{name}/commit")
async def commit(request: Request, name: Name, caller: Operator, service: TheService) -> HTMLResponse:
    """Write the chosen changes to the project, or to a new branch of it."""
    chosen = read_choice(await request.form())
    async with service.reviews:
        said = await agents.commit(name, chosen)
    return await _page(request, name, caller, service, said)


@router.post("/agents/{name}/discard")
async def discard(request: Request, name: Name, caller: Operator, service: TheService) -> HTMLResponse:
    """Save all changes to an archive, and undo them in the sandbox."""
    diff_id = _read_id(await request.form())
    async with service.reviews:
        said = await agents.discard(name, diff_id)
    await service.note("sandbox", what="discard", name=name)
    return await _page(request, name, caller, service, said)


async def _page(
    request: Request, name: str, caller: Caller, service: TheService, said: list[str] | None = None
) -> HTMLResponse:
    async with service.reviews:
        shown: dict[str, Any] = await agents.shown(name)
    return await render(request, "agent.html", caller, said=said or [], **shown)


def read_choice(form: FormData) -> agents.Chosen:
    """Return what a form chose. Raises InvalidRequest."""
    files = [str(value) for value in form.getlist("file")]
    if not all(text.isascii() and text.isdigit() and len(text) < 7 for text in files):
        raise InvalidRequest("file: this is not the number of a change")
    hunks: dict[int, list[str]] = {int(text): [] for text in map(str, form.getlist("split")) if text.isdigit()}
    for text in map(str, form.getlist("hunk")):
        match = _HUNK.fullmatch(text)
        if match is None:
            raise InvalidRequest("hunk: this is not the id of a hunk")
        hunks.setdefault(int(match[1]), []).append(match[2])
    branch = str(form.get("branch", "")).strip()
    if len(branch) > agents.MOST_BRANCH_CHARS:
        raise InvalidRequest("branch: the name is too long")
    return agents.Chosen(
        diff_id=_read_id(form), files=tuple(map(int, files)), branch=branch,
        hunks={number: tuple(ids) for number, ids in hunks.items()},
    )  # fmt: skip


def _read_id(form: FormData) -> str:
    text = str(form.get("id", ""))
    if _ID.fullmatch(text) is None:
        raise InvalidRequest("id: this is not the id of a diff")
    return text
