"""Snapshots of live sandboxes: their files in one archive on this host, from which other sandboxes begin.

The archive is written by the sandbox and read by sandboxes. Nothing on this host unpacks it, or reads what is in it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from os import PathLike
from typing import Any, BinaryIO, Protocol, cast

from cloche import hostfs
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import MIB
from cloche.core.loops import finish
from cloche.core.processes import Transfer
from cloche.keeper.attach import Kept

from .live import LiveOperations
from .paths import Timeout, file_time

MOST_ENTRIES = 250_000
PIECE_BYTES = 1 << 18
PRIVATE = 0o600


class _SavedFiles(Protocol):
    """Do operations of `init.snapshots`, as every live sandbox of this machine does."""

    def save_stream(
        self, *, max_bytes: int, max_entries: int, note_answer: Callable[[Mapping[str, Any]], None]
    ) -> AsyncGenerator[bytes]: ...

    async def restore(self, archive: AsyncIterator[bytes], *, max_entries: int) -> None: ...


class SnapshotOperations(LiveOperations):
    """Save the files of a live sandbox, and begin with saved ones."""

    _first_files: str | None  # the path of the archive that it begins with
    _existing: Kept | None

    async def snapshot(
        self, host_path: str | PathLike[str], *, max_bytes: int | None = None, timeout: Timeout = None
    ) -> Transfer:
        """Write all files of the sandbox to one archive of this host: those in its writable folders, `/run` excepted.

        All processes are stopped meanwhile, and go on afterwards; their memory is not saved, nor are sockets, pipes and
        mounts, which `left_out` counts. Owners, permissions, links and attributes are saved; views of folders of this
        host are not. `Sandbox(snapshot=host_path)` begins with these files. An existing file is replaced.

        Raises SandboxFileTooLarge for more than `max_bytes`, by default what the sandbox's disk may hold.
        """
        live = saving_of(self)
        most = self.limits.disk_bytes if max_bytes is None else max_bytes
        folder, name = os.path.split(os.fspath(host_path))
        async with file_time("snapshot", timeout):
            with _folder(folder or ".") as folder_fd, hostfs.new_file(folder_fd, PRIVATE) as (beside, file):
                with file:
                    saved = await write_snapshot(live, file, max_bytes=most)
                os.rename(beside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        return saved

    async def _restore(self, opened: object) -> None:
        """Replace the files of a new sandbox by those that it begins with. Raises SandboxFileError, InvalidRequest."""
        if self._first_files is None or self._existing is not None:
            return
        live = _saving(opened, self.backend)
        try:
            file = await asyncio.to_thread(open, self._first_files, "rb")
        except OSError as error:
            raise InvalidRequest(f"snapshot: the file cannot be read: {error}") from error
        with file:
            await live.restore(_pieces(file), max_entries=MOST_ENTRIES)


def saving_of(sandbox: LiveOperations) -> _SavedFiles:
    """Return the open sandbox. Raises InvalidRequest unless it is live, BackendUnavailable on another machine."""
    return _saving(sandbox._require_live("a snapshot"), sandbox.backend)


def _saving(opened: object, backend: str) -> _SavedFiles:
    if not hasattr(opened, "save_stream"):
        raise BackendUnavailable(
            f"backend {backend!r} has no snapshots of files.", remedy="Use a live sandbox of this machine."
        )
    return cast("_SavedFiles", opened)


@contextmanager
def _folder(path: str) -> Iterator[int]:
    """Yield an open folder. Raises InvalidRequest."""
    try:
        folder_fd = hostfs.open_folder(path, follows_link=True)
    except OSError as error:
        raise InvalidRequest(f"snapshot: {path!r} cannot be opened: {error.strerror}") from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


async def write_snapshot(live: _SavedFiles, file: BinaryIO, *, max_bytes: int) -> Transfer:
    """Write the archive of a sandbox's files to an open file. Raises SandboxFileError."""
    answer: dict[str, Any] = {}
    stream = live.save_stream(
        max_bytes=max_bytes + max_bytes // 4 + MIB, max_entries=MOST_ENTRIES, note_answer=answer.update
    )  # with the overhead of an archive
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            await finish(asyncio.to_thread(file.write, piece))
    await finish(asyncio.to_thread(_sync, file))
    files, skipped = (value if isinstance(value := answer.get(key), int) else 0 for key in ("count", "skipped"))
    return Transfer(files=files, size=file.tell(), left_out=skipped)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await finish(asyncio.to_thread(file.read, PIECE_BYTES)):
        yield piece
