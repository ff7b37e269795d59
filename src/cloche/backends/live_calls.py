"""The calls of the caller's functions by one process of a live sandbox: two streams of the process's channel."""

from __future__ import annotations

import asyncio

from cloche.channels import Channel
from cloche.core.functions import OfferedFunctions
from cloche.init import wire

FULL_BYTES = 1 << 18  # of answers that the process has not read
PIECE_BYTES = wire.MOST_DATA


class CallChannel:
    """Carry one process's calls; see core.functions.CallTransport. Use from a running event loop, and close it."""

    def __init__(self, channel: Channel, functions: OfferedFunctions):
        self._channel = channel
        self._unsent = bytearray()
        self._sending: asyncio.Task[None] | None = None
        self._is_paused = self._is_closed = False
        self._held = 0  # bytes that were received and not granted again
        self.calls = functions.serve(self)

    @property
    def is_full(self) -> bool:
        """Tell whether the process has many answers to read."""
        return len(self._unsent) > FULL_BYTES

    def send(self, data: bytes) -> None:
        """Queue a frame for the process."""
        if self._is_closed or (not self._unsent and self._channel.send_at_once(wire.HOST_ANSWERS, data)):
            return
        self._unsent += data
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._unsent and not self._is_closed:
                was_full, piece = self.is_full, bytes(self._unsent[:PIECE_BYTES])
                if not await self._channel.send(wire.HOST_ANSWERS, piece):
                    self._unsent.clear()
                    return
                del self._unsent[: len(piece)]
                if was_full and not self.is_full:
                    self.calls.resume()
        finally:
            self._sending = None

    async def drain(self) -> None:
        """Wait until the process has read what was queued, or is gone."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def pause(self, is_paused: bool) -> None:
        """Hold back, or grant, what the process may send."""
        self._is_paused = is_paused
        if not is_paused and self._held:
            held, self._held = self._held, 0
            self._channel.grant(wire.HOST_CALLS, held)

    def receive(self, data: memoryview) -> None:
        """Take a piece of the process's calls, which the channel's window bounds."""
        self.calls.receive(bytes(data))
        self._held += len(data)
        self.pause(self._is_paused)

    def hang_up(self) -> None:
        """End the answers."""
        self._unsent.clear()
        self._channel.end(wire.HOST_ANSWERS)

    def close(self) -> None:
        """Cancel all calls."""
        self._is_closed = True
        self.calls.end()
        if self._sending is not None:
            self._sending.cancel()

    async def wait_closed(self) -> None:
        """Close, and wait a moment for the cancelled functions."""
        self.close()
        await self.calls.close()
