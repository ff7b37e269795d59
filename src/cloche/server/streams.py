"""Answers that are streamed from a generator, which is closed however the answer ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ClosingStream(StreamingResponse):
    """Stream from a generator. A client that was dropped in the midst of a message leaves nothing of it behind.

    The framework's own leaves the generator to the garbage collector then, and with it what the generator holds.
    """

    def __init__(
        self, content: AsyncGenerator[str], status_code: int = 200, headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(content, status_code, headers, media_type)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()
