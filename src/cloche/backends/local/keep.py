"""Keep a run's files readable after its sandbox is gone, for as long as somebody holds the result.

Whatever keeps them has no name in any file system, so nothing is left behind however the caller ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from cloche.core.errors import SandboxFileNotFound, SandboxFileRefused
from cloche.core.result import FileRecord, SaveFiles

from ..saving import Slice, Source, changed_since, copy_out
from .collect import open_regular


def keep_mount(workspace_fd: int, records: tuple[FileRecord, ...]) -> SaveFiles:
    """Keep a tmpfs workspace by a descriptor: without a mount point it lives exactly as long as that."""
    return _KeptMount(os.dup(workspace_fd), records).save


class _KeptMount:
    def __init__(self, fd: int, records: tuple[FileRecord, ...]):
        self._fd, self._records = fd, records
        weakref.finalize(self, os.close, fd)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        try:
            fd = open_regular(self._fd, record.path)
        except FileNotFoundError as error:
            raise SandboxFileNotFound(
                f"{record.path!r} is no longer in the workspace: what ran there since has removed it; save the files "
                "of a cell before the next one, or pass out=DIR to the cell",
                path=record.path,
            ) from error
        except SandboxFileRefused as error:
            raise changed_since(record) from error
        except OSError as error:
            raise changed_since(record) from error
        with open(fd, "rb") as file:
            yield file


class KeptCopies:
    """Keep copies of the files of a workspace that is a folder of the host, which goes away: in one unnamed file.

    They are taken while the files are read for their hashes, so that what is kept is what the result says.
    """

    def __init__(self) -> None:
        import tempfile

        self._file: BinaryIO = tempfile.TemporaryFile(prefix="cloche-")  # noqa: SIM115 - lives as long as the result
        weakref.finalize(self, self._file.close)  # dropping a result is no leak, so nobody shall be warned of one
        self._records: tuple[FileRecord, ...] = ()
        self._places: dict[str, int] = {}

    def begin(self, path: str) -> None:
        """Begin with the next file."""
        self._places[path] = self._file.tell()

    def write(self, data: bytes, /) -> None:
        """Take more of it."""
        self._file.write(data)

    def forget(self, path: str) -> None:
        """Keep nothing of the last file."""
        self._file.seek(self._places.pop(path))
        self._file.truncate()

    def saver(self, records: tuple[FileRecord, ...]) -> SaveFiles:
        """Return what `Result.save` needs."""
        self._file.flush()
        self._records = records
        return self.save

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Copy the files into a folder; see Result.save."""
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        yield Slice(self._file.fileno(), self._places[record.path])
