"""`/api/sandboxes/{id}/files/mark` and `…/changes`: what has changed in a folder since a mark, kept by the client."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field, StringConstraints

from cloche.core.errors import InvalidRequest
from cloche.core.loops import finish
from cloche.wire.at_path import MOST_PATH, MOST_ROWS, GuestPath, read_path
from cloche.wire.exec_options import WireModel, decoded
from cloche.wire.files import named
from cloche.wire.problems import Refused
from cloche.wire.sandbox_changes import MOST_SINCE, clock_ns, snapshot_of
from cloche.wire.uses import Use
from cloche.workspace.snapshot import Snapshot

from ..bodies import JsonRoute
from ..marks import ENTRY_PATTERN, Differences, FileDifference, archive, compare, entry_text
from ..problems import RESPONSES
from ..sandbox_use import Running
from ..streams import HeldStream
from .sandbox_files import ARCHIVE, Path

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}/files", tags=["sandbox files"], route_class=JsonRoute)
MOST_MARKED, MOST_LOOKED_AT = 20_000, 100_000  # files of a mark, and of a folder when it is compared
MOST_NAMES_BYTES = 8 << 20  # in one answer
PIECE = 1 << 18  # of an archive
T = TypeVar("T")
EntryText = Annotated[str, StringConstraints(pattern=ENTRY_PATTERN)]
EntryName = Annotated[str, StringConstraints(min_length=1, max_length=2 * MOST_PATH)]  # also in base64
Entries = Annotated[dict[EntryName, EntryText], Field(max_length=MOST_MARKED)]


class FolderMark(WireModel):
    """The mark of a folder, as `GET …/files/mark` returned it: for each path type, mode and SHA-256."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"path": "/workspace", "since": "1", "entries": {"a.txt": "file 0644 " + "0" * 64}}]
        }
    )

    path: GuestPath | None = None
    path_base64: Annotated[str, StringConstraints(max_length=2 * MOST_PATH)] | None = None
    since: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,18}$")]
    entries: Entries
    entries_base64: Entries = Field(default_factory=dict)

    def folder(self) -> str:
        """Return the path of the folder. Raises InvalidRequest."""
        return read_path(self.path, self.path_base64)

    def since_ns(self) -> int:
        """Return the time of the mark. Raises InvalidRequest."""
        if (since := int(self.since)) >= MOST_SINCE:
            raise InvalidRequest("since: this is no time of a mark")
        return since

    def texts(self) -> dict[bytes, str]:
        """Return the text of each path. Raises InvalidRequest."""
        odd = {decoded(name, "entriesBase64"): text for name, text in self.entries_base64.items()}
        return {name.encode("utf-8", "surrogateescape"): text for name, text in self.entries.items()} | odd


@router.get("/mark", responses=RESPONSES)
async def mark_folder(use: Running, path: Path) -> Response:
    """Return a mark of a folder: its files with their hashes. With it you can ask later what has changed.

    The service does not store marks. All processes of the sandbox are stopped while the files are read. A folder of
    more than 20,000 files has no mark.
    """
    since = await clock_ns(use)
    async with snapshot_of(use, path, since=1, entries=MOST_MARKED) as snapshot:
        if snapshot.is_partial:
            why = f"the folder has more than {MOST_MARKED} files, or files that cannot be described"
            raise Refused(413, "body-too-large", why, remedy="mark a folder below it")
        return Response(await asyncio.to_thread(_mark_text, path, since, snapshot), media_type="application/json")


def _mark_text(path: str, since: int, snapshot: Snapshot) -> str:
    entries, odd, names_bytes = dict[str, str](), dict[str, str](), 0
    for name, entry in snapshot.entries.items():
        names_bytes += len(name)
        if names_bytes > MOST_NAMES_BYTES:
            raise Refused(413, "body-too-large", f"the paths of the files have more than {MOST_NAMES_BYTES} bytes")
        try:
            entries[name.decode()] = entry_text(entry)
        except UnicodeDecodeError:
            odd[base64.b64encode(name).decode()] = entry_text(entry)
    document = {**named(path, "path"), "since": str(since), "entries": entries, "entriesBase64": odd}
    return json.dumps(document, ensure_ascii=False)


