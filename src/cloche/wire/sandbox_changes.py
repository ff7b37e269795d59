"""The report of a sandbox about the files of a folder, for the wire and for marks: bounded, and held on disk.

All processes of the sandbox are stopped until it is read, so nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

from cloche import hostfs
from cloche.core.changes import SupportsChanges
from cloche.core.errors import OutcomeUnknown
from cloche.core.loops import finish
from cloche.workspace.snapshot import Snapshot, SnapshotReader

from .problems import Refused
from .uses import Use

T = TypeVar("T")
MOST_SINCE = 1 << 62  # ns of the sandbox's clock
ROWS_BYTES, PER_ENTRY_BYTES = 256 << 20, 16  # of names and frames beside the content


async def clock_ns(use: Use) -> int:
    """Return the time, in ns, that a file of the sandbox changed now would get."""
    return natural((await use.held.live.ask("clock")).get("ns"))


async def changed(
    use: Use, path: str, *, since: int, most: int, entries: int, answer: dict[str, Any]
) -> AsyncGenerator[bytes]:
    """Yield the sandbox's report, and fill `answer`. Raises Refused (413) for more than there may be."""
    live = use.held.live
    if not isinstance(live, SupportsChanges):
        raise Refused(409, "backend-unavailable", f"backend {use.sandbox.backend!r} reports no changes of files")
    most = min(most, use.sandbox.limits.disk_bytes)
    left = most + most // 256 + ROWS_BYTES + PER_ENTRY_BYTES * entries
    stream = live.changes_stream(path, since=since, max_bytes=most, max_entries=entries, note_answer=answer.update)
    async with aclosing(cast("AsyncGenerator[bytes]", stream)) as pieces:
        async for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise Refused(413, "body-too-large", f"the changes have more than {most} bytes")
            yield piece


@asynccontextmanager
async def snapshot_of(use: Use, path: str, *, since: int, entries: int) -> AsyncIterator[Snapshot]:
    """Yield a folder's files, the content of those that changed `since` a time on this machine's disk."""
    load, whose, size = use.service.wire, use.caller.key_id, 0
    reader = SnapshotReader(
        hostfs.temporary_folder(), max_bytes=use.sandbox.limits.disk_bytes, entries=entries, is_whole=True
    )
    answer: dict[str, Any] = {}
    try:
        report = changed(use, path, since=since, most=use.sandbox.limits.disk_bytes, entries=entries, answer=answer)
        async with aclosing(report) as pieces:
            async for piece in pieces:
                load.spool(whose, len(piece))
                size += len(piece)
                await _checked(partial(reader.feed, piece))
        snapshot = await _checked(partial(reader.finish, answer))
        try:
            yield snapshot
        finally:
            snapshot.close()
    finally:
        reader.close()
        load.spooled.give_back(whose, size)


async def _checked(reading: Callable[[], T]) -> T:
    """Read a part of a report in a thread. Raises OutcomeUnknown for an invalid one."""
    try:
        return await finish(asyncio.to_thread(reading))
    except ValueError as error:
        raise OutcomeUnknown(f"the sandbox's report of its files is invalid: {error}") from error


def natural(value: object) -> int:
    """Return a number that a sandbox said, 0 for anything else."""
    return value if type(value) is int and 0 <= value < MOST_SINCE else 0
