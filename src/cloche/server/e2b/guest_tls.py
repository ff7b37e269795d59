"""TLS to a server inside a sandbox that serves HTTPS itself. Its certificate is not verified: it is the guest's own."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable
from typing import TypeVar

from cloche.execution.ports import AsyncConnection

from .guest_http import PIECE_BYTES

T = TypeVar("T")
SHAKE_S = 20.0


@functools.cache
def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


class TlsConnection:
    """Carry bytes inside TLS over a connection, which it does not close."""

    def __init__(self, connection: AsyncConnection):
        self._connection, self._sending = connection, asyncio.Lock()
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context().wrap_bio(self._received, self._to_send)

    async def begin(self) -> None:
        """Shake hands. Raises OSError."""
        async with asyncio.timeout(SHAKE_S):
            await self._step(self._tls.do_handshake)

    async def read(self, most: int = PIECE_BYTES) -> bytes:
        """Return the next bytes, empty at the end of the stream. Raises OSError."""
        try:
            return await self._step(lambda: self._tls.read(most))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def write(self, data: bytes) -> None:
        """Send bytes, at the server's speed. Raises OSError."""
        self._tls.write(data)
        await self._send()

    async def end(self) -> None:
        """Send the end of the stream."""
        await self._send()
        await self._connection.end()

    async def _step(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._send()
                self._take(await self._connection.read(PIECE_BYTES))
            else:
                await self._send()
                return result

    def _take(self, data: bytes) -> None:
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()

    async def _send(self) -> None:
        async with self._sending:  # what is sent by a reader and by a writer keeps its order
            if data := self._to_send.read():
                await self._connection.write(data)
