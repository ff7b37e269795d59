"""Files that are kept between processes: complete or not at all, and in this user's own folder without other writers.

The caller's side; no helper imports it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import marshal
import os
import threading
from collections.abc import Iterator

MOST_BYTES = 1 << 24


def own_cache(kind: str) -> str:
    """Return the folder for one kind of things in this user's cache; empty where that is nowhere, or another's."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        above = os.stat(cache if os.path.exists(cache) else os.path.dirname(cache))
    except OSError:
        return ""
    is_ours = os.path.isabs(cache) and above.st_uid == os.geteuid()  # root may have a user's home
    return os.path.join(cache, "cloche", kind) if is_ours else ""


def read_cache(folder: str, name: str, key: bytes, *, is_own: bool = False) -> bytes | None:
    """Return the data stored for `key`; None if the file is missing, or stores another key.

    Data of the user's own cache runs with this user's rights, or is given to guests: no other user may have written it.
    """
    try:
        with _opened(folder, is_own=is_own) as cache_folder, open(name, "rb", opener=cache_folder.open) as file:
            if is_own and not _is_ours(file.fileno()):
                return None
            stored_key, data, digest = marshal.loads(file.read(MOST_BYTES))
        is_whole = digest == hashlib.blake2b(data).digest()
        return bytes(data) if stored_key == key and is_whole else None
    except (OSError, EOFError, ValueError, TypeError, MemoryError):  # the last ones from another kind of file
        return None


def write_cache(folder: str, name: str, key: bytes, data: bytes, *, is_own: bool = False, max_files: int = 0) -> bool:
    """Store data, complete or not at all, and tell whether it is stored: not without the right to write.

    With `max_files`, the oldest files of the folder are removed until that many are left.
    """
    fresh = f"{name}.{os.getpid()}.{threading.get_ident()}"
    try:
        os.makedirs(folder, 0o700 if is_own else 0o777, exist_ok=True)
        with _opened(folder, is_own=is_own) as cache_folder:
            try:
                with open(fresh, "xb", opener=cache_folder.open) as file:
                    file.write(marshal.dumps((key, data, hashlib.blake2b(data).digest()), 4))
                os.replace(fresh, name, src_dir_fd=cache_folder.fd, dst_dir_fd=cache_folder.fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(fresh, dir_fd=cache_folder.fd)
                raise
            if max_files:
                _remove_oldest(cache_folder.fd, max_files)
    except OSError:
        return False
    return True


def remove_cache(folder: str, name: str) -> None:
    """Remove a stored file, if it exists."""
    with contextlib.suppress(OSError), _opened(folder, is_own=True) as cache_folder:
        os.unlink(name, dir_fd=cache_folder.fd)


def _remove_oldest(folder_fd: int, max_files: int) -> None:
    """Remove the oldest files beyond `max_files`; unfinished files of a killed writer count too."""
    names = os.listdir(folder_fd)
    if len(names) <= max_files:
        return
    ages = {}
    for name in names:
        with contextlib.suppress(OSError):  # another process removed it
            ages[name] = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mtime_ns
    for name in sorted(ages, key=lambda name: ages[name])[: len(ages) - max_files]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder_fd)


class _CacheFolder:
    """Hold a folder open, and open files in it, through no link."""

    def __init__(self, fd: int, mode: int):
        self.fd, self._mode = fd, mode

    def open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, self._mode, dir_fd=self.fd)


@contextlib.contextmanager
def _opened(folder: str, *, is_own: bool) -> Iterator[_CacheFolder]:
    """Open a folder. Raises OSError, also where one that should be the user's own is not."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if is_own and not _is_ours(fd):
            raise PermissionError(errno.EPERM, "others may write there", folder)
        yield _CacheFolder(fd, 0o600 if is_own else 0o666)
    finally:
        os.close(fd)


def _is_ours(fd: int) -> bool:
    """Tell whether a file or folder is this user's, and no other user may write to it."""
    state = os.fstat(fd)
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022
