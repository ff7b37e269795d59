"""System calls without a function in Python: renames that overwrite nothing, and syncing a whole file system."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

_NOREPLACE, _EXCHANGE = 1, 2
# System call numbers, since not every C library has renameat2() (glibc: since 2.28).
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "riscv64": 276, "ppc64le": 357, "s390x": 347, "i686": 353, "armv7l": 382}


def rename_new(old: str, old_at: int, new: str, new_at: int) -> None:
    """Rename to a name that does not exist (RENAME_NOREPLACE). Raises FileExistsError if it does, and any other
    OSError.
    """
    _renameat2(old, old_at, new, new_at, _NOREPLACE)


def exchange(first: str, one_at: int, second: str, other_at: int) -> None:
    """Exchange two names atomically (RENAME_EXCHANGE). Raises FileNotFoundError if one is missing, and any other
    OSError.
    """
    _renameat2(first, one_at, second, other_at, _EXCHANGE)


def sync_file_system(fd: int) -> None:
    """Sync the whole file system of an open file. Raises OSError."""
    import ctypes

    if library().syncfs(fd):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _renameat2(old: str, old_at: int, new: str, new_at: int, flags: int) -> None:
    import ctypes

    number = _RENAMEAT2.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"renameat2: no number known on {os.uname().machine}")
    long, text = ctypes.c_long, ctypes.c_char_p
    arguments = (long(old_at), text(os.fsencode(old)), long(new_at), text(os.fsencode(new)), long(flags))
    if library().syscall(long(number), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), old, None, new)


@cache
def library() -> Any:  # noqa: ANN401 - ctypes has no types for it
    """Return the C library."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)
