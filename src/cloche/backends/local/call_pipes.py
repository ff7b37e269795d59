"""The caller's ends of one guest's calls: a pipe with the calls, and a socket for the answers.

As with a session's link, the guest writes to a pipe alone, and the socket's way back is shut down: nothing that carries
descriptors arrives here (see `streams`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

from cloche.core.functions import OfferedFunctions

READ_BYTES = 1 << 16
FULL_BYTES, DRAINED_BYTES = 1 << 18, 1 << 16  # of unread answers


class QuietSocket(socket.socket):
    """Send with MSG_NOSIGNAL, since a guest may close the other end: SIGPIPE's default action would end the caller."""

    def __init__(self, source: socket.socket):
        super().__init__(fileno=source.detach())

    def send(self, data: Any, flags: int = 0, /) -> int:  # noqa: ANN401 - whatever has bytes
        return super().send(data, flags | socket.MSG_NOSIGNAL)

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /) -> int:  # noqa: ANN401
        return super().sendmsg(buffers, ancdata, flags | socket.MSG_NOSIGNAL, address)


class CallPipes:
    """Carry one guest's calls; see core.functions.CallTransport. Use from a running event loop, and close it."""

    def __init__(self, functions: OfferedFunctions):
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self._is_writing = self._is_paused = self._is_listening = False
        self.incoming, self._calls_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.incoming, False)
        ours, self._answers_end = socket.socketpair()
        self._socket = QuietSocket(ours)
        self._socket.shutdown(socket.SHUT_RD)
        self._socket.setblocking(False)
        self._beginning = self._loop.call_soon(self._listen)  # a run that ends before the loop turns needs no reader
        self.calls = functions.serve(self)

    def guest_ends(self) -> tuple[int, int]:
        """Return the guest's ends: the pipe that it writes its calls to, the socket that it reads answers from."""
        return self._calls_end, self._answers_end.fileno()

    def close_guest_ends(self) -> None:
        """Close the guest's ends, once they are passed on."""
        if self._calls_end >= 0:
            os.close(self._calls_end)
            self._calls_end = -1
        self._answers_end.close()

    @property
    def is_full(self) -> bool:
        """Tell whether the guest has many answers to read."""
        return len(self._unsent) > FULL_BYTES

    def send(self, data: bytes) -> None:
        """Queue a frame for the guest; of one that is gone it is dropped."""
        if self._socket.fileno() < 0:
            return
        self._unsent += data
        if not self._is_writing:
            self._write()

    def _write(self) -> None:
        was_full = self.is_full
        try:
            del self._unsent[: self._socket.send(bytes(self._unsent[:FULL_BYTES]))]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        if bool(self._unsent) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket, self._write)
            else:
                self._loop.remove_writer(self._socket)
        if len(self._unsent) <= DRAINED_BYTES and self._drained is not None:
            self._settle()
        if was_full and not self.is_full:
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self.calls.resume()

    def _settle(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    async def drain(self) -> None:
        """Wait until the guest has read most of what was queued, or is gone."""
        if len(self._unsent) > DRAINED_BYTES:
            self._drained = self._drained or self._loop.create_future()
            await asyncio.shield(self._drained)

    def pause(self, is_paused: bool) -> None:
        """Stop, or go on, reading the guest's bytes."""
        self._is_paused = is_paused
        self._listen()

    def _listen(self) -> None:
        is_wanted = self.incoming >= 0 and not self._is_paused
        if is_wanted == self._is_listening:
            return
        self._is_listening = is_wanted
        if is_wanted:
            self._loop.add_reader(self.incoming, self._read)
        else:
            self._loop.remove_reader(self.incoming)

    def _read(self) -> None:
        try:
            data = os.read(self.incoming, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.calls.receive(data)
        else:
            self._stop_reading()

    def _stop_reading(self) -> None:
        self._beginning.cancel()
        self.pause(True)
        if self.incoming >= 0:
            os.close(self.incoming)
            self.incoming = -1

    def hang_up(self) -> None:
        """Close this end of the answers."""
        self._unsent.clear()
        if self._socket.fileno() >= 0:
            with suppress(OSError):  # of a guest that is gone
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Cancel all calls, and close both ends."""
        self.calls.end()
        self._stop_reading()
        if self._is_writing:
            self._loop.remove_writer(self._socket)
            self._is_writing = False
        self._unsent.clear()
        self._settle()
        self._socket.close()
        self.close_guest_ends()

    async def wait_closed(self) -> None:
        """Close, and wait a moment for the cancelled functions."""
        self.close()
        await self.calls.close()
