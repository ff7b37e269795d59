"""Files on their way in and out: bounded archives, whose content is not trusted.

An archive received from a guest is kept unchanged, in memory while small, else in an unnamed file. So a result's files
can be saved long after the container is gone. `core/tar.py` walks it header by header.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.languages import is_program_file
from cloche.core.record import dataclass
from cloche.core.request import InputFile, workspace_path
from cloche.core.result import FileRecord, SaveFiles
from cloche.core.tar import BLOCK, ENCODING, ERRORS, members, read_at
from cloche.init.patterns import matches

from .saved_files import CHUNK_BYTES, REASONS, Changes, ContentSource, Slice, Until, copy_out

SMALL_BYTES = 1 << 20
MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_PATH_CHARS = 8 << 20  # of all paths together
MOST_NAMES, MOST_NAME_BYTES = 200_000, 4 * MAX_PATH_CHARS  # in a list of paths
# The bytes that an archive adds to each file: headers, padding, a long name.
PER_FILE_BYTES = 8192
MOST_SKIPPED = 10**9  # larger numbers are not trusted
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
log = logging.getLogger("cloche.containers")


def pack(files: Sequence[InputFile]) -> bytes:
    """Return an archive of `files`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT, encoding=ENCODING, errors=ERRORS) as archive:
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.size, member.mode = len(file.data), stat.S_IMODE(file.mode)
            archive.addfile(member, io.BytesIO(file.data))
    return packed.getvalue()


def archive_pieces(files: Sequence[InputFile], count: int = CHUNK_BYTES) -> Iterator[bytes | memoryview]:
    """Yield an archive of `files` in pieces of at most `count` bytes of content, which are views."""
    for file in files:
        yield _header(file)
        content = memoryview(file.data)
        for offset in range(0, len(content), count):
            yield content[offset : offset + count]
        if len(content) % BLOCK:
            yield bytes(BLOCK - len(content) % BLOCK)
    yield bytes(2 * BLOCK)


