"""Files of the host's folder as an archive for a sandbox: a copy of it, or what shall be there again."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.limits import format_size

PIECE_BYTES = 1 << 18
MOST_DEPTH = 256
ENCODING, ERRORS = "utf-8", "surrogateescape"


def paths_below(folder: int, *, hidden: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all files, folders and links, folders before what is in them, without what is hidden.

    No other file system is entered. Raises OSError for a folder that cannot be read.
    """
    left_out, device = frozenset(hidden), os.fstat(folder).st_dev
    stack = [""]
    while stack:
        above = stack.pop()
        parts = above.split("/") if above else []
        with hostfs.descended(folder, parts) as at:
            if os.fstat(at).st_dev != device:
                continue
            with os.scandir(at) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for name, is_folder in found:
            path = f"{above}/{name}" if above else name
            if path in left_out:
                continue
            yield path
            if is_folder and len(parts) < MOST_DEPTH:
                stack.append(path)


class Packed:
    """Hold an archive in a file without a name, and the paths that are not in it."""

    def __init__(self, file: BinaryIO, left_out: tuple[str, ...]):
        self.file, self.left_out = file, left_out
        self.size = file.tell()

    def pieces(self) -> Iterator[bytes]:
        """Yield it, piece by piece."""
        self.file.seek(0)
        while piece := self.file.read(PIECE_BYTES):
            yield piece


def pack(folder: int, paths: Iterable[str], *, max_bytes: int) -> Packed:
    """Pack files, folders and links of a folder, by descriptors and through no link; what has gone is left out.

    What is none of these, or cannot be read, is left out as well. Raises InvalidRequest for more than `max_bytes`.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - who gets it closes it
    left_out: list[str] = []
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding=ENCODING, errors=ERRORS) as into:
            for path in paths:
                try:
                    is_packed = _add(into, folder, path, max_bytes)
                except (FileNotFoundError, NotADirectoryError, PermissionError, hostfs.NotRegular):
                    is_packed = False
                if not is_packed:
                    left_out.append(path)
    except BaseException:
        file.close()
        raise
    return Packed(file, tuple(left_out))


def _add(into: tarfile.TarFile, folder: int, path: str, max_bytes: int) -> bool:
    *above, name = path.split("/")
    with hostfs.descended(folder, above) as at:
        state = hostfs.look(name, at)
        if state is None:
            return False
        member = tarfile.TarInfo(path)
        member.mode, member.mtime = state.st_mode & 0o777, int(state.st_mtime)
        if stat.S_ISDIR(state.st_mode):
            member.type = tarfile.DIRTYPE
            into.addfile(member)
        elif stat.S_ISLNK(state.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=at)
            into.addfile(member)
        elif stat.S_ISREG(state.st_mode):
            _add_file(into, member, name, at, max_bytes)
        else:
            return False
    return True


def _add_file(into: tarfile.TarFile, member: tarfile.TarInfo, name: str, at: int, max_bytes: int) -> None:
    fd, state = hostfs.open_regular(name, at)
    with open(fd, "rb") as source:
        if into.offset + state.st_size > max_bytes:
            raise InvalidRequest(
                f"workspace: a copy of the folder would have more than {format_size(max_bytes)}; raise "
                "workspace_disk, or hide what is not needed (.clocheignore)"
            )
        member.size, member.mode = state.st_size, state.st_mode & 0o777
        try:
            into.addfile(member, source)
        except OSError as error:  # it became shorter meanwhile, and half of it is in the archive
            raise InvalidRequest(f"workspace: {member.name!r} was changed while it was copied; try again") from error
