"""A connection to a server in a jail, over a socket that pid 1 made there and sent to the caller: no process relays
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from .call_pipes import QuietSocket

MOST_READ = 1 << 20  # bytes per read, however many are requested


class SocketTunnel:
    """Carry a connection to a server inside; see core.protocols.OpenConnection. Use from one event loop."""

    def __init__(self, fd: int):
        self._loop = asyncio.get_running_loop()
        self._socket = QuietSocket(socket.socket(fileno=fd))
        self._socket.setblocking(False)
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._has_ended = self._is_over = False
        self._waiting = 0  # calls that use the socket

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes; empty at the end."""
        if self._is_over or self._closed.done():
            return b""
        self._waiting += 1
        try:
            data = await self._loop.sock_recv(self._socket, min(most, MOST_READ))
        except OSError:
            self.close()
            return b""
        finally:
            self._leave()
        if not data:
            self._is_over = True
            self._close_if_done()
        return data

    async def write(self, data: bytes) -> bool:
        """Send all of `data` at the server's pace; return False if the server is gone."""
        if self._has_ended or self._closed.done():
            return False
        self._waiting += 1
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError:
            self.close()
            return False
        finally:
            self._leave()
        return True

    def end(self) -> None:
        """Shut down the sending direction."""
        if self._has_ended or self._closed.done():
            return
        self._has_ended = True
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the server has gone
            self.close()
            return
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_ended and self._is_over:
            self.close()

    def _leave(self) -> None:
        self._waiting -= 1
        if self._closed.done() and not self._waiting:
            self._socket.close()

    def close(self) -> None:
        """Close it; pending reads and writes end."""
        if self._closed.done():
            return
        self._closed.set_result(None)
        if self._waiting:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        else:
            self._socket.close()

    async def wait_closed(self) -> None:
        """Wait until either side has closed it."""
        await asyncio.wait([self._closed])