def archive_size(files: Sequence[InputFile]) -> int:
    """Return the number of bytes of the archive of `files`."""
    return sum(len(_header(file)) + -(-len(file.data) // BLOCK) * BLOCK for file in files) + 2 * BLOCK


def _header(file: InputFile) -> bytes:
    member = tarfile.TarInfo(file.path)
    member.size, member.mode = len(file.data), stat.S_IMODE(file.mode)
    return member.tobuf(tarfile.GNU_FORMAT, ENCODING, ERRORS)


class Spool:
    """Receive the bytes of an archive, up to a maximum."""

    def __init__(self, max_bytes: int):
        self._most = max_bytes + MAX_FILES * PER_FILE_BYTES
        self.size = 0
        self.file: BinaryIO = io.BytesIO()

    def add(self, data: bytes) -> None:
        """Add bytes. Raises ValueError beyond the maximum."""
        self.size += len(data)
        if self.size > self._most:
            raise ValueError("the container sent more files than its disk holds")
        if self.size > SMALL_BYTES and isinstance(self.file, io.BytesIO):
            folder, before = hostfs.temporary_folder(), self.file
            self.file = tempfile.TemporaryFile(prefix="cloche-", dir=folder)  # noqa: SIM115 - see `KeptArchive`
            self.file.write(before.getvalue())
        self.file.write(data)

    def cut(self, size: int) -> None:
        """Drop all bytes but the first `size`."""
        self.file.truncate(size)
        self.file.seek(size)
        self.size = size

    def take_names(self, size: object) -> list[str]:
        """Cut the last `size` bytes off the archive and return the NUL-separated paths in them; empty for an
        invalid size.

        Paths beyond the number that the first process sends are ignored.
        """
        if not isinstance(size, int) or not 0 < size <= self.size:
            return []
        self.size -= size
        names = read_at(self.file, self.size, min(size, MOST_NAME_BYTES)).split(b"\0", MOST_NAMES)[:MOST_NAMES]
        return [os.fsdecode(name) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Hold a file's position in a spool, and its hash."""

    offset: int
    size: int
    sha256: str


def unpack(spool: Spool, until: Until) -> tuple[dict[str, ByteRange], int]:
    """Return the byte range of each regular file by its path, and the number of members left out.

    The members after an invalid header, or after the time is up, are left out and count as one.
    """
    ranges: dict[str, ByteRange] = {}
    left_out = chars = 0
    try:
        for member in members(spool.file, spool.size):
            if until.is_over():
                return ranges, left_out + 1
            path = _inside(member.name) if member.kind in REGULAR and member.name is not None else None
            chars += len(path or "")
            if path is None or len(ranges) >= MAX_FILES or chars > MAX_PATH_CHARS:
                left_out += member.kind != tarfile.DIRTYPE and not is_program_file(member.name or "")
                continue
            digest = _digest(spool, member.offset, member.size, until)
            if digest is None:
                return ranges, left_out + 1
            ranges[path] = ByteRange(offset=member.offset, size=member.size, sha256=digest)
    except (tarfile.TarError, ValueError) as error:
        log.warning("the archive of a container is invalid; its remaining files are left out: %s", error)
        left_out += 1
    return ranges, left_out


def _inside(name: str) -> str | None:
    try:
        path = workspace_path(name)
    except InvalidRequest:
        return None
    return path if path.count("/") <= MAX_DEPTH else None


def _digest(spool: Spool, offset: int, size: int, until: Until) -> str | None:
    """Return the hash of a member's content; None if the time runs out."""
    digest = hashlib.sha256()
    spool.file.seek(offset)
    while size and (data := spool.file.read(min(size, CHUNK_BYTES))):
        if until.is_over():
            return None
        digest.update(data)
        size -= len(data)
    return digest.hexdigest()


def collected(
    spool: Spool, patterns: Sequence[str], inputs: Mapping[str, bytes], answer: Mapping[str, Any], until: Until
) -> Changes:
    """Return the files of an archive that match `patterns` and differ from `inputs`.

    `answer` is the report of the process that packed the archive.
    """
    byte_ranges, left_out = unpack(spool, until)
    ranges = {
        path: byte_range
        for path, byte_range in byte_ranges.items()
        if not is_program_file(path) and not until.is_over() and any(matches(pattern, path) for pattern in patterns)
        if path not in inputs or hashlib.sha256(inputs[path]).hexdigest() != byte_range.sha256
    }
    records = tuple(
        FileRecord(path=path, size=ranges[path].size, sha256=ranges[path].sha256) for path in sorted(ranges)
    )
    skipped, partial = answer.get("skipped"), answer.get("partial")
    reasons = {reason for reason in partial if isinstance(reason, str)} if isinstance(partial, list) else set[str]()
    return Changes(
        records=records,
        skipped=left_out + (skipped if isinstance(skipped, int) and 0 <= skipped <= MOST_SKIPPED else 0),
        partial=REASONS & (reasons | {"time"} if until.has_ended else reasons),
        save=keep(spool, ranges, records),
        is_shared=True,
    )


class KeptArchive:
    """Keep a spool as long as the result exists."""

    def __init__(self, spool: Spool, ranges: Mapping[str, ByteRange], records: tuple[FileRecord, ...]):
        self._file, self._ranges, self._records = spool.file, ranges, records
        spool.file.flush()
        weakref.finalize(self, spool.file.close)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[ContentSource]:
        byte_range = self._ranges[record.path]
        if isinstance(self._file, io.BytesIO):
            yield io.BytesIO(self._file.getbuffer()[byte_range.offset : byte_range.offset + byte_range.size])
        else:
            yield Slice(self._file.fileno(), byte_range.offset)


def keep(spool: Spool, ranges: Mapping[str, ByteRange], records: tuple[FileRecord, ...]) -> SaveFiles | None:
    """Return the function that `Result.save` calls; None if there are no files."""
    if records:
        return KeptArchive(spool, ranges, records).save
    spool.file.close()
    return None
