"""`/api/sandboxes/{id}/files` and `…/changes`: files of a sandbox, at any path that its user may access.

A path belongs to the guest: it is resolved inside the sandbox with the rights of its user, never on this host. Content
is streamed. Names that are not UTF-8 are given in base64, as `pathBase64` or `nameBase64`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.requests import ClientDisconnect

from cloche.core.errors import ClocheError
from cloche.execution.paths import AsyncWatch, file_time, rights
from cloche.records.ids import new_id
from cloche.wire import at_path, files
from cloche.wire.events import ActiveRun
from cloche.wire.exec_options import Amount
from cloche.wire.problems import Refused
from cloche.wire.uses import Use

from ..auth import TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..sandbox_use import EVENTS, Reading, Running
from ..streams import HeldStream, event_stream

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}", tags=["sandbox files"], route_class=JsonRoute)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_RAW = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string"}}}}}
_BYTES: dict[str, Any] = {"application/octet-stream": {}}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole file.", "content": _BYTES},
    206: {"description": "The requested part of the file.", "content": _BYTES},
    416: {**RESPONSES[422], "description": "The file has no such part."},
}
ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"description": "A tar archive.", "content": {"application/x-tar": {}}}
}


async def _path(
    path: Annotated[str | None, Query(max_length=at_path.MOST_PATH)] = None,
    path_base64: Annotated[str | None, Query(alias="pathBase64", max_length=2 * at_path.MOST_PATH)] = None,
) -> str:
    return at_path.read_path(path, path_base64)


Path = Annotated[str, Depends(_path)]
User = Annotated[str | None, Query(max_length=256, description="Whose rights to use, in a sandbox with several users.")]
Depth = Annotated[int | None, Query(ge=1, le=64, description="How many levels to list.")]
Timeout = Annotated[Amount | None, Query(description="The time limit of the call: 2, or 500ms.")]


@router.get("/files", responses=RESPONSES)
async def entries(
    use: Reading, path: Path, recursive: bool = False, depth: Depth = None, user: User = None, timeout: Timeout = None
) -> Response:
    """List a folder, and with `recursive` or a `depth` what is below it. Entries beyond 10,000 are left out."""
    return Response(
        await files.entries(use, path, recursive, timeout, depth, rights(user)), media_type="application/json"
    )


@router.get("/files/stat", responses=RESPONSES)
async def stat(use: Reading, path: Path, user: User = None, timeout: Timeout = None) -> dict[str, Any]:
    """Describe the file at a path. Links are not followed."""
    return await files.stat(use, path, timeout, rights(user))


@router.delete("/files", responses=RESPONSES)
async def remove(
    use: Running, path: Path, recursive: bool = False, user: User = None, timeout: Timeout = None
) -> dict[str, Any]:
    """Remove a file, a link or an empty folder, with `recursive` a folder and everything in it."""
    return await files.remove(use, path, recursive, timeout, rights(user))


@router.post("/files/folder", status_code=201, responses=RESPONSES)
async def make_folder(use: Running, body: files.NewFolder) -> dict[str, Any]:
    """Create a folder."""
    return await files.make_folder(use, body)


@router.post("/files/move", responses=RESPONSES)
async def move(use: Running, body: files.Move) -> dict[str, Any]:
    """Move a file or a folder."""
    return await files.move(use, body)


@router.get("/files/content", responses={**RESPONSES, **_CONTENT}, response_class=Response)
async def read(
    use: Reading,
    path: Path,
    range_: Annotated[str | None, Header(alias="Range", max_length=64)] = None,
    user: User = None,
    timeout: Timeout = None,
) -> Response:
    """Return the content of a file, or the part that `Range` names. `timeout` applies until its first bytes."""
    async with file_time(path, timeout):
        return await _read(use, path, range_, user)


async def _read(use: Use, path: str, range_: str | None, user: str | None) -> Response:
    info = await use.sandbox.stat(path, user=user)
    size = info.size if info.type == "file" else 0  # files of /proc report 0, too, and are read to their end
    byte_range = _byte_range(range_, size) if size else None
    offset, count = byte_range or (0, size or None)
    headers = {"Accept-Ranges": "bytes"} if size else {}
    if count is not None:
        headers["Content-Length"] = str(count)
    if byte_range is not None:
        headers["Content-Range"] = f"bytes {offset}-{offset + (count or 0) - 1}/{size}"
    pieces = use.held.live.read_stream(path, offset=offset, count=count, by=rights(user))
    return await _stream(pieces, 206 if byte_range else 200, "application/octet-stream", headers)


def _byte_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return offset and count of a Range; None for the whole file. Raises Refused (416)."""
    match = None if text is None else _RANGE.fullmatch(text.strip())
    if match is None or match[1] == match[2] == "":
        return None  # several ranges or another unit: the whole file is a valid answer (RFC 9110, 14.2)
    first, last = match[1], match[2]
    if first == "":
        offset, end = max(0, size - int(last)), size - 1
    else:
        offset, end = int(first), min(int(last or size - 1), size - 1)
    if offset > end:
        headers = {"Content-Range": f"bytes */{size}"}
        raise Refused(416, "range-not-satisfiable", f"the file has {size} bytes", headers=headers)
    return offset, end - offset + 1


