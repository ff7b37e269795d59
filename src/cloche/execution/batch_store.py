"""The files of a batch: results in the input's order, and beside them a journal, so that a killed batch goes on.

Theory of operation: the journal (`NAME.batch`) is a file of JSON lines: a head with the input's digest, `start` before
a program starts that must not run twice, `end` with the row of results, `clear` for a program that did not run after
all. A row is appended to the journal when its program ends, and from there to the results once all rows before it are
there. So after `kill -9` every row is in one of the two files, and a program with `start` alone may have run.

A write may be cut anywhere. An incomplete last line of either file is removed when the batch is resumed. Before a
program starts, space for its row and those of all that run is reserved in the journal (posix_fallocate): a full disk is
noticed while nothing new has begun. The file then ends in null bytes, which no JSON line has. Both files are passed to
the disk (fdatasync) about once a second and at the end.

A journal whose rows are in the results is written anew, beside, and renamed. The lock (flock) is on the results, which
are never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO, Self

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.limits import format_size
from cloche.core.record import dataclass

from .batch_rows import LOST, START_FAILED, begins_row, encode_row

FORMAT = 1
JOURNAL_SUFFIX = ".batch"
LONGEST_JOURNAL_BYTES = 16 << 20  # longer ones are written anew if half of it is in the results
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK

_to_disk = getattr(os, "fdatasync", os.fsync)

OnRow = Callable[[Mapping[str, Any]], None]


class BatchFilesFailed(ClocheError):
    """Report that results cannot be written; what has ended is in the files as far as the message does not name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """Hold what a journal says about its input."""

    sha256: str
    rows: int


class _AppendedFile:
    """Append to a file at a position of our own, and reserve space behind it."""

    def __init__(self, fd: int, position: int) -> None:
        self.fd, self.position = fd, position
        self._reserved = position

    def append(self, data: bytes) -> int:
        """Write all of it and return where it begins. Raises OSError; the position is then unchanged."""
        begin, unwritten = self.position, memoryview(data)
        offset = begin
        while unwritten:
            count = os.pwrite(self.fd, unwritten, offset)
            offset, unwritten = offset + count, unwritten[count:]
        self.position = offset
        self._reserved = max(self._reserved, offset)
        return begin

    def reset(self) -> None:
        """Forget the reserved space, which truncating has returned."""
        self._reserved = self.position

    def reserve(self, size: int) -> None:
        """Ensure that so many bytes can be appended. Raises OSError."""
        if self._reserved - self.position < size:
            os.posix_fallocate(self.fd, self.position, 2 * size)  # twice: one call for several programs
            self._reserved = self.position + 2 * size


