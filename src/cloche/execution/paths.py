"""Files of an open sandbox: those of the workspace of any, and those at any path of one that lives."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from os import PathLike
from types import TracebackType
from typing import BinaryIO, Protocol, Self, runtime_checkable

from cloche.core.errors import (
    BackendUnavailable,
    InvalidRequest,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
)
from cloche.core.limits import MIB, format_size
from cloche.core.processes import FileChange, FileInfo, Transfer
from cloche.core.protocols import OpenLiveSandbox, OpenWatch

from .live import LiveOperations, in_time

READ_BYTES = 16 * MIB
PIECE_BYTES = 1 << 18
MOST_MODE = 0o7777
Timeout = float | str | None
MOST_LINKS = 40  # in a row, as for the kernel


@runtime_checkable
class SupportsListing(Protocol):
    """List the workspace."""

    async def list_files(self, path: str = ".") -> Sequence[str]:
        """Return the paths of the files below `path`, relative to the workspace."""
        ...


def file_time(path: str, timeout: Timeout) -> AbstractAsyncContextManager[None]:
    """Give a call on a file so long, or all the time there is. Raises SandboxFileError of kind `timeout`."""
    return in_time(timeout, lambda late: SandboxFileError(f"{path}: {late}", path=path, kind="timeout"))


class AsyncWatch:
    """Tell what changes in a folder, or a file, that is watched; made by `AsyncSandbox.watch`.

        async with await sandbox.watch("/workspace", recursive=True) as changes:
            async for change in changes:
                ...

    Changes that are not taken wait, up to a bound; beyond it, one of kind `lost` stands for those that were dropped.
    """

    def __init__(self, changes: OpenWatch, stack: AsyncExitStack) -> None:
        self._changes, self._stack = aiter(changes), stack

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self._changes

    async def next(self) -> FileChange | None:
        """Wait for the next change and return it; None when there can be none any more."""
        return await anext(self._changes, None)

    async def close(self) -> None:
        """Watch no more."""
        await self._stack.aclose()


class PathOperations(LiveOperations):
    """Read and write files of a sandbox.

    In one that lives, a path may be any that its user may reach; a relative one begins in /workspace. In any other,
    only `read_file`, `write_file` and `list_files` are there, and paths lie below /workspace. All raise
    SandboxFileError.

    `timeout` is what a whole call may take, in seconds, or as text such as `500ms`; then it raises SandboxFileError of
    kind `timeout`. In a sandbox that lives none takes longer than the sandbox's own time-out, `upload` and `download`
    no longer for a piece: processes inside may stop each other.
    """

    async def read_file(
        self,
        path: str,
        *,
        max_bytes: int = READ_BYTES,
        offset: int = 0,
        count: int | None = None,
        timeout: Timeout = None,
    ) -> bytes:
        """Return a file, or, in a sandbox that lives, `count` bytes of it at most, from `offset` on.

        Raises SandboxFileError, also for more than `max_bytes`.
        """
        async with file_time(path, timeout):
            if not offset and count is None:
                return await self._require_open().read_file(path, max_bytes=max_bytes)
            _check_range(offset, count)
            live = self._require_live("read_file with offset or count")
            return await live.read_path(path, max_bytes=max_bytes, offset=offset, count=count)

    async def write_file(
        self, path: str, data: bytes | str, *, mode: int | None = None, timeout: Timeout = None
    ) -> None:
        """Create or replace a file, with its folders; text is written as UTF-8. A `mode` needs a sandbox that lives.

        Raises SandboxFileError, and InvalidRequest for a path that leaves the workspace or is a program's own, where
        the sandbox does not live.
        """
        async with file_time(path, timeout):
            if mode is None:
                await self._require_open().write_file(path, _content(data))
                return
            if not 0 <= mode <= MOST_MODE:
                raise InvalidRequest(f"mode: {mode!r} is none; give permission bits such as 0o755")
            await self._require_live("write_file with a mode").write_path(path, _content(data), mode=mode)

    async def append_file(self, path: str, data: bytes | str, *, timeout: Timeout = None) -> None:
        """Write at the end of a file, which is made where it is not there."""
        async with file_time(path, timeout):
            await self._require_live("append_file").write_path(path, _content(data), how="append")

    async def list_files(self, path: str = ".", *, timeout: Timeout = None) -> tuple[str, ...]:
        """Return the paths of the files below `path`, relative to the workspace, if the backend can.

        Raises SandboxFileError where there is too much to list it whole.
        """
        opened = self._require_open()
        if not isinstance(opened, SupportsListing):
            name = self._prepared.backend.name
            raise BackendUnavailable(f"backend {name!r} cannot list files; run a command that lists them")
        async with file_time(path, timeout):
            return tuple(await opened.list_files(path))

    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, timeout: Timeout = None
    ) -> tuple[FileInfo, ...]:
        """Describe the entries of a folder, by name; `recursive` those below it, too, with paths relative to it."""
        async with file_time(path, timeout):
            return tuple(await self._require_live("list_dir").list_path(path, recursive=recursive))

    async def stat(self, path: str, *, timeout: Timeout = None) -> FileInfo:
        """Describe what is at a path, a link as a link."""
        async with file_time(path, timeout):
            return await self._require_live("stat").stat_path(path)

    async def exists(self, path: str, *, timeout: Timeout = None) -> bool:
        """Tell whether anything is at a path, a link that leads nowhere included."""
        try:
            await self.stat(path, timeout=timeout)
        except SandboxFileNotFound:
            return False
        return True

    async def make_dir(self, path: str, *, parents: bool = True, timeout: Timeout = None) -> None:
        """Make a folder, with those above it; one that is there is no error then. Without `parents`, it is."""
        async with file_time(path, timeout):
            await self._require_live("make_dir").make_folder(path, parents=parents)

    async def move(self, path: str, target: str, *, replace: bool = False, timeout: Timeout = None) -> None:
        """Give a file or a folder another path. Raises SandboxFileExists where something is there, unless `replace`."""
        async with file_time(path, timeout):
            await self._require_live("move").move_path(path, target, replaces=replace)

    async def remove(self, path: str, *, recursive: bool = False, timeout: Timeout = None) -> None:
        """Remove a file, a link, or an empty folder; `recursive` a folder with all that is below it."""
        async with file_time(path, timeout):
            await self._require_live("remove").remove_path(path, recursive=recursive)

    async def watch(self, path: str = ".", *, recursive: bool = False, timeout: Timeout = None) -> AsyncWatch:
        """Watch a folder, or a file: what changes from now on is told; `recursive` also what does further below.

        `timeout` is until it watches.
        """
        live = self._require_live("watch")
        async with AsyncExitStack() as on_failure:
            async with file_time(path, timeout):
                changes = await on_failure.enter_async_context(live.watch_path(path, recursive=recursive))
            return AsyncWatch(changes, on_failure.pop_all())

    async def upload(
        self,
        host_path: str | PathLike[str],
        path: str,
        *,
        max_bytes: int | None = None,
        leave_out: Collection[str] = (),
        timeout: Timeout = None,
    ) -> Transfer:
        """Copy a file or a whole folder of this machine to a path inside, over what is there.

        Files, folders, and links that stay inside the folder are copied; all else is left out, and counted. Of a
        folder, what has one of the names `leave_out` is not looked at. More than `max_bytes`, else the sandbox's disk,
        is refused before anything is written.
        """
        import tempfile

        from .folders import pack_folder, read_host_file  # with `tarfile`, which nothing else here needs

        live = self._require_live("upload")
        byte_limit = self._most_bytes(max_bytes)
        source = os.fspath(host_path)
        async with file_time(path, timeout):
            if not await asyncio.to_thread(os.path.isdir, source):
                data, mode = await asyncio.to_thread(read_host_file, source, byte_limit)
                await live.write_path(path, data, mode=mode)
                return Transfer(files=1, size=len(data))
            with tempfile.TemporaryFile() as archive:
                transfer = await asyncio.to_thread(pack_folder, source, archive, byte_limit, leave_out)
                await live.unpack_path(path, _pieces(archive))
            return transfer

    async def download(
        self, path: str, host_path: str | PathLike[str], *, max_bytes: int | None = None, timeout: Timeout = None
    ) -> Transfer:
        """Copy a file or a whole folder from inside to a path of this machine, over what is there.

        Files, folders, and links that stay inside the folder are copied; all else is left out, and counted. Nothing is
        written outside of `host_path`, or through a link below it. More than `max_bytes`, else the sandbox's disk, is
        refused. `timeout` is until all has come; then it is written here.
        """
        import tempfile

        from .folders import unpack_folder, write_host_file

        live = self._require_live("download")
        byte_limit = self._most_bytes(max_bytes)
        target, data, left_out = os.fspath(host_path), b"", 0
        with tempfile.TemporaryFile() as archive:
            async with file_time(path, timeout):
                info = await live.stat_path(path)
                if info.is_directory:
                    left_out = await _receive(live, path, archive, byte_limit)
                else:
                    data = await live.read_path(path, max_bytes=byte_limit)
                    info = await _followed(live, path, info)
            if info.is_directory:
                transfer = await asyncio.to_thread(unpack_folder, archive, target, byte_limit)
                return Transfer(files=transfer.files, size=transfer.size, left_out=transfer.left_out + left_out)
        await asyncio.to_thread(write_host_file, target, data, info.mode)
        return Transfer(files=1, size=len(data))

    def _most_bytes(self, max_bytes: int | None) -> int:
        return self._prepared.limits.disk_bytes if max_bytes is None else max_bytes


async def _followed(live: OpenLiveSandbox, path: str, info: FileInfo) -> FileInfo:
    """Return what a link, or a link to a link, leads to; after so many of them, the next one."""
    for _ in range(MOST_LINKS):
        if info.type != "link":
            break
        path = posixpath.join(posixpath.dirname(path), info.target)
        info = await live.stat_path(path)
    return info


async def _receive(live: OpenLiveSandbox, path: str, archive: BinaryIO, max_bytes: int) -> int:
    """Write the archive of a folder to a file; return how many files it lacks. Raises SandboxFileTooLarge."""
    is_over = False

    def take(data: bytes) -> None:
        nonlocal is_over
        if not is_over and archive.tell() + len(data) > max_bytes + max_bytes // 4 + MIB:  # with what an archive adds
            is_over = True
            packing.cancel()
        elif not is_over:
            archive.write(data)

    packing = asyncio.ensure_future(live.pack_path(path, take))
    try:
        left_out = await packing
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if not is_over or (current is not None and current.cancelling()):
            packing.cancel()
            raise
        from .folders import MORE

        raise SandboxFileTooLarge(f"{path}: it has more than {format_size(max_bytes)}; {MORE}", path=path) from None
    archive.seek(0)
    return left_out


async def _pieces(archive: BinaryIO) -> AsyncIterator[bytes]:
    archive.seek(0)
    while piece := await asyncio.to_thread(archive.read, PIECE_BYTES):
        yield piece


def _content(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)


def _check_range(offset: object, count: object) -> None:
    for name, value in (("offset", offset), ("count", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise InvalidRequest(f"{name}: {value!r} is no number of bytes")
