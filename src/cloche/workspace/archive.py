"""Pack files into a tar archive for a sandbox: of the host's folder (a copy, files to restore), or of a snapshot."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.limits import format_size

from .host_files import MOST_DEPTH, HostTree
from .snapshot import Snapshot, SnapshotEntry

PIECE_BYTES = 1 << 18
_LEFT_OUT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EXDEV)
ENCODING, ERRORS = "utf-8", "surrogateescape"


def paths_below(folder: int, *, hidden: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all files, folders and links except hidden ones, each folder before its contents.

    Mounts below the folder are not entered. Raises OSError for a folder that cannot be read.
    """
    left_out = frozenset(map(os.fsencode, hidden))
    stack = [b""]
    with HostTree(folder) as tree:
        while stack:
            above = stack.pop()
            for name, is_folder in _names_in(tree, above):
                path = above + b"/" + name if above else name
                if path in left_out:
                    continue
                yield os.fsdecode(path)
                if is_folder and path.count(b"/") < MOST_DEPTH:
                    stack.append(path)


def _names_in(tree: HostTree, folder: bytes) -> list[tuple[bytes, bool]]:
    try:
        return tree.names(folder)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return []
        raise


class Packed:
    """An archive in an unnamed file, and the paths that are missing from it."""

    def __init__(self, file: BinaryIO, left_out: tuple[str, ...]):
        self.file, self.left_out = file, left_out
        self.size = file.tell()

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive in pieces."""
        self.file.seek(0)
        while piece := self.file.read(PIECE_BYTES):
            yield piece


def pack(folder: int, paths: Iterable[str], *, max_bytes: int) -> Packed:
    """Pack files, folders and links of a folder, by descriptors and without following links.

    Paths are left out that have disappeared, have another type, cannot be read, are too deep, or are on another mount.
    Raises InvalidRequest for more than `max_bytes`.
    """
    file = tempfile.TemporaryFile(dir=hostfs.temporary_folder())  # noqa: SIM115 - the caller closes it
    left_out: list[str] = []
    try:
        with (
            HostTree(folder) as tree,
            tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding=ENCODING, errors=ERRORS) as into,
        ):
            for path in paths:
                try:
                    is_packed = _add(into, tree, path, max_bytes)
                except hostfs.NotRegular:
                    is_packed = False
                except OSError as error:
                    if error.errno not in _LEFT_OUT:
                        raise
                    is_packed = False
                if not is_packed:
                    left_out.append(path)
    except BaseException:
        file.close()
        raise
    return Packed(file, tuple(left_out))


def _add(into: tarfile.TarFile, tree: HostTree, path: str, max_bytes: int) -> bool:
    state = tree.look(path)
    if state is None:
        return False
    member = tarfile.TarInfo(path)
    member.mode, member.mtime = state.st_mode & 0o777, int(state.st_mtime)
    if stat.S_ISDIR(state.st_mode):
        if path.count("/") >= MOST_DEPTH:  # HostTree cannot open its contents
            return False
        member.type = tarfile.DIRTYPE
        into.addfile(member)
    elif stat.S_ISLNK(state.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(tree.target(path))
        into.addfile(member)
    elif stat.S_ISREG(state.st_mode):
        _add_file(into, member, tree, max_bytes)
    else:
        return False
    return True


def _add_file(into: tarfile.TarFile, member: tarfile.TarInfo, tree: HostTree, max_bytes: int) -> None:
    fd, state = tree.open_regular(member.name)
    with open(fd, "rb") as source:
        if into.offset + state.st_size > max_bytes:
            raise InvalidRequest(
                f"workspace: a copy of the folder would have more than {format_size(max_bytes)}; raise "
                "workspace_disk (at a service: disk), or hide what is not needed (.clocheignore)"
            )
        member.size, member.mode = state.st_size, state.st_mode & 0o777
        try:
            into.addfile(member, source)
        except OSError as error:  # the file was truncated, and part of it is in the archive
            raise InvalidRequest(f"workspace: {member.name!r} was changed while it was copied; try again") from error


_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}


def pack_snapshot(snapshot: Snapshot, entries: Iterable[SnapshotEntry]) -> Iterator[bytes]:
    """Yield a tar archive of some files, folders and links of a snapshot, piece by piece."""
    for entry in entries:
        member = tarfile.TarInfo(os.fsdecode(entry.path))
        member.type, member.mode, member.mtime = _TYPES[entry.kind], entry.mode & 0o777, entry.mtime_s
        member.size, member.linkname = entry.size, os.fsdecode(entry.target)
        yield member.tobuf(tarfile.GNU_FORMAT, ENCODING, ERRORS)
        yield from snapshot.read(entry)
        if padding := -entry.size % tarfile.BLOCKSIZE:
            yield bytes(padding)
    yield bytes(2 * tarfile.BLOCKSIZE)
