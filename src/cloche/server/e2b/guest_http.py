"""One HTTP/1.1 exchange with a server inside a sandbox, over a connection of its own.

The server is hostile. `h11` reads its answer: a head of at most `MOST_HEAD` bytes, few informational answers before it,
and a body with one framing. Nothing of the answer is passed on as it came: the caller writes its own framing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

import h11

MOST_HEAD = 64 << 10
MOST_INFORMATIONAL = 16  # answers such as 103 before the final one
PIECE_BYTES = 1 << 17
PIECES_OF_TURN = 64  # of the event loop
SWITCHING = 101
Headers = Iterable[tuple[bytes, bytes]]
# Headers about one connection, which no proxy passes on (RFC 9110, 7.6.1).
OF_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip


class GuestConnection(Protocol):
    """Carry bytes to and from a server in a sandbox: plain, or inside TLS."""

    async def read(self, most: int = PIECE_BYTES, /) -> bytes:
        """Return the next bytes, empty at the end of the stream. Raises OSError."""
        ...

    async def write(self, data: bytes, /) -> None:
        """Send bytes. Raises OSError."""
        ...

    async def end(self) -> None:
        """Send the end of the stream."""
        ...


class BadAnswer(Exception):
    """The server has answered with something that is not HTTP, or not at all."""


class GuestExchange:
    """Send one request to a server, and read its answer."""

    def __init__(self, connection: GuestConnection):
        self.connection = connection
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Send a part of the request. Raises OSError where the server reads no more, h11.LocalProtocolError."""
        if data := self._http.send(event):
            await self.connection.write(data)

    async def head(self) -> h11.Response | h11.InformationalResponse:
        """Return the head of the answer, also of one that switches protocols. Raises BadAnswer."""
        for _ in range(MOST_INFORMATIONAL):
            event = await self._event()
            if isinstance(event, h11.Response):
                _check_framing(event)
                return event
            if not isinstance(event, h11.InformationalResponse):
                break
            if event.status_code == SWITCHING:
                return event
        raise BadAnswer

    async def body(self) -> AsyncGenerator[bytes]:
        """Yield the pieces of the answer's body. Raises BadAnswer where it breaks off."""
        count = 0
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise BadAnswer
            yield bytes(event.data)
            count += 1
            if count % PIECES_OF_TURN == 0:  # they are read without waiting, where many are small
                await asyncio.sleep(0)

    def after_head(self) -> bytes:
        """Return what the server has sent after an answer that switches protocols."""
        return self._http.trailing_data[0]

    async def _event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self.connection.read(PIECE_BYTES))
        except (h11.ProtocolError, OSError) as error:
            raise BadAnswer from error
        return event


def _check_framing(head: h11.Response) -> None:
    """Raise BadAnswer for an answer whose length can be read in two ways."""
    names = [name for name, _ in head.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise BadAnswer


def passed_on(headers: Headers, *others: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that a proxy passes on: neither those about the connection, nor those that it names."""
    kept = [(name.lower(), value) for name, value in headers]
    named = b",".join(value for name, value in kept if name == b"connection").lower().split(b",")
    dropped = {*OF_CONNECTION, *others, *(name.strip() for name in named)}
    return [(name, value) for name, value in kept if name not in dropped]
