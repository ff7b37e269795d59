"""`/api/sandboxes/{id}/processes`: start, list, read, write, signal and kill processes of a sandbox.

A process belongs to its sandbox, not to this worker, which detaches from it after each request. The sandbox keeps the
last 32 KiB of unread output of each stream.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, StringConstraints, model_validator

from cloche.core.errors import ClocheError, NotFound
from cloche.core.escape import escape_name
from cloche.core.processes import ProcessInfo
from cloche.core.protocols import OpenStream
from cloche.execution.processes import SignalTarget

from ..attachments import SharedProcess, encode_result
from ..bodies import JsonRoute
from ..events import HEARTBEAT, HEARTBEAT_S, as_sent
from ..exec_options import Amount, WireModel, Word, decoded
from ..problems import RESPONSES, Refused
from ..sandbox_use import EVENTS, Reading, Running, Use
from ..streams import HeldStream

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}/processes", tags=["sandbox processes"], route_class=JsonRoute)
MOST_INPUT = 1 << 20
INPUT_S = 30.0  # for a process to read its input
MOST_WAIT_S = 300.0
FIRST_PAUSE_S, MOST_PAUSE_S, LONGER = 0.01, 1.0, 1.5  # between two checks whether it has ended
PIECES = 4  # of output that wait to be sent


class NewProcess(WireModel):
    """A process to start: a command `argv`, or a line of `shell`. Without a time-out it ends with its sandbox."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"argv": ["python3", "-m", "http.server", "8000"]}]})

    argv: list[str] | None = Field(default=None, max_length=10_000)
    shell: str | None = None
    cwd: Annotated[str, StringConstraints(max_length=4096)] | None = None
    env: dict[Word, str] | None = None
    user: Word | None = None
    timeout: Amount | None = None


class Input(WireModel):
    """Input for a process, as text or in base64. `end` closes its standard input."""

    text: Annotated[str, StringConstraints(max_length=MOST_INPUT)] | None = None
    base64: Annotated[str, StringConstraints(max_length=2 * MOST_INPUT)] | None = None
    end: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.text is not None and self.base64 is not None:
            raise ValueError("give text or base64, not both")
        return self

    def content(self) -> bytes:
        """Return its bytes. Raises InvalidRequest."""
        return decoded(self.base64, "base64") if self.base64 is not None else (self.text or "").encode()


class Signal(WireModel):
    """A signal, by name or number, to the process, its `group` or its `tree`."""

    signal: int | Word = "TERM"
    to: SignalTarget = "process"


@router.post("", status_code=201, responses=RESPONSES)
async def start(use: Running, body: NewProcess) -> dict[str, Any]:
    """Start a process. It outlives this service."""
    process = await use.sandbox.start(
        body.argv, shell=body.shell, cwd=body.cwd, env=body.env, user=body.user, timeout=body.timeout, keep=True
    )
    await process.detach()
    return {"id": process.id, "pid": process.pid, "status": "running", "exitCode": None}


@router.get("", responses=RESPONSES)
async def processes(use: Reading) -> dict[str, Any]:
    """List running processes and those that ended recently."""
    return {"items": [as_dict(process) for process in await use.sandbox.processes()], "nextCursor": None}


def as_dict(info: ProcessInfo) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    return {
        "id": info.id, "pid": info.pid, "command": info.command, "age": info.age,
        "status": str(info.status or "running"),
        "exitCode": info.exit_code,
    }  # fmt: skip


async def find(use: Use, process_id: str) -> ProcessInfo:
    """Return the description of a process. Raises NotFound."""
    for process in await use.sandbox.processes():
        if process.id == process_id:
            return process
    raise NotFound(f"there is no process {escape_name(process_id[:64])} in sandbox {use.held.id}, or no longer")


@router.get("/{process_id}", responses=RESPONSES)
async def look(process_id: str, use: Reading) -> dict[str, Any]:
    """Return a process with its last unread output, which stays unread."""
    process = await find(use, process_id)
    stdout, stderr = await use.sandbox.logs(process_id)
    return {**as_dict(process), "stdout": stdout.decode(errors="replace"), "stderr": stderr.decode(errors="replace")}


