"""A run as a stream of what happens in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from cloche.core.events import Ended, Event, Sink
from cloche.core.result import Result

log = logging.getLogger("cloche.runtime")


async def streamed(run: Callable[[Sink], Coroutine[Any, Any, Result]]) -> AsyncIterator[Event]:
    """Begin a run, yield what it hands to its sink, at last Ended; raise what it raises. Closing it cancels the run."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    running = asyncio.ensure_future(run(events.put_nowait))
    running.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield Ended(result=await running)
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()) is not None:
            log.debug("a run whose stream is over had failed: %s", error)
