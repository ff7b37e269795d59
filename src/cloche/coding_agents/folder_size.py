"""How much a folder holds that a guest writes: a walk that follows no link, enters no mount, and has bounds."""

from __future__ import annotations

import os
import time

from cloche.core.record import dataclass

MOST_ENTRIES, MOST_DEPTH, MOST_S = 1_000_000, 64, 5.0
BLOCK_BYTES = 512  # of st_blocks, see stat(2)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSize:
    """Hold the bytes that a folder takes on the disk, and the seconds that counting took.

    `is_whole` is False if something could not be read, or a bound was reached: there may be more.
    """

    size: int
    seconds: float
    is_whole: bool = True


def folder_size(path: str) -> FolderSize:
    """Count what a folder and all below it takes; a file with several names counts once for all of them together."""
    began = time.monotonic()
    counting = _Counting(began + MOST_S)
    try:
        fd = os.open(path, _FOLDER)
    except OSError:
        return FolderSize(size=0, seconds=0.0, is_whole=False)
    counting.device = os.fstat(fd).st_dev
    counting.count(fd, MOST_DEPTH)
    return FolderSize(size=int(counting.size), seconds=time.monotonic() - began, is_whole=counting.is_whole)


class _Counting:
    def __init__(self, until: float):
        self.until, self.entries, self.size, self.device, self.is_whole = until, MOST_ENTRIES, 0.0, 0, True

    def count(self, fd: int, depth: int) -> None:
        """Count below an open folder, and close it."""
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    self.entries -= 1
                    if self.entries < 0 or time.monotonic() > self.until:
                        self.is_whole = False
                        return
                    self._count_entry(fd, entry, depth)
        except OSError:
            self.is_whole = False
        finally:
            os.close(fd)

    def _count_entry(self, fd: int, entry: os.DirEntry[str], depth: int) -> None:
        try:
            state = entry.stat(follow_symlinks=False)
            self.size += state.st_blocks * BLOCK_BYTES / (1 if entry.is_dir(follow_symlinks=False) else state.st_nlink)
            if not entry.is_dir(follow_symlinks=False) or state.st_dev != self.device:
                return
            if not depth:
                self.is_whole = False
                return
            self.count(os.open(entry.name, _FOLDER, dir_fd=fd), depth - 1)
        except (OSError, ZeroDivisionError):  # it has gone meanwhile, or cannot be entered
            self.is_whole = False
