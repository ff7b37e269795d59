"""A batch from a file of programs to a file of results: `cloche batch run` without its display.

`open_source` reads the input once for its digest and the number of its rows; a stream is copied to an unnamed file
first. `FileBatch` then reads it row by row: a row that has ended is skipped, a wrong one becomes a result,
and the others go to `amap`, whose outcomes go to the `BatchStore`. Memory depends on neither the number of rows nor
their order. After `stop`, programs that run may end; nothing further starts.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import stat
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any, BinaryIO

from cloche.core.batch import Outcome, Program
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.record import dataclass, field, replace

from .batch import amap
from .batch_rows import (
    LOST,
    BatchSummary,
    InputRow,
    error_row,
    invalid_row,
    most_row_bytes,
    outcome_row,
    read_lines,
    read_row,
    stops_the_batch,
)
from .batch_store import BatchInput, BatchStore
from .prepare import prepare

STDIN = "-"
MOST_AHEAD = 50_000  # rows that have ended while an earlier one runs; each takes some 200 bytes of memory
SYNC_EVERY_S = 1.0
DRAIN_S = 10.0  # for programs that run when the batch is stopped
FULL_ROW_BYTES = 1 << 20  # reserved for a row with everything in it
MOST_RESERVED_BYTES = 64 << 20  # of disk, for the rows of all programs that run
LONG_ROW_BYTES = 1 << 20  # longer rows are read in a thread
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
ROWS_PER_TURN = 1_000  # read before other tasks of the loop have their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBatchSettings:
    """Hold what `cloche batch run` is told: `keywords` and `options` are those of `amap`."""

    source: str
    out: str
    is_resumed: bool = False
    retries_lost: bool = False
    is_idempotent: bool = False
    is_full: bool = False
    concurrency: int | None = None
    retries: int = 2
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def open_source(name: str, folder: str) -> Iterator[tuple[BinaryIO, BatchInput]]:
    """Open an input, `-` for stdin, and yield its content without gzip, its digest and number of rows.

    A stream is copied to an unnamed file in `folder`. Raises InvalidRequest.
    """
    with ExitStack() as opened:
        try:
            raw: Any = opened.enter_context(open(0 if name == STDIN else name, "rb", closefd=name != STDIN))
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raw = opened.enter_context(_copied(raw, folder))
            raw.seek(0)
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            is_gzip = raw.read(2) == _GZIP
            raw.seek(0)
            file: Any = opened.enter_context(gzip.open(raw)) if is_gzip else raw
            rows = sum(1 for _ in read_lines(file))
            file.seek(0)
        except (OSError, EOFError, zlib.error) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"cannot read the programs from {name!r}: {why}") from error
        yield file, BatchInput(sha256=sha256, rows=rows)


def _copied(stream: BinaryIO, folder: str) -> IO[bytes]:
    try:
        return _copy(stream, folder)
    except OSError as error:
        raise InvalidRequest(
            f"cannot copy the programs to an unnamed file in {folder!r}: {error.strerror}; give them as a file, which "
            "needs no copy"
        ) from error


def _copy(stream: BinaryIO, folder: str) -> IO[bytes]:
    copy = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the caller closes it
    try:
        while chunk := stream.read(_CHUNK):
            copy.write(chunk)
        copy.flush()
    except BaseException:
        copy.close()
        raise
    return copy


class FileBatch:
    """Run the programs of an input, and store their results. `summary` counts all rows, also those of earlier
    processes.
    """

    def __init__(self, settings: FileBatchSettings, file: BinaryIO, source: BatchInput) -> None:
        self.settings, self.rows = settings, source.rows
        self.summary = BatchSummary()
        self._file = file
        prepared = prepare(**settings.options)  # a wrong option is an error before a file is made
        self._row_bytes = most_row_bytes(prepared.limits.output_bytes) + (FULL_ROW_BYTES if settings.is_full else 0)
        self._store = BatchStore.open(
            settings.out, source, self.summary.add,
            is_resumed=settings.is_resumed, retries_lost=settings.retries_lost,
        )  # fmt: skip
        self.rows_before = self.summary.rows
        self.running: dict[int, InputRow] = {}
        self._began = time.monotonic()
        self._is_stopping = False
        self._task: asyncio.Task[Any] | None = None
        self._news = asyncio.Event()
        self.failure: ClocheError | None = None  # why it ended before its input did

    @property
    def seconds(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self._began

    async def run(self) -> None:
        """Run until the input has ended, `stop` is called, or results cannot be written; see `failure`."""
        self._began = time.monotonic()
        self._task = asyncio.current_task()
        syncing = asyncio.create_task(self._sync())
        try:
            await self._run_all()
        except asyncio.CancelledError:
            if not self._is_stopping or self._task is None:
                raise
            self._task.uncancel()
        finally:
            syncing.cancel()
            await asyncio.wait([syncing])

    def stop(self) -> None:
        """Start no further program, and end in DRAIN_S those that run; called again, at once."""
        if self._task is not None and self._is_stopping:
            self._task.cancel()
        elif self._task is not None:
            asyncio.get_running_loop().call_later(DRAIN_S, self._task.cancel)
        self._is_stopping = True
        self._news.set()

    def close(self) -> None:
        """Complete and unlock the files; see `failure`."""
        with self._failing():
            self._store.close()

    @property
    def is_finished(self) -> bool:
        """Tell whether each program has its row in the results."""
        return self._store.written == self.rows

    async def _run_all(self) -> None:
        settings = self.settings
        outcomes = amap(
            self._programs(), in_order=False, return_errors=True, concurrency=settings.concurrency,
            retries=settings.retries, idempotent=settings.is_idempotent, on_result=self._take,
            **settings.keywords, **settings.options,
        )  # fmt: skip
        async with outcomes:
            async for _ in outcomes:
                self._news.set()

    async def _programs(self) -> AsyncIterator[Program]:
        """Yield the programs that have not run."""
        for index, (line, data) in enumerate(read_lines(self._file)):
            if index and index % ROWS_PER_TURN == 0:
                await asyncio.sleep(0)  # also where nothing runs, as with rows that have ended
            while index - self._store.written > MOST_AHEAD and not self._is_stopping:
                self._news.clear()
                await self._news.wait()
            if self._is_stopping:
                return
            if self._store.has_ended(index):
                continue
            if data is None or len(data) < LONG_ROW_BYTES:
                row = read_row(data, index=index, line=line)
            else:
                row = await asyncio.to_thread(read_row, data, index=index, line=line)
            program = None
            with self._failing():
                program = self._started(row)
            if program is not None:
                yield program

    def _started(self, row: InputRow) -> Program | None:
        """Note that a row's program starts, and return it; None if the row has a result without running."""
        program, index = row.program, row.index
        if program is None:
            self._store.end(index, invalid_row(row, row.why))
            return None
        is_idempotent = self.settings.is_idempotent if program.idempotent is None else program.idempotent
        if self._store.may_have_run(index) and not is_idempotent:
            self._store.end(index, error_row(row, LOST, "it may have run when an earlier process of the batch ended"))
            return None
        self._store.reserve(min((len(self.running) + 1) * self._row_bytes, MOST_RESERVED_BYTES))
        if not is_idempotent:
            self._store.start(index)
        self.running[index] = replace(row, program=None)
        merged: dict[str, Any] = {
            name: {**(self.settings.keywords.get(name) or {}), **own}
            for name in ("env", "files")
            if (own := getattr(program, name)) is not None
        }
        return replace(program, id=index, **merged)

    def _take(self, outcome: Outcome) -> None:
        """Store the row of an outcome, and stop if each further program would fail in the same way."""
        named = outcome.program if isinstance(outcome, ClocheError) else outcome.meta["program"]
        index = (named or {})["id"]
        row = self.running.pop(index)
        with self._failing():
            if isinstance(outcome, ClocheError) and stops_the_batch(outcome):
                self._store.clear(index)
                raise outcome
            self._store.end(index, outcome_row(row, outcome, is_full=self.settings.is_full))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note a failure of the block; the programs that run may end, and their results be stored."""
        try:
            yield
        except ClocheError as error:
            self.failure = self.failure or error
            if not self._is_stopping and self._task is not None and not self._task.done():
                self.stop()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            with self._failing():
                await asyncio.to_thread(self._store.sync_copies, self._store.copies())
