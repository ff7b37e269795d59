"""`/api/sandboxes/{id}/sessions`: interpreters that keep their state between cells, checkpoints and forks.

A session belongs to this worker. It ends with the worker or the sandbox.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from cloche.wire import sessions as sessions_inside

from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..sandbox_use import RESULT_OR_EVENTS, Reading, Running, answer_call

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}/sessions", tags=["sandbox sessions"], route_class=JsonRoute)


@router.post("", status_code=201, responses=RESPONSES)
async def open_session(use: Running, body: sessions_inside.NewSession) -> dict[str, Any]:
    """Open a session, an interpreter that keeps its state between cells."""
    return await sessions_inside.open_session(use, body)


@router.get("", responses=RESPONSES)
async def sessions(use: Reading) -> dict[str, Any]:
    """List the sessions of a sandbox."""
    return await sessions_inside.sessions(use)


@router.get("/{session_id}", responses=RESPONSES)
async def look(session_id: str, use: Reading) -> dict[str, Any]:
    """Return one session."""
    return await sessions_inside.look(use, session_id)


@router.post("/{session_id}/run", responses={**RESPONSES, **RESULT_OR_EVENTS})
async def run_cell(
    request: Request, session_id: str, use: Running, cell: sessions_inside.Cell, stream: bool = False
) -> Response:
    """Run a cell, and answer with its whole result.

    With `?stream=1` the answer is server-sent events. Cells of a session run one after the other. A disconnect
    interrupts the cell.
    """
    return await answer_call(request, use, await sessions_inside.cell_work(use, session_id, cell), stream=stream)


@router.post("/{session_id}/interrupt", responses=RESPONSES)
async def interrupt(session_id: str, use: Running) -> dict[str, Any]:
    """Interrupt the running cell, as Ctrl-C does."""
    return await sessions_inside.interrupt(use, session_id)


@router.post("/{session_id}/checkpoint", responses=RESPONSES)
async def checkpoint(session_id: str, use: Running, body: sessions_inside.Checkpoint) -> dict[str, Any]:
    """Save memory and workspace under a name. A failed checkpoint is an error and loses nothing."""
    return await sessions_inside.checkpoint(use, session_id, body)


@router.post("/{session_id}/rollback", responses=RESPONSES)
async def rollback(session_id: str, use: Running, body: sessions_inside.Checkpoint) -> dict[str, Any]:
    """Restore memory and workspace from a checkpoint."""
    return await sessions_inside.rollback(use, session_id, body)


@router.post("/{session_id}/fork", status_code=201, responses=RESPONSES)
async def fork(session_id: str, use: Running, body: sessions_inside.Forks) -> dict[str, Any]:
    """Fork a session. The new sessions have a copy of its memory and workspace, each in a separate sandbox."""
    return await sessions_inside.fork(use, session_id, body)


@router.delete("/{session_id}", responses=RESPONSES)
async def close(session_id: str, use: Running) -> dict[str, Any]:
    """End a session and everything that it started. The sandbox stays."""
    return await sessions_inside.close(use, session_id)
