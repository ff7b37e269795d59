"""Keep a run's files readable after its sandbox is gone, for as long as somebody holds the result."""

from __future__ import annotations

import os
import tempfile
import weakref

from cloche.core.result import FileRecord

from .collect import copy_out


class Kept:
    """Hold a workspace by a descriptor: a tmpfs without mount point lives exactly as long as that."""

    def __init__(self, fd: int, records: tuple[FileRecord, ...], folder: tempfile.TemporaryDirectory[str] | None):
        self._fd, self._records, self._folder = fd, records, folder
        self._finalizer = weakref.finalize(self, os.close, fd)

    @classmethod
    def of(cls, workspace_fd: int, records: tuple[FileRecord, ...], *, is_mount: bool) -> Kept:
        """Keep the recorded files of a workspace; one that is a folder of the host is copied, since it goes away."""
        if is_mount:
            return cls(os.dup(workspace_fd), records, None)
        folder = tempfile.TemporaryDirectory(prefix="cloche-kept-", ignore_cleanup_errors=True)
        copy_out(workspace_fd, folder.name, records)
        fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(fd, records, folder)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Copy the files into `directory`; see Result.save."""
        return copy_out(self._fd, directory, self._records)
