"""The files of a batch: rows in order, whatever the order of the ends, and wherever a process was killed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.core.errors import InvalidRequest
from cloche.execution import batch_store
from cloche.execution.batch_store import BatchFilesFailed, BatchInput, BatchStore, _AppendedFile

SOURCE = BatchInput(sha256="a" * 64, rows=6)


class Batch:
    """Stores of one pair of files, each as if its process had been killed."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "r.jsonl"
        self.journal = folder / "r.jsonl.batch"
        self.ended: list[int] = []

    def open(self, *, is_resumed: bool = False, retries_lost: bool = False, source: BatchInput = SOURCE) -> BatchStore:
        """Open the files as a new process does."""
        self.ended = []
        return BatchStore.open(str(self.out), source, self._note, is_resumed=is_resumed, retries_lost=retries_lost)

    def kill(self, store: BatchStore) -> None:
        """Close the descriptors and nothing else."""
        os.close(store._journal.fd)
        os.close(store._results.fd)

    def indexes(self) -> list[int]:
        """Return the indexes of the results."""
        return [json.loads(line)["index"] for line in self.out.read_bytes().splitlines()]

    def _note(self, row: Mapping[str, Any]) -> None:
        self.ended.append(row["index"])


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Return files in an empty folder."""
    return Batch(tmp_path)


def row(index: int, **more: object) -> dict[str, object]:
    """Return a row of results."""
    return {"index": index, "status": "ok", **more}


def test_rows_are_written_in_order_and_each_once(batch: Batch) -> None:
    """A row waits in the journal for those before it; a complete batch has a journal of one line."""
    with batch.open() as store:
        for index in (2, 0, 1, 5, 4):
            store.start(index)
            store.end(index, row(index))
        assert batch.indexes() == [0, 1, 2]
        store.end(3, row(3))
    assert batch.indexes() == list(range(6))
    assert batch.ended == [2, 0, 1, 5, 4, 3]
    assert batch.journal.read_bytes().count(b"\n") == 1


def test_a_killed_batch_knows_what_ended_and_what_may_have_run(batch: Batch) -> None:
    """Wherever either file was cut: rows are there once, and a start without an end is remembered."""
    store = batch.open()
    store.reserve(1 << 16)
    for index in (0, 1, 3, 4):
        store.start(index)
    store.end(0, row(0))
    store.end(3, row(3))
    store.clear(4)
    batch.kill(store)
    batch.out.write_bytes(batch.out.read_bytes() + b'{"index": 1, "sta')
    for _ in range(2):  # resuming does not change what is known
        store = batch.open(is_resumed=True)
        assert [store.has_ended(index) for index in range(6)] == [True, False, False, True, False, False]
        assert [store.may_have_run(index) for index in range(6)] == [False, True, False, False, False, False]
        assert sorted(batch.ended) == [0, 3]
        assert batch.indexes() == [0]
        batch.kill(store)


def test_every_cut_of_the_journal_is_read(batch: Batch) -> None:
    """A prefix of the journal, with or without reserved space behind it, is a batch that was killed earlier."""
    store = batch.open()
    for index in (1, 2, 3):
        store.start(index)
        store.end(index, row(index))
    batch.kill(store)
    whole = batch.journal.read_bytes()
    head = whole.index(b"\n") + 1
    for cut in range(head, len(whole) + 1):
        batch.journal.write_bytes(whole[:cut] + b"\x00" * (cut % 3))
        batch.out.write_bytes(b"")
        store = batch.open(is_resumed=True)
        ends = whole[:cut].count(b'"ok"}}\n')
        assert sorted(batch.ended) == list(range(1, ends + 1))
        batch.kill(store)


def test_rows_that_never_ran_run_again_and_lost_ones_if_wanted(batch: Batch) -> None:
    """The rows behind them are kept, and the results are again complete and in order."""
    with batch.open() as store:
        for index in range(6):
            error = {1: "start_failed", 3: "lost"}.get(index)
            store.end(index, {"index": index, "error": error} if error else row(index))
    store = batch.open(is_resumed=True)
    assert [index for index in range(6) if not store.has_ended(index)] == [1]
    assert sorted(batch.ended) == [0, 2, 3, 4, 5]
    assert batch.indexes() == [0]
    batch.kill(store)
    store = batch.open(is_resumed=True, retries_lost=True)
    assert not store.has_ended(1)
    store.end(1, row(1))
    batch.kill(store)
    with batch.open(is_resumed=True, retries_lost=True) as store:
        assert [index for index in range(6) if not store.has_ended(index)] == [3]
        store.end(3, row(3))
    assert batch.indexes() == list(range(6))
    assert b"lost" not in batch.out.read_bytes()


def test_what_lies_where_the_journal_is_written_is_not_written_to(batch: Batch) -> None:
    """In a folder of several users it may be another name of any file, or a file that another user has open."""
    precious = batch.journal.with_name("precious")
    precious.write_text("kept")
    beside = batch.journal.with_name(f"{batch.journal.name}.new")
    for link in (beside.hardlink_to, beside.symlink_to):
        link(precious)
        with batch.open(is_resumed=True) as store:
            store.end(0, row(0))
        assert precious.read_text() == "kept"
        assert not os.path.lexists(beside)


def test_the_journal_does_not_grow_with_the_results(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew when its rows are in the results; held rows and starts stay in it."""
    monkeypatch.setattr(batch_store, "LONGEST_JOURNAL_BYTES", 4096)
    source = BatchInput(sha256="b" * 64, rows=1000)
    store = batch.open(source=source)
    store._next_rewrite = 4096
    store.start(600)
    store.end(650, row(650))
    for index in range(500):
        store.start(index)
        store.end(index, row(index))
        assert batch.journal.stat().st_size < 10_000
    batch.kill(store)
    store = batch.open(is_resumed=True, source=source)
    assert store.may_have_run(600)
    assert store.has_ended(650)
    assert batch.indexes() == list(range(500))
    batch.kill(store)


