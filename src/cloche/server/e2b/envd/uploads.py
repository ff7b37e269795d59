"""Bodies of uploads: decompressed, and cut into the parts of a form, piece by piece, bounded in memory and number."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.message import Message
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser
from starlette.requests import ClientDisconnect, Request

from cloche.core.record import dataclass

from ..errors import E2BError

PIECE_BYTES = 1 << 18
QUEUED = 4  # pieces between the client and the sandbox
WHOLE_BYTES = 1 << 17  # below which a content is collected before it is sent on
KEPT_BYTES = 1 << 20  # of the beginning, which can be read again
MOST_PARTS = 10_000
MOST_PART_HEAD = 16 << 10
MOST_BOUNDARY = 256
MOST_DRAINED, DRAIN_S = 64 << 20, 5.0  # of a body that is refused: the client reads its answer after that
GZIP = 31  # for zlib: a header of gzip and the largest window
ENDED_EARLY = "the body ended too early; no file was replaced"


class Pump:
    """Read the body of a request in a task of its own, so that readers may be cancelled, and others go on."""

    def __init__(self, request: Request):
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED)
        self._error: E2BError | None = None
        self._task = asyncio.ensure_future(self._read(request))
        self._is_over = False

    async def _read(self, request: Request) -> None:
        try:
            async for piece in request.stream():
                for start in range(0, len(piece), PIECE_BYTES):
                    await self._pieces.put(piece[start : start + PIECE_BYTES])
        except ClientDisconnect:
            self._error = E2BError(400, ENDED_EARLY)
        await self._pieces.put(None)

    def __aiter__(self) -> Pump:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece. Raises E2BError for a body that broke off."""
        piece = None if self._is_over else await self._pieces.get()
        if piece is not None:
            return piece
        self._is_over = True
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def drain(self) -> None:
        """Read what is left, for a while: a client that is still sending does not read an answer."""
        left = MOST_DRAINED
        with contextlib.suppress(TimeoutError, E2BError):
            async with asyncio.timeout(DRAIN_S):
                async for piece in self:
                    left -= len(piece)
                    if left < 0:
                        return

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()


@asynccontextmanager
async def pumping(request: Request) -> AsyncIterator[Pump]:
    """Read the body of a request for a block."""
    pump = Pump(request)
    try:
        yield pump
    except Exception:
        await pump.drain()
        raise
    finally:
        pump.close()


