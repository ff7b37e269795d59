"""Keep a run's files readable after its sandbox is gone, for as long as somebody holds the result.

Whatever keeps them has no name in any file system, so nothing is left behind however the caller ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from cloche.core.result import FileRecord, SaveFiles

from ..saving import CHUNK_BYTES, Slice, Source, copy_out
from .collect import open_regular


def keep_mount(workspace_fd: int, records: tuple[FileRecord, ...]) -> SaveFiles:
    """Keep a tmpfs workspace by a descriptor: without a mount point it lives exactly as long as that."""
    return _KeptMount(os.dup(workspace_fd), records).save


def keep_copies(workspace_fd: int, records: tuple[FileRecord, ...]) -> SaveFiles:
    """Keep copies of the files of a workspace that is a folder of the host, which goes away: in one unnamed file."""
    return _KeptCopies(workspace_fd, records).save


class _KeptMount:
    def __init__(self, fd: int, records: tuple[FileRecord, ...]):
        self._fd, self._records = fd, records
        weakref.finalize(self, os.close, fd)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        with open(open_regular(self._fd, record.path), "rb") as file:
            yield file


class _KeptCopies:
    def __init__(self, workspace_fd: int, records: tuple[FileRecord, ...]):
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="cloche-")  # noqa: SIM115 - lives as long as the result
        weakref.finalize(self, self._file.close)  # dropping a result is no leak, so nobody shall be warned of one
        self._records = records
        self._places: dict[str, int] = {}
        for record in records:
            self._places[record.path] = self._file.tell()
            with open(open_regular(workspace_fd, record.path), "rb") as source:
                left = record.size
                while left > 0 and (data := source.read(min(CHUNK_BYTES, left))):
                    self._file.write(data)
                    left -= len(data)
        self._file.flush()

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        yield Slice(self._file.fileno(), self._places[record.path])
