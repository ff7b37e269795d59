"""Whole folders as archives: one of the host's to send into a sandbox, and one received from a sandbox.

A received archive is untrusted. `core/tar.py` parses it header by header. Its members are written by descriptors,
through no link, and only below the folder that the caller named. A link is created only if it leads to a path below
that folder, whatever else the archive contains: its target may begin with `..` no further up than the folder, and has
no `..` after its first name.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Collection
from contextlib import suppress
from typing import BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest, SandboxFileError, SandboxFileTooLarge
from cloche.core.limits import format_size
from cloche.core.processes import Transfer
from cloche.core.record import replace
from cloche.core.tar import ENCODING, ERRORS, Member, members

MOST_ENTRIES, MOST_DEPTH = 100_000, 64
MORE = "open the sandbox with a larger disk (disk=, --disk SIZE), and raise max_bytes if you set it"
CHUNK_BYTES = 1 << 18
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)


def read_host_file(path: str, max_bytes: int) -> tuple[bytes, int]:
    """Return a host file and its permission bits. Raises InvalidRequest."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise InvalidRequest(f"upload: {path!r} is neither a regular file nor a folder")
            _check_size(state.st_size, max_bytes, path)
            return file.read(state.st_size), state.st_mode & 0o777
    except OSError as error:
        raise InvalidRequest(f"upload: cannot read {path!r}: {error.strerror}") from error


def write_host_file(path: str, data: bytes, mode: int) -> None:
    """Write a host file. An existing file or link of that name is replaced, not written through."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        folder_fd = hostfs.open_folder(folder, follows_link=True)
        try:
            hostfs.replace(folder_fd, name, data, permissions=_mode(mode))
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise InvalidRequest(f"download: cannot write {path!r}: {error.strerror}") from error


def pack_folder(source: str, archive: BinaryIO, max_bytes: int, leave_out: Collection[str] = ()) -> Transfer:
    """Write an archive of a host folder, without entries named in `leave_out` at any depth.

    Raises InvalidRequest for files that cannot be read, and beyond a limit.
    """
    try:
        root = hostfs.open_folder(source, follows_link=True)
        try:
            with tarfile.open(
                fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, encoding=ENCODING, errors=ERRORS
            ) as into:
                return _Packing(into, source, max_bytes, frozenset(leave_out)).pack(root)
        finally:
            os.close(root)
    except OSError as error:
        where = os.path.join(source, os.fsdecode(error.filename)) if error.filename else source
        raise InvalidRequest(f"upload: cannot read {where!r}: {error.strerror or error}") from error


class _Packing:
    def __init__(self, into: tarfile.TarFile, source: str, max_bytes: int, leave_out: frozenset[str]):
        self._into, self._source, self._max_bytes, self._names_left_out = into, source, max_bytes, leave_out
        self._files = self._entries = self._size = self._left_out = 0

    def pack(self, root: int) -> Transfer:
        for folder, folders, names, folder_fd in os.fwalk(".", dir_fd=root, onerror=_raise):
            folders[:] = sorted(set(folders) - self._names_left_out)
            for name in sorted({*folders, *names} - self._names_left_out):
                self._entries += 1
                if self._entries > MOST_ENTRIES:
                    raise InvalidRequest(
                        f"upload: {self._source!r} has more than {MOST_ENTRIES} entries; send a part of it"
                    )
                self._add(os.path.normpath(os.path.join(folder, name)), name, folder_fd)
        return Transfer(files=self._files, size=self._size, left_out=self._left_out)

    def _add(self, path: str, name: str, folder_fd: int) -> None:
        state = hostfs.look(name, folder_fd)
        member = tarfile.TarInfo(path)
        if state is None:
            return  # it was removed meanwhile
        member.mode, member.mtime = state.st_mode & 0o777, int(state.st_mtime)
        if stat.S_ISDIR(state.st_mode):
            member.type = tarfile.DIRTYPE
            self._into.addfile(member)
        elif stat.S_ISLNK(state.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder_fd)
            if stays_inside(path, member.linkname):
                self._into.addfile(member)
            else:
                self._left_out += 1
        elif stat.S_ISREG(state.st_mode):
            self._add_file(member, name, folder_fd)
        else:
            self._left_out += 1

    def _add_file(self, member: tarfile.TarInfo, name: str, folder_fd: int) -> None:
        fd, state = hostfs.open_regular(name, folder_fd)
        with open(fd, "rb") as file:
            self._size += state.st_size
            _check_size(self._size, self._max_bytes, self._source)
            member.size = state.st_size
            self._into.addfile(member, file)  # raises OSError if the file was truncated meanwhile
        self._files += 1


def _raise(error: OSError) -> None:
    raise error


def _check_size(size: int, max_bytes: int, path: str) -> None:
    if size > max_bytes:
        raise InvalidRequest(f"upload: {path!r} has more than {format_size(max_bytes)}; {MORE}")


def stays_inside(path: str, target: str) -> bool:
    """Tell whether a link at a relative path leads below the same folder, whatever other links there are."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    names = [name for name in target.split("/") if name not in ("", ".")]
    up = next((index for index, name in enumerate(names) if name != ".."), len(names))
    return up <= path.count("/") and ".." not in names[up:]


