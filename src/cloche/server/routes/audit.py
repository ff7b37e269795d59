"""`/api/audit`: list, export and verify the audit log. It is read in threads, a few at the same time."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import ConfigDict, Field, StringConstraints

from cloche.audit.export import texts_of
from cloche.audit.log import audit_for
from cloche.audit.query import AuditPage, Filters, newest_events
from cloche.audit.verify import Reading, read_heads, verify
from cloche.core.errors import PolicyDenied
from cloche.core.letter_case import camel
from cloche.records.tables import DEFAULT_PROJECT
from cloche.wire.callers import Caller
from cloche.wire.exec_options import WireModel
from cloche.wire.problems import Refused

from ..auth import Admin, Reader, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..service import Service
from ..streams import HeldStream

router = APIRouter(prefix="/api/audit", tags=["audit"], route_class=JsonRoute)
MOST_AT_ONCE = 2  # readings of the log; each has a thread
CHUNK_CHARS = 64 << 10  # of an export
_MEDIA_TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
_reading = threading.BoundedSemaphore(MOST_AT_ONCE)

Text = Annotated[str | None, Query(max_length=200)]


async def _filters(
    kind: Annotated[list[str] | None, Query(max_length=16)] = None,
    status: Annotated[list[str] | None, Query(max_length=16)] = None,
    since: Text = None,
    until: Text = None,
    run: Text = None,
    text: Text = None,
) -> Filters:
    """Return the filters of a query. `since` and `until` are 2026-01-31, 2026-01-31T12:00, or an age such as 2h, 7d."""
    filters = Filters(kinds=kind or (), statuses=status or (), since=since, until=until, run=run, text=text)
    filters.wanted()  # an invalid time is an error before anything is read
    return filters


Wanted = Annotated[Filters, Depends(_filters)]


class Heads(WireModel):
    """Heads that were kept elsewhere, as `cloche audit head` prints them. Each must be in the log."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"heads": []}]})

    heads: list[Annotated[str, StringConstraints(max_length=128)]] = Field(default_factory=list, max_length=100)


@router.get("", responses=RESPONSES)
async def events(
    caller: Reader,
    service: TheService,
    filters: Wanted,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None,
) -> Response:
    """List the events of the audit log, the newest first. With `isPartial`, older ones were not searched."""
    folder = await _folder(service, caller)
    async with one_of_few():
        page = await asyncio.to_thread(newest_events, folder, filters.wanted(), limit=limit, before=cursor)
        return Response(await asyncio.to_thread(_page_text, page), media_type="application/json")


def _page_text(page: AuditPage) -> str:
    cursor = None if page.before is None else str(page.before)
    return json.dumps({"items": list(page.events), "nextCursor": cursor, "isPartial": page.is_partial})


@router.get(
    "/export", response_class=HeldStream,
    responses={
        **RESPONSES, 200: {"description": "The events.", "content": {kind: {} for kind in _MEDIA_TYPES.values()}},
    },
)  # fmt: skip
async def export(
    caller: Admin, service: TheService, filters: Wanted, format: Literal["jsonl", "csv"] = "jsonl"  # noqa: A002 - the wire's
) -> Response:  # fmt: skip
    """Export the events of the audit log, the oldest first, as JSON Lines or as CSV for a spreadsheet.

    `cloche audit verify --file` verifies JSON Lines of all events.
    """
    folder = await _folder(service, caller)
    headers = {"Content-Disposition": f'attachment; filename="audit.{format}"'}
    has_ended = threading.Event()
    chunks = _chunks(Reading(folder), filters, format, has_ended)
    first = await asyncio.to_thread(next, chunks, "")  # an unreadable log is an error response
    return HeldStream(_remaining(first, chunks, has_ended), media_type=_MEDIA_TYPES[format], headers=headers)


@router.post("/verify", responses=RESPONSES)
async def check(caller: Admin, service: TheService, asked: Heads | None = None) -> dict[str, Any]:
    """Verify the whole audit log. The answer has the fields of `cloche audit verify --json`, in camel case."""
    folder = await _folder(service, caller)
    heads = [head for text in (asked.heads if asked else ()) for head in read_heads(text, name="heads")]
    async with one_of_few():
        report = await asyncio.to_thread(verify, folder, heads=heads)
    return {camel(name): value for name, value in report.as_dict().items()}


async def _folder(service: Service, caller: Caller) -> str:
    """Return the folder of the log. Raises Refused (409) if the audit is off, PolicyDenied for another project."""
    if caller.project != DEFAULT_PROJECT:
        raise PolicyDenied("the audit log covers all projects, so only the operator may read it; ask the operator")
    audit = audit_for(await service.settings())
    if audit is None:
        raise Refused(
            409, "audit-off", "the audit log is switched off here, so there is nothing to read",
            remedy="let the operator switch it on: CLOCHE_AUDIT=on, or audit: on in the configuration",
        )  # fmt: skip
    return audit.folder


@asynccontextmanager
async def one_of_few() -> AsyncIterator[None]:
    """Hold one of `MOST_AT_ONCE` places, since reading takes much processor time. Raises Refused (503)."""
    if not _reading.acquire(blocking=False):
        raise Refused(503, "busy", "the audit log is being read for other requests", headers={"Retry-After": "2"})
    try:
        yield
    finally:
        _reading.release()


async def _remaining(first: str, chunks: Iterator[str], has_ended: threading.Event) -> AsyncGenerator[str]:
    """Yield an export in chunks. Each is read in a thread once the client has taken the previous one."""
    try:
        yield first
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk
    finally:
        has_ended.set()  # a thread that still reads for a disconnected client ends at its next event


def _chunks(reading: Reading, filters: Filters, form: str, has_ended: threading.Event) -> Iterator[str]:
    lines = itertools.takewhile(lambda _: not has_ended.is_set(), reading)
    held: list[str] = []
    size = 0
    for text in texts_of(filter(filters.wanted(), (line.fields() for line in lines)), form):
        held.append(text)
        size += len(text)
        if size >= CHUNK_CHARS:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)
