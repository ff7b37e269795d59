"""The page for a browser with a login link: login, static files, running code, past runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from cloche.config.keys import Settings
from cloche.core.errors import ClocheError, InvalidRequest, NotFound
from cloche.core.languages import LANGUAGES
from cloche.core.protocols import SupportsLanguageNames
from cloche.execution.prepare import prepare_in_thread
from cloche.records import runs as run_records
from cloche.records.lists import list_page
from cloche.records.tables import StoredRun
from cloche.wire.bodies import validated
from cloche.wire.exec_options import ExecRequest
from cloche.wire.orders import make_order

from .. import below
from ..auth import COOKIE, Browser, TheService
from ..html import PageRoute, assets, is_fragment, render
from ..identities import COOKIE_S, end_cookie, use_link_code
from ..pages import FRAME_HEADERS, audit_chain, framed, read_run_form, run_form, show_row, show_run
from ..service import Service
from .audit import one_of_few

router = APIRouter(route_class=PageRoute, include_in_schema=False)
SHORT_RUN_S = 3.0  # a browser without scripts waits so long for a page with the result
END_S = 5.0
PER_PAGE = 25
STATUSES = (
    "ok", "error", "timeout", "out_of_memory", "output_limit", "pids_limit", "disk_limit", "signaled", "denied",
    "cancelled", "queued",
)  # fmt: skip
KEEP = {"Cache-Control": "public, max-age=31536000, immutable"}


@router.get("/")
async def index() -> Response:
    """Redirect to the first section of the page."""
    return RedirectResponse("/run", 303)


@router.get("/static/{path:path}")
async def static(path: str, v: str = "") -> Response:
    """Return a static file of the table; any other path is not found."""
    asset = assets().get(path)
    if asset is None:
        raise NotFound("there is no such file")
    return Response(asset.content, media_type=asset.media_type, headers=KEEP if v == asset.version else {})


@router.get("/login")
async def ask_to_log_in(request: Request, code: Annotated[str, Query(max_length=128)] = "") -> HTMLResponse:
    """Show a button before the link is used up, since programs that preview links must not consume it."""
    return await render(request, "login.html", None, code=code)


@router.post("/login")
async def log_in(request: Request, service: TheService) -> Response:
    """Exchange a link's code for a cookie, once."""
    code = str((await request.form(max_files=0, max_fields=4)).get("code", ""))[:128]
    cookie = await asyncio.to_thread(use_link_code, service.database, code)
    address = request.client.host if request.client else ""
    if cookie is None:
        await service.note_refused_login(address)
        return await render(request, "no_cookie.html", None, status_code=403)
    await service.record("login", what="used", address=address)
    response = RedirectResponse("/run", 303)
    response.set_cookie(
        COOKIE, cookie, max_age=COOKIE_S, path=below.address("/"), httponly=True, samesite="strict",
        secure=service.options.is_secure or request.url.scheme == "https",
    )  # fmt: skip
    return response


@router.post("/logout")
async def log_out(caller: Browser, service: TheService) -> Response:
    """Invalidate the cookie, in the browser and in the database."""
    if caller.session_hash is not None:
        await asyncio.to_thread(end_cookie, service.database, caller.session_hash)
    service.identities.forget()
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, path=below.address("/"))
    return response


@router.get("/run")
async def run_page(
    request: Request, caller: Browser, service: TheService, again: Annotated[str, Query(max_length=64)] = ""
) -> HTMLResponse:
    """Show the run form, filled with the request of another run if `again` names one."""
    settings = await service.settings()
    request_fields = None
    if again:
        request_fields = await service.read(
            lambda records: run_records.asked_for(records, again, project=caller.project)
        )
    form = run_form(settings, await _languages(service, settings), request_fields or {})
    return await render(request, "run.html", caller, again=again if request_fields else "", **form)


async def _languages(service: Service, settings: Settings) -> Sequence[str]:
    """Return the languages that are allowed and available, as far as known before a run."""
    allowed = settings.policy.languages or tuple(LANGUAGES)
    try:
        backend = (await prepare_in_thread(**service.options.options)).backend
    except ClocheError:  # a run reports what is missing
        return allowed
    languages = await asyncio.to_thread(backend.languages) if isinstance(backend, SupportsLanguageNames) else allowed
    return [name for name in allowed if name in languages]


@router.post("/run")
async def run_code(request: Request, caller: Browser, service: TheService) -> Response:
    """Run the form's code; show its output live or, without scripts, on the next page."""
    form = await request.form()
    exec_request = validated(ExecRequest, await read_run_form(form))
    size = len(exec_request.code or "") + sum(len(file.base64 or "") for file in exec_request.files)
    live = await service.runs.submit(await make_order(service, caller, exec_request, size=size))
    if is_fragment(request):
        return await render(request, "live.html", caller, run_id=live.id)
    if live.task is not None:
        await asyncio.wait({live.task}, timeout=SHORT_RUN_S)
    return RedirectResponse(f"/runs/{live.id}", 303)


