"""The rows of runs: one is written before its run, and again at its end.

A run whose row cannot be written does not start. A run's response is sent after its result is committed. The exception
is a run that is `noted_beside`: while the database accepts rows, its row is written in the background, after the end of
a short run, or soon after the start of a longer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from cloche.core.errors import RecordsFailed
from cloche.core.result import Result
from cloche.records import runs as run_records
from cloche.records.results import as_json, result_as_wire
from cloche.records.statements import Encoded, Statements
from cloche.records.writer import Writer
from cloche.wire.events import ActiveRun
from cloche.wire.queue import RunOrder
from cloche.wire.results import read_files

FEW_BYTES, FEW_FILES = 16 << 10, 16
NOTE_RUNNING_S, RETRY_S = 1.0, 1.0
BESIDE_S = 0.1  # delay of a row written in the background, after responses and other runs
log = logging.getLogger("cloche.service")


class StoredRuns:
    """Write the rows of one worker's runs."""

    def __init__(self, writer: Writer, worker: str):
        self._writer, self._worker = writer, worker
        self._unwritten: set[asyncio.Task[None]] = set()  # ends that could not be written
        self._beside: set[asyncio.Task[None]] = set()  # rows written in the background
        self._later: list[Coroutine[Any, Any, None]] = []  # of these, the ones written together after `BESIDE_S`
        self._takes_rows = True  # as far as is known

    async def begin(self, live: ActiveRun, order: RunOrder) -> None:
        """Write the row of a run, or have it written soon. Raises RecordsFailed, IntegrityError."""
        if order.noted_beside and self._takes_rows:
            live.row = asyncio.get_running_loop().call_later(BESIDE_S, self._begin_beside, live, order)
        else:
            await self._begin_row(live, order)

    def note_running(self, live: ActiveRun) -> None:
        """Store that a run is running, unless it ends soon."""
        loop = asyncio.get_running_loop()
        live.noting = loop.call_later(NOTE_RUNNING_S, lambda: self._write_beside(self._note_running(live.id)))

    def note_over(self, live: ActiveRun) -> None:
        """Leave the rows of a run to `finish` and `fail`."""
        for timer in (live.noting, live.row):
            if timer is not None:
                timer.cancel()

    async def encode(self, live: ActiveRun, order: RunOrder, _run_id: str, result: Result) -> tuple[str, Encoded]:
        """Encode a result, a large one in a thread, so that the event loop is not blocked."""
        size = len(result.stdout_bytes) + len(result.stderr_bytes)
        if order.returns_files or size > FEW_BYTES or result.outputs or len(result.files) > FEW_FILES or result.value:
            return await asyncio.to_thread(lambda: _encode(live.id, result_as_wire(result), result, order))
        plain = result_as_wire(result)
        if not order.has_events:  # else it would be kept as long as the events
            live.plain = plain
        return _encode(live.id, plain, result, order)

    async def finish(self, live: ActiveRun, order: RunOrder, status: str, document: str) -> None:
        """Write the end of a run, or have it written soon."""
        recording = self._record(live, order, status, Encoded(document))
        if order.noted_beside and self._takes_rows:
            self._write_later(recording)
        else:
            await recording

    async def fail(
        self, live: ActiveRun, order: RunOrder, status: str, document: Mapping[str, Any], *, gives_key_back: bool
    ) -> None:  # fmt: skip
        """Write the end of a run that failed."""
        await self._record(live, order, status, document, gives_key_back=gives_key_back)

    async def drain(self) -> None:
        """Wait a moment for the rows that are being written."""
        self._write_late()
        if self._beside:
            await asyncio.wait(self._beside, timeout=2 * RETRY_S)
        if self._unwritten:
            _, left_unwritten = await asyncio.wait(self._unwritten, timeout=2 * RETRY_S)
            for writing in left_unwritten:
                writing.cancel()  # the next start records these runs as lost

    async def _begin_row(self, live: ActiveRun, order: RunOrder) -> None:
        live.has_row = True
        try:
            await self._writer.write(_begin(live, order, self._worker))
        except RecordsFailed:
            self._takes_rows = False
            raise
        self._takes_rows = True

    def _begin_beside(self, live: ActiveRun, order: RunOrder) -> None:
        if not live.has_row:
            self._write_beside(self._begin_row(live, order))

    def _write_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Write a row after `BESIDE_S`, together with those of other runs that ended meanwhile."""
        self._later.append(work)
        if len(self._later) == 1:
            asyncio.get_running_loop().call_later(BESIDE_S, self._write_late)

    def _write_late(self) -> None:
        late, self._later = self._later, []
        for work in late:
            self._write_beside(work)

    def _write_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Write a row in the background. Rows are written in the order of these calls."""
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._written_beside)

    def _written_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the row of a run could not be written", exc_info=error)

    async def _record(
        self, live: ActiveRun, order: RunOrder, status: str, document: Encoded | Mapping[str, Any],
        *, gives_key_back: bool = False,
    ) -> None:  # fmt: skip
        """Write the end of a run. If the database fails, retry in the background; the client still gets the result."""
        work = run_records.finish(id=live.id, status=status, document=document)
        if not live.has_row:
            work = _begin(live, order, self._worker) + work
        if gives_key_back and order.idempotency_key is not None:
            work += run_records.give_key_back(id=live.id)
        live.has_row = True
        try:
            await self._writer.write(work)
        except RecordsFailed:
            self._takes_rows = False
            log.exception("the end of %s will be recorded later", live.id)
            task = asyncio.ensure_future(self._record_later(work))
            self._unwritten.add(task)
            task.add_done_callback(self._unwritten.discard)

    async def _record_later(self, work: Statements) -> None:
        while True:  # no new run begins meanwhile, since its row cannot be written either
            await asyncio.sleep(RETRY_S)
            with suppress(RecordsFailed):
                await self._writer.write(work)
                return

    async def _note_running(self, run_id: str) -> None:
        """Store that a run is running. Called after a delay, since most runs end before it."""
        with suppress(RecordsFailed):  # the write of the end reports it
            await self._writer.write(partial(run_records.note_running, id=run_id))


def _begin(live: ActiveRun, order: RunOrder, worker: str) -> Statements:
    return run_records.begin(
        id=live.id, project=order.project, worker=worker, session_id=order.session_id, api_key=order.api_key,
        idempotency_key=order.idempotency_key, request_sha256=order.request_sha256, summary=order.summary,
        asked=order.asked,
    )  # fmt: skip


def _encode(run_id: str, plain: Mapping[str, Any], result: Result, order: RunOrder) -> tuple[str, Encoded]:
    """Return the document for the caller, and that for the row, which has no file contents."""
    document = {"id": run_id, **order.summary, **plain}
    stored = Encoded(as_json(document))
    if not order.returns_files:
        return stored, stored
    return as_json({**document, "files": read_files(result)}), stored
