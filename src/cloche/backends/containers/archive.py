"""Files on their way in and out: archives, bounded, and believed in nothing.

An archive that comes out is kept as it came, in memory while small and else in a file without a name, so that a
result's files can be saved long after the container is gone.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

from cloche.core.errors import InvalidRequest
from cloche.core.request import InputFile, workspace_path
from cloche.core.result import FileRecord, SaveFiles

from ..saving import CHUNK_BYTES, Slice, Source, copy_out

SMALL_BYTES = 1 << 20
MAX_FILES, MAX_DEPTH = 10_000, 64
# What an archive adds to each file: headers, padding, a long name.
PER_FILE_BYTES = 8192


def pack(files: Sequence[InputFile]) -> bytes:
    """Return an archive of `files`."""
    packed = io.BytesIO()
    with _tar(packed, "w") as archive:
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.size, member.mode = len(file.data), stat.S_IMODE(file.mode)
            archive.addfile(member, io.BytesIO(file.data))
    return packed.getvalue()


def _tar(file: BinaryIO, mode: Literal["r", "w"]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode=mode, format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape")


class Spool:
    """Take the bytes of an archive, at most so many."""

    def __init__(self, max_bytes: int):
        self._most = max_bytes + MAX_FILES * PER_FILE_BYTES
        self.size = 0
        self.file: BinaryIO = io.BytesIO()

    def add(self, data: bytes) -> None:
        """Take more. Raises ValueError when it is too much."""
        self.size += len(data)
        if self.size > self._most:
            raise ValueError("the container sent more files than its disk holds")
        if self.size > SMALL_BYTES and isinstance(self.file, io.BytesIO):
            before, self.file = self.file, tempfile.TemporaryFile(prefix="cloche-")  # noqa: SIM115 - see `Kept`
            self.file.write(before.getvalue())
        self.file.write(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Say where a file's bytes are in a spool, and which they are."""

    offset: int
    size: int
    sha256: str


def unpack(spool: Spool) -> tuple[dict[str, Place], int]:
    """Return where each regular file is by its path, and how many members were left out."""
    found: dict[str, Place] = {}
    if spool.size == 0:
        return found, 0
    left_out = 0
    spool.file.seek(0)
    with _tar(spool.file, "r") as archive:
        for member in archive:
            path = _inside(member.name)
            source = archive.extractfile(member) if member.isreg() and path else None
            if source is None or path is None or len(found) >= MAX_FILES:
                left_out += member.type != tarfile.DIRTYPE
                continue
            found[path] = Place(offset=member.offset_data, size=member.size, sha256=_digest(source))
    return found, left_out


def _inside(name: str) -> str | None:
    try:
        path = workspace_path(name)
    except InvalidRequest:
        return None
    return path if path.count("/") <= MAX_DEPTH else None


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    while data := source.read(CHUNK_BYTES):
        digest.update(data)
    return digest.hexdigest()


class Kept:
    """Keep a spool for as long as somebody holds the result."""

    def __init__(self, spool: Spool, places: Mapping[str, Place], records: tuple[FileRecord, ...]):
        self._file, self._places, self._records = spool.file, places, records
        spool.file.flush()
        weakref.finalize(self, spool.file.close)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Copy the files into a folder; see Result.save."""
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        place = self._places[record.path]
        if isinstance(self._file, io.BytesIO):
            yield io.BytesIO(self._file.getbuffer()[place.offset : place.offset + place.size])
        else:
            yield Slice(self._file.fileno(), place.offset)


def keep(spool: Spool, places: Mapping[str, Place], records: tuple[FileRecord, ...]) -> SaveFiles | None:
    """Return what `Result.save` needs; None when there is nothing to save."""
    if records:
        return Kept(spool, places, records).save
    spool.file.close()
    return None
