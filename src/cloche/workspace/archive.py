"""Pack files into a tar archive for a sandbox: of the host's folder (a copy, files to restore), or of a snapshot."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from typing import BinaryIO

from cloche import hostfs
from cloche.core.changes import Change
from cloche.core.errors import InvalidRequest
from cloche.core.limits import format_size
from cloche.core.record import replace

from .host_files import MOST_DEPTH, HostTree
from .snapshot import Snapshot, SnapshotEntry

PIECE_BYTES = 1 << 18
_LEFT_OUT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EXDEV)
ENCODING, ERRORS = "utf-8", "surrogateescape"
PATCH_NAME, FILES_FOLDER = "changes.patch", "files"


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


def entries_of(snapshot: Snapshot, changes: Iterable[Change], *, below: str = "") -> Iterator[SnapshotEntry]:
    """Yield the entries with the new contents of changes, in a folder `below`."""
    for change in changes:
        entry = snapshot.entries.get(os.fsencode(change.path))
        if change.what != "removed" and entry is not None and entry.kind == change.kind and not entry.problem:
            yield replace(entry, path=os.fsencode(below + change.path), mode=change.mode)


def save_changes(snapshot: Snapshot, changes: Iterable[Change], patch: str, target: str) -> int:
    """Write the new contents of changes, and a patch, as an archive to a new file of mode 0600; return its bytes.

    Raises OSError, FileExistsError among them.
    """
    folder, name = os.path.split(target)
    head = tarfile.TarInfo(PATCH_NAME)
    text = patch.encode(errors=ERRORS)
    head.size, head.mode, head.mtime = len(text), 0o600, int(time.time())
    dir_fd = hostfs.open_folder(folder or ".", follows_link=True)
    try:
        with hostfs.new_file(dir_fd, 0o600) as (beside, file), file:
            file.write(head.tobuf(tarfile.GNU_FORMAT) + text + bytes(-len(text) % tarfile.BLOCKSIZE))
            for piece in pack_snapshot(snapshot, entries_of(snapshot, changes, below=f"{FILES_FOLDER}/")):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.link(beside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)  # unlike a rename, it replaces nothing
            os.unlink(beside, dir_fd=dir_fd)
            return file.tell()
    finally:
        os.close(dir_fd)
