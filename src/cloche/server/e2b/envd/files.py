"""`/files`: read a file, write files of a form or a body of octets, and put several files together as one."""

from __future__ import annotations

import asyncio
import mimetypes
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.responses import JSONResponse, Response

from cloche.core.errors import InvalidRequest, SandboxFileError
from cloche.core.processes import FilePart, FileRights
from cloche.wire.attachments import OpenedSandbox

from ...streams import HeldStream
from ..calls import Call, E2BModel, Row
from ..errors import Dropped, E2BError, answer
from .entries import checked_user, enter_with_rights, file_error, printable, rights_of, unknown_user, with_rights
from .ranges import byte_range, encoding_of
from .signatures import READ, WRITE, authorize
from .uploads import Form, Repeatable, beginning, decompressed, pumping

METADATA_HEADER = "x-metadata-"
MOST_SOURCES = 10_000
SNIFFED_BYTES = 512
GZIPPED_AT_ONCE = 1 << 14  # bytes that are compressed on the event loop
GZIP, GZIP_LEVEL = 31, 1
OCTETS = "application/octet-stream"
MOST_TOGETHER, TOGETHER_BYTES, PATH_COSTS = 64, 1 << 20, 32  # small files of one operation; bytes for one of a path
NAMELESS = "error getting multipart custom part file name: filename not found in Content-Disposition header"
TWICE = (
    "you cannot upload multiple files to the same path '{}' in one upload request, only the first specified file was "
    "uploaded"
)


def plain(handler: Callable[[Call], Awaitable[Response]]) -> Callable[[Call], Awaitable[Response]]:
    """Return a handler whose errors have the form of HTTP, not of Connect."""

    async def handled(call: Call) -> Response:
        try:
            return await handler(call)
        except Dropped:
            raise
        except Exception as error:
            return answer(error)

    return handled


def user_of(call: Call) -> str:
    """Return the user's name in the query. Raises E2BError (401)."""
    return checked_user(call.request.query_params.get("username", ""))


async def download(call: Call) -> Response:
    """Return the content of a file, or the part that `Range` names."""
    call = await authorize(call, READ)
    path, headers = call.request.query_params.get("path", ""), call.request.headers
    encoding = encoding_of(headers)
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        try:
            begin = partial(use.held.live.reading, path, byte_range=byte_range(headers))
            part, pieces = await enter_with_rights(stack, user_of(call), lambda by: begin(by=by))
            first = await anext(pieces, b"")
        except SandboxFileError as error:
            raise _as_read_error(error, user_of(call)) from error
        if part.count == 0:
            raise E2BError(416, f"the file has {part.size} bytes", headers={"Content-Range": f"bytes */{part.size}"})
        content = _after(first, pieces)
        if encoding == "gzip":
            content = _gzipped(content)
        if _is_unchanged(headers, part):
            return Response(status_code=304, headers=_headers(part, first, encoding, has_length=False))
        return HeldStream(
            content, stack.pop_all(), status_code=200 if part.count is None else 206,
            headers=_headers(part, first, encoding),
        )  # fmt: skip


def _as_read_error(error: SandboxFileError, user: str) -> E2BError:
    messages = {
        "not_found": f"path '{error.path}' does not exist", "is_directory": f"path '{error.path}' is a directory",
        "user": unknown_user(user),
    }  # fmt: skip
    return file_error(error, messages.get(error.kind, ""))


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


async def _gzipped(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    stream = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP)
    async for piece in pieces:
        is_small = len(piece) <= GZIPPED_AT_ONCE
        data = stream.compress(piece) if is_small else await asyncio.to_thread(stream.compress, piece)
        if data:
            yield data
    yield stream.flush()


