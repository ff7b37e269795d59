"""Files of a sandbox, at any path that its user may access.

A path belongs to the guest: it is resolved inside the sandbox with the rights of its user, never on this host. Names
that are not UTF-8 are given in base64, as `pathBase64` or `nameBase64`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, StringConstraints

from cloche.core.errors import InvalidRequest
from cloche.core.limits import MIB
from cloche.core.processes import FileChange, FileInfo
from cloche.execution.paths import file_time

from .exec_options import Amount, WireModel, decoded
from .uses import Use

MOST_PATH, MOST_ROWS = 4096, 10_000

GuestPath = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATH)]


def read_path(path: str | None, path_base64: str | None) -> str:
    """Return the path from one of two fields. Raises InvalidRequest."""
    if path_base64 is not None:
        return decoded(path_base64, "pathBase64").decode("utf-8", "surrogateescape")
    if not path:
        raise InvalidRequest("path: give the path of a file, such as /workspace/out.txt")
    return path


class NewFolder(WireModel):
    """A folder to create, by default with its parents."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"path": "/workspace/out"}]})

    path: GuestPath
    parents: bool = True
    timeout: Amount | None = None


class Move(WireModel):
    """The source and target of a move. An existing target is replaced only with `replace`."""

    path: GuestPath
    target: GuestPath
    replace: bool = False
    timeout: Amount | None = None


def named(name: str, key: str = "name") -> dict[str, str]:
    """Return a name under a key, in base64 under another one if it is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return {f"{key}Base64": base64.b64encode(name.encode("utf-8", "surrogateescape")).decode()}
    return {key: name}


def as_dict(info: FileInfo) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    link = {**named(info.target, "target"), "leadsTo": info.leads_to} if info.type == "link" else {}
    return {
        **named(info.name), "type": info.type, "size": info.size, "mode": f"{info.mode:04o}", "mtime": info.mtime,
        "uid": info.uid, "gid": info.gid, **link,
    }  # fmt: skip


async def entries(use: Use, path: str, recursive: bool, timeout: Amount | None) -> str:  # noqa: ASYNC109 - of the call
    """Return a folder's entries as JSON."""
    async with use.service.sandboxes.listings:
        entries = await use.sandbox.list_dir(path, recursive=recursive, timeout=timeout)
        return await asyncio.to_thread(_encode, entries)


def _encode(entries: Sequence[FileInfo]) -> str:
    rows = [as_dict(entry) for entry in entries[:MOST_ROWS]]
    document = {"items": rows, "nextCursor": None, "isPartial": len(entries) > MOST_ROWS}
    return json.dumps(document, ensure_ascii=False)


async def stat(use: Use, path: str, timeout: Amount | None) -> dict[str, Any]:  # noqa: ASYNC109 - of the call
    """Describe the file at a path. Links are not followed."""
    return as_dict(await use.sandbox.stat(path, timeout=timeout))


async def remove(
    use: Use,
    path: str,
    recursive: bool,
    timeout: Amount | None,  # noqa: ASYNC109 - of the call
) -> dict[str, Any]:
    """Remove a file, a link or an empty folder; with `recursive` a folder and everything in it."""
    await use.sandbox.remove(path, recursive=recursive, timeout=timeout)
    return {"removed": True}


async def make_folder(use: Use, body: NewFolder) -> dict[str, Any]:
    """Create a folder."""
    async with file_time(body.path, body.timeout):
        await use.sandbox.make_dir(body.path, parents=body.parents)
        return as_dict(await use.sandbox.stat(body.path))


async def move(use: Use, body: Move) -> dict[str, Any]:
    """Move a file or a folder."""
    async with file_time(body.path, body.timeout):
        await use.sandbox.move(body.path, body.target, replace=body.replace)
        return as_dict(await use.sandbox.stat(body.target))


def packed(use: Use, path: str, note_skipped: Callable[[int], None] = lambda _: None) -> AsyncIterator[bytes]:
    """Return the pieces of a tar archive, bounded by the sandbox's disk limit."""
    disk = use.sandbox.limits.disk_bytes
    max_bytes = disk + disk // 4 + MIB  # with the overhead of an archive
    return use.held.live.pack_stream(path, max_bytes=max_bytes, note_skipped=note_skipped)


def change_as_dict(change: FileChange) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    target = named(change.target, "target") if change.target else {}
    return {"kind": change.kind, **named(change.path, "path"), **target, "isDirectory": change.is_directory}
