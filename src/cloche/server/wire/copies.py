"""A client's folder of which a sandbox has a copy: the clock of the copy's files, and what was changed since.

The client compares and commits. The changes are read into a file of this machine first, since all processes of the
sandbox are stopped meanwhile: a slow client would stop them for as long as it likes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, BinaryIO, cast

from pydantic import Field

from cloche import hostfs
from cloche.core.changes import SupportsChanges
from cloche.core.loops import finish

from ..problems import Refused
from ..sandbox_use import Use
from .calls import OUT, Call, CallRequest
from .work import PIECE, AtPath, use_of

MOST_SINCE, MOST_BYTES, MOST_ENTRIES = 1 << 62, 1 << 40, 1_000_000
ROWS_BYTES, PER_ENTRY_BYTES = 256 << 20, 16  # of names and frames beside the content


class ChangesSince(AtPath):
    """A copy at a path: what was changed `since` a time of its clock, `most` bytes and `entries` at the most."""

    since: Annotated[int, Field(ge=1, lt=MOST_SINCE)]
    most: Annotated[int, Field(ge=0, le=MOST_BYTES)]
    entries: Annotated[int, Field(ge=1, le=MOST_ENTRIES)] = MOST_ENTRIES


async def clock(_: Call, request: CallRequest) -> object:
    """Return the time, in ns, that a file of the sandbox changed now would get."""
    answer = await use_of(request).held.live.ask("clock")
    return {"ns": _count(answer.get("ns"))}


async def changes(call: Call, request: CallRequest) -> object:
    """Send the changes in a copy, as `cloche.workspace.snapshot` reads them."""
    use = use_of(request)
    with tempfile.TemporaryFile(dir=hostfs.temporary_folder()) as spool:
        size = 0
        try:
            answer: dict[str, Any] = {}
            async for piece in _changed(use, request.fields, answer):
                request.service.wire.spool(call.whose, len(piece))
                size += len(piece)
                await finish(asyncio.to_thread(spool.write, piece))
            sent = await call.send_all(OUT, _pieces(spool))
        finally:
            request.service.wire.spooled.give_back(call.whose, size)
    return {
        "size": sent, "count": _count(answer.get("count")), "tooMany": bool(answer.get("too_many")),
        "skipped": _count(answer.get("skipped")),
    }  # fmt: skip


async def _changed(use: Use, asked: ChangesSince, answer: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the sandbox's report, and fill `answer`. Raises Refused (413) for more than there may be."""
    live = use.held.live
    if not isinstance(live, SupportsChanges):
        raise Refused(409, "backend-unavailable", f"backend {use.sandbox.backend!r} reports no changes of files")
    most = min(asked.most, use.sandbox.limits.disk_bytes)
    left = most + most // 256 + ROWS_BYTES + PER_ENTRY_BYTES * asked.entries
    stream = live.changes_stream(
        asked.read(), since=asked.since, max_bytes=most, max_entries=asked.entries, note_answer=answer.update
    )
    async with aclosing(cast("AsyncGenerator[bytes]", stream)) as pieces:
        async for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise Refused(413, "body-too-large", f"the changes have more than {most} bytes")
            yield piece


async def _pieces(spool: BinaryIO) -> AsyncIterator[bytes]:
    spool.seek(0)
    while piece := await finish(asyncio.to_thread(spool.read, PIECE)):
        yield piece


def _count(value: object) -> int:
    """Return a number that a sandbox said, 0 for anything else."""
    return value if type(value) is int and 0 <= value < MOST_SINCE else 0
