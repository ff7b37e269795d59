"""Contents of files, each stored once by its SHA-256, in `blobs/sha256/ab/cdef…` beside the database.

Theory of operation: writers hold a shared lock on the folder until the rows that refer to their blobs are committed;
readers hold it, too. `remove_unnamed` needs the exclusive lock, or does nothing. While it holds the lock, a blob
without a row is garbage, and a partial file is the remainder of a killed process. A blob is written to a temporary
file, synced and renamed. Its hash is verified at every read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from cloche import hostfs
from cloche.core.errors import RecordsFailed
from cloche.core.escape import escape_name

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_LOCK = ".lock"
_PREFIX = re.compile(r"[0-9a-f]{2}")
IS_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch


class Damaged(Exception):
    """Report a blob whose bytes do not match its hash."""


class Blobs:
    """The blobs below one of Cloche's own folders, which is created when needed."""

    def __init__(self, folder: str):
        self._parts = ("blobs", "sha256")
        self._above = folder
        self.folder = os.path.join(folder, *self._parts)

    @contextmanager
    def held(self) -> Iterator[BlobFolder]:
        """Yield a folder to store and read blobs; no blob is removed meanwhile. Raises RecordsFailed."""
        with _failures_named(self.folder):
            folder = self._open()
        try:
            with _failures_named(self.folder):
                lock = _lock(folder, fcntl.LOCK_SH)
            try:
                yield BlobFolder(folder, self.folder)
            finally:
                os.close(lock)
        finally:
            os.close(folder)

    def remove_unnamed(self, named: Callable[[str], Collection[str]]) -> int | None:
        """Remove unreferenced blobs; return the number of removed files. Raises RecordsFailed.

        `named` returns the referenced hashes that begin with two given digits. The result is None if the blobs are in
        use: the scan stopped early, and the next call continues. The lock is taken for one prefix at a time, so that
        other processes wait only briefly.
        """
        with _failures_named(self.folder):
            folder = self._open()
            try:
                return sum(_sweep(folder, prefix, named) for prefix in os.listdir(folder) if _PREFIX.fullmatch(prefix))
            except BlockingIOError:
                return None
            finally:
                os.close(folder)

    def _open(self) -> int:
        above = hostfs.open_folder(self._above, follows_link=True)
        try:
            return hostfs.descend(above, self._parts, mode=_PRIVATE_FOLDER)
        finally:
            os.close(above)


class BlobFolder:
    """Store and read blobs under the shared lock."""

    def __init__(self, folder: int, shown: str):
        self._fd, self._shown = folder, shown
        self._changed: set[str] = set()

    def store(self, data: bytes, sha256: str) -> bool:
        """Store bytes by their hash; return whether they were new. Raises RecordsFailed."""
        prefix, name = sha256[:2], sha256[2:]
        with _failures_named(self._shown), hostfs.descended(self._fd, [prefix], mode=_PRIVATE_FOLDER) as prefix_folder:
            status = hostfs.look(name, prefix_folder)
            if status is not None and status.st_size == len(data):
                return False
            with hostfs.new_file(prefix_folder, _PRIVATE_FILE) as (beside, file):
                with file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(beside, name, src_dir_fd=prefix_folder, dst_dir_fd=prefix_folder)
        self._changed.add(prefix)
        return True

    def read(self, sha256: str) -> bytes | None:
        """Return the bytes with a hash, None if they are not stored. Raises Damaged, RecordsFailed."""
        with _failures_named(self._shown):
            try:
                with hostfs.descended(self._fd, [sha256[:2]]) as prefix_folder:
                    fd, _ = hostfs.open_regular(sha256[2:], prefix_folder)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as file:
                data = file.read()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Damaged(sha256)
        return data

    def sync(self) -> None:
        """Sync the folders with new names, before a row refers to them. Raises RecordsFailed."""
        with _failures_named(self._shown):
            for prefix in sorted(self._changed):
                with hostfs.descended(self._fd, [prefix]) as prefix_folder:
                    os.fsync(prefix_folder)
            if self._changed:
                os.fsync(self._fd)
        self._changed.clear()


def _lock(folder: int, how: int) -> int:
    """Return a descriptor that holds the lock. With LOCK_NB, raises BlockingIOError if another process holds it."""
    fd, _ = hostfs.open_regular(_LOCK, folder, os.O_RDWR | os.O_CREAT, _PRIVATE_FILE)
    try:
        fcntl.flock(fd, how)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sweep(blobs_folder: int, prefix: str, named: Callable[[str], Collection[str]]) -> int:
    """Remove the unreferenced blobs of a prefix. Raises BlockingIOError while another process holds the lock."""
    lock = _lock(blobs_folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        named_hashes = named(prefix)
        with hostfs.descended(blobs_folder, [prefix]) as folder:
            unnamed = [name for name in os.listdir(folder) if prefix + name not in named_hashes]
            for name in unnamed:
                os.unlink(name, dir_fd=folder)
        with suppress(OSError):  # it is not empty
            os.rmdir(prefix, dir_fd=blobs_folder)
        return len(unnamed)
    finally:
        os.close(lock)


@contextmanager
def _failures_named(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = (
            "make room and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check its owner and mode"
        )
        raise RecordsFailed(f"contents cannot be kept in {escape_name(shown)}: {error.strerror}; {remedy}") from error
