"""Write a file in a folder that may be another user's, who can put anything at its name.

The file is made new beside its place, by a descriptor of the folder, and renamed over whatever is there: no link is
followed, no FIFO is waited for, and a file that has another name elsewhere keeps its content there.
"""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

# Where nobody but the system puts anything: a terminal, or a descriptor, is what the user means by its name there.
DEVICES = ("/dev", "/dev/fd", "/dev/pts")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_IT_IS = os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC


def open_in_place_of(folder: str | os.PathLike[str], name: str, data: bytes = b"") -> BinaryIO:
    """Return a file that begins with `data` and takes the place of what has this name in a folder, to be written on.

    Raises OSError, where a folder is in its place above all.
    """
    folder_fd = os.open(folder, _FOLDER)
    try:
        return _replace(folder_fd, name, data, 0o666, None)
    finally:
        os.close(folder_fd)


def open_named(path: str, data: bytes = b"", *, is_private: bool = False) -> BinaryIO:
    """Return a file that the user named, likewise; what is in `/dev` (`/dev/stdout`, a terminal) is opened itself.

    A file of the user's that is replaced passes its mode on, unless the new one is to be private. Raises OSError.
    """
    folder, name = os.path.split(path)
    folder_fd = os.open(folder or ".", _FOLDER)
    try:
        if not _is_of_devices(folder_fd):
            kept = None if is_private else _mode_of(folder_fd, name)
            return _replace(folder_fd, name, data, 0o600 if is_private else 0o666, kept)
        file = open(os.open(name, _AS_IT_IS, dir_fd=folder_fd), "wb")  # noqa: SIM115 - who asked closes it
        try:
            file.write(data)
            file.flush()
        except BaseException:
            file.close()
            raise
        return file
    finally:
        os.close(folder_fd)


def _replace(folder_fd: int, name: str, data: bytes, mode: int, kept: int | None) -> BinaryIO:
    temporary = f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
    file = open(os.open(temporary, _NEW, mode, dir_fd=folder_fd), "wb")  # noqa: SIM115 - who asked closes it
    try:
        if kept is not None:
            os.fchmod(file.fileno(), kept)
        file.write(data)
        file.flush()
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=folder_fd)
        file.close()
        raise
    return file


def _is_of_devices(folder_fd: int) -> bool:
    here = os.fstat(folder_fd)
    return any(os.path.samestat(here, os.stat(one)) for one in DEVICES if os.path.isdir(one))


def _mode_of(folder_fd: int, name: str) -> int | None:
    """Return the permissions of a regular file of ours; None where nothing like that is there."""
    try:
        state = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return None
    return state.st_mode & 0o777 if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() else None
