"""What one sandbox's network holds: its jails, and the connections of each; how many of these there may be."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Sequence

from cloche.core.hosts import Address

from .ledger import LedgerRow
from .names import Names
from .stream import SocketStream

# One sandbox gets a part of this process's descriptors, and all together leave some for others; a connection has two.
MOST_CONNECTIONS, LEAST_CONNECTIONS, FILES_FOR_EACH, FILES_FOR_ANY = 512, 8, 8, 3


class GuestConnection:
    """Hold one connection of the guest: its target, its row, the task that serves it."""

    def __init__(self, jail: JailNetwork, host: str, port: int, buffer_bytes: int):
        self.jail, self.host, self.port = jail, host, port
        self.buffer_bytes = buffer_bytes  # of the kernel's for each socket and direction, 0 for as it likes
        self.row: LedgerRow | None = None
        self.name = ""  # in TLS, where the connection is to an address
        self.address: Address | None = None  # that it was made to
        self.is_approved = False  # by somebody, and by no rule
        self.is_read = False  # request by request
        self.is_of_host = False  # to a port of this host's loopback, by the address itself: a name may read like it
        self.task: asyncio.Task[None] | None = None
        self.guest: SocketStream | None = None
        self._counted = (0, 0)

    def count(self) -> None:
        """Add the bytes moved since the last count to the row."""
        if self.row is not None and self.guest is not None:
            now = (self.guest.received_bytes, self.guest.sent_bytes)
            self.row.sent += now[0] - self._counted[0]
            self.row.received += now[1] - self._counted[1]
            self._counted = now


class JailNetwork:
    """Hold the sockets of one jail, and the names that are known in it. One that took its place knows none of them."""

    def __init__(self, sockets: list[socket.socket], own_names: Sequence[str] = ()):
        self.sockets, self.names = sockets, Names(own_names)
        self.tasks: set[asyncio.Task[None]] = set()


def most_connections() -> tuple[int, int]:
    """Return how many connections one sandbox may have, and all of them, by the descriptors that this process may."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files // FILES_FOR_EACH)), files // FILES_FOR_ANY
