"""Tell whether an agent has a conversation to go on with, by names in its home folder.

The folder is the guest's: no link is followed, nothing is read, and a bounded number of names is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice

from cloche import hostfs

from .row import CodingAgent

MOST_NAMES = 10_000  # of one folder


def has_conversation(home: str, row: CodingAgent) -> bool:
    """Tell whether the home folder has a conversation; true for an agent whose files of them are not known."""
    return not row.conversations or any(_has(home, None, pattern.split("/")) for pattern in row.conversations)


def _has(folder: str, dir_fd: int | None, names: Sequence[str]) -> bool:
    """Tell whether a path with these patterns of names is below a folder."""
    first, *rest = names
    try:
        fd = hostfs.open_folder(folder, dir_fd)
    except OSError:
        return False
    try:
        with os.scandir(fd) as entries:
            found = [entry.name for entry in islice(entries, MOST_NAMES) if fnmatchcase(entry.name, first)]
        return any(_has(name, fd, rest) for name in found) if rest else bool(found)
    finally:
        os.close(fd)
