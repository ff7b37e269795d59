"""`/api/sandboxes/{id}/processes`: start, list, read, write, signal and kill processes of a sandbox.

A process belongs to its sandbox, not to this worker, which detaches from it after each request. The sandbox keeps the
last 32 KiB of unread output of each stream.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from cloche.core.errors import ClocheError
from cloche.core.protocols import OpenStream
from cloche.wire import processes as processes_inside
from cloche.wire.attachments import SharedProcess
from cloche.wire.events import HEARTBEAT_S

from ..auth import TheService
from ..bodies import JsonRoute
from ..events import HEARTBEAT, as_sent
from ..problems import RESPONSES
from ..sandbox_use import EVENTS, Reading, Running
from ..streams import HeldStream

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}/processes", tags=["sandbox processes"], route_class=JsonRoute)
PIECES = 4  # of output that wait to be sent


@router.post("", status_code=201, responses=RESPONSES)
async def start(use: Running, body: processes_inside.NewProcess) -> dict[str, Any]:
    """Start a process. It continues after the request, and after the end of the service."""
    process = await use.sandbox.start(
        body.argv, shell=body.shell, cwd=body.cwd, env=body.env, user=body.user, timeout=body.timeout, keep=True,
        tag=body.tag, alone=body.alone,
    )  # fmt: skip
    await process.detach()
    return {"id": process.id, "pid": process.pid, "status": "running", "exitCode": None}


@router.get("", responses=RESPONSES)
async def processes(use: Reading) -> dict[str, Any]:
    """List running processes and those that ended recently."""
    return await processes_inside.processes(use)


@router.get("/{process_id}", responses=RESPONSES)
async def look(process_id: str, use: Reading) -> dict[str, Any]:
    """Return a process with its last unread output. The output stays unread."""
    process = await processes_inside.find(use, process_id)
    stdout, stderr = await use.sandbox.logs(process_id)
    return {
        **processes_inside.as_dict(process),
        "stdout": stdout.decode(errors="replace"),
        "stderr": stderr.decode(errors="replace"),
    }


@router.get("/{process_id}/output", responses={**RESPONSES, **EVENTS}, response_class=Response)
async def output(process_id: str, use: Running, service: TheService) -> Response:
    """Follow the output of a process as server-sent events, the last one `ended`. One client at a time.

    If the client does not read, the process blocks once its pipes are full. A disconnect detaches from the process.
    """
    await processes_inside.find(use, process_id)
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(use.held.process(process_id))
        stack.enter_context(processes_inside.followed(shared, process_id))
        pieces: asyncio.Queue[str | None] = asyncio.Queue(PIECES)
        task = asyncio.ensure_future(_follow(shared, pieces))
        task.add_done_callback(
            lambda _: None if pieces.full() else pieces.put_nowait(None)
        )  # wakes the reader at the end
        service.sandboxes.note_stream(task)
        stack.push_async_callback(_cancelled, task)
        return HeldStream(_sent(pieces, task), stack.pop_all(), media_type="text/event-stream")


async def _follow(shared: SharedProcess, pieces: asyncio.Queue[str | None]) -> None:
    process = shared.process
    errors = asyncio.ensure_future(_pass_on("stderr", process.stderr, pieces))
    try:
        await _pass_on("stdout", process.stdout, pieces)
        await errors
        result = await process.wait()
        await pieces.put(_event("ended", {"status": str(result.status), "exitCode": result.exit_code}))
    except ClocheError as error:  # it was taken over, or its sandbox has ended
        await pieces.put(_event("error", {"error": str(error)}))
    finally:
        errors.cancel()


async def _pass_on(name: str, stream: OpenStream, pieces: asyncio.Queue[str | None]) -> None:
    async for data in stream:
        try:
            content = {"text": data.decode()}
        except UnicodeDecodeError:  # a character continues in the next piece, or it is not text
            content = {"base64": base64.b64encode(data).decode()}
        await pieces.put(_event("output", {"stream": name, **content}))


def _event(name: str, data: dict[str, Any]) -> str:
    return as_sent(name, json.dumps(data, ensure_ascii=False))


async def _sent(pieces: asyncio.Queue[str | None], task: asyncio.Task[None]) -> AsyncGenerator[str]:
    while not (task.done() and pieces.empty()):
        try:
            async with asyncio.timeout(HEARTBEAT_S):  # `wait_for` may drop a cancellation
                piece = await pieces.get()
        except TimeoutError:
            piece = HEARTBEAT
        if piece is not None:
            yield piece


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@router.post("/{process_id}/stdin", responses=RESPONSES)
async def write(process_id: str, use: Running, body: processes_inside.Input) -> dict[str, Any]:
    """Write to the standard input of a process. With `end`, it is closed afterwards."""
    return await processes_inside.write(use, process_id, body)


@router.post("/{process_id}/signal", responses=RESPONSES)
async def send_signal(process_id: str, use: Running, body: processes_inside.Signal) -> dict[str, Any]:
    """Send a signal to a process, to its group, or to its tree."""
    return await processes_inside.send_signal(use, process_id, body)


@router.delete("/{process_id}", responses=RESPONSES)
async def kill(process_id: str, use: Running) -> dict[str, Any]:
    """Kill a process and all that it started."""
    return await processes_inside.kill(use, process_id)


@router.post("/{process_id}/wait", responses={**RESPONSES, 202: {"description": "It is still running."}})
async def wait(
    process_id: str, use: Running, seconds: Annotated[float, Query(ge=0, le=processes_inside.MOST_WAIT_S)] = 30.0
) -> Response:
    """Wait for the end of a process, and return its result. The answer is 202 if it still runs."""
    answer = await processes_inside.wait(use, process_id, seconds)
    if not isinstance(answer, str):
        return JSONResponse(answer, 202)
    return Response(answer, media_type="application/json")
