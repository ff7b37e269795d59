"""One request and its whole answer, on a connection that no guest can close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import h11

from cloche.core.record import dataclass

from .errors import Refused
from .http_request import Headers
from .stream import Stream

CONNECT_S, ANSWER_S = 30.0, 60.0
MOST_BYTES, READ_BYTES = 256 << 10, 64 << 10
# What belongs to the connection of the guest, and what is written anew.
_LEFT_OUT = frozenset((
    b"host", b"connection", b"keep-alive", b"content-length", b"content-type", b"transfer-encoding", b"expect", b"te",
    b"trailer", b"upgrade", b"accept", b"accept-encoding", b"content-encoding", b"proxy-authorization",
    b"proxy-connection",
))  # fmt: skip


class NotSent(OSError):
    """Report that nothing has reached the host, with a sentence in `strerror`."""

    def __init__(self, sentence: str):
        super().__init__(0, sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """Hold an answer of a host."""

    status: int
    headers: Headers
    body: bytes


async def exchange(
    connect: Callable[[], Awaitable[Stream]], host: str, path: str, headers: Headers, content_type: str, body: bytes
) -> ReadAnswer:  # fmt: skip
    """Send a POST on a new connection, and return the whole answer. Raises NotSent, or OSError once it may be there."""
    try:
        async with asyncio.timeout(CONNECT_S):
            stream = await connect()
    except (OSError, Refused) as error:
        raise NotSent(str(error)) from None
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _exchange(stream, host, path, headers, content_type, body)
    except h11.RemoteProtocolError:
        raise OSError(0, "the host's answer is malformed") from None
    finally:
        stream.close()


async def _exchange(
    stream: Stream, host: str, path: str, headers: Headers, content_type: str, body: bytes
) -> ReadAnswer:  # fmt: skip
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_BYTES)
    own = {"host": host, "content-type": content_type, "content-length": str(len(body)), "connection": "close"}
    own |= {"accept": "application/json", "accept-encoding": "identity"}  # a form that can be read for tokens
    pairs = [(name.encode(), text.encode()) for name, text in own.items()]
    kept = [header for header in headers if header[0].lower() not in _LEFT_OUT]
    request = h11.Request(method="POST", target=path, headers=[*pairs, *kept])
    parts = [connection.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
    await stream.send(b"".join(part or b"" for part in parts))
    response, content = None, bytearray()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > MOST_BYTES:
                raise OSError(0, f"the host's answer has more than {MOST_BYTES} bytes")
        elif event in (h11.NEED_DATA, h11.PAUSED):
            connection.receive_data(await stream.receive(READ_BYTES))
    assert response is not None  # noqa: S101 - its end is behind its head
    return ReadAnswer(status=response.status_code, headers=response.headers.raw_items(), body=bytes(content))
