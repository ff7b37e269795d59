"""`POST /api/code/exec`, and its runs: list, look, events, cancel."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session as DatabaseSession
from starlette.datastructures import UploadFile

from cloche.core.errors import NotFound
from cloche.core.record import replace
from cloche.records import runs as run_records
from cloche.records.lists import list_page
from cloche.records.results import as_json
from cloche.records.tables import StoredRun
from cloche.wire.bodies import BodyBounds, parse, validated
from cloche.wire.callers import Caller
from cloche.wire.exec_options import (
    MOST_PATH,
    ExecRequest,
)
from cloche.wire.orders import make_order
from cloche.wire.problems import Refused
from cloche.wire.queue import RunOrder

from ..auth import Reader, Runner, TheService
from ..bodies import MOST_JSON, JsonRoute
from ..events import as_sent, server_sent, wait_or_cancel
from ..problems import MEDIA_TYPE, RESPONSES, Problem
from ..service import Service
from ..streams import HeldStream, event_stream

router = APIRouter(prefix="/api", tags=["code"], route_class=JsonRoute)
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": ExecRequest.model_json_schema(ref_template="#/components/schemas/{model}")},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "description": "`request` is the JSON of a run; each `file` goes to the path of its file name.",
                    "properties": {
                        "request": {"type": "string"},
                        "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
                    },
                    "required": ["request"],
                }
            },
        },
    }
}

_EVENTS: dict[str, Any] = {"description": "Server-sent events.", "content": {"text/event-stream": {}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The complete result.", "content": {"application/json": {}, "text/event-stream": {}}},
    202: {"description": "It was queued.", "content": {"application/json": {"example": {"id": "run_…"}}}},
    415: {"model": Problem, "description": "Neither JSON nor a form.", "content": {MEDIA_TYPE: {}}},
}


AGAIN_S = 0.1  # between two checks whether another worker's run has ended


class Digest(Protocol):
    """An incremental hash."""

    def update(self, data: bytes, /) -> None:
        """Hash more data."""


@router.post("/code/exec", responses={**RESPONSES, **_ANSWERS}, openapi_extra=_BODY)
async def execute(
    request: Request,
    caller: Runner,
    service: TheService,
    stream: bool = False,
    prefer: Annotated[str | None, Header()] = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Run code in a fresh sandbox, and answer with the whole result.

    With `?stream=1` the answer is server-sent events, the last one `result` or `error`. With `Prefer: respond-async` it
    is 202 and the run's id. A disconnect cancels the run, unless it is `respond-async`. The same `Idempotency-Key` with
    the same request returns the same run, unless that was refused before any of it ran.
    """
    key = run_records.check_idempotency_key(idempotency_key)
    digest = None if key is None else hashlib.sha256()
    exec_request, files, size = await _read_request(request, digest)
    order = await make_order(service, caller, exec_request, size=size, files=files)
    if digest is not None:
        order = replace(order, idempotency_key=key, request_sha256=digest.digest())
    is_async = prefer is not None and "respond-async" in prefer.lower()
    try:
        live = await service.runs.submit(replace(order, has_events=stream or is_async))
    except IntegrityError:
        if (repeated := await _repeated(service, order)) is not None:
            return repeated
        live = await service.runs.submit(replace(order, has_events=stream or is_async))
    if is_async:
        headers = {"Location": f"/api/runs/{live.id}", "Preference-Applied": "respond-async"}
        return JSONResponse({"id": live.id, "status": "queued"}, 202, headers)
    if stream:
        return event_stream(live)
    return Response(await wait_or_cancel(request, live), media_type="application/json")


