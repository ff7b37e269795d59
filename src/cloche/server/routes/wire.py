"""`GET /api/wire`: the web socket of Cloche's own client; see `docs/service/wire.md`."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from ..auth import find_caller, service_of
from ..wire.connection import Wire

router = APIRouter(prefix="/api")


@router.websocket("/wire")
async def wire(websocket: WebSocket) -> None:
    """Carry many concurrent calls, each checked like a request."""
    caller = await find_caller(websocket)
    service = service_of(websocket)
    with service.wire.connection(caller.key_id):
        await websocket.accept()
        await Wire(websocket, service).serve()
