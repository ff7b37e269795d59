"""The files that a run changed: saved into a folder of the caller's, and the time limit for walking them.

Saving copies all files or none, and follows no link inside the target folder.

Theory of operation of walks: a guest decides how many files there are, and beside a session it may move files during
the walk. Its own time-out is over by then. So a walk has a separate time limit, which begins when its thread does.
There are as many threads as runs and cells at once, as far as descriptors allow. A walk that waited too long for a
thread gets no time and reports that files may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol, TypeVar

from cloche import hostfs
from cloche.core.errors import SandboxFileError, SandboxFileRefused
from cloche.core.loops import finish
from cloche.core.record import dataclass
from cloche.core.result import FileRecord, SaveFiles

CHUNK_BYTES = 1 << 20

T = TypeVar("T")
# Why files may be missing from a result, as `meta["files_partial"]` says it; docs/api.md explains each.
REASONS = frozenset({"time", "entries", "files", "bytes", "paths", "depth", "access"})
SHARE, LEAST_S, MOST_S = 0.5, 1.0, 5.0
LONGEST_QUEUE_S = 2 * MOST_S
LOOKS_PER_CORE = 4  # the same as for runs, see `execution.concurrency`
LEAST_AT_ONCE = 2
DESCRIPTORS_OF_A_LOOK = 128  # two per level of folders; all walks together use at most half of the limit
_threads: tuple[int, ThreadPoolExecutor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Hold the files that a run created or changed, the number of files left out, and how to save them.

    `partial` says why files may be missing: members of `REASONS`. `is_shared` says that other programs may have changed
    files meanwhile, too.
    """

    records: tuple[FileRecord, ...] = ()
    skipped: int = 0
    partial: frozenset[str] = frozenset()
    save: SaveFiles | None = None
    is_shared: bool = False

    def meta(self) -> dict[str, Any]:
        """Return the entries of a result's meta about files left out."""
        notes: dict[str, Any] = {"files_shared": True} if self.is_shared else {}
        notes |= {"files_skipped": self.skipped} if self.skipped else {}
        return notes | ({"files_partial": ", ".join(sorted(self.partial))} if self.partial else {})


class ContentSource(Protocol):
    """Return a recorded file's content piece by piece; empty at its end."""

    def read(self, size: int, /) -> bytes: ...


OpenSource = Callable[[FileRecord], AbstractContextManager[ContentSource]]


@dataclass(frozen=True, slots=True)
class _Written:
    """Hold a written file that has yet to get its name."""

    folder: str
    temporary: str
    name: str


def changed_since(record: FileRecord) -> SandboxFileRefused:
    """Return the error for a file that no longer matches its record."""
    return SandboxFileRefused(
        f"{record.path!r} has changed since the result was made: a later run there wrote to it; save the "
        "files of a cell before the next one, or pass out=DIR to the cell",
        path=record.path,
    )


def copy_out(
    open_source: OpenSource, directory: str | os.PathLike[str], records: tuple[FileRecord, ...]
) -> tuple[str, ...]:
    """Copy the recorded files into `directory`, replacing regular files and following no link: all of them, or none.

    Each file is written under a temporary name and renamed once all files match their records. Raises
    SandboxFileNotFound and SandboxFileRefused, and SandboxFileError if a rename fails: existing files may then have
    been replaced, and new ones are removed.
    """
    _check_places(records)
    os.makedirs(directory, exist_ok=True)
    target_fd = hostfs.open_folder(directory, follows_link=True)
    new_folders: list[str] = []
    written: list[_Written] = []
    new: list[_Written] = []
    try:
        for record in records:
            written.append(_write_one(open_source, target_fd, record, new_folders))  # noqa: PERF401 - known when one fails
        while written:
            if _name_one(target_fd, written[-1]):
                new.append(written[-1])
            written.pop()
    except BaseException:
        leftovers = [(entry.folder, entry.temporary) for entry in written] + [
            (entry.folder, entry.name) for entry in new
        ]
        _undo(target_fd, leftovers, new_folders)
        raise
    finally:
        os.close(target_fd)
    return tuple(record.path for record in records)


def _check_places(records: tuple[FileRecord, ...]) -> None:
    """Refuse a path that is both a file and a folder, which a walk may record if the guest moved files meanwhile."""
    # "\0" sorts first, so paths below a path directly follow it.
    paths = sorted(record.path.replace("/", "\0") for record in records)
    for path, below in pairwise(paths):
        if below.startswith(f"{path}\0"):
            first, second = path.replace("\0", "/"), below.replace("\0", "/")
            raise SandboxFileRefused(
                f"cannot write both {first!r} and {second!r}: one is the folder of the other, because a running "
                "process moved them; end it, and save the files of a later cell",
                path=second,
            )


def _write_one(open_source: OpenSource, target_fd: int, record: FileRecord, new_folders: list[str]) -> _Written:
    folder, _, name = record.path.rpartition("/")
    folder_fd = _make_folder(target_fd, folder, new_folders)
    try:
        if _is_folder(name, folder_fd):
            raise SandboxFileRefused(f"cannot write {record.path!r}: a folder is in its place", path=record.path)
        with open_source(record) as source:
            return _Written(folder, _write_beside(folder_fd, source, record), name)
    finally:
        os.close(folder_fd)