@router.get("/{process_id}/output", responses={**RESPONSES, **EVENTS}, response_class=Response)
async def output(process_id: str, use: Running) -> Response:
    """Follow a process's output as server-sent events, the last one `ended`. One reader at a time.

    If the client does not read, the process blocks once its pipes are full. A disconnect detaches from the process.
    """
    await find(use, process_id)
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(use.held.process(process_id))
        stack.enter_context(followed(shared, process_id))
        pieces: asyncio.Queue[str | None] = asyncio.Queue(PIECES)
        task = asyncio.ensure_future(_follow(shared, pieces))
        task.add_done_callback(
            lambda _: None if pieces.full() else pieces.put_nowait(None)
        )  # wakes the reader at the end
        use.service.sandboxes.note_stream(task)
        stack.push_async_callback(_cancelled, task)
        return HeldStream(_sent(pieces, task), stack.pop_all(), media_type="text/event-stream")


@contextmanager
def followed(shared: SharedProcess, process_id: str) -> Iterator[None]:
    """Be the only reader of a process's output. Raises Refused (409) if it already has one."""
    if shared.is_followed:
        raise Refused(409, "followed", f"another client follows the output of process {escape_name(process_id[:64])}")
    shared.is_followed = True
    try:
        yield
    finally:
        shared.is_followed = False


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
async def write(process_id: str, use: Running, body: Input) -> dict[str, Any]:
    """Write to a process's standard input; `end` closes it."""
    data = body.content()
    if len(data) > MOST_INPUT:
        raise Refused(413, "body-too-large", f"base64: more than {MOST_INPUT} bytes; send them in pieces")
    await find(use, process_id)
    async with use.held.process(process_id) as shared:
        try:
            async with asyncio.timeout(INPUT_S):
                is_read = not data or await shared.process.write(data)
        except TimeoutError:
            raise Refused(
                409, "not-read", f"the process did not read all input within {INPUT_S:g} s; it may have read a part"
            ) from None
        if body.end:
            await shared.process.close_stdin()
    return {"id": process_id, "isRead": is_read}


@router.post("/{process_id}/signal", responses=RESPONSES)
async def send_signal(process_id: str, use: Running, body: Signal) -> dict[str, Any]:
    """Send a signal."""
    await find(use, process_id)
    async with use.held.process(process_id) as shared:
        await shared.process.signal(body.signal, body.to)
    return as_dict(await find(use, process_id))


@router.delete("/{process_id}", responses=RESPONSES)
async def kill(process_id: str, use: Running) -> dict[str, Any]:
    """Kill a process and all that it started."""
    await find(use, process_id)
    async with use.held.process(process_id) as shared:
        await shared.process.kill()
    await _end_of(use, process_id, INPUT_S)
    return as_dict(await find(use, process_id))


@router.post("/{process_id}/wait", responses={**RESPONSES, 202: {"description": "It is still running."}})
async def wait(
    process_id: str, use: Running, seconds: Annotated[float, Query(ge=0, le=MOST_WAIT_S)] = 30.0
) -> Response:
    """Wait for a process and return its result with the unread output; 202 if it still runs."""
    if not await _end_of(use, process_id, seconds):
        return JSONResponse(as_dict(await find(use, process_id)), 202)
    async with use.held.process(process_id) as shared:
        result = await shared.process.wait(INPUT_S)
    return Response(await asyncio.to_thread(encode_result, process_id, result), media_type="application/json")


async def _end_of(use: Use, process_id: str, seconds: float) -> bool:
    """Poll for the end of a process without attaching, since another client may read its output. Raises NotFound."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + seconds, FIRST_PAUSE_S
    while (await find(use, process_id)).exit_code is None:
        remaining_s = until - loop.time()
        if remaining_s <= 0:
            return False
        await asyncio.sleep(min(pause, remaining_s))
        pause = min(pause * LONGER, MOST_PAUSE_S)
    return True
