"""Tell whether an agent has a conversation to go on with, by names in its home folder.

The folder is the guest's: no link is followed, nothing is read, and a bounded number of names is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from cloche import hostfs

from .row import CodingAgent

MOST_NAMES = 10_000  # of all folders of a pattern


def has_conversation(home: str, row: CodingAgent) -> bool:
    """Tell whether the home folder has a conversation; true for an agent whose files of them are not known."""
    return not row.conversations or any(_is_there(home, pattern) for pattern in row.conversations)


def _is_there(home: str, pattern: str) -> bool:
    return _has(home, None, pattern.split("/"), iter(range(MOST_NAMES)))


def _has(folder: str, dir_fd: int | None, names: Sequence[str], left: Iterator[int]) -> bool:
    """Tell whether a path with these patterns of names is below a folder; each name looked at takes one of `left`."""
    first, *rest = names
    try:
        fd = hostfs.open_folder(folder, dir_fd)
    except OSError:
        return False
    try:
        with os.scandir(fd) as entries:
            found = [entry.name for entry, _ in zip(entries, left, strict=False) if fnmatchcase(entry.name, first)]
        return any(_has(name, fd, rest, left) for name in found) if rest else bool(found)
    finally:
        os.close(fd)