def _headers(part: FilePart, first: bytes, encoding: str, *, has_length: bool = True) -> dict[str, str]:
    name = printable(part.path.rpartition("/")[2])
    headers = {
        "Content-Type": _content_type(part.path, first), "Last-Modified": formatdate(part.mtime, usegmt=True),
        "Content-Disposition": _inline(name), "Vary": "Accept-Encoding", "X-Accel-Buffering": "no",
    }  # fmt: skip
    if encoding == "gzip":
        return {**headers, "Content-Encoding": "gzip"}
    headers["Accept-Ranges"] = "bytes"
    if part.count is not None:
        headers["Content-Range"] = f"bytes {part.offset}-{part.offset + part.count - 1}/{part.size}"
    if has_length and (part.size or not first):  # files of /proc tell no size
        headers["Content-Length"] = str(part.size if part.count is None else part.count)
    return headers


def _inline(name: str) -> str:
    if name.isascii() and name.isprintable() and not set(name) & set('"\\'):
        return f'inline; filename="{name}"'
    return f"inline; filename*=UTF-8''{quote(name, safe='')}"


def _content_type(path: str, first: bytes) -> str:
    """Return the type by the file's name, else by whether its beginning is text."""
    guessed, _ = mimetypes.guess_type(f"file:{quote(printable(path))}", strict=False)
    if guessed is not None:
        return f"{guessed}; charset=utf-8" if guessed.startswith("text/") else guessed
    begin = first[:SNIFFED_BYTES]
    is_text = begin.decode("utf-8", "ignore").encode() == begin[: len(begin.decode("utf-8", "ignore").encode())]
    has_controls = any(byte < 9 or 13 < byte < 27 for byte in begin)
    return "text/plain; charset=utf-8" if is_text and not has_controls else OCTETS


def _is_unchanged(headers: Mapping[str, str], part: FilePart) -> bool:
    text = headers.get("if-modified-since", "")
    try:
        return (
            bool(text) and "if-none-match" not in headers and int(part.mtime) <= parsedate_to_datetime(text).timestamp()
        )
    except (ValueError, TypeError, OverflowError):
        return False


async def upload(call: Call) -> Response:
    """Write a file from a body of octets, or several from a form; replace what was there."""
    call = await authorize(call, WRITE)
    user, metadata = user_of(call), metadata_of(call)
    headers, path = call.request.headers, call.request.query_params.get("path")
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    async with call.use() as use, pumping(call.request) as pump:
        content = decompressed(pump, headers.get("content-encoding", ""))
        writing = _Writing(use.held.live, user, metadata)
        if kind == OCTETS:
            if path is None:
                raise E2BError(400, "path query parameter is required for raw body upload")
            await writing.write(path, content)
        elif kind.startswith("multipart/"):
            await writing.write_form(Form(content, content_type), path)
        else:
            sent = printable(content_type)[:80]
            raise E2BError(400, f"unsupported content type: {sent}, expected multipart/form-data or {OCTETS}")
        await writing.flush()
        await use.service.record("sandbox", what="upload", path=printable(", ".join(writing.paths)[:1000]))
        return JSONResponse(writing.entries)


def metadata_of(call: Call) -> dict[str, str]:
    """Return the metadata in the headers `X-Metadata-KEY`: of one that comes twice, the first."""
    metadata: dict[str, str] = {}
    for name, value in call.request.headers.items():
        if name.startswith(METADATA_HEADER) and len(name) > len(METADATA_HEADER):
            metadata.setdefault(name.removeprefix(METADATA_HEADER), value)
    return metadata


def _yes() -> bool:
    return True


