"""A guest's sockets: accepted without waiting, watched for their first bytes, reset; and a pace for new ones."""

from __future__ import annotations

import asyncio
import functools
import socket
import struct

from .stream import SocketStream

RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset, and waits for nothing


class Pace:
    """Let so many things happen in a second, and some more at once."""

    def __init__(self, per_s: float, burst: float):
        self._per_s, self._burst, self._left, self._at = per_s, burst, burst, 0.0

    def wait_s(self, now: float) -> float:
        """Count one more, and return for how many seconds no other may follow, 0.0 for none."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        return max(0.0, -self._left / self._per_s)


async def speaks_first(stream: SocketStream, peer: SocketStream, idle_s: float) -> bool:
    """Wait until there is something to be read from one or the other; tell whether from the first."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[bool] = loop.create_future()

    def note(*, is_one: bool) -> None:
        if not first.done():
            first.set_result(is_one)

    fds = {stream.fileno(): True, peer.fileno(): False}
    for fd, is_one in fds.items():
        loop.add_reader(fd, functools.partial(note, is_one=is_one))
    try:
        async with asyncio.timeout(idle_s):
            return await first
    finally:
        for fd in fds:
            loop.remove_reader(fd)


def accept_now(listener: socket.socket) -> socket.socket | None:
    """Return a connection that waits to be accepted, if there is one and room for it."""
    try:
        accepted, _ = listener.accept()
    except OSError:
        return None
    accepted.setblocking(False)
    return accepted


def reset(guest_socket: socket.socket) -> None:
    """Close a connection so that the guest sees it refused; unread bytes are dropped."""
    try:
        guest_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    except OSError:
        pass  # it was closed
    guest_socket.close()