async def beginning(pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """Return the first bytes of a content, at least `WHOLE_BYTES` of them, and whether that was all."""
    data = bytearray()
    async for piece in pieces:
        data += piece
        if len(data) >= WHOLE_BYTES:
            return bytes(data), False
    return bytes(data), True


class Repeatable:
    """Yield pieces that can be asked for again, as long as few were yielded."""

    def __init__(self, begin: bytes, rest: AsyncIterator[bytes]):
        self._rest, self._kept, self._size = rest, [begin], len(begin)

    @property
    def can_repeat(self) -> bool:
        """Tell whether all pieces so far can be had again."""
        return self._size <= KEPT_BYTES

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield all pieces from the first one on."""
        for piece in list(self._kept):
            yield piece
        async for piece in self._rest:
            self._size += len(piece)
            if self.can_repeat:
                self._kept.append(piece)
            else:
                self._kept.clear()
            yield piece


async def decompressed(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield a body without its content encoding. Raises E2BError (400)."""
    name = encoding.partition(";")[0].strip().lower()
    if name in ("", "identity"):
        async for piece in pieces:
            yield piece
    elif name == "gzip":
        async for piece in _gunzipped(pieces):
            yield piece
    else:
        raise E2BError(400, f"unsupported Content-Encoding: {encoding[:80]}, supported: [gzip]")


async def _gunzipped(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the content of one or several streams of gzip (RFC 1952)."""
    stream = zlib.decompressobj(GZIP)
    has_any = False
    async for piece in pieces:
        data, has_any = piece, True
        while data:
            if _is_over(stream):
                data = data.lstrip(b"\0")  # padding
                stream = zlib.decompressobj(GZIP) if data else stream
                continue
            try:
                content = await asyncio.to_thread(stream.decompress, data, PIECE_BYTES)
            except zlib.error as error:
                raise E2BError(400, f"error decompressing request body: {error}") from error
            if content:
                yield content
            data = stream.unused_data if _is_over(stream) else stream.unconsumed_tail
    if not _is_over(stream):
        why = "unexpected end" if has_any else "it is empty"
        raise E2BError(400, f"error decompressing request body: {why}")


def _is_over(stream: Any) -> bool:  # noqa: ANN401 - zlib names no type
    return bool(stream.eof)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Hold a part of a form: its name, its file name if it has one, and its content, which is read before the next."""

    name: str
    filename: str | None
    content: AsyncIterator[bytes]


class Form:
    """Cut a body of `multipart/form-data` (RFC 7578) into its parts."""

    def __init__(self, pieces: AsyncIterator[bytes], content_type: str):
        self._pieces, self._events = pieces, deque[tuple[str, Any]]()
        self._field, self._value, self._headers = bytearray(), bytearray(), dict[str, str]()
        self._head_bytes = 0
        self._is_over = False
        on: Mapping[str, Any] = {
            "on_part_begin": self._begin, "on_header_field": self._add_field, "on_header_value": self._add_value,
            "on_header_end": self._end_header, "on_headers_finished": self._end_headers, "on_part_data": self._add_data,
            "on_part_end": lambda: self._events.append(("end", None)), "on_end": self._end,
        }  # fmt: skip
        self._parser = MultipartParser(_boundary(content_type), dict(on))  # type: ignore[arg-type]

    async def parts(self) -> AsyncIterator[Part]:
        """Yield each part. Raises E2BError (400)."""
        count = 0
        while (event := await self._next()) is not None:
            if event[0] != "headers":
                continue
            count += 1
            if count > MOST_PARTS:
                raise E2BError(413, f"the form has more than {MOST_PARTS} parts")
            content = self._content()
            yield _part(event[1], content)
            async for _ in content:
                pass

    async def _content(self) -> AsyncIterator[bytes]:
        while (event := await self._next()) is not None and event[0] == "data":
            yield event[1]

    async def _next(self) -> tuple[str, Any] | None:
        while not self._events:
            if self._is_over:
                return None
            piece = await anext(self._pieces, None)
            if piece is None:
                raise E2BError(400, "error reading form: unexpected EOF")
            try:
                self._parser.write(piece)
            except MultipartParseError as error:
                raise E2BError(400, f"error reading form: {error}") from error
        return self._events.popleft()

    def _begin(self) -> None:
        self._headers, self._head_bytes = {}, 0

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._count(end - start)

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._count(end - start)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_PART_HEAD:
            raise E2BError(400, f"the head of a part has more than {MOST_PART_HEAD} bytes")

    def _end_header(self) -> None:
        name, value = bytes(self._field), bytes(self._value)
        self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")
        self._field.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        self._events.append(("headers", self._headers))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(("data", data[start:end]))

    def _end(self) -> None:
        self._is_over = True


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str) or not boundary or len(boundary) > MOST_BOUNDARY:
        raise E2BError(400, "error parsing multipart form: no multipart boundary param in Content-Type")
    return boundary.encode("latin-1", "replace")


def _part(headers: Mapping[str, str], content: AsyncIterator[bytes]) -> Part:
    parameters = disposition(headers.get("content-disposition", ""))
    return Part(name=parameters.get("name", ""), filename=parameters.get("filename"), content=content)


def disposition(text: str) -> dict[str, str]:
    """Return the parameters of a header `Content-Disposition`: quoted, plain, or as RFC 8187 has them."""
    parameters: dict[str, str] = {}
    position = text.find(";")
    while 0 <= position < len(text):
        name, equals, _ = text[position + 1 :].partition("=")
        if not equals:
            break
        value, position = _value(text, position + 1 + len(name) + 1)
        key = name.strip().lower()
        if key.endswith("*"):
            parameters[key[:-1]] = _extended(value)
        else:
            parameters.setdefault(key, value)
    return parameters


def _value(text: str, start: int) -> tuple[str, int]:
    """Return the value that begins somewhere, and where the next parameter's semicolon is, or the end of the text."""
    if text[start : start + 1] != '"':
        end = text.find(";", start)
        end = len(text) if end < 0 else end
        return text[start:end].strip(), end
    value, position = "", start + 1
    while position < len(text) and text[position] != '"':
        is_escape = text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\")
        position += is_escape
        value += text[position]
        position += 1
    end = text.find(";", position)
    return value, len(text) if end < 0 else end


def _extended(value: str) -> str:
    from urllib.parse import unquote_to_bytes

    return unquote_to_bytes(value.rpartition("'")[2]).decode("utf-8", "surrogateescape")