@router.get("/activity")
async def activity(
    request: Request,
    caller: Browser,
    service: TheService,
    status: Annotated[str, Query(max_length=16)] = "",
    session: Annotated[str, Query(max_length=64)] = "",
    cursor: Annotated[str, Query(max_length=64)] = "",
) -> HTMLResponse:
    """Show the running, waiting and past runs."""
    page = await service.read(
        lambda records: list_page(
            records, StoredRun, project=caller.project, show=lambda row: show_row(run_records.facts(row)),
            limit=PER_PAGE, cursor=cursor or None, session_id=session or None, status=status or None,
            large=StoredRun.document,
        )
    )  # fmt: skip
    items: list[dict[str, Any]] = page["items"]
    return await render(
        request, "activity.html", caller, history=[row for row in items if row["is_over"] or status],
        next_cursor=page["nextCursor"], status=status, session=session, cursor=cursor, statuses=STATUSES,
        **await _now(service, caller.project),
    )  # fmt: skip


@router.get("/activity/now")
async def activity_now(request: Request, caller: Browser, service: TheService) -> HTMLResponse:
    """Show only the running and waiting runs, which the script polls every few seconds."""
    return await render(request, "now.html", caller, **await _now(service, caller.project))


async def _now(service: Service, project: str) -> dict[str, Any]:
    """Return the unfinished runs of all workers, the newest first."""

    def read(status: str) -> Any:  # noqa: ANN401 - work for `read`
        return lambda records: list_page(
            records, StoredRun, project=project, show=lambda row: show_row(run_records.facts(row)), status=status
        )["items"]

    rows = [row for status in run_records.UNFINISHED for row in await service.read(read(status))]
    begun = {run.id for run in service.runs.begun()}
    running = [{**row, "status": "running"} for row in rows if row["id"] in begun or row["status"] == "running"]
    known_ids = {row["id"] for row in running}
    return {"running": running, "queued": [row for row in rows if row["id"] not in known_ids]}


@router.get("/runs/{run_id}")
async def one_run(request: Request, run_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show one run in detail, with its audit events."""
    facts, exec_request = await service.read(
        lambda records: (
            run_records.find(records, run_id, project=caller.project),
            run_records.asked_for(records, run_id, project=caller.project),
        )
    )
    settings = await service.settings()
    async with one_of_few():
        chain = await asyncio.to_thread(audit_chain, settings, facts.document)
    shown = await asyncio.to_thread(show_run, facts)
    return await render(request, "one_run.html", caller, run=shown, run_id=run_id, chain=chain, asked=exec_request)


@router.get("/runs/{run_id}/outcome")
async def outcome(request: Request, run_id: str, caller: Browser, service: TheService) -> HTMLResponse:
    """Show the result of a run, once it is stored."""
    live = service.runs.find(run_id, caller.project)
    if live is not None and live.task is not None:
        await asyncio.wait({live.task}, timeout=END_S)
    facts = await service.read(lambda records: run_records.find(records, run_id, project=caller.project))
    if facts.status in run_records.UNFINISHED:
        return await render(request, "live.html", caller, run_id=run_id)
    return await render(request, "outcome.html", caller, run=await asyncio.to_thread(show_run, facts))


@router.get("/runs/{run_id}/frame/{number}")
async def frame(run_id: str, number: int, caller: Browser, service: TheService) -> Response:
    """Return a guest's HTML or SVG for a sandboxed frame without scripts."""
    facts = await service.read(lambda records: run_records.find(records, run_id, project=caller.project))
    text = await asyncio.to_thread(framed, facts.document, number)
    if text is None:
        raise NotFound(f"run {run_id} has no such output")
    content = await asyncio.to_thread(text.encode, "utf-8", "replace")
    return Response(content, media_type="text/html; charset=utf-8", headers=FRAME_HEADERS)


@router.post("/runs/{run_id}/cancel")
async def cancel(request: Request, run_id: str, caller: Browser, service: TheService) -> Response:
    """Kill a running run."""
    live = service.runs.find(run_id, caller.project)
    if live is None or live.task is None:
        raise InvalidRequest("this run has ended, or another worker has it")
    if not live.task.done():
        live.cancel()
        await asyncio.wait({live.task}, timeout=END_S)
    if is_fragment(request):
        return await outcome(request, run_id, caller, service)
    return RedirectResponse(f"/runs/{run_id}", 303)