@router.post("/changes", responses=RESPONSES)
async def compare_with_mark(use: Running, body: FolderMark) -> Response:
    """Compare a folder with its mark: created, modified and removed files, and changed permission bits.

    At most 10,000 changes are listed, and 100,000 files are compared. If there are more, `isPartial` is true.
    """
    async with _compared(use, body) as (differences, _):
        return Response(await asyncio.to_thread(_as_text, differences), media_type="application/json")


@router.post("/changes/archive", responses={**RESPONSES, **ARCHIVE}, response_class=Response)
async def pack_changes(use: Running, body: FolderMark) -> Response:
    """Return the created and modified files as a tar archive. Removed files are not in it.

    If there are more changes or files than can be compared, the answer is 413.
    """
    async with AsyncExitStack() as stack:
        differences, snapshot = await stack.enter_async_context(_compared(use, body))
        if differences.is_partial:
            raise Refused(413, "body-too-large", "there are more changes or files than can be compared")
        pieces = _in_threads(archive(differences, snapshot))
        return HeldStream(pieces, stack.pop_all(), media_type="application/x-tar")


@asynccontextmanager
async def _compared(use: Use, body: FolderMark) -> AsyncIterator[tuple[Differences, Snapshot]]:
    """Yield what differs from a mark, and the files as they are now. Raises InvalidRequest, Refused."""
    path, since, before = body.folder(), body.since_ns(), await asyncio.to_thread(body.texts)
    load, whose = use.service.wire, use.caller.key_id
    async with snapshot_of(use, path, since=since, entries=MOST_LOOKED_AT) as snapshot:
        differences = await finish(asyncio.to_thread(compare, before, snapshot))
        load.hold(whose, differences.held_bytes)
        try:
            yield differences, snapshot
        finally:
            load.held.give_back(whose, differences.held_bytes)


async def _in_threads(pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while piece := await finish(asyncio.to_thread(_joined, pieces)):
        yield piece


def _joined(pieces: Iterator[bytes]) -> bytes:
    """Return the next pieces, as many as make a large one; nothing at the end."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= PIECE:
            break
    return bytes(data)


def _as_text(differences: Differences) -> str:
    rows = [_as_row(row) for row in _first(differences.rows, lambda row: len(row.path))]
    left_out = _first(differences.left_out.items(), lambda item: len(item[0]))
    is_partial = (
        differences.is_partial or len(rows) < len(differences.rows) or len(left_out) < len(differences.left_out)
    )
    document = {
        "items": rows, "leftOut": [{**_path(path), "reason": why} for path, why in left_out], "nextCursor": None,
        "isPartial": is_partial,
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False)


def _first(rows: Iterable[T], size: Callable[[T], int]) -> list[T]:
    """Return the first rows, as many as an answer takes by number and size of names."""
    taken, total = list[T](), 0
    for row in islice(rows, MOST_ROWS):
        total += size(row)
        if total > MOST_NAMES_BYTES:
            break
        taken.append(row)
    return taken


def _as_row(row: FileDifference) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    old_type, old_mode, *_ = (*row.old.split(" "), "")
    old = {"oldType": old_type, "oldMode": old_mode} if row.old else {}
    entry = row.entry
    if entry is None:
        return {**_path(row.path), "what": row.what, **old}
    content: Mapping[str, Any] = {}
    if entry.kind == "file":
        content = {"size": entry.size, "sha256": entry.sha256}
    elif entry.kind == "link":
        content = named(os.fsdecode(entry.target), "target")
    return {**_path(row.path), "what": row.what, "type": entry.kind, "mode": f"{entry.mode:04o}", **content, **old}


def _path(path: bytes) -> dict[str, str]:
    return named(os.fsdecode(path), "path")
