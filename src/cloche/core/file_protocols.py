"""Optional protocols of a live sandbox about its files: work on them, watch them, and pass them on piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from .processes import OWN_RIGHTS, ByteRange, FileChange, FileInfo, FilePart, FileRights


class OpenWatch(Protocol):
    """Tell what changes."""

    @property
    def is_directory(self) -> bool:
        """Tell whether a folder is watched."""
        ...

    @property
    def folder(self) -> str:
        """Return the absolute path of the watched folder, or of the one with the watched file."""
        ...

    def __aiter__(self) -> AsyncIterator[FileChange]:
        """Iterate over changes as they happen, until there can be none any more. Raises SandboxFileError."""
        ...

    async def so_far(self) -> Sequence[FileChange]:
        """Return all changes that were made until now and not read yet, without waiting for others."""
        ...


@runtime_checkable
class SupportsPaths(Protocol):
    """Work on files at any path of a live sandbox, with its user's rights. All raise SandboxFileError."""

    async def read_path(
        self, path: str, *, max_bytes: int, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> bytes:
        """Return a file, or `count` bytes of it from an offset on."""
        ...

    async def write_path(
        self,
        path: str,
        data: bytes | AsyncIterator[bytes],
        *,
        how: str = "replace",
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> str:
        """Write a file, with the folders above it; return its path. `how` is `replace`, `append` or `new`."""
        ...

    async def write_paths(
        self,
        files: Sequence[tuple[str, bytes]],
        *,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> Sequence[str]:
        """Write several small files, by path and content, one after the other; return their paths."""
        ...

    async def stat_path(self, path: str, *, by: FileRights = OWN_RIGHTS) -> FileInfo:
        """Describe the file at a path, a link as a link."""
        ...

    async def list_path(
        self, path: str, *, recursive: bool = False, depth: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> Sequence[FileInfo]:
        """Describe the entries of a folder, by name; those below it, too, with paths relative to it."""
        ...

    async def make_folder(
        self, path: str, *, parents: bool = True, is_new: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Make a folder, and describe it."""
        ...

    async def move_path(
        self, path: str, target: str, *, replaces: bool = False, parents: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Rename a file or a folder, and describe it."""
        ...

    async def remove_path(
        self, path: str, *, recursive: bool = False, may_be_gone: bool = False, by: FileRights = OWN_RIGHTS
    ) -> None:
        """Remove a file, or a folder."""
        ...

    async def compose_path(self, path: str, sources: Sequence[str], *, by: FileRights = OWN_RIGHTS) -> str:
        """Write the contents of files, in their order, as one; remove them; return its path."""
        ...

    async def pack_path(self, path: str, take: Callable[[bytes], None]) -> int:
        """Hand a folder, or a file, as a tar archive to `take`, piece by piece; return how many files were left out."""
        ...

    async def disk_used(self) -> int:
        """Return how many bytes the files of all writable file systems take."""
        ...

    def watch_path(
        self,
        path: str,
        *,
        recursive: bool = False,
        is_exact: bool = False,
        describes: bool = False,
        by: FileRights = OWN_RIGHTS,
    ) -> AbstractAsyncContextManager[OpenWatch]:
        """Watch a folder, or a file, as a block: every change from then on is reported."""
        ...

    async def unpack_path(self, path: str, archive: bytes | AsyncIterator[bytes]) -> None:
        """Unpack a tar archive into a folder, which is made where it is not there."""
        ...


@runtime_checkable
class SupportsFileStreams(Protocol):
    """Pass files on piece by piece, of any size, as fast as the reader takes them. All raise SandboxFileError.

    `write_path` and `unpack_path` take an iterator, and read from it only as fast as the sandbox writes.
    """

    def read_stream(
        self, path: str, *, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncIterator[bytes]:
        """Yield a file, or a part of it."""
        ...

    def reading(
        self, path: str, *, byte_range: ByteRange | None = None, by: FileRights = OWN_RIGHTS
    ) -> AbstractAsyncContextManager[tuple[FilePart, AsyncIterator[bytes]]]:
        """Read a file, or a range of it, as a block: its facts, and its content piece by piece."""
        ...

    def pack_stream(
        self, path: str, *, max_bytes: int | None = None, note_skipped: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[bytes]:
        """Yield a folder, or a file, as a tar archive; more than `max_bytes` are refused.

        At the end `note_skipped` gets how many files were left out.
        """
        ...
