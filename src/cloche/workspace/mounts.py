"""Which mount a file of the host is on, by the number that the kernel gives each of them.

A mount below a folder may be another file system, or the same one at another place (a bind mount): the first has
another device, the second has another mount's number alone.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from functools import cache

from .renames import library

_STATX = {"x86_64": 332, "aarch64": 291, "riscv64": 291, "ppc64le": 383, "s390x": 379, "i686": 383, "armv7l": 397}
_SYMLINK_NOFOLLOW, _NO_AUTOMOUNT, _EMPTY_PATH, _DONT_SYNC = 0x100, 0x800, 0x1000, 0x4000
_MNT_ID = 0x1000  # STATX_MNT_ID, since Linux 5.8
_MNT_ID_AT, _BYTES = 0x90, 256  # of struct statx
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # how mountinfo writes blanks, ends of lines and backslashes
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # to an old kernel, or to a container's filter


def mount_of(fd: int) -> int:
    """Return the number of the mount that a descriptor is on. Raises OSError where the kernel does not say."""
    return _ask(fd, b"", _EMPTY_PATH) or _from_proc(fd)


def mount_at(name: str, at: int) -> int:
    """Return the number of the mount that a name in an open folder leads to; of a link, its own. Raises OSError."""
    if number := _ask(at, os.fsencode(name), _SYMLINK_NOFOLLOW):
        return number
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        return _from_proc(fd)
    finally:
        os.close(fd)


def mounts_below(path: str) -> list[str]:
    """Return the mount points below a folder, relative to its real path, as this process has them."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            point = os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split(b" ", 5)[4]))
            if point.startswith(f"{path}/"):
                found.append(point[len(path) + 1 :])
    return sorted(set(found))


def _ask(at: int, name: bytes, flags: int) -> int:
    """Ask `statx`; return 0 where it is not there, or does not know mounts."""
    import ctypes

    number = _number()
    if not number:
        return 0
    found, word = ctypes.create_string_buffer(_BYTES), ctypes.c_long
    flags |= _NO_AUTOMOUNT | _DONT_SYNC
    words = (word(at), ctypes.c_char_p(name), word(flags), word(_MNT_ID), found)
    if library().syscall(word(number), *words):
        code = ctypes.get_errno()
        if code in _UNKNOWN:
            return 0
        raise OSError(code, os.strerror(code), os.fsdecode(name))
    data = found.raw
    if not int.from_bytes(data[:4], sys.byteorder) & _MNT_ID:
        return 0
    return int.from_bytes(data[_MNT_ID_AT : _MNT_ID_AT + 8], sys.byteorder)


@cache
def _number() -> int:
    return _STATX.get(os.uname().machine, 0)


def _from_proc(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return int(line.split()[1])
    raise OSError(errno.ENOSYS, "the kernel does not tell the number of a mount")
