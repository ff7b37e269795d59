"""A client's folder of which a sandbox has a copy: the clock of the copy's files, and what was changed since.

The client compares and commits. The changes are read into a file of this machine first, since all processes of the
sandbox are stopped meanwhile: a slow client would stop them for as long as it likes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from cloche import hostfs
from cloche.core.loops import finish

from . import sandbox_changes
from .at_path import AtPath
from .calls import OUT, Call, CallRequest
from .sandbox_changes import MOST_SINCE, natural
from .work import PIECE, use_of

MOST_BYTES, MOST_ENTRIES = 1 << 40, 1_000_000


class ChangesSince(AtPath):
    """A copy at a path: what was changed `since` a time of its clock, `most` bytes and `entries` at the most."""

    since: Annotated[int, Field(ge=1, lt=MOST_SINCE)]
    most: Annotated[int, Field(ge=0, le=MOST_BYTES)]
    entries: Annotated[int, Field(ge=1, le=MOST_ENTRIES)] = MOST_ENTRIES


async def clock(_: Call, request: CallRequest) -> object:
    """Return the time, in ns, that a file of the sandbox changed now would get."""
    return {"ns": await sandbox_changes.clock_ns(use_of(request))}


async def changes(call: Call, request: CallRequest) -> object:
    """Send the changes in a copy, as `cloche.workspace.snapshot` reads them."""
    use, asked = use_of(request), request.fields
    with tempfile.TemporaryFile(dir=hostfs.temporary_folder()) as spool:
        size = 0
        try:
            answer: dict[str, Any] = {}
            report = sandbox_changes.changed(
                use, asked.read(), since=asked.since, most=asked.most, entries=asked.entries, answer=answer
            )
            async with aclosing(report) as pieces:  # until then the processes inside are stopped
                async for piece in pieces:
                    request.service.wire.spool(call.whose, len(piece))
                    size += len(piece)
                    await finish(asyncio.to_thread(spool.write, piece))
            sent = await call.send_all(OUT, _pieces(spool))
        finally:
            request.service.wire.spooled.give_back(call.whose, size)
    return {
        "size": sent, "count": natural(answer.get("count")), "tooMany": bool(answer.get("too_many")),
        "skipped": natural(answer.get("skipped")),
    }  # fmt: skip


async def _pieces(spool: BinaryIO) -> AsyncIterator[bytes]:
    spool.seek(0)
    while piece := await finish(asyncio.to_thread(spool.read, PIECE)):
        yield piece
