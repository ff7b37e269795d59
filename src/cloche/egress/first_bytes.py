"""A guest's first bytes on a connection: a whole hello of TLS, whose name is looked at before anything is carried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cloche.core.refusals import not_allowed

from .client_hello import NotTls
from .connections import GuestConnection
from .errors import Refused
from .sockets import speaks_first
from .stream import SocketStream

HELLO_S, MOST_HELLO = 20.0, 16_384
NameIn = Callable[[bytes], str | None]  # the host's name from the first bytes, None while more are needed


async def read_hello(guest: SocketStream, connection: GuestConnection, name_in: NameIn) -> bytes:
    """Return the bytes of a complete hello that names the host. Raises Refused for anything else."""
    data, name, where = b"", None, f"{connection.host}:{connection.port}"
    async with asyncio.timeout(HELLO_S):
        while name is None:
            more = await guest.receive(MOST_HELLO)
            if not more:
                raise Refused(f"{where}: the connection was closed before it sent a request")
            data += more
            try:
                name = name_in(data)
            except NotTls:
                what = f"{where}: data that is not TLS"
                raise Refused(not_allowed(what, "port 443 is for TLS", "use https, or another port")) from None
    return data


async def read_first(guest: SocketStream, upstream: SocketStream, name_in: NameIn, idle_s: float) -> bytes:
    """Return the guest's first bytes, a whole hello where it is one; nothing where the server speaks first."""
    if not await speaks_first(guest, upstream, idle_s):
        return b""
    data, name = b"", None
    async with asyncio.timeout(HELLO_S):
        while name is None:
            more = await guest.receive(MOST_HELLO)
            data += more
            try:
                name = name_in(data) if more else ""
            except NotTls:
                return data
    return data
