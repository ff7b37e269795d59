"""Processes of a sandbox: found, written to, signalled, waited for.

A process belongs to its sandbox, not to the server, which detaches from it after each call. The sandbox keeps the last
32 KiB of unread output of each stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.escape import escape_name
from cloche.core.processes import MOST_TAG, ProcessInfo
from cloche.execution.processes import AsyncProcess, SignalTarget

from .attachments import SharedProcess, encode_result
from .exec_options import Amount, WireModel, Word, decoded
from .problems import Refused
from .uses import Use

MOST_INPUT = 1 << 20
INPUT_S = 30.0  # for a process to read its input
MOST_WAIT_S = 300.0
FIRST_PAUSE_S, MOST_PAUSE_S, LONGER = 0.01, 1.0, 1.5  # between two checks whether it has ended


class NewProcess(WireModel):
    """A process to start: a command `argv`, or a line of `shell`. Without a time-out it ends with its sandbox."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"argv": ["python3", "-m", "http.server", "8000"]}]})

    argv: list[str] | None = Field(default=None, max_length=10_000)
    shell: str | None = None
    cwd: Annotated[str, StringConstraints(max_length=4096)] | None = None
    env: dict[Word, str] | None = None
    user: Word | None = None
    timeout: Amount | None = None
    tag: Annotated[str, StringConstraints(max_length=MOST_TAG)] = ""
    alone: bool = False


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


async def processes(use: Use) -> dict[str, Any]:
    """List running processes and those that ended recently."""
    return {"items": [as_dict(process) for process in await use.sandbox.processes()], "nextCursor": None}


def as_dict(info: ProcessInfo) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    return {
        "id": info.id, "pid": info.pid, "tag": info.tag, "command": info.command, "age": info.age,
        "status": str(info.status or "running"),
        "exitCode": info.exit_code,
    }  # fmt: skip


async def find(use: Use, process_id: str) -> ProcessInfo:
    """Return the description of a process. Raises NotFound."""
    for process in await use.sandbox.processes():
        if process.id == process_id:
            return process
    raise NotFound(f"there is no process {escape_name(process_id[:64])} in sandbox {use.held.id}, or no longer")


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


async def write(use: Use, process_id: str, body: Input) -> dict[str, Any]:
    """Write to a process's standard input; `end` closes it."""
    data = body.content()
    if len(data) > MOST_INPUT:
        raise Refused(413, "body-too-large", f"base64: more than {MOST_INPUT} bytes; send them in pieces")
    is_read = False
    async with reached(use, process_id) as process:
        if process is not None:
            is_read = await _written(process, data)
            if body.end:
                await process.close_stdin()
    return {"id": process_id, "isRead": is_read}


async def _written(process: AsyncProcess, data: bytes) -> bool:
    try:
        async with asyncio.timeout(INPUT_S):
            return not data or await process.write(data)
    except TimeoutError:
        raise Refused(
            409, "not-read", f"the process did not read all input within {INPUT_S:g} s; it may have read a part"
        ) from None


async def send_signal(use: Use, process_id: str, body: Signal) -> dict[str, Any]:
    """Send a signal."""
    async with reached(use, process_id) as process:
        if process is not None:
            await process.signal(body.signal, body.to)
    return as_dict(await find(use, process_id))


@asynccontextmanager
async def reached(use: Use, process_id: str) -> AsyncIterator[AsyncProcess | None]:
    """Yield a running process, whose output stays with its reader; None for one that has ended. Raises NotFound."""
    try:
        process = await use.sandbox.process(process_id, reads=False)
    except InvalidRequest:
        await find(use, process_id)
        yield None
        return
    async with process:
        yield process


async def kill(use: Use, process_id: str) -> dict[str, Any]:
    """Kill a process and all that it started."""
    await find(use, process_id)
    async with use.held.process(process_id) as shared:
        await shared.process.kill()
    await _end_of(use, process_id, INPUT_S)
    return as_dict(await find(use, process_id))


async def wait(use: Use, process_id: str, seconds: float) -> str | dict[str, Any]:
    """Wait for a process and return its result as JSON with the unread output; its facts if it still runs."""
    if not await _end_of(use, process_id, seconds):
        return as_dict(await find(use, process_id))
    async with use.held.process(process_id) as shared:
        result = await shared.process.wait(INPUT_S)
    return await asyncio.to_thread(encode_result, process_id, result)


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
