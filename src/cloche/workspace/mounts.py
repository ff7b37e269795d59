"""Find the mount of a host file by its mount ID.

A mount below a folder may be another file system, which has another device number, or a bind mount of the same one,
which differs only in the mount ID.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable
from functools import cache

from .renames import library

_STATX = {"x86_64": 332, "aarch64": 291, "riscv64": 291, "ppc64le": 383, "s390x": 379, "i686": 383, "armv7l": 397}
_SYMLINK_NOFOLLOW, _NO_AUTOMOUNT, _EMPTY_PATH, _DONT_SYNC = 0x100, 0x800, 0x1000, 0x4000
_MNT_ID = 0x1000  # STATX_MNT_ID, since Linux 5.8
_MNT_ID_AT, _BYTES = 0x90, 256  # stx_mnt_id's offset in struct statx, and its size (linux/stat.h)
_MASK, _NUMBER = struct.Struct("=I"), struct.Struct("=Q")
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # proc(5): mountinfo escapes blanks, line feeds and backslashes in octal
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # from an old kernel, or from a container's seccomp filter


def mount_of(fd: int) -> int:
    """Return the mount ID of a descriptor. Raises OSError if the kernel does not report it."""
    return _ask(fd, b"", _EMPTY_PATH) or _from_proc(fd)


def mount_at(name: str, dir_fd: int) -> int:
    """Return the mount ID of a name in an open folder, without following a link. Raises OSError."""
    if number := _ask(dir_fd, os.fsencode(name), _SYMLINK_NOFOLLOW):
        return number
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return _from_proc(fd)
    finally:
        os.close(fd)


def mounts_below(path: str) -> list[str]:
    """Return the mount points below a folder in this process's mount namespace, relative to the folder's real path."""
    mount_points = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            point = os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split(b" ", 5)[4]))
            if point.startswith(f"{path}/"):
                mount_points.append(point[len(path) + 1 :])
    return sorted(set(mount_points))


def _ask(dir_fd: int, name: bytes, flags: int) -> int:
    """Return the mount ID from `statx`; 0 if the system call is missing or does not report it."""
    call = _statx()
    if call is None:
        return 0
    buffer = bytearray(_BYTES)
    code = call(dir_fd, name, flags | _NO_AUTOMOUNT | _DONT_SYNC, buffer)
    if code in _UNKNOWN:
        return 0
    if code:
        raise OSError(code, os.strerror(code), os.fsdecode(name))
    (result_mask,), (number,) = _MASK.unpack_from(buffer), _NUMBER.unpack_from(buffer, _MNT_ID_AT)
    return int(number) if result_mask & _MNT_ID else 0


@cache
def _statx() -> Callable[[int, bytes, int, bytearray], int] | None:
    """Return a function that calls `statx` and returns errno, or 0; None if this machine's system call number is
    unknown.
    """
    import ctypes

    number = _STATX.get(os.uname().machine)
    if number is None:
        return None
    syscall = library()["syscall"]  # indexing gives a new function object, since argtypes are set on it
    syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    syscall.restype = ctypes.c_long
    room = ctypes.c_char * _BYTES

    def call(dir_fd: int, name: bytes, flags: int, buffer: bytearray) -> int:
        return ctypes.get_errno() if syscall(number, dir_fd, name, flags, _MNT_ID, room.from_buffer(buffer)) else 0

    return call


def _from_proc(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return int(line.split()[1])
    raise OSError(errno.ENOSYS, "the kernel does not tell the number of a mount")
