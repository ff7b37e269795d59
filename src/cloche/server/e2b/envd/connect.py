"""Connect RPC with the JSON codec, unary and with streams (connectrpc.com/docs/protocol). Nothing is compressed.

A message of a stream is a byte of flags, its length in four bytes, big endian, and JSON. The last one has flag 2, and
an error or nothing. A stream that must not look ended is dropped (`Dropped`).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.serving.http import SLOW_BODY

from ...streams import HeldStream
from ..calls import Call, Row, read_json
from ..errors import Dropped, E2BError, connect_error

UNARY_TYPE, STREAM_TYPE = "application/json", "application/connect+json"
LAST = 0x02
_HEAD = struct.Struct(">BI")
NO_BUFFER = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}


class Encoded(bytes):
    """A message that is JSON already."""


MOST_MESSAGE, SMALL = 16 << 20, 64 << 10  # bytes of a message; larger ones than SMALL are read in a thread
TIMEOUT_HEADER, MOST_TIMEOUT_DIGITS = "connect-timeout-ms", 10
Unary = Callable[[Call, Mapping[str, Any]], Awaitable[Mapping[str, Any] | Encoded]]
ClientStream = Callable[[Call], Awaitable[Mapping[str, Any]]]
Stream = Callable[[Call, Mapping[str, Any], AsyncExitStack], Awaitable[AsyncGenerator[Mapping[str, Any]]]]


def frame(message: Mapping[str, Any], flags: int = 0) -> bytes:
    """Return a message of a stream as bytes."""
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _HEAD.pack(flags, len(data)) + data


async def messages(call: Call) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the messages of a client's stream. Raises E2BError (400, 413)."""
    data = bytearray()
    async for piece in call.request.stream():
        data += piece
        while len(data) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(data)
            if length > MOST_MESSAGE:
                raise E2BError(413, f"a message has more than {MOST_MESSAGE} bytes")
            if len(data) < _HEAD.size + length:
                break
            body = bytes(data[_HEAD.size : _HEAD.size + length])
            del data[: _HEAD.size + length]
            if flags & LAST:
                return
            if flags:
                raise E2BError(400, "compressed messages are not supported")
            yield await _message(body)


async def _message(data: bytes) -> Mapping[str, Any]:
    value = await asyncio.to_thread(read_json, data) if len(data) > SMALL else read_json(data)
    if not isinstance(value, dict):
        raise E2BError(400, "a message must be a JSON object")
    return value


async def _unary_body(call: Call) -> Mapping[str, Any]:
    data = bytearray()
    async for piece in call.request.stream():
        data += piece
        if len(data) > MOST_MESSAGE:
            raise E2BError(413, f"the body has more than {MOST_MESSAGE} bytes")
    return await _message(bytes(data) or b"{}")


def timeout_of(call: Call) -> float | None:
    """Return the seconds after which a client gives a request up; None without a limit. Raises E2BError (400)."""
    text = call.request.headers.get(TIMEOUT_HEADER, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_TIMEOUT_DIGITS):
        raise E2BError(400, f"{TIMEOUT_HEADER}: give a natural number of milliseconds")
    return int(text) / 1000 or None


@asynccontextmanager
async def _in_time(call: Call, longest_s: float | None = None) -> AsyncIterator[None]:
    """Bound the body by the time that the client gives. Raises E2BError (504)."""
    try:
        async with asyncio.timeout(timeout_of(call) or longest_s):
            yield
    except TimeoutError as error:
        raise E2BError(504, "context deadline exceeded", connect="deadline_exceeded") from error


def unary(service: str, method: str, work: Unary, *, longest_s: float | None = None) -> Row:
    """Return the route of a unary method, which takes at most the client's time, without one `longest_s`."""

    async def handler(call: Call) -> Response:
        call.check_token()
        body = await _unary_body(call)
        async with _in_time(call, longest_s):
            message = await work(call, body)
        return Response(message, media_type=UNARY_TYPE) if isinstance(message, Encoded) else JSONResponse(message)

    return Row(method="POST", path=f"/{service}/{method}", handler=handler)


def client_stream(service: str, method: str, work: ClientStream) -> Row:
    """Return the route of a method that reads a client's stream, however slow, and answers with one message."""

    async def handler(call: Call) -> Response:
        call.check_token()
        _check_type(call)
        call.request.scope[SLOW_BODY] = True
        try:
            async with _in_time(call):
                content = frame(await work(call)) + frame({}, LAST)
        except Dropped:
            raise
        except Exception as error:
            if isinstance(error, E2BError) and error.status == 502:
                raise
            content = frame({"error": connect_error(error)}, LAST)
        return Response(content, media_type=STREAM_TYPE, headers=NO_BUFFER)

    return Row(method="POST", path=f"/{service}/{method}", handler=handler)


def _check_type(call: Call) -> None:
    if not call.request.headers.get("content-type", "").startswith(STREAM_TYPE):
        raise E2BError(415, f"send {STREAM_TYPE}", connect="invalid_argument")


def server_stream(service: str, method: str, begin: Stream) -> Row:
    """Return the route of a method that answers with a stream. `begin` may raise before the first message."""

    async def handler(call: Call) -> Response:
        call.check_token()
        _check_type(call)
        async with AsyncExitStack() as stack:
            try:
                body: Mapping[str, Any] = await anext(aiter(messages(call)), {})
                pieces: AsyncGenerator[Mapping[str, Any]] | Exception = await begin(call, body, stack)
            except E2BError as error:
                if error.status == 502:
                    raise
                pieces = error
            except Exception as error:  # in a stream, errors are its last message
                pieces = error
            return HeldStream(_framed(pieces), stack.pop_all(), media_type=STREAM_TYPE, headers=NO_BUFFER)

    return Row(method="POST", path=f"/{service}/{method}", handler=handler)


async def _framed(pieces: AsyncGenerator[Mapping[str, Any]] | Exception) -> AsyncGenerator[bytes]:
    if isinstance(pieces, Exception):
        yield frame({"error": connect_error(pieces)}, LAST)
        return
    try:
        async for piece in pieces:
            yield frame(piece)
    except Dropped:
        raise
    except Exception as error:
        yield frame({"error": connect_error(error)}, LAST)
    else:
        yield frame({}, LAST)
    finally:
        await pieces.aclose()