async def _stream(pieces: AsyncIterator[bytes], status: int, kind: str, headers: dict[str, str]) -> Response:
    """Return a streamed response. An error before the first piece is a separate error response."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pieces.aclose)  # type: ignore[attr-defined]
        first = await anext(pieces, b"")
        return HeldStream(_after(first, pieces), stack.pop_all(), status_code=status, media_type=kind, headers=headers)


async def _after(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


@router.put("/files/content", responses=RESPONSES, openapi_extra=_RAW)
async def write(
    request: Request,
    use: Running,
    path: Path,
    append: bool = False,
    mode: Annotated[str | None, Query(pattern="^0?[0-7]{3}$")] = None,
    user: User = None,
    timeout: Timeout = None,
) -> dict[str, Any]:
    """Write the body to a file. Missing folders are created. An incomplete body replaces nothing.

    Headers `X-Metadata-KEY` are stored with the file, in place of what was; without any, it keeps none.
    """
    options: dict[str, Any] = {
        "mode": None if mode is None else int(mode, 8), "how": "append" if append else "replace", "by": rights(user),
    }  # fmt: skip
    metadata = _metadata(request)
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, timeout):
        with _uploading():
            await use.held.live.write_path(path, _content(request), metadata=metadata, **options)
        return files.as_dict(await use.sandbox.stat(path, user=user))


def _metadata(request: Request) -> dict[str, str] | None:
    """Return the metadata in the headers; None for none."""
    prefix = "x-metadata-"
    found = {name.removeprefix(prefix): text for name, text in request.headers.items() if name.startswith(prefix)}
    return found or None


@router.get("/files/archive", responses={**RESPONSES, **ARCHIVE}, response_class=Response)
async def pack(use: Reading, path: Path, timeout: Timeout = None) -> Response:
    """Return a folder or a file as a tar archive. `timeout` applies until its first bytes."""
    async with file_time(path, timeout):
        return await _stream(files.packed(use, path), 200, "application/x-tar", {})


@router.put("/files/archive", responses=RESPONSES, openapi_extra=_RAW)
async def unpack(request: Request, use: Running, path: Path, timeout: Timeout = None) -> dict[str, Any]:
    """Unpack a tar archive below a folder, which is created if missing. Nothing is written outside of it."""
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, timeout):
        with _uploading():
            await use.held.live.unpack_path(path, _content(request))
        return files.as_dict(await use.sandbox.stat(path))


async def _content(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


@contextmanager
def _uploading() -> Iterator[None]:
    """Turn the disconnect of an uploading client into a response."""
    try:
        yield
    except ClientDisconnect as error:
        raise Refused(400, "incomplete-body", "the body ended too early; no file was replaced") from error


@router.get("/changes", responses={**RESPONSES, **EVENTS}, response_class=Response)
async def changes(
    use: Reading,
    service: TheService,
    path: Path,
    recursive: bool = False,
    exact: bool = False,
    entries: bool = False,
    user: User = None,
    timeout: Timeout = None,
) -> Response:
    """Watch a folder or file. Changes are sent as server-sent events until the client disconnects.

    With `exact`, `written` and `attributes` are told apart; `entries` describes the files then. `timeout` applies until
    the watch has begun.
    """
    options: dict[str, Any] = {"exact": exact, "entries": entries, "user": user}
    watch = await use.sandbox.watch(path, recursive=recursive, timeout=timeout, **options)
    live = ActiveRun(id=new_id("call"), project=use.caller.project, size=0)
    live.task = asyncio.ensure_future(_tell(watch, live))
    service.sandboxes.note_stream(live.task)
    return event_stream(live)


async def _tell(watch: AsyncWatch, live: ActiveRun) -> str:
    live.events.add("watching", {})
    try:
        async with watch:
            while (change := await watch.next()) is not None:
                live.events.add("change", files.change_as_dict(change))
    except ClocheError as error:
        live.events.add("error", {"error": str(error).encode("utf-8", "backslashreplace").decode()})
    finally:
        live.events.end()
    return ""
