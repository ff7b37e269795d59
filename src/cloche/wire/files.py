"""Files of a sandbox, at any path that its user may access.

A path belongs to the guest: it is resolved inside the sandbox with the rights of its user, never on this host. Names
that are not UTF-8 are given in base64, as `pathBase64` or `nameBase64`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from cloche.core.limits import MIB
from cloche.core.processes import OWN_RIGHTS, FileChange, FileInfo, FileRights
from cloche.execution.paths import file_time

from .at_path import MOST_ROWS, Acting, GuestPath
from .exec_options import Amount
from .uses import Use


class NewFolder(Acting):
    """A folder to create, by default with its parents; one that `isNew` must not exist."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"path": "/workspace/out"}]})

    path: GuestPath
    parents: bool = True
    is_new: bool = False
    timeout: Amount | None = None


class Move(Acting):
    """The source and target of a move. An existing target is replaced only with `replace`.

    With `parents`, missing folders above the target are created.
    """

    path: GuestPath
    target: GuestPath
    replace: bool = False
    parents: bool = False
    timeout: Amount | None = None


def named(name: str, key: str = "name") -> dict[str, str]:
    """Return a name under a key, in base64 under another one if it is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return {f"{key}Base64": base64.b64encode(name.encode("utf-8", "surrogateescape")).decode()}
    return {key: name}


class Sources(Acting):
    """Files to put together, in their order, as the file at `path`. They are removed."""

    path: GuestPath
    sources: list[GuestPath] = Field(min_length=1, max_length=MOST_ROWS)


def as_dict(info: FileInfo) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    link: dict[str, Any] = {}
    if info.type == "link":
        real = {**named(info.real, "real"), "targetMode": f"{info.target_mode:04o}"} if info.real else {}
        link = {**named(info.target, "target"), "leadsTo": info.leads_to, **real}
    return {
        **named(info.name), "type": info.type, "size": info.size, "mode": f"{info.mode:04o}", "mtime": info.mtime,
        "uid": info.uid, "gid": info.gid, "owner": info.owner, "group": info.group, "metadata": dict(info.metadata),
        **link, **(named(info.path, "path") if info.path else {}),
    }  # fmt: skip


async def entries(
    use: Use,
    path: str,
    recursive: bool,
    timeout: Amount | None,  # noqa: ASYNC109 - of the call
    depth: int | None = None,
    by: FileRights = OWN_RIGHTS,
) -> str:
    """Return a folder's entries as JSON."""
    async with use.service.sandboxes.listings, file_time(path, timeout):
        entries = await use.held.live.list_path(path, recursive=recursive, depth=depth, by=by)
        return await asyncio.to_thread(_encode, entries)


def _encode(entries: Sequence[FileInfo]) -> str:
    rows = [as_dict(entry) for entry in entries[:MOST_ROWS]]
    document = {"items": rows, "nextCursor": None, "isPartial": len(entries) > MOST_ROWS}
    return json.dumps(document, ensure_ascii=False)


async def stat(
    use: Use,
    path: str,
    timeout: Amount | None,  # noqa: ASYNC109 - of the call
    by: FileRights = OWN_RIGHTS,
) -> dict[str, Any]:
    """Describe the file at a path. Links are not followed."""
    async with file_time(path, timeout):
        return as_dict(await use.held.live.stat_path(path, by=by))


async def remove(
    use: Use,
    path: str,
    recursive: bool,
    timeout: Amount | None,  # noqa: ASYNC109 - of the call
    by: FileRights = OWN_RIGHTS,
) -> dict[str, Any]:
    """Remove a file, a link or an empty folder; with `recursive` a folder and everything in it."""
    async with file_time(path, timeout):
        await use.held.live.remove_path(path, recursive=recursive, by=by)
    return {"removed": True}


async def make_folder(use: Use, body: NewFolder) -> dict[str, Any]:
    """Create a folder."""
    async with file_time(body.path, body.timeout):
        made = use.held.live.make_folder(body.path, parents=body.parents, is_new=body.is_new, by=body.rights())
        return as_dict(await made)


async def move(use: Use, body: Move) -> dict[str, Any]:
    """Move a file or a folder."""
    options: dict[str, Any] = {"replaces": body.replace, "parents": body.parents, "by": body.rights()}
    async with file_time(body.path, body.timeout):
        return as_dict(await use.held.live.move_path(body.path, body.target, **options))


async def compose(use: Use, body: Sources) -> dict[str, Any]:
    """Write the contents of files as one, and remove them."""
    return named(await use.held.live.compose_path(body.path, body.sources, by=body.rights()), "path")


def packed(use: Use, path: str, note_skipped: Callable[[int], None] = lambda _: None) -> AsyncIterator[bytes]:
    """Return the pieces of a tar archive, bounded by the sandbox's disk limit."""
    disk = use.sandbox.limits.disk_bytes
    max_bytes = disk + disk // 4 + MIB  # with the overhead of an archive
    return use.held.live.pack_stream(path, max_bytes=max_bytes, note_skipped=note_skipped)


def change_as_dict(change: FileChange) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    target = named(change.target, "target") if change.target else {}
    entry = {"entry": as_dict(change.entry)} if change.entry is not None else {}
    return {"kind": change.kind, **named(change.path, "path"), **target, "isDirectory": change.is_directory, **entry}
