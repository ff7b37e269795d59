"""Streamed responses from a generator, which is closed with its resources however the response ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse

from cloche.wire.events import ActiveRun

from .events import server_sent


class HeldStream(StreamingResponse):
    """Stream from a generator, and close it and a stack at the end, even if its first piece was never requested.

    Starlette's StreamingResponse leaves the generator of a disconnected client to the garbage collector.
    """

    def __init__(
        self, pieces: AsyncGenerator[Any], stack: AsyncExitStack | None = None, *, status_code: int = 200,
        headers: Mapping[str, str] | None = None, media_type: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pieces, status_code, headers, media_type)
        self._pieces, self._stack = pieces, stack or AsyncExitStack()

    async def __call__(self, *arguments: Any) -> None:  # noqa: ANN401 - scope, receive, send
        """Send the response."""
        async with self._stack:
            try:
                await super().__call__(*arguments)
            finally:
                await self._pieces.aclose()


def event_stream(live: ActiveRun) -> HeldStream:
    """Return the events of a call as a response. The call is cancelled when the client disconnects."""
    stack = AsyncExitStack()
    stack.callback(lambda: None if live.events.is_over else live.cancel())
    return HeldStream(server_sent(live.events, 0), stack, media_type="text/event-stream")