def test_a_second_batch_on_the_same_results_is_refused(batch: Batch, tmp_path: Path) -> None:
    """While one writes; without --resume; with another input; without its journal; and what is not a file of rows."""
    with batch.open() as store:
        with pytest.raises(InvalidRequest, match="another batch"):
            batch.open(is_resumed=True)
        store.end(0, row(0))
    with pytest.raises(InvalidRequest, match="--resume"):
        batch.open()
    with pytest.raises(InvalidRequest, match="another input"):
        batch.open(is_resumed=True, source=BatchInput(sha256="b" * 64, rows=6))
    batch.out.write_bytes(b'{"index": 7}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        batch.open(is_resumed=True)
    batch.journal.unlink()
    with pytest.raises(InvalidRequest, match="no journal"):
        batch.open(is_resumed=True)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidRequest, match="regular file"):
        BatchStore.open(str(tmp_path / "fifo"), SOURCE, batch._note, is_resumed=True)
    with pytest.raises(InvalidRequest, match="No such file"):
        BatchStore.open(str(tmp_path / "none" / "r"), SOURCE, batch._note, is_resumed=True)


def test_a_full_disk_loses_no_row(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the results cannot be written, rows that end are kept in the journal, and no further program may start."""
    store = batch.open()
    store.start(1)
    append = _AppendedFile.append

    def full(file: _AppendedFile, data: bytes) -> int:
        if file is store._results:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(file, data)

    monkeypatch.setattr(_AppendedFile, "append", full)
    with pytest.raises(BatchFilesFailed, match="No space left"):
        store.end(0, row(0))
    store.end(1, row(1))
    with pytest.raises(BatchFilesFailed, match="No space left"):
        store.reserve(1)
    with pytest.raises(BatchFilesFailed, match="No space left"):
        store.close()
    monkeypatch.undo()
    with batch.open(is_resumed=True) as store:
        assert batch.indexes() == [0, 1]
        assert [store.has_ended(index) for index in range(3)] == [True, True, False]