def _is_folder(name: str, folder_fd: int) -> bool:
    with contextlib.suppress(OSError):
        state = hostfs.look(name, folder_fd)
        return state is not None and stat.S_ISDIR(state.st_mode)
    return False


def _write_beside(folder_fd: int, source: ContentSource, record: FileRecord) -> str:
    """Write a recorded file and return its temporary name, so that no reader sees a partial file."""
    with hostfs.new_file(folder_fd) as (temporary, target), target:
        digest, bytes_left = hashlib.sha256(), record.size
        while bytes_left > 0 and (data := source.read(min(CHUNK_BYTES, bytes_left))):
            digest.update(data)
            target.write(data)
            bytes_left -= len(data)
        if bytes_left or digest.hexdigest() != record.sha256:
            raise changed_since(record)
    return temporary


def _name_one(target_fd: int, entry: _Written) -> bool:
    """Rename a file into place and tell whether the name was free. rename(2) replaces a link and does not follow it."""
    try:
        folder_fd = _make_folder(target_fd, entry.folder, [])
        try:
            is_new = hostfs.look(entry.name, folder_fd) is None
            os.rename(entry.temporary, entry.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    except OSError as error:
        path = f"{entry.folder}/{entry.name}" if entry.folder else entry.name
        raise SandboxFileError(
            f"cannot write {path!r}: {error.strerror or error}; the target has changed meanwhile. New files were "
            "removed again, others may have been replaced; save into a folder that no other process writes to",
            path=path,
        ) from error
    return is_new


def _undo(target_fd: int, names: list[tuple[str, str]], new_folders: list[str]) -> None:
    for folder, name in names:
        with contextlib.suppress(OSError, SandboxFileRefused):
            folder_fd = _make_folder(target_fd, folder, [])
            try:
                os.unlink(name, dir_fd=folder_fd)
            finally:
                os.close(folder_fd)
    for folder in reversed(new_folders):
        with contextlib.suppress(OSError, SandboxFileRefused):
            above, _, last = folder.rpartition("/")
            folder_fd = _make_folder(target_fd, above, [])
            try:
                os.rmdir(last, dir_fd=folder_fd)
            finally:
                os.close(folder_fd)


def _make_folder(target_fd: int, folder: str, new_folders: list[str]) -> int:
    """Open a folder below the target, following no link; created folders are added to `new_folders`."""
    try:
        return hostfs.descend(target_fd, folder.split("/") if folder else [], mode=0o777, created=new_folders)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the disk or quota is full; no link is in the way
            raise
        raise SandboxFileRefused(f"cannot write below {folder!r}: {error.strerror}", path=folder) from error


class Slice:
    """Read from an offset with pread(2), without moving the descriptor's shared position."""

    def __init__(self, fd: int, offset: int):
        self._fd, self._offset = fd, offset

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._fd, size, self._offset)
        self._offset += len(data)
        return data


def most_at_once() -> int:
    """Return the number of walks that this process runs at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    by_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 // DESCRIPTORS_OF_A_LOOK
    return max(LEAST_AT_ONCE, min(LOOKS_PER_CORE * cores, by_descriptors))


def _executor() -> ThreadPoolExecutor:
    """Return this process's threads for walks; a forked child starts its own."""
    global _threads
    if _threads is None or _threads[0] != os.getpid():
        _threads = (os.getpid(), ThreadPoolExecutor(most_at_once(), thread_name_prefix="cloche-files"))
    return _threads[1]


def time_for_files(timeout_s: float) -> float:
    """Return the seconds allowed for the files of a run or cell whose own time-out was `timeout_s`."""
    return min(MOST_S, max(LEAST_S, timeout_s * SHARE))


class Until:
    """Tell a walk in another thread when to end: its time is over, or its caller was cancelled."""

    def __init__(self, seconds: float):
        self._seconds, self._is_cancelled = seconds, False
        self._deadline = monotonic() + seconds
        self.has_ended = False  # `is_over` has returned True

    def begin(self) -> None:
        """Restart the time limit now."""
        self._deadline = monotonic() + self._seconds

    def cancel(self) -> None:
        self._is_cancelled = True

    def is_over(self) -> bool:
        self.has_ended = self.has_ended or self._is_cancelled or monotonic() >= self._deadline
        return self.has_ended


async def in_thread(until: Until, work: Callable[[], T]) -> T:
    """Run `work` in a thread; it must end when `until` says so, and its time limit begins there.

    When cancelled, `work` either never begins, or it is ended and waited for, since it uses descriptors that the caller
    closes. If no thread becomes free for too long, `work` runs in the calling thread with its time already over.
    """

    def begin() -> T:
        until.begin()
        return work()

    job = _executor().submit(begin)
    task = asyncio.wrap_future(job)
    # Retrieved, so that asyncio does not log it.
    task.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        await asyncio.wait([task], timeout=LONGEST_QUEUE_S)
        if job.cancel():
            until.cancel()
            return work()
        await asyncio.wait([task])
    except asyncio.CancelledError:
        until.cancel()
        if not job.cancel():
            await finish(asyncio.wait([task]))
        raise
    return task.result()
