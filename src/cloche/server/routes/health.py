"""`/health`, `/ready` and `/metrics`: for whoever watches the service, without a key (but for metrics)."""

from __future__ import annotations

import asyncio
import os

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import delete, false, func, select
from sqlalchemy.orm import Session

from cloche.core.errors import RecordsFailed
from cloche.records.tables import LiveSandbox

from ..auth import Reader, TheService
from ..problems import RESPONSES, Refused
from ..service import Service

router = APIRouter(tags=["health"])
READY_S, LEAST_BYTES = 2.0, 1 << 20


@router.get("/health", responses=RESPONSES)
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/ready", responses=RESPONSES)
async def ready(service: TheService) -> dict[str, str]:
    """Say that runs can be taken: their records can be written, and the service is not being stopped."""
    if service.is_draining or service.runs.is_closed:
        raise Refused(503, "draining", "the service is being stopped", headers={"Retry-After": "5"})
    try:
        async with asyncio.timeout(READY_S):
            left = await asyncio.shield(_look(service))
    except TimeoutError:
        raise Refused(
            503,
            "records-failed",
            f"the database could not be written to within {READY_S:g} s",
            headers={"Retry-After": "5"},
        ) from None
    if left is not None and left < LEAST_BYTES:
        raise Refused(503, "records-failed", "the disk of the database is full", headers={"Retry-After": "60"})
    return {"status": "ok"}


def _look(service: Service) -> asyncio.Future[int | None]:
    """Return the one attempt to write that all who ask at the same time wait for, also where it takes long."""
    look = service.room
    if look is None or look.done():
        look = service.room = asyncio.ensure_future(service.write(_room))
        look.add_done_callback(lambda done: done.cancelled() or done.exception())
    return look


def _room(session: Session) -> int | None:
    """Return how many bytes are left for a database in a file; nothing is changed in what takes a lock to write."""
    session.execute(delete(LiveSandbox).where(false()))
    bind = session.get_bind()
    if bind.dialect.name != "sqlite" or bind.engine.url.database is None:
        return None
    there = os.statvfs(os.path.dirname(os.path.realpath(bind.engine.url.database)))
    return there.f_bavail * there.f_frsize


@router.get("/metrics", responses=RESPONSES, response_class=PlainTextResponse)
async def metrics(_: Reader, service: TheService) -> Response:
    """Return counters and gauges in Prometheus' text format."""
    try:
        sandboxes = await service.read(lambda session: session.scalar(select(func.count()).select_from(LiveSandbox)))
    except RecordsFailed:  # which is counted, and must not hide the other figures
        sandboxes = None
    content, kind = service.metrics.render(service.runs, sandboxes=sandboxes)
    return Response(content, media_type=kind)
