"""Shared memory by name among the sandbox's temporary files, with the functions of the module that this one hides."""

from __future__ import annotations

import errno
import os

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tmp", ".shm")


def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
    """Open or make an object; the name is that of a file in no folder, as in the C library."""
    file = _place_of(path)
    try:
        return os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except FileNotFoundError:
        if os.path.isdir(FOLDER) or not flags & os.O_CREAT:
            raise
    os.makedirs(FOLDER, 0o700, exist_ok=True)
    return os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def shm_unlink(path: str) -> None:
    """Remove the name of an object."""
    os.unlink(_place_of(path))


def _place_of(path: str) -> str:
    name = path.lstrip("/")
    if name in {"", ".", ".."} or "/" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return os.path.join(FOLDER, name)
