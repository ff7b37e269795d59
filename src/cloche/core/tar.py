"""The headers of an archive that came out of a sandbox, which is untrusted, read one after the other.

`tarfile` is not used: it would also unpack compressed archives, fill sparse files, go back where a size is negative,
and read extended headers with regular expressions that take unbounded time.
"""

from __future__ import annotations

import tarfile

from .record import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

MOST_HEADERS = 8  # of one member: its own, those of long names, extended ones
LONGEST_NAME_BYTES = 4096 + 2  # as long as a path may be, "./" before it
BLOCK = tarfile.BLOCKSIZE
ENCODING, ERRORS = "utf-8", "surrogateescape"  # names that are no text come through as they are
EMPTY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Hold one header of an archive; `name` is None where an extended header has it."""

    name: str | None
    kind: bytes
    mode: int
    target: str
    offset: int
    size: int


def members(archive: BinaryIO, whole_size: int) -> Iterator[Member]:
    """Yield what an archive in a file says of its members, one after the other. Raises TarError or ValueError."""
    offset, beside, name, target, has_name_elsewhere = 0, 0, "", "", False
    while offset < whole_size:
        header = read_at(archive, offset, BLOCK)
        if not any(header):
            return
        member = tarfile.TarInfo.frombuf(header, ENCODING, ERRORS)
        offset += BLOCK
        size = member.size if member.type not in EMPTY else 0
        if not 0 <= size <= whole_size - offset:
            raise ValueError(f"a member of {size} bytes, of which {whole_size - offset} arrived")
        beside += 1
        if beside > MOST_HEADERS:
            raise ValueError(f"more than {MOST_HEADERS} headers of one member")
        if member.type == tarfile.GNUTYPE_LONGNAME:
            name = _text(archive, offset, size)
        elif member.type == tarfile.GNUTYPE_LONGLINK:
            target = _text(archive, offset, size)
        elif member.type in EXTENDED:
            has_name_elsewhere = True
        elif member.type != tarfile.XGLTYPE:
            shown = None if has_name_elsewhere else name or member.name
            yield Member(
                name=shown,
                kind=member.type,
                mode=member.mode,
                target=target or member.linkname,
                offset=offset,
                size=size,
            )
            beside, name, target, has_name_elsewhere = 0, "", "", False
        offset += -(-size // BLOCK) * BLOCK


def _text(archive: BinaryIO, offset: int, size: int) -> str:
    return read_at(archive, offset, min(size, LONGEST_NAME_BYTES)).split(b"\0", 1)[0].decode(ENCODING, ERRORS)


def read_at(archive: BinaryIO, offset: int, size: int) -> bytes:
    """Return so many bytes from an offset on."""
    archive.seek(offset)
    return archive.read(size)
