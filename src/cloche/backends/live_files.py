"""Files of a live sandbox, at the caller's end: each operation is a process inside, see `init.files`.

Content flows under flow control in both directions; at most one window of it is buffered, unless a caller requests it
as a whole. Cancelling an operation kills its process. Answers may be written by a guest: they are bounded, and long
ones are parsed in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cloche.core.errors import (
    InvalidRequest,
    OutcomeUnknown,
    SandboxFileError,
    SandboxFileTooLarge,
    TooManyWatches,
)
from cloche.core.functions import OffersFunctions
from cloche.core.languages import is_program_file
from cloche.core.loops import become_task
from cloche.core.processes import OWN_RIGHTS, ByteRange, FileInfo, FilePart, FileRights
from cloche.init.facts import MOST_METADATA_BYTES, PREFIX
from cloche.init.names import pack_text

from .file_answers import (
    MOST_ENTRIES,
    MOST_LINE_BYTES,
    file_info,
    file_part,
    late,
    path_of,
    paths_of,
    read_object,
    read_rows,
    skipped,
)
from .file_operations import Content, FileOperation, FileWatch, each, first_line, rest
from .init_link import InitLink, OperationFailed
from .saved_files import Changes, Until, in_thread, time_for_files

log = logging.getLogger("cloche.live")
FILE_S = 300.0  # for one file operation, or one piece of a stream, unless the sandbox's own time-out is shorter
FILE_MODE = 0o600  # of a file with placeholders
MOST_AT_ONCE = 16  # operations at once, and as many outgoing streams
MOST_WATCHES = 12  # the kernel gives each user of a sandbox 16 at the most
MOST_LIST_BYTES = 64 << 20
MOST_KEY = 255 - len(PREFIX)  # XATTR_NAME_MAX of linux/limits.h
_PRINTABLE = re.compile(r"[ -~]*")


class LiveFiles(OffersFunctions):
    """Provide the file operations of every live sandbox, and the functions that its programs may call."""

    file_timeout_s = FILE_S  # at most the sandbox's own
    clock_slack_ns = 0  # how far the workspace's clock may lag behind init's
    writable: tuple[str, ...] = ()  # folders
    _has_users = False

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        # A separate limit: copying from one file to another needs one turn of each.
        self._outgoing_turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._watches = 0

    def own_paused_s(self) -> float:
        """Return the seconds that it was paused in all from here."""
        return 0.0

    async def connected(self) -> InitLink:
        """Return the link, starting the sandbox if necessary."""
        raise NotImplementedError

    def absolute(self, path: str) -> str:
        """Return an absolute path inside; relative paths start at /workspace."""
        return path if path.startswith("/") else f"/workspace/{path}"

    @asynccontextmanager
    async def _operation(
        self,
        do: str,
        path: str,
        content: Content | None = None,
        *,
        timeout_s: float | None,
        **arguments: Any,  # noqa: ANN401 - any JSON
    ) -> AsyncIterator[FileOperation]:
        link = await self.connected()
        named = self._named(path, at_home=bool(arguments.get("at_home")))
        operation = FileOperation(
            link.open("files", do=do, path=named, timeout_s=timeout_s, **arguments), path, content, self.file_timeout_s
        )
        try:
            yield operation
        finally:
            await operation.close()

    def _named(self, path: str, *, at_home: bool = False) -> str | dict[str, str]:
        if not (path or at_home) or "\0" in path:
            raise InvalidRequest(f"path: {path!r} is not valid; give text without NUL characters")
        try:
            return pack_text(path if at_home else self.absolute(path))
        except ValueError as error:
            raise InvalidRequest(f"path: {path!r} cannot be encoded: {error}") from error

    async def file(
        self,
        do: str,
        path: str,
        *,
        content: Content | None = None,
        max_bytes: int = 0,
        **arguments: Any,  # noqa: ANN401 - any JSON
    ) -> tuple[Mapping[str, Any], bytes]:
        """Do one operation on files, see `init.files`; return its answer and at most `max_bytes` of content.

        Raises a SandboxFileError.
        """
        is_streamed = content is not None and not isinstance(content, bytes | bytearray | memoryview)
        timeout_s = None if is_streamed else self.file_timeout_s
        await self.connected()  # starting the sandbox may take longer than an operation
        async with self._turns:
            try:
                async with (
                    asyncio.timeout(timeout_s),
                    self._operation(do, path, content, timeout_s=timeout_s, most=max_bytes, **arguments) as operation,
                ):
                    file_content = await operation.incoming.read_all(max_bytes)
                    if len(file_content) > max_bytes:
                        raise SandboxFileTooLarge(
                            f"{path}: more than {max_bytes} bytes arrived", path=path, kind="too_large"
                        )
                    return await operation.answer(), file_content
            except TimeoutError as error:
                raise late(path, self.file_timeout_s) from error

    # One function for each operation.

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file. Raises the SandboxFile errors."""
        return await self.read_path(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders. Raises the SandboxFile errors."""
        await self.write_path(path, data)

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        rows = await self.list_path(path, recursive=True)
        prefix = "" if path in (".", "") else f"{path.rstrip('/')}/"
        paths = (f"{prefix}{row.name}" for row in rows if row.type == "file")
        return tuple(path for path in paths if not is_program_file(path))

    async def read_path(
        self, path: str, *, max_bytes: int, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> bytes:
        """Return a file, or `count` bytes of it from `offset` on. Raises SandboxFileTooLarge beyond `max_bytes`."""
        _, data = await self.file(
            "read",
            path,
            max_bytes=_natural("max_bytes", max_bytes),
            offset=_natural("offset", offset),
            count=_count(count),
            **_rights(by),
        )
        return data

    async def read_stream(
        self, path: str, *, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncIterator[bytes]:
        """Yield a file piece by piece at the reader's pace; close the iterator to stop earlier."""
        offset, count = _natural("offset", offset), _count(count)
        async with (
            self._outgoing_turns,
            self._operation("read", path, timeout_s=None, offset=offset, count=count, **_rights(by)) as operation,
        ):
            while piece := await operation.read():
                yield piece
            await operation.answer()

    async def write_path(
        self,
        path: str,
        data: Content,
        *,
        how: str = "replace",
        mode: int | None = None,
        parents: bool = True,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> str:
        """Write a file and create missing folders above it: `how` is `replace`, `append` or `new`. Return its path.

        `data` may be an iterator, which is consumed no faster than the sandbox writes. `metadata` replaces the file's.
        """
        stored = None if metadata is None else check_metadata(metadata)
        answer, _ = await self.file(
            "write", path, content=data, how=how, mode=_count(mode), parents=parents, metadata=stored, **_rights(by)
        )
        return path_of(answer, path)

    async def write_paths(
        self,
        files: Sequence[tuple[str, bytes]],
        *,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> Sequence[str]:
        """Write several small files, by path and content, in one operation; return their paths.

        After an error the files before the failed one are written.
        """
        stored = None if metadata is None else check_metadata(metadata)
        sizes = [(self._named(path, at_home=by.at_home), len(data)) for path, data in files]
        content = b"".join(data for _, data in files)
        answer, _ = await self.file(
            "write_many", "/", content=content, contents=sizes, parents=True, metadata=stored, **_rights(by)
        )
        return paths_of(answer, len(files))

    async def write_first(self, link: InitLink, path: str, data: bytes, mode: int) -> None:
        """Write a file of a sandbox that has just been started, before anybody else uses it."""
        channel = link.open(
            "files", do="write", path=self._named(path), timeout_s=self.file_timeout_s, most=0, how="replace",
            mode=mode, parents=True,
        )  # fmt: skip
        operation = FileOperation(channel, path, data, self.file_timeout_s)
        try:
            await operation.answer()
        finally:
            await operation.close()

    async def stat_path(self, path: str, *, by: FileRights = OWN_RIGHTS) -> FileInfo:
        """Describe the file or folder at a path."""
        answer, _ = await self.file("stat", path, **_rights(by))
        return file_info(answer, path)

    async def list_path(
        self, path: str, *, recursive: bool = False, depth: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> Sequence[FileInfo]:
        """Describe the entries of a folder, sorted by name; with `recursive` or a `depth`, those below it, too."""
        limits: dict[str, Any] = {"entries": MOST_ENTRIES, "recursive": recursive, "depth": _count(depth)}
        answer, data = await self.file("list", path, max_bytes=MOST_LIST_BYTES, **limits, **_rights(by))
        folder = path_of(answer, path)
        if len(data) <= MOST_LINE_BYTES:
            return list(read_rows(data, folder))
        return await asyncio.to_thread(lambda: list(read_rows(data, folder)))

    async def make_folder(
        self, path: str, *, parents: bool = True, is_new: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Create a folder and describe it; one that `is_new` must not exist."""
        answer, _ = await self.file("make_folder", path, parents=parents, is_new=is_new, **_rights(by))
        return file_info(answer, path)

    async def move_path(
        self, path: str, target: str, *, replaces: bool = False, parents: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Rename a file or a folder, and describe it; with `parents`, missing folders above the target are created."""
        named = self._named(target, at_home=by.at_home)
        answer, _ = await self.file("move", path, target=named, replaces=replaces, parents=parents, **_rights(by))
        return file_info(answer, target)

    async def remove_path(
        self, path: str, *, recursive: bool = False, may_be_gone: bool = False, by: FileRights = OWN_RIGHTS
    ) -> None:
        """Remove a file or a folder."""
        await self.file("remove", path, recursive=recursive, may_be_gone=may_be_gone, **_rights(by))

    async def compose_path(self, path: str, sources: Sequence[str], *, by: FileRights = OWN_RIGHTS) -> str:
        """Write the contents of files, one after the other, as one, remove them, and return its path."""
        named = [self._named(source, at_home=by.at_home) for source in sources]
        answer, _ = await self.file("compose", path, sources=named, **_rights(by))
        return path_of(answer, path)

    @asynccontextmanager
    async def reading(
        self, path: str, *, byte_range: ByteRange | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncIterator[tuple[FilePart, AsyncIterator[bytes]]]:
        """Yield the facts of a file, or of a range of it, and its content piece by piece."""
        arguments: dict[str, Any] = {"describes": True, "range": byte_range, **_rights(by)}
        async with self._outgoing_turns, self._operation("read", path, timeout_s=None, **arguments) as operation:
            line, _, data = await first_line(operation, path)
            yield file_part(read_object(line, path), path), rest(operation, data)

    async def disk_used(self) -> int:
        """Return how many bytes the files of all writable file systems take."""
        answer, _ = await self.file("space", "/")
        used = answer.get("used")
        return used if isinstance(used, int) else 0

    async def chmod_path(self, path: str, mode: int) -> None:
        """Set the permission bits of a file or a folder."""
        await self.file("chmod", path, mode=_natural("mode", mode))

    async def pack_path(self, path: str, take: Callable[[bytes], None]) -> int:
        """Pass a folder or file as a tar archive to `take`, piece by piece; return the number of files left out."""
        async with self._outgoing_turns, self._packing(path) as operation:
            while piece := await operation.read():
                take(piece)
            return skipped(await operation.answer())

    async def pack_stream(
        self, path: str, *, max_bytes: int | None = None, note_skipped: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[bytes]:
        """Yield a tar archive at the reader's pace, and report the number of files left out at the end.

        Archives larger than `max_bytes` are refused.
        """
        async with self._outgoing_turns, self._packing(path, max_bytes=_count(max_bytes)) as operation:
            while piece := await operation.read():
                yield piece
            note_skipped(skipped(await operation.answer()))

    def _packing(self, path: str, max_bytes: int | None = None) -> AbstractAsyncContextManager[FileOperation]:
        return self._operation("pack", path, timeout_s=None, most=max_bytes, entries=MOST_ENTRIES)

    async def changes_stream(
        self,
        root: str,
        *,
        since: int | None,
        max_bytes: int,
        max_entries: int,
        skip: Sequence[str] = (),
        note_answer: Callable[[Mapping[str, Any]], None],
        base: int | None = None,
        pauses: bool = True,
    ) -> AsyncIterator[bytes]:
        """Yield the changes in a view of a host folder, or in a copy; with `pauses` all other processes are stopped.

        See `init.changes` for `base`, for the frames, and for the answer, which `note_answer` gets at the end.
        """
        bounds: dict[str, Any] = {"since": since, "base": base, "most": max_bytes, "entries": max_entries}
        async with (
            self._outgoing_turns,
            self._operation(
                "changes", root, timeout_s=FILE_S, pauses=pauses, skip=[*map(pack_text, skip)], **bounds
            ) as operation,
        ):
            while piece := await operation.incoming.read():
                yield piece
            note_answer(await operation.answer())

    def saved_folders(self) -> tuple[str, ...]:
        """Return the folders that belong to a snapshot: the writable ones, less that of running processes."""
        return tuple(folder for folder in self.writable if folder != "/run")

    async def save_stream(
        self, *, max_bytes: int, max_entries: int, note_answer: Callable[[Mapping[str, Any]], None]
    ) -> AsyncIterator[bytes]:
        """Yield the saved folders as an archive, see `init.snapshots`, while all other processes are stopped.

        The answer, which `note_answer` gets at the end, counts files and bytes.
        """
        await self.connected()
        async with (
            self._outgoing_turns,
            self._operation(
                "save", "/", timeout_s=FILE_S, pauses=True, most=max_bytes, entries=max_entries, **self._of_snapshot()
            ) as operation,
        ):
            while piece := await operation.incoming.read():
                yield piece
            note_answer(await operation.answer())

    async def restore(self, archive: Content, *, max_entries: int) -> None:
        """Make the saved folders what an archive of `save_stream` has. Raises SandboxFileError."""
        await self.file("restore", "/", content=archive, entries=max_entries, **self._of_snapshot())
        await self._fill(await self.connected())

    def _of_snapshot(self) -> dict[str, Any]:
        user = {"user": "root"} if self._has_users else {}
        return {"paths": [*map(pack_text, self.saved_folders())], **user}

    async def _fill(self, link: InitLink) -> None:
        """Write the files that a new sandbox begins with."""

    async def unpack_path(self, path: str, archive: Content) -> None:
        """Unpack a tar archive below a folder, which is created if missing."""
        await self.file("unpack", path, content=archive, entries=MOST_ENTRIES)

    async def note_cell(self, code: str) -> None:
        """Do nothing; backends that prepare cells override it."""

    async def clock_ns(self, patterns: Sequence[str]) -> int:
        """Return the ctime, in ns, that a file changed now would get; 0 if no files are to be collected."""
        if not patterns:
            return 0
        await become_task()
        try:
            nanoseconds = (await (await self.connected()).ask("clock")).get("ns")
        except OperationFailed as error:
            raise InvalidRequest(f"collect: {error}") from error
        return (
            max(0, nanoseconds - self.clock_slack_ns)
            if isinstance(nanoseconds, int) and 0 <= nanoseconds < 1 << 62
            else 0
        )

    async def collect_files(
        self,
        patterns: Sequence[str],
        *,
        since: int,
        timeout_s: float,
        max_bytes: int,
        inputs: Mapping[str, bytes] | None = None,
    ) -> Changes:
        """Return the files of the workspace that match `patterns` and were changed `since` a time of `clock_ns`.

        Files equal to the `inputs` are not included. Files beyond a bound, or unreadable, are left out, and the result
        says why.
        """
        if not patterns:
            return Changes()
        await become_task()
        from .archive import MAX_FILES, Spool, collected

        spool, seconds = Spool(max_bytes), time_for_files(timeout_s)
        bounds: dict[str, Any] = {"most_files": MAX_FILES, "most": max_bytes, "entries": MOST_ENTRIES}
        answer: Mapping[str, Any]
        try:
            async with (
                self._outgoing_turns,
                asyncio.timeout(seconds),
                self._operation(
                    "collect",
                    "/workspace",
                    timeout_s=seconds,
                    since=since,
                    **bounds,
                    patterns=[*map(pack_text, patterns)],
                ) as operation,
            ):
                while piece := await operation.incoming.read():
                    spool.add(piece)
                answer = await operation.answer()
        except TimeoutError:
            answer = {"partial": ["time"]}
        except ValueError:
            answer = {"partial": ["bytes"]}
        except (SandboxFileError, OutcomeUnknown, InvalidRequest, OSError) as error:
            log.warning("files of a run could not be collected: %s", error)
            answer = {"partial": ["access"]}
        until = Until(seconds)
        try:
            return await in_thread(until, lambda: collected(spool, patterns, inputs or {}, answer, until))
        except OSError as error:  # there is no room for the files, but the run has ended in any case
            log.warning("files of a run could not be kept: %s", error)
            return Changes(partial=frozenset({"access"}), is_shared=True)

    @asynccontextmanager
    async def watch_path(
        self,
        path: str,
        *,
        recursive: bool = False,
        is_exact: bool = False,
        describes: bool = False,
        by: FileRights = OWN_RIGHTS,
    ) -> AsyncIterator[FileWatch]:
        """Watch a folder or file; the returned object yields every change from then on.

        See `FileChange` for exact watches; `describes` needs one.
        """
        if self._watches >= MOST_WATCHES:
            raise TooManyWatches(f"path: {MOST_WATCHES} watches of this sandbox are open; close one before another")
        self._watches += 1
        requests: asyncio.Queue[bytes] = asyncio.Queue()
        arguments: dict[str, Any] = {"recursive": recursive, "is_exact": is_exact, "describes": describes}
        try:
            async with self._operation(
                "watch", path, each(requests), timeout_s=None, **arguments, **_rights(by)
            ) as operation:
                watch = FileWatch(operation, path, requests)
                try:
                    async with asyncio.timeout(self.file_timeout_s):
                        await watch.begin()
                except TimeoutError as error:
                    raise late(path, self.file_timeout_s) from error
                try:
                    yield watch
                finally:
                    await watch.close()
        finally:
            self._watches -= 1


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata that a file can have. Raises InvalidRequest."""
    for key, value in metadata.items():
        if not key or not _PRINTABLE.fullmatch(key) or not _PRINTABLE.fullmatch(value):
            raise InvalidRequest(f"metadata: {key[:80]!r}: give keys and values in printable ASCII")
        if len(key) > MOST_KEY:
            raise InvalidRequest(f"metadata: the key {key[:80]!r}… has more than {MOST_KEY} characters")
    size = sum(len(PREFIX) + len(key) + len(value) for key, value in metadata.items())
    if size > MOST_METADATA_BYTES:
        raise InvalidRequest(f"metadata: {size} bytes are more than {MOST_METADATA_BYTES}")
    return dict(metadata)


def _rights(by: FileRights) -> dict[str, Any]:
    """Return the arguments of an operation that are not their default."""
    arguments = {"user": by.user, "owner": by.owner, "at_home": by.at_home}
    return {name: value for name, value in arguments.items() if value}


def _natural(name: str, value: int) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidRequest(f"{name}: {value!r} is not valid; give an integer from 0 on")
    return value


def _count(value: int | None) -> int | None:
    return None if value is None else _natural("count", value)
