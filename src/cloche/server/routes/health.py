"""`/health`, `/ready` and `/metrics`: for whoever watches the service, without a key (but for metrics)."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import func, select, text

from cloche.core.errors import RecordsFailed
from cloche.records.tables import LiveSandbox

from ..auth import Reader, TheService
from ..problems import RESPONSES, Refused

router = APIRouter(tags=["health"])


@router.get("/health", responses=RESPONSES)
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/ready", responses=RESPONSES)
async def ready(service: TheService) -> dict[str, str]:
    """Say that runs can be taken: the database answers, and the service is not being stopped."""
    if service.is_draining or service.runs.is_closed:
        raise Refused(503, "draining", "the service is being stopped", headers={"Retry-After": "5"})
    await service.read(lambda session: session.execute(text("SELECT 1")).scalar())
    return {"status": "ok"}


@router.get("/metrics", responses=RESPONSES, response_class=PlainTextResponse)
async def metrics(_: Reader, service: TheService) -> Response:
    """Return counters and gauges in Prometheus' text format."""
    try:
        sandboxes = await service.read(lambda session: session.scalar(select(func.count()).select_from(LiveSandbox)))
    except RecordsFailed:  # which is counted, and must not hide the other figures
        sandboxes = None
    content, kind = service.metrics.render(service.runs, sandboxes=sandboxes)
    return Response(content, media_type=kind)
