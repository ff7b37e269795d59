"""Files of an open sandbox: of the workspace in any sandbox, and at any path in a live one."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
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
from cloche.core.file_protocols import OpenWatch
from cloche.core.limits import MIB, format_size
from cloche.core.processes import OWN_RIGHTS, FileChange, FileInfo, FileRights, Transfer
from cloche.core.protocols import OpenLiveSandbox

from .live import LiveOperations, in_time

READ_BYTES = 16 * MIB
PIECE_BYTES = 1 << 18
MOST_MODE = 0o7777
Timeout = float | str | None
MOST_LINKS = 40  # in a chain, as in the kernel (path_resolution(7))


@runtime_checkable
class SupportsListing(Protocol):
    """List the files of the workspace."""

    async def list_files(self, path: str = ".") -> Sequence[str]:
        """Return the paths of the files below `path`, relative to the workspace."""
        ...


def file_time(path: str, timeout: Timeout) -> AbstractAsyncContextManager[None]:
    """Limit a file operation to `timeout`, if given. Raises SandboxFileError of kind `timeout`."""
    return in_time(timeout, lambda late: SandboxFileError(f"{path}: {late}", path=path, kind="timeout"))


class AsyncWatch:
    """Yield the changes in a watched folder or file; made by `AsyncSandbox.watch`.

        async with await sandbox.watch("/workspace", recursive=True) as changes:
            async for change in changes:
                ...

    Unread changes are queued up to a limit; beyond it, one change of kind `lost` stands for the dropped ones.
    """

    def __init__(self, changes: OpenWatch, stack: AsyncExitStack) -> None:
        self._watch, self._changes, self._stack = changes, aiter(changes), stack

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self._changes

    async def next(self) -> FileChange | None:
        """Wait for the next change and return it; None after the last one."""
        return await anext(self._changes, None)

    async def so_far(self) -> tuple[FileChange, ...]:
        """Return the changes that were made until now and not returned yet, without waiting for others.

        For a program that asks now and then: what was done before the call is in the answer. Not beside `next`.
        """
        return tuple(await self._watch.so_far())

    async def close(self) -> None:
        """Stop watching."""
        await self._stack.aclose()


class PathOperations(LiveOperations):
    """Read and write files of a sandbox.

    In a live sandbox a path may be any that its user can access; relative paths begin in /workspace. In any other
    sandbox only `read_file`, `write_file` and `list_files` are available, and paths lie below /workspace. All raise
    SandboxFileError.

    `user` does it with another user's rights, such as root's, in a live sandbox with several; what is created is that
    user's.

    `timeout` limits a whole call, in seconds or as text such as `500ms`; then it raises SandboxFileError of kind
    `timeout`. In a live sandbox no call takes longer than the sandbox's own time-out, which `upload` and `download`
    apply to each piece: processes inside may stop each other.
    """

    async def read_file(
        self,
        path: str,
        *,
        max_bytes: int = READ_BYTES,
        offset: int = 0,
        count: int | None = None,
        user: str | None = None,
        timeout: Timeout = None,
    ) -> bytes:
        """Return the content of a file, or, in a live sandbox, at most `count` bytes of it from `offset` on.

        Raises SandboxFileError, also for more than `max_bytes`.
        """
        async with file_time(path, timeout):
            if not offset and count is None and user is None:
                return await self._require_open().read_file(path, max_bytes=max_bytes)
            _check_range(offset, count)
            live = self._require_live("read_file with offset, count or user")
            return await live.read_path(path, max_bytes=max_bytes, offset=offset, count=count, by=rights(user))

    async def write_file(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: Timeout = None,
    ) -> None:
        """Create or replace a file and its parent folders; text is written as UTF-8.

        `mode`, `metadata` and `user` need a live sandbox. `metadata` are keys and values in printable ASCII, 4096 bytes
        in all, which are stored with the file and replace those that it had; `stat` returns them. Raises
        SandboxFileError, of kind `unsupported` where the file system keeps no metadata; in a sandbox that is not live,
        InvalidRequest for a path outside of the workspace or of a program file.
        """
        async with file_time(path, timeout):
            if mode is None and metadata is None and user is None:
                await self._require_open().write_file(path, _content(data))
                return
            if mode is not None and not 0 <= mode <= MOST_MODE:
                raise InvalidRequest(f"mode: {mode!r} is not valid; give permission bits such as 0o755")
            live = self._require_live("write_file with mode, metadata or user")
            await live.write_path(path, _content(data), mode=mode, metadata=metadata, by=rights(user))

    async def append_file(self, path: str, data: bytes | str, *, timeout: Timeout = None) -> None:
        """Append to a file, which is created if missing."""
        async with file_time(path, timeout):
            await self._require_live("append_file").write_path(path, _content(data), how="append")

    async def list_files(self, path: str = ".", *, timeout: Timeout = None) -> tuple[str, ...]:
        """Return the paths of the files below `path`, relative to the workspace, if the backend can list them.

        Raises SandboxFileError if there are too many.
        """
        opened = self._require_open()
        if not isinstance(opened, SupportsListing):
            name = self._prepared.backend.name
            raise BackendUnavailable(f"backend {name!r} cannot list files; run a command that lists them")
        async with file_time(path, timeout):
            return tuple(await opened.list_files(path))

    async def list_dir(
        self,
        path: str = ".",
        *,
        recursive: bool = False,
        depth: int | None = None,
        user: str | None = None,
        timeout: Timeout = None,
    ) -> tuple[FileInfo, ...]:
        """Return the entries of a folder, sorted by name; with `recursive` all entries below, with paths relative to
        the folder, or with a `depth` those of so many levels.
        """
        if depth is not None and (isinstance(depth, bool) or depth < 1):
            raise InvalidRequest(f"depth: {depth!r} is not valid; give a number of levels, 1 for the folder alone")
        async with file_time(path, timeout):
            live = self._require_live("list_dir")
            return tuple(await live.list_path(path, recursive=recursive, depth=depth, by=rights(user)))

    async def stat(self, path: str, *, user: str | None = None, timeout: Timeout = None) -> FileInfo:
        """Return the facts of a path, without following a link."""
        async with file_time(path, timeout):
            return await self._require_live("stat").stat_path(path, by=rights(user))

    async def exists(self, path: str, *, user: str | None = None, timeout: Timeout = None) -> bool:
        """Tell whether a path exists; a dangling link does."""
        try:
            await self.stat(path, user=user, timeout=timeout)
        except SandboxFileNotFound:
            return False
        return True

    async def make_dir(
        self, path: str, *, parents: bool = True, user: str | None = None, timeout: Timeout = None
    ) -> None:
        """Create a folder and its parents; an existing folder is no error. Without `parents`, it is."""
        async with file_time(path, timeout):
            await self._require_live("make_dir").make_folder(path, parents=parents, by=rights(user))

    async def move(
        self, path: str, target: str, *, replace: bool = False, user: str | None = None, timeout: Timeout = None
    ) -> None:
        """Rename a file or folder. Raises SandboxFileExists if the target exists, unless `replace`."""
        async with file_time(path, timeout):
            await self._require_live("move").move_path(path, target, replaces=replace, by=rights(user))

    async def remove(
        self, path: str, *, recursive: bool = False, user: str | None = None, timeout: Timeout = None
    ) -> None:
        """Remove a file, a link, or an empty folder; with `recursive` a folder with its contents."""
        async with file_time(path, timeout):
            await self._require_live("remove").remove_path(path, recursive=recursive, by=rights(user))

    async def watch(
        self,
        path: str = ".",
        *,
        recursive: bool = False,
        exact: bool = False,
        entries: bool = False,
        user: str | None = None,
        timeout: Timeout = None,
    ) -> AsyncWatch:
        """Watch a folder or file for changes from now on; with `recursive` also everything below.

        With `exact` content (`written`) and mode, owner and metadata (`attributes`) are told apart, and a change has
        the file's facts in `entry` if it was asked for `entries`. `timeout` limits the time until the watch is set up.
        """
        if entries and not exact:
            raise InvalidRequest("entries: only an exact watch has them; give exact=True")
        live = self._require_live("watch")
        async with AsyncExitStack() as on_failure:
            async with file_time(path, timeout):
                begun = live.watch_path(path, recursive=recursive, is_exact=exact, describes=entries, by=rights(user))
                changes = await on_failure.enter_async_context(begun)
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
        """Copy a file or a whole folder of this machine to a path inside, replacing existing files.

        Files, folders, and links that stay inside the folder are copied; other entries are left out and counted.
        Entries of a folder named in `leave_out` are skipped. More than `max_bytes`, by default the sandbox's disk, is
        refused before anything is written.
        """
        import tempfile

        from .folders import pack_folder, read_host_file  # imports `tarfile`, which is slow to import

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
        """Copy a file or a whole folder from inside to a path of this machine, replacing existing files.

        Files, folders, and links that stay inside the folder are copied; other entries are left out and counted.
        Nothing is written outside of `host_path`, or through a link below it. More than `max_bytes`, by default the
        sandbox's disk, is refused. `timeout` limits the transfer, not the writing afterwards.
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
    """Return the facts of a link's target, following at most MOST_LINKS links."""
    for _ in range(MOST_LINKS):
        if info.type != "link":
            break
        path = posixpath.join(posixpath.dirname(path), info.target)
        info = await live.stat_path(path)
    return info


async def _receive(live: OpenLiveSandbox, path: str, archive: BinaryIO, max_bytes: int) -> int:
    """Write the archive of a folder to a file; return the number of entries left out. Raises SandboxFileTooLarge."""
    is_over = False

    def take(data: bytes) -> None:
        nonlocal is_over
        if not is_over and archive.tell() + len(data) > max_bytes + max_bytes // 4 + MIB:  # plus the archive's overhead
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


def rights(user: str | None) -> FileRights:
    """Return the rights of a user by name, by default the sandbox's own."""
    return OWN_RIGHTS if user is None else FileRights(user=user)


def _content(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)


def _check_range(offset: object, count: object) -> None:
    for name, value in (("offset", offset), ("count", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise InvalidRequest(f"{name}: {value!r} is not a number of bytes")
