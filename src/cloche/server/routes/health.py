"""`/health`, `/ready` and `/metrics`, for monitoring. Only the metrics need a key."""

from __future__ import annotations

import asyncio
import os

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import delete, false, func, select
from sqlalchemy.orm import Session

from cloche.core.errors import RecordsFailed
from cloche.records.tables import StoredSandbox
from cloche.wire.problems import Refused

from ..auth import Reader, TheService
from ..problems import RESPONSES
from ..service import Service

router = APIRouter(tags=["health"])
READY_S, LEAST_BYTES = 2.0, 1 << 20


@router.get("/health", responses=RESPONSES)
async def health() -> dict[str, str]:
    """Tell that the process of the service answers."""
    return {"status": "ok"}


@router.get("/ready", responses=RESPONSES)
async def ready(service: TheService) -> dict[str, str]:
    """Tell whether runs are accepted: records can be written, and the service is not stopping."""
    if service.is_draining or service.runs.is_closed:
        raise Refused(503, "draining", "the service is being stopped", headers={"Retry-After": "5"})
    try:
        async with asyncio.timeout(READY_S):
            free_bytes = await asyncio.shield(_look(service))
    except TimeoutError:
        raise Refused(
            503,
            "records-failed",
            f"the database could not be written to within {READY_S:g} s",
            headers={"Retry-After": "5"},
        ) from None
    if free_bytes is not None and free_bytes < LEAST_BYTES:
        raise Refused(503, "records-failed", "the disk of the database is full", headers={"Retry-After": "60"})
    return {"status": "ok"}


def _look(service: Service) -> asyncio.Future[int | None]:
    """Return the current attempt to write. Concurrent requests share it, however long it takes."""
    look = service.room
    if look is None or look.done():
        look = service.room = asyncio.ensure_future(service.write(_room))
        look.add_done_callback(lambda task: task.cancelled() or task.exception())
    return look


def _room(session: Session) -> int | None:
    """Return the free bytes for a database in a file, once a write was possible."""
    # A DELETE of no rows takes the lock of a writer, and changes nothing.
    session.execute(delete(StoredSandbox).where(false()))
    bind = session.get_bind()
    if bind.dialect.name != "sqlite" or bind.engine.url.database is None:
        return None
    filesystem = os.statvfs(os.path.dirname(os.path.realpath(bind.engine.url.database)))
    return filesystem.f_bavail * filesystem.f_frsize


@router.get("/metrics", responses=RESPONSES, response_class=PlainTextResponse)
async def metrics(_: Reader, service: TheService) -> Response:
    """Return metrics in the text format of Prometheus."""
    try:
        sandboxes = await service.read(lambda session: session.scalar(select(func.count()).select_from(StoredSandbox)))
    except RecordsFailed:  # it is counted, and must not hide the other metrics
        sandboxes = None
    content, kind = service.metrics.render(service.runs, sandboxes=sandboxes)
    return Response(content, media_type=kind)