async def _read_request(request: Request, digest: Digest | None) -> tuple[ExecRequest, dict[str, bytes], int]:
    """Return the request, the files of a form, and the number of bytes. All of it is fed to `digest`.

    Raises InvalidFields, Refused.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(request, digest)
    if kind not in ("", "application/json"):
        raise Refused(415, "unsupported-media-type", "send application/json, or multipart/form-data with files")
    size = len(await request.body())
    if digest is not None:
        await asyncio.to_thread(digest.update, await request.body())
    return validated(ExecRequest, await request.json()), {}, size


async def _read_form(request: Request, digest: Digest | None) -> tuple[ExecRequest, dict[str, bytes], int]:
    async with request.form(max_files=1_000, max_fields=10, max_part_size=MOST_JSON) as form:
        text = str(form.get("request", "")).encode()
        BodyBounds().feed(text)
        exec_request, files, size = validated(ExecRequest, parse(text)), {}, len(text)
        if digest is not None:
            digest.update(exec_request.model_dump_json().encode())
        for upload in form.getlist("file"):
            if not isinstance(upload, UploadFile) or len(upload.filename or "") > MOST_PATH:
                raise Refused(422, "invalid-request", "file: send files with a file name", field="file")
            name, data = upload.filename or "file", await upload.read()
            size, files[name] = size + len(data), data
            if digest is not None:
                await asyncio.to_thread(digest.update, f"{name}\0{len(data)}\0".encode() + data)
    if files:
        exec_request.model_fields_set.add("files")  # they were given, if not as JSON
    return exec_request, files, size


async def _repeated(service: Service, order: RunOrder) -> Response | None:
    """Return the response of the run with the same idempotency key, None if that key was released since.

    Raises Refused (409) if the key was used for a different request.
    """
    ask = partial(
        run_records.find_repeated, project=order.project, api_key=order.api_key,
        idempotency_key=str(order.idempotency_key),
    )  # fmt: skip
    repeated = await service.read(ask)
    if repeated is None:
        return None
    if repeated.request_sha256 != order.request_sha256:
        raise Refused(409, "idempotency-key-reused", "this Idempotency-Key was used with another request")
    live = service.runs.find(repeated.id, order.project)
    if live is not None and live.task is not None:
        await asyncio.wait({live.task})
        if live.task.cancelled():
            raise Refused(409, "cancelled", "the run was cancelled")
        return Response(live.task.result(), media_type="application/json")
    while repeated is not None and repeated.status in run_records.UNFINISHED:  # by another worker
        await asyncio.sleep(AGAIN_S)
        repeated = await service.read(ask)
    if repeated is None:
        return None
    return Response(as_json(repeated.as_dict()), media_type="application/json")


@router.get("/runs", responses=RESPONSES)
async def runs(
    caller: Reader,
    service: TheService,
    session_id: Annotated[str | None, Query(alias="sessionId", max_length=64)] = None,
    status: Annotated[str | None, Query(max_length=16)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """List runs, the newest first. There are fewer than `limit` if their results are large."""

    def read(session: DatabaseSession) -> str:
        page = list_page(
            session, StoredRun, project=caller.project, show=lambda row: run_records.facts(row).as_dict(), limit=limit,
            cursor=cursor, session_id=session_id, status=status, large=StoredRun.document,
        )  # fmt: skip
        return as_json(page)

    return Response(await service.read(read), media_type="application/json")


@router.get("/runs/{run_id}", responses=RESPONSES)
async def run(run_id: str, caller: Reader, service: TheService) -> Response:
    """Return one run, whether it has ended or not."""
    return Response(await _run_text(service, caller, run_id), media_type="application/json")


async def _run_text(service: Service, caller: Caller, run_id: str) -> str:
    """Return a run as JSON, written in a thread: a large one must not block the event loop."""
    return await service.read(
        lambda session: as_json(run_records.find(session, run_id, project=caller.project).as_dict())
    )


@router.get("/runs/{run_id}/events", responses={**RESPONSES, 200: _EVENTS})
async def events(
    run_id: str, caller: Reader, service: TheService, last_event_id: Annotated[int, Header(ge=0)] = 0
) -> Response:
    """Follow the events of a run as server-sent events, from `Last-Event-ID` on.

    Of a run that ended more than a minute ago only `result` is sent.
    """
    live = service.runs.find(run_id, caller.project)
    if live is None:
        text = await _run_text(service, caller, run_id)
        return Response(as_sent("result", text, 1), media_type="text/event-stream")
    return HeldStream(server_sent(live.events, last_event_id), media_type="text/event-stream")


@router.post("/runs/{run_id}/cancel", responses=RESPONSES)
async def cancel(run_id: str, caller: Runner, service: TheService) -> dict[str, Any]:
    """Kill a run. A run that has ended stays as it is."""
    live = service.runs.find(run_id, caller.project)
    if live is not None and live.task is not None and not live.task.done():
        live.cancel()
        await asyncio.wait({live.task})
    facts = await service.read(lambda session: run_records.find(session, run_id, project=caller.project))
    if facts.status in run_records.UNFINISHED:
        raise NotFound(f"run {run_id} is of another worker; ask that worker, or wait")
    why = {"error": facts.document["error"]} if "error" in facts.document else {}  # such as that its worker is gone
    return {"id": facts.id, "status": facts.status, **why}