class _Writing:
    """Write the files of one upload, small ones together, and hold what is answered about them."""

    def __init__(self, live: OpenedSandbox, user: str, metadata: Mapping[str, str]):
        self._live, self._user, self._rights, self._metadata = live, user, rights_of(user), metadata
        self.entries: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._small: list[tuple[str, bytes]] = []

    async def write(self, path: str, content: AsyncIterator[bytes]) -> None:
        """Write one file, or keep a small one for `flush`. Raises E2BError."""
        begin, is_whole = await beginning(content)
        if is_whole:
            self._small.append((path, begin))
            size = sum(len(data) + len(path) * PATH_COSTS for path, data in self._small)
            if len(self._small) >= MOST_TOGETHER or size >= TOGETHER_BYTES:
                await self.flush()
            return
        await self.flush()
        long = Repeatable(begin, content)

        async def work(by: FileRights) -> Sequence[str]:
            return [await self._live.write_path(path, long.pieces(), metadata=self._metadata, by=by)]

        await self._do(work, lambda: long.can_repeat)

    async def flush(self) -> None:
        """Write the small files that were kept. Raises E2BError."""
        files, self._small = self._small, []

        async def work(by: FileRights) -> Sequence[str]:
            return await self._live.write_paths(files, metadata=self._metadata, by=by)

        if files:
            await self._do(work, _yes)

    async def _do(self, work: Callable[[FileRights], Awaitable[Sequence[str]]], can_repeat: Callable[[], bool]) -> None:
        try:
            written = await with_rights(self._rights, work, can_repeat)
        except SandboxFileError as error:
            raise _as_write_error(error, self._user) from error
        except InvalidRequest as error:
            raise E2BError(400, printable(str(error))) from error
        metadata = {"metadata": dict(self._metadata)} if self._metadata else {}
        for path in written:
            entry = {"path": printable(path), "name": printable(path.rpartition("/")[2]), "type": "file"}
            self.paths.append(path)
            self.entries.append({**entry, **metadata})

    async def write_form(self, form: Form, path: str | None) -> None:
        """Write the parts with the name `file`, each to the path that is its file name, or all to one path."""
        targets: set[str] = set()
        async for part in form.parts():
            if part.name != "file":
                continue
            target = path if path is not None else part.filename
            if target is None or target in targets:
                await self.flush()
                raise E2BError(400, NAMELESS if target is None else TWICE.format(printable(target)[:4096]))
            targets.add(target)
            await self.write(target, part.content)


def _as_write_error(error: SandboxFileError, user: str) -> E2BError:
    messages = {"is_directory": f"path is a directory: {error.path}", "user": unknown_user(user)}
    return file_error(error, messages.get(error.kind, ""))


class Compose(E2BModel):
    """Files to put together: in their order, as one at `destination`. They are removed then."""

    source_paths: list[str]
    destination: str
    username: str | None = None


async def compose(call: Call) -> Response:
    """Write the contents of several files as one file, and remove them."""
    call.check_token()
    body = await _compose_body(call)
    user, sources, destination = checked_user(body.username or ""), body.source_paths, body.destination

    async def work(by: FileRights) -> str:
        return await live.compose_path(destination, sources, by=by)

    async with call.use() as use:
        live: OpenedSandbox = use.held.live
        try:
            written = await with_rights(rights_of(user), work)
        except SandboxFileError as error:
            messages = {
                "not_found": f"source file not found: {error.path}", "user": unknown_user(user),
                "not_regular": f"source path is not a regular file: {error.path}",
            }  # fmt: skip
            raise file_error(error, messages.get(error.kind, "")) from error
    return JSONResponse({"path": printable(written), "name": printable(written.rpartition("/")[2]), "type": "file"})


async def _compose_body(call: Call) -> Compose:
    body: Compose = await call.body(Compose)
    _check_sources(body.source_paths)
    if not body.destination:
        raise E2BError(400, "destination is required")
    return body


def _check_sources(sources: Sequence[str]) -> None:
    if not sources:
        raise E2BError(400, "source_paths must not be empty")
    if len(sources) > MOST_SOURCES:
        raise E2BError(400, f"source_paths: more than {MOST_SOURCES} files")


ROWS = (
    Row(method="GET", path="/files", handler=plain(download)),
    Row(method="POST", path="/files", handler=plain(upload)),
    Row(method="POST", path="/files/compose", handler=plain(compose)),
)
