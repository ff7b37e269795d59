"""`process.Process`: start processes, read, write, signal and list them, and their terminals."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from cloche.execution.processes import AsyncProcess

from ..calls import Call
from .connect import server_stream

SERVICE = "process.Process"
Message = Mapping[str, Any]


async def start(call: Call, body: Message, stack: AsyncExitStack) -> AsyncGenerator[Message]:
    """Start a process; answer with its output and its end."""
    use = await stack.enter_async_context(call.use())
    config = body["process"]
    process = await use.sandbox.start(
        [config["cmd"], *config.get("args", ())],
        cwd=config.get("cwd") or "/tmp",
        env=config.get("envs"),
        keep=True,
    )
    return _events(process)


async def _events(process: AsyncProcess) -> AsyncGenerator[Message]:
    yield {"event": {"start": {"pid": process.pid}}}
    pieces: asyncio.Queue[Message | None] = asyncio.Queue(4)

    async def follow(name: str, stream: Any) -> None:  # noqa: ANN401
        async for data in stream:
            await pieces.put({"event": {"data": {name: base64.b64encode(data).decode()}}})

    async def follow_all() -> None:
        await asyncio.gather(follow("stdout", process.stdout), follow("stderr", process.stderr))
        await pieces.put(None)

    task = asyncio.ensure_future(follow_all())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        result = await process.wait()
    finally:
        task.cancel()
    yield {
        "event": {"end": {"exitCode": result.exit_code, "exited": True, "status": f"exit status {result.exit_code}"}}
    }


ROWS = (server_stream(SERVICE, "Start", start),)
