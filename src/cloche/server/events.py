"""A request that waits for a run, and the events of a run as server-sent events.

When a client disconnects, the work that it waits for is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from cloche.wire.events import HEARTBEAT_S, ActiveRun, EventLog, wait_a_moment
from cloche.wire.problems import Refused

HEARTBEAT = ": still here\n\n"  # a comment, ignored by clients (HTML standard, 9.2)
MOMENT_S = 0.2  # most runs end within it; only then the client's disconnect is watched


async def wait_or_cancel(request: Request, live: ActiveRun) -> str:
    """Return the run's document; kill the run if the client disconnects or the wait is cancelled. Raises Refused."""
    assert live.task is not None  # noqa: S101 - set by the code that creates it
    try:
        await wait_a_moment(live.task, MOMENT_S)
        if not live.task.done():
            await _wait_for_client(request, live.task)
    finally:
        if not live.task.done():
            live.cancel()
    if not live.task.done():
        await asyncio.wait({live.task})
    if live.task.cancelled():
        raise Refused(409, "cancelled", "the run was cancelled")
    return live.task.result()


async def _wait_for_client(request: Request, task: asyncio.Task[Any]) -> None:
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_sent(name: str, data: str, number: int | None = None) -> str:
    """Return a server-sent event. Its data is JSON and therefore one line."""
    identity = "" if number is None else f"id: {number}\n"
    return f"{identity}event: {name}\ndata: {data}\n\n"


async def server_sent(events: EventLog, after: int) -> AsyncGenerator[str]:
    """Yield the server-sent events after a number, and a comment every `HEARTBEAT_S` without one."""
    async for event in events.read(after, heartbeat_s=HEARTBEAT_S):
        yield HEARTBEAT if event is None else as_sent(event.name, event.data, event.number)