class BatchStore:
    """Hold the two files of a batch, locked. A context manager; `open` makes it."""

    def __init__(self, out: str, results: _AppendedFile, source: BatchInput, on_row: OnRow) -> None:
        self._out, self._results, self._source, self._on_row = out, results, source, on_row
        self._journal_path = out + JOURNAL_SUFFIX
        self._journal = _AppendedFile(-1, 0)
        self._held: dict[int, tuple[int, int]] = {}  # rows in the journal alone: offset and length
        self._held_bytes = 0
        self._started: set[int] = set()
        self._lost: set[int] = set()  # started by an earlier process, without an end
        self._next_rewrite = LONGEST_JOURNAL_BYTES
        self._failure: BatchFilesFailed | None = None
        self.written = 0  # rows in the results

    @classmethod
    def open(cls, out: str, source: BatchInput, on_row: OnRow, *, is_resumed: bool, retries_lost: bool = False) -> Self:
        """Create the files, or those of an earlier process if `is_resumed`; `on_row` gets each row that has ended.

        Raises InvalidRequest if the files are another batch's, are in use, or exist and the batch is not resumed.
        """
        with ExitStack() as on_failure:
            fd, is_new = _open_locked(out)
            if is_new:
                on_failure.callback(os.unlink, out)
            on_failure.callback(os.close, fd)
            store = cls(out, _AppendedFile(fd, 0), source, on_row)
            on_failure.callback(store._close_journal)
            has_journal = os.path.lexists(store._journal_path)
            is_empty = os.fstat(fd).st_size == 0
            if not is_resumed and not is_new and (has_journal or not is_empty):
                raise InvalidRequest(
                    f"out: {out!r} exists; --resume continues its batch; give another name for a new one"
                )
            if is_resumed and not has_journal and not is_empty:
                raise InvalidRequest(f"out: {out!r} has no journal {store._journal_path!r} beside it to resume from")
            try:
                if is_resumed and has_journal:
                    store._load(retries_lost=retries_lost)
                else:
                    store._rewrite_journal(())
            except OSError as error:
                raise store._failed(store._journal_path, error) from error
            on_failure.pop_all()
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_ended(self, index: int) -> bool:
        """Tell whether the row of this index is there."""
        return index < self.written or index in self._held

    def may_have_run(self, index: int) -> bool:
        """Tell whether an earlier process started this program and did not see its end."""
        return index in self._lost

    def reserve(self, row_bytes: int) -> None:
        """Reserve space in the journal. Raises BatchFilesFailed; then no program may start."""
        if self._failure is not None:
            raise self._failure
        try:
            self._journal.reserve(row_bytes)
        except OSError as error:
            advice = "; a lower --concurrency or --output-limit needs less" if error.errno == errno.ENOSPC else ""
            more = f" (for the rows of programs that run, {format_size(2 * row_bytes)}){advice}"
            raise self._failed(self._journal_path, error, more) from error

    def start(self, index: int) -> None:
        """Note that a program starts that must not run twice. Raises BatchFilesFailed."""
        self._note({"start": index})
        self._started.add(index)
        self._lost.discard(index)

    def clear(self, index: int) -> None:
        """Note that a program did not run after all. Raises BatchFilesFailed."""
        if index in self._started:
            self._note({"clear": index})
            self._started.discard(index)

    def end(self, index: int, row: Mapping[str, Any]) -> None:
        """Store a row. Raises BatchFilesFailed; its message says whether the row was lost."""
        line = encode_row(row)
        head = b'{"end": %d, "row": ' % index
        try:
            begin = self._journal.append(head + line[:-1] + b"}\n")
        except OSError as error:
            raise self._failed(self._journal_path, error, f"; the result of program {index} is lost") from error
        self._started.discard(index)
        self._lost.discard(index)
        self._hold(index, begin + len(head), len(line) - 1)
        self._on_row(row)
        self._write_due()

    def copies(self) -> list[int]:
        """Return descriptors of both files for `sync_copies`, which may run in another thread."""
        return [os.dup(self._journal.fd), os.dup(self._results.fd)]

    def sync_copies(self, fds: Sequence[int]) -> None:
        """Pass both files to the disk. Raises BatchFilesFailed."""
        try:
            for fd in fds:
                _to_disk(fd)
        except OSError as error:
            raise self._failed(self._out, error) from error
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Write the due rows, shorten the journal, and unlock. Raises BatchFilesFailed."""
        try:
            self._failure = None
            with suppress(OSError):
                os.ftruncate(self._journal.fd, self._journal.position)
            self._write_due()
            _to_disk(self._journal.fd)
            _to_disk(self._results.fd)
            if self.written == self._source.rows:
                self._rewrite_journal(())
        except OSError as error:
            raise self._failed(self._out, error) from error
        finally:
            self._close_journal()
            os.close(self._results.fd)

    def _close_journal(self) -> None:
        if self._journal.fd >= 0:
            os.close(self._journal.fd)
            self._journal.fd = -1

    def _note(self, record: Mapping[str, int]) -> None:
        try:
            self._journal.append(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise self._failed(self._journal_path, error) from error

    def _failed(self, path: str, error: OSError, more: str = "") -> BatchFilesFailed:
        what = f"cannot write {path!r}: {error.strerror}{more}"
        self._failure = BatchFilesFailed(what)
        return self._failure

    def _hold(self, index: int, begin: int, length: int) -> None:
        self._held[index] = (begin, length)
        self._held_bytes += length

    def _write_due(self) -> None:
        """Append the due rows to the results; after a failure rows stay in the journal. Raises BatchFilesFailed."""
        if self._failure is not None:
            return
        while (place := self._held.get(self.written)) is not None:
            begin, length = place
            try:
                self._results.append(os.pread(self._journal.fd, length, begin) + b"\n")
            except OSError as error:
                raise self._failed(self._out, error) from error
            del self._held[self.written]
            self._held_bytes -= length
            self.written += 1
        position = self._journal.position
        if position > self._next_rewrite and self._held_bytes < position // 2:
            self._next_rewrite = 2 * position  # if there is no room for a second journal
            with suppress(OSError):
                _to_disk(self._results.fd)
                self._rewrite_journal(self._held_lines())
                self._next_rewrite = max(LONGEST_JOURNAL_BYTES, 2 * self._journal.position)

    def _held_lines(self) -> Iterator[tuple[int, bytes]]:
        for index, (begin, length) in tuple(self._held.items()):
            yield index, os.pread(self._journal.fd, length, begin)

    def _rewrite_journal(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Replace the journal by one with these rows and the programs that have started."""
        beside = f"{self._journal_path}.new"
        with suppress(FileNotFoundError):
            os.unlink(beside)  # of a killed process, or of another user, who would have it open
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        new, held = _AppendedFile(fd, 0), {}
        try:
            head = {"format": FORMAT, "sha256": self._source.sha256, "rows": self._source.rows}
            new.append(json.dumps(head).encode() + b"\n")
            for index in sorted(self._started | self._lost):
                new.append(b'{"start": %d}\n' % index)
            for index, line in rows:
                record = b'{"end": %d, "row": ' % index
                held[index] = (new.append(record + line + b"}\n") + len(record), len(line))
            _to_disk(fd)
            os.rename(beside, self._journal_path)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(beside)
            raise
        self._close_journal()
        self._journal, self._held = new, held
        self._held_bytes = sum(length for _, length in held.values())

    def _load(self, *, retries_lost: bool) -> None:
        """Read the files of an earlier process. Raises InvalidRequest if they are not this batch's."""
        repeated = {START_FAILED, LOST} if retries_lost else {START_FAILED}
        self._journal = _AppendedFile(os.open(self._journal_path, _OPEN), 0)
        with open(self._journal.fd, "rb", closefd=False) as file:
            self._read_journal(file)
        if retries_lost:
            self._lost.clear()
        with open(self._results.fd, "rb", closefd=False) as file:
            later = self._read_results(file, repeated)
            unwritten = {index: place for index, place in self._held.items() if index >= self.written}
            self._held = unwritten
            file.seek(self._results.position)
            kept = [] if later is None else _rows_of(file, later, until=self.written)
            if later is not None:
                self.written = later
            self._rewrite_journal(_without(repeated, itertools.chain(kept, self._held_lines())))
        os.ftruncate(self._results.fd, self._results.position)
        self._results.reset()
        for _, line in self._held_lines():
            self._on_row(json.loads(line))
        self._write_due()

    def _read_journal(self, file: BinaryIO) -> None:
        """Read which programs have started, and where the rows of those that have ended are."""
        head = _parsed(file.readline())
        if head.get("format") != FORMAT:
            raise InvalidRequest(
                f"out: {self._journal_path!r} is not the journal of a batch that this version can read"
            )
        if (head.get("sha256"), head.get("rows")) != (self._source.sha256, self._source.rows):
            raise InvalidRequest(
                f"out: {self._out!r} has the results of another input; resume with that one, whose sha256 is "
                f"{head.get('sha256')}, not {self._source.sha256}"
            )
        position = file.tell()
        for line in file:
            record = _parsed(line)
            if not record:
                break  # cut, or reserved space
            if "start" in record:
                self._lost.add(record["start"])
            elif "clear" in record:
                self._lost.discard(record["clear"])
            elif "end" in record:
                begin = len(b'{"end": %d, "row": ' % record["end"])
                self._held[record["end"]] = (position + begin, len(line) - begin - 2)
                self._lost.discard(record["end"])
            position += len(line)

    def _read_results(self, file: BinaryIO, repeated: Collection[str]) -> int | None:
        """Count the complete rows; return the index of the first whose program runs again, None without one.

        The position is then at the end of the rows before it.
        """
        later = None
        for line in file:
            if not line.endswith(b"\n"):
                break
            if not line.startswith(begins_row(self.written)):
                raise InvalidRequest(f"out: line {self.written + 1} of {self._out!r} is not the row of a batch")
            if later is None:
                row = json.loads(line)
                if row.get("error") in repeated:
                    later = self.written
                else:
                    self._on_row(row)
                    self._results.position += len(line)
            self._lost.discard(self.written)
            self.written += 1
        return later


def _rows_of(file: BinaryIO, first: int, *, until: int) -> Iterator[tuple[int, bytes]]:
    for index in range(first, until):
        yield index, file.readline()[:-1]


def _without(repeated: Collection[str], rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Leave out the rows of programs that run again."""
    for index, line in rows:
        if json.loads(line).get("error") not in repeated:
            yield index, line


def _parsed(line: bytes) -> dict[str, Any]:
    """Return a record of the journal; an empty one for a line that is cut or is no record."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _open_locked(out: str) -> tuple[int, bool]:
    """Return a descriptor of the results, locked, and whether the file is new. Raises InvalidRequest."""
    is_new = True
    try:
        try:
            fd = os.open(out, _OPEN | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            fd, is_new = os.open(out, _OPEN), False
    except OSError as error:
        raise InvalidRequest(f"out: cannot write {out!r}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidRequest(f"out: {out!r} is not a regular file; results must be in one, to be resumed")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InvalidRequest(
            f"out: another batch is writing to {out!r}; wait for its end, or give another name"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd, is_new
