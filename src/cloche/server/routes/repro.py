"""`/api/sandbox/bug-repro` (C13): programs that show a bug, stored, run in a sandbox, and judged by their exit code."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from cloche.records.reproductions import Reproductions
from cloche.wire.callers import Caller
from cloche.wire.exec_options import SessionId, WireModel, check_stays
from cloche.wire.problems import Refused

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..service import Service
from .snapshots import Cursor, Limit, Session

router = APIRouter(prefix="/api/sandbox/bug-repro", tags=["bug reproductions"], route_class=JsonRoute)


class Expected(WireModel):
    """The exit code when the bug is fixed."""

    exit_code: int = 0


class NewReproduction(WireModel):
    """A program that shows a bug."""

    title: str
    description: str = ""
    language: str = "python"
    code: str
    session_id: SessionId | None = None
    expect: Expected | None = None


class RunReproduction(WireModel):
    """Where to run it: the configured backend, or another one that is no weaker."""

    backend: Annotated[str, StringConstraints(max_length=32)] | None = None


def _of(service: Service, caller: Caller) -> Reproductions:
    return Reproductions(service.database, project=caller.project, worker=service.worker)


@router.post("", status_code=201, responses=RESPONSES)
async def create(body: NewReproduction, caller: Runner, service: TheService) -> dict[str, Any]:
    """Store the reproduction of a bug. It is `queued` until it is run."""
    fields = body.model_dump(by_alias=True, exclude_none=True)
    return await asyncio.to_thread(_of(service, caller).create, fields)


@router.get("", responses=RESPONSES)
async def listed(
    caller: Reader,
    service: TheService,
    status: Annotated[str | None, Query(max_length=16)] = None,
    session_id: Session = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List the reproductions of bugs, the newest first."""
    return await asyncio.to_thread(
        _of(service, caller).list, status=status, session_id=session_id, limit=limit, cursor=cursor
    )  # fmt: skip


@router.get("/{repro_id}", responses=RESPONSES)
async def look(repro_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return a reproduction with the result of its last run."""
    return await asyncio.to_thread(_of(service, caller).get, repro_id)


@router.delete("/{repro_id}", status_code=204, responses=RESPONSES)
async def delete(repro_id: str, caller: Runner, service: TheService) -> None:
    """Delete a reproduction that is not running."""
    await asyncio.to_thread(_of(service, caller).delete, repro_id)


@router.post("/{repro_id}/run", status_code=202, responses=RESPONSES)
async def run(
    repro_id: str, caller: Runner, service: TheService, body: RunReproduction | None = None
) -> dict[str, Any]:  # fmt: skip
    """Run a reproduction. It ends as `passed`, `failed` (the code failed) or `error` (the run failed)."""
    await service.settings()
    reproductions, backend = _of(service, caller), body.backend if body is not None else None
    if backend is not None and not caller.has("admin"):
        check_stays(backend.strip().lower(), await service.settings())
    started = await asyncio.to_thread(reproductions.start, repro_id, backend)

    async def finish() -> None:
        try:
            async with service.runs.hold(caller.key_id):
                await reproductions.finish(repro_id, service.options.options)
        except Refused as error:  # the queue was full: it must not stay `running`
            await asyncio.to_thread(reproductions.give_up, repro_id, error.detail)

    service.in_background(finish())
    return started
