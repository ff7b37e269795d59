"""`filesystem.Filesystem`: describe, list, make, move and remove files. Watches are in `watches`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import SandboxFileError
from cloche.core.processes import FileInfo, FileRights
from cloche.wire.attachments import OpenedSandbox

from ..calls import Call
from ..errors import E2BError
from .connect import Encoded, unary
from .entries import as_entry, basic_user, file_error, printable, rights_of, with_rights

SERVICE = "filesystem.Filesystem"
MOST_DEPTH = 1 << 32
Message = Mapping[str, Any]


def text_of(body: Message, name: str) -> str:
    """Return a text of a message; empty where it is left out. Raises E2BError (400)."""
    value = body.get(name, "")
    if not isinstance(value, str):
        raise E2BError(400, f"{name}: give text")
    return value


def _message(kinds: Mapping[str, str], error: SandboxFileError) -> str:
    """Return the message of a table for an error, `{}` in it being the path."""
    return kinds[error.kind].replace("{}", error.path) if error.kind in kinds else ""


async def _do(call: Call, kinds: Mapping[str, str], work: Any) -> Any:  # noqa: ANN401 - a function and what it returns
    """Return what `work(live, rights)` returns. Raises E2BError, with a message of a table."""
    name = basic_user(call)
    async with call.use() as use:
        live: OpenedSandbox = use.held.live
        try:
            return await with_rights(rights_of(name), lambda rights: work(live, rights))
        except SandboxFileError as error:
            raise file_error(error, _message({**kinds, "user": f"invalid username: '{name}'"}, error)) from error


_STAT = {"not_found": "file not found: {}"}


async def stat(call: Call, body: Message) -> Message:
    """Describe a file; a link with what it leads to."""
    path = text_of(body, "path")

    async def work(live: OpenedSandbox, by: FileRights) -> FileInfo:
        return await live.stat_path(path, by=by)

    return {"entry": as_entry(await _do(call, _STAT, work))}


_LIST = {
    "not_found": "path not found: {}",
    "not_directory": "path is not a directory: {}",
    "loop": "cyclic symlink: {}",
    "too_large": "{}: it has more entries than can be listed; give a smaller depth",
}


async def list_dir(call: Call, body: Message) -> Encoded:
    """List a folder, and the folders below it up to a depth, which is 1 by default."""
    path, depth = text_of(body, "path"), body.get("depth", 0)
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth < MOST_DEPTH:
        raise E2BError(400, "depth: give a number from 1 on")

    async def work(live: OpenedSandbox, by: FileRights) -> Sequence[FileInfo]:
        return await live.list_path(path, depth=depth or 1, by=by)

    async with call.service.sandboxes.listings:
        entries = await _do(call, _LIST, work)
        return await asyncio.to_thread(_encode, entries)


def _encode(entries: Sequence[FileInfo]) -> Encoded:
    return Encoded(json.dumps({"entries": [as_entry(entry) for entry in entries]}).encode())


_MAKE = {
    "exists": "directory already exists: {}",
    "not_directory": "path already exists but it is not a directory: {}",
}


async def make_dir(call: Call, body: Message) -> Message:
    """Make a folder that is not there yet, and those above it."""
    path = text_of(body, "path")

    async def work(live: OpenedSandbox, by: FileRights) -> FileInfo:
        return await live.make_folder(path, is_new=True, by=by)

    return {"entry": as_entry(await _do(call, _MAKE, work))}


async def move(call: Call, body: Message) -> Message:
    """Rename a file or a folder; a file at the destination is replaced, folders above it are made."""
    source, destination = text_of(body, "source"), text_of(body, "destination")

    async def work(live: OpenedSandbox, by: FileRights) -> FileInfo:
        return await live.move_path(source, destination, replaces=True, parents=True, by=by)

    kinds = {"not_found": f"source file not found: {printable(source)[:4096]}"}
    return {"entry": as_entry(await _do(call, kinds, work))}


async def remove(call: Call, body: Message) -> Message:
    """Remove a file, or a folder with everything in it. One that is not there is no error."""
    path = text_of(body, "path")

    async def work(live: OpenedSandbox, by: FileRights) -> None:
        await live.remove_path(path, recursive=True, may_be_gone=True, by=by)

    await _do(call, {}, work)
    return {}


ROWS = (
    unary(SERVICE, "Stat", stat),
    unary(SERVICE, "ListDir", list_dir),
    unary(SERVICE, "MakeDir", make_dir),
    unary(SERVICE, "Move", move),
    unary(SERVICE, "Remove", remove),
)