def unpack_folder(archive: BinaryIO, target: str, max_bytes: int) -> Transfer:
    """Write an archive's members below a host folder, which is created if missing.

    Raises SandboxFileError for a malformed archive, InvalidRequest for a folder that cannot be written to.
    """
    try:
        os.makedirs(target, exist_ok=True)
        root = hostfs.open_folder(target, follows_link=True)
    except OSError as error:
        raise InvalidRequest(f"download: cannot write to {target!r}: {error.strerror}") from error
    try:
        return _Unpacking(archive, root, target, max_bytes).unpack()
    except (tarfile.TarError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise SandboxFileError(f"the data is invalid from some point on: {error}", path=target) from error
    finally:
        os.close(root)


class _Unpacking:
    def __init__(self, archive: BinaryIO, root: int, target: str, max_bytes: int):
        self._archive, self._root, self._target, self._remaining_bytes = archive, root, target, max_bytes
        self._size = archive.seek(0, os.SEEK_END)
        self._written: dict[str, tuple[int, int]] = {}  # offset and size of each file's content

    def unpack(self) -> Transfer:
        files = size = left_out = 0
        for count, member in enumerate(members(self._archive, self._size)):
            if count >= MOST_ENTRIES:
                raise ValueError(f"more than {MOST_ENTRIES} entries")
            names = _names(member.name)
            if names == []:  # the folder itself
                continue
            written = self._try(member, names) if names is not None else None
            if written is None:
                left_out += 1
            elif written >= 0:
                files, size = files + 1, size + written
        return Transfer(files=files, size=size, left_out=left_out)

    def _try(self, member: Member, names: list[str]) -> int | None:
        """Write one member; return a file's size, -1 for another type, None if it is left out."""
        if member.kind == tarfile.LNKTYPE and member.target in self._written:  # a hard link
            offset, size = self._written[member.target]
            member = replace(member, kind=tarfile.REGTYPE, offset=offset, size=size)
        try:
            if not self._write(member, names):
                return None
        except OSError as error:
            if error.errno in NO_ROOM:
                path = "/".join([self._target, *names])
                raise InvalidRequest(f"download: cannot write {path!r}: {error.strerror}") from error
            return None  # the path, or a parent, has another type
        return member.size if member.kind in REGULAR else -1

    def _write(self, member: Member, names: list[str]) -> bool:
        """Write one member; return False if it is left out."""
        if member.kind == tarfile.DIRTYPE:
            os.close(hostfs.descend(self._root, names, mode=0o777))
            return True
        path = "/".join(names)
        if member.kind == tarfile.SYMTYPE:
            if not stays_inside(path, member.target):
                return False
            with hostfs.descended(self._root, names[:-1], mode=0o777) as folder_fd:
                _link(member.target, names[-1], folder_fd)
            return True
        if member.kind not in REGULAR:
            return False
        self._remaining_bytes -= member.size
        if self._remaining_bytes < 0:
            raise SandboxFileTooLarge(f"{path}: it is larger than allowed; {MORE}", path=path)
        with hostfs.descended(self._root, names[:-1], mode=0o777) as folder_fd:
            self._fill(member, names[-1], folder_fd)
        self._written[path] = (member.offset, member.size)
        return True

    def _fill(self, member: Member, name: str, folder_fd: int) -> None:
        existing = hostfs.look(name, folder_fd)
        if existing is not None and stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with hostfs.new_file(folder_fd) as (beside, file):
            with file:
                os.fchmod(file.fileno(), _mode(member.mode))
                self._archive.seek(member.offset)
                remaining = member.size
                while remaining and (data := self._archive.read(min(remaining, CHUNK_BYTES))):
                    file.write(data)
                    remaining -= len(data)
            os.rename(beside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _names(path: str | None) -> list[str] | None:
    """Return the components of a path; None if it leaves the folder, empty for the folder itself."""
    if path is None or path.startswith("/") or "\0" in path:
        return None
    names = [name for name in path.split("/") if name not in ("", ".")]
    return None if ".." in names or len(names) > MOST_DEPTH else names


def _link(target: str, name: str, folder_fd: int) -> None:
    """Create a link in place of an existing file or link. Raises FileExistsError for a folder."""
    existing = hostfs.look(name, folder_fd)
    if existing is not None and not stat.S_ISDIR(existing.st_mode):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
    os.symlink(target, name, dir_fd=folder_fd)


def _mode(mode: int) -> int:
    """Return the permissions of a received file: no write access for others, no set-ID bits."""
    return mode & 0o755 | 0o600
