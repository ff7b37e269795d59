"""Contents of files, each stored once under its SHA-256, in `blobs/sha256/ab/cdef…` beside the database.

Theory of operation: whoever stores blobs holds the folder's lock, shared, until the rows that name them are committed;
so does whoever reads. `remove_unnamed` takes the lock alone, or does nothing: what is unnamed then is nobody's, and a
file half written is one that a killed process left. A blob is written beside, synced and renamed, and its hash is
checked each time it is read.
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
    """Report a blob whose bytes are not those that its name says."""


class Blobs:
    """Be the blobs below a folder of Cloche's own; made when something is stored first."""

    def __init__(self, folder: str):
        self._parts = ("blobs", "sha256")
        self._above = folder
        self.folder = os.path.join(folder, *self._parts)

    @contextmanager
    def held(self) -> Iterator[BlobFolder]:
        """Hold the blobs, so that none is removed, to store and read some. Raises RecordsFailed."""
        with _failures_named(self.folder):
            at = self._open()
        try:
            with _failures_named(self.folder):
                lock = _lock(at, fcntl.LOCK_SH)
            try:
                yield BlobFolder(at, self.folder)
            finally:
                os.close(lock)
        finally:
            os.close(at)

    def remove_unnamed(self, named: Callable[[str], Collection[str]]) -> int | None:
        """Remove what nothing names; return how many files that were. Raises RecordsFailed.

        `named` returns, for two digits, the hashes that begin with them and are named. None: somebody stores or reads
        blobs now, and not all was looked at; the next call goes on. Whoever waits for the lock waits for a part alone.
        """
        with _failures_named(self.folder):
            at = self._open()
            try:
                return sum(_sweep(at, prefix, named) for prefix in os.listdir(at) if _PREFIX.fullmatch(prefix))
            except BlockingIOError:
                return None
            finally:
                os.close(at)

    def _open(self) -> int:
        above = hostfs.open_folder(self._above, follows_link=True)
        try:
            return hostfs.descend(above, self._parts, mode=_PRIVATE_FOLDER)
        finally:
            os.close(above)


class BlobFolder:
    """Store and read blobs while they are held."""

    def __init__(self, at: int, shown: str):
        self._at, self._shown = at, shown
        self._changed: set[str] = set()

    def store(self, data: bytes, sha256: str) -> bool:
        """Store bytes under their hash; tell whether they were new. Raises RecordsFailed."""
        prefix, name = sha256[:2], sha256[2:]
        with _failures_named(self._shown), hostfs.descended(self._at, [prefix], mode=_PRIVATE_FOLDER) as at:
            found = hostfs.look(name, at)
            if found is not None and found.st_size == len(data):
                return False
            with hostfs.new_file(at, _PRIVATE_FILE) as (beside, file):
                with file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(beside, name, src_dir_fd=at, dst_dir_fd=at)
        self._changed.add(prefix)
        return True

    def read(self, sha256: str) -> bytes | None:
        """Return the bytes that have a hash, None where they are not kept. Raises Damaged, RecordsFailed."""
        with _failures_named(self._shown):
            try:
                with hostfs.descended(self._at, [sha256[:2]]) as at:
                    fd, _ = hostfs.open_regular(sha256[2:], at)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as file:
                data = file.read()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Damaged(sha256)
        return data

    def sync(self) -> None:
        """Make the new names last; a row that names them comes after. Raises RecordsFailed."""
        with _failures_named(self._shown):
            for prefix in sorted(self._changed):
                with hostfs.descended(self._at, [prefix]) as at:
                    os.fsync(at)
            if self._changed:
                os.fsync(self._at)
        self._changed.clear()


def _lock(at: int, how: int) -> int:
    """Return a descriptor that holds the lock. Raises BlockingIOError where it is not to be waited for."""
    fd, _ = hostfs.open_regular(_LOCK, at, os.O_RDWR | os.O_CREAT, _PRIVATE_FILE)
    try:
        fcntl.flock(fd, how)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sweep(at: int, prefix: str, named: Callable[[str], Collection[str]]) -> int:
    """Remove what is not named of the blobs with a prefix. Raises BlockingIOError while somebody holds them."""
    lock = _lock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        kept = named(prefix)
        with hostfs.descended(at, [prefix]) as folder:
            unnamed = [name for name in os.listdir(folder) if prefix + name not in kept]
            for name in unnamed:
                os.unlink(name, dir_fd=folder)
        with suppress(OSError):  # there is still something in it
            os.rmdir(prefix, dir_fd=at)
        return len(unnamed)
    finally:
        os.close(lock)


@contextmanager
def _failures_named(shown: str) -> Iterator[None]:
    """Turn what the file system cannot do into RecordsFailed with the remedy."""
    try:
        yield
    except OSError as error:
        what = "make room and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check its owner and mode"
        raise RecordsFailed(f"contents cannot be kept in {escape_name(shown)}: {error.strerror}; {what}") from error
