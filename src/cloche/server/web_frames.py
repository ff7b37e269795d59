"""Web sockets of uvicorn whose frames are handled a bounded number at once, and whose unread answers are bounded."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from cloche.serving.web_frames import WebFrameTurns

MOST_UNSENT = 32 << 20  # bytes to one client: more than a frame of each of its calls


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Carry one web socket."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._turns = WebFrameTurns(self.transport, self._take, is_paused=lambda: self.read_paused)

    def data_received(self, data: bytes) -> None:
        """Take data in turns."""
        self._turns.feed(data)

    def _take(self, data: bytes) -> None:
        """Pass frames to the package, which answers to pings by itself."""
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MOST_UNSENT:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what was not handled."""
        self._turns.stop()
        super().connection_lost(exc)
