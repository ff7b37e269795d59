"""Files of a live sandbox, at the caller's end: each operation is a process inside, see `init.files`.

Content flows under flow control in both directions; at most one window of it is buffered, unless a caller requests it
as a whole. Cancelling an operation kills its process. Answers may be written by a guest: they are bounded, and long
ones are parsed in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cloche.core.errors import (
    InvalidRequest,
    OutcomeUnknown,
    SandboxDirectoryError,
    SandboxFileError,
    SandboxFileExists,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
    SandboxNotDirectoryError,
)
from cloche.core.functions import OffersFunctions
from cloche.core.guest_json import finite, refuse_constant
from cloche.core.languages import is_program_file
from cloche.core.loops import become_task
from cloche.core.processes import FileChange, FileInfo
from cloche.init import wire
from cloche.init.names import pack_text, unpack_text

from .init_link import InitLink, Operation, OperationFailed, read_guest_object
from .live_streams import ByteStream
from .saved_files import Changes, Until, in_thread, time_for_files

log = logging.getLogger("cloche.live")
FILE_S = 300.0  # for one file operation, or one piece of a stream, unless the sandbox's own time-out is shorter
FILE_MODE = 0o600  # of a file with placeholders
MOST_AT_ONCE = 16  # operations at once, and as many outgoing streams
MOST_WATCHES = 12  # the kernel gives each user of a sandbox 16 at the most
MOST_ENTRIES, MOST_LIST_BYTES = 100_000, 64 << 20
MOST_ANSWER_BYTES = 1 << 17
MOST_LINE_BYTES = 1 << 16  # two paths of 4096 bytes in hexadecimal, and the other fields
Content = bytes | bytearray | memoryview | AsyncIterable[bytes]
FILE_ERRORS: dict[str, type[SandboxFileError]] = {
    "not_found": SandboxFileNotFound, "too_large": SandboxFileTooLarge, "exists": SandboxFileExists,
    "not_empty": SandboxFileExists, "is_directory": SandboxDirectoryError, "permission": SandboxFileRefused,
    "not_regular": SandboxFileRefused, "loop": SandboxFileRefused,
    "not_directory": SandboxNotDirectoryError,
}  # fmt: skip
REMEDIES = {"full": "the sandbox's disk is full; remove files, or open one with a larger limit (disk=)"}
_LINE = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)
CHANGES = ("created", "changed", "removed", "moved", "lost", "over")


class FileOperation:
    """Hold one running operation: `incoming` is its content, `answer` its result."""

    def __init__(self, channel: Operation, path: str, content: Content | None, stall_s: float):
        self._stall_s = stall_s
        self.incoming = ByteStream(channel, wire.STDOUT)
        self._channel, self._path = channel, path
        self._answer = bytearray()
        channel.on_data = self._take
        channel.closed.add_done_callback(lambda _: self.incoming.put_end())
        self._sending = asyncio.get_running_loop().create_task(self._send(content))

    def _take(self, stream: int, data: memoryview) -> None:
        if stream == wire.STDOUT:
            self.incoming.put(bytes(data))
            return
        if stream == wire.REPORT:
            self._answer += data[: MOST_ANSWER_BYTES - len(self._answer)]
        self._channel.grant(stream, len(data))

    async def _send(self, content: Content | None) -> None:
        try:
            await self._send_all(content)
        except BaseException:
            self._channel.close()  # partial content is useless, and no caller waits for the answer
            raise

    async def _send_all(self, content: Content | None) -> None:
        if isinstance(content, bytes | bytearray | memoryview):
            await self._channel.send(wire.STDIN, memoryview(content))
        elif content is not None:
            async for piece in content:
                async with self._in_time():
                    if not await self._channel.send(wire.STDIN, piece):
                        return
        self._channel.end(wire.STDIN)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bound the wait for the process inside, which another process may have stopped. Raises SandboxFileError."""
        try:
            async with asyncio.timeout(self._stall_s):
                yield
        except TimeoutError as error:
            raise _late(self._path, self._stall_s) from error

    async def read(self) -> bytes:
        """Return the next piece of content, empty at the end. Raises SandboxFileError if it is late."""
        async with self._in_time():
            return await self.incoming.read()

    async def answer(self) -> Mapping[str, Any]:
        """Wait for the end and return the answer. Raises a SandboxFileError, or the exception of the content's
        source.
        """
        await asyncio.wait((self._sending, self._channel.closed), return_when=asyncio.FIRST_COMPLETED)
        if self._sending.done():
            self._sending.result()
        try:
            async with self._in_time():
                await asyncio.shield(self._channel.closed)
        except OperationFailed as error:
            kind = "pids" if error.kind == "pids" else "other"
            raise SandboxFileError(f"{self._path}: {error}", path=self._path, kind=kind) from error
        if not self._answer:
            message = f"{self._path}: the operation ended before it was complete"
            raise SandboxFileError(message, path=self._path, kind="timeout")
        answer = _read_answer(bytes(self._answer), self._path)
        refused = answer.get("error")
        if isinstance(refused, dict):
            raise _file_error(refused, self._path)
        return answer

    async def close(self) -> None:
        """Cancel the operation, finished or not."""
        self._channel.close()
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)


class FileWatch:
    """Yield changes below a watched path until it is closed or gone; a slow reader gets the change `lost`."""

    def __init__(self, operation: FileOperation, path: str):
        self._operation, self._path = operation, path
        self._lines = _lines(operation.incoming, path)
        self._is_closed = asyncio.Event()

    async def _begin(self) -> None:
        first = await anext(self._lines, None)
        if first is None:
            await self._operation.answer()
        if first is None or first.get("event") != "watching":
            raise SandboxFileError(f"{self._path}: the answer is invalid", path=self._path, kind="other")

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self._changes()

    async def _changes(self) -> AsyncIterator[FileChange]:
        async for line in self._lines:
            yield _file_change(line, self._path)
        if not self._is_closed.is_set():
            await self._operation.answer()

    async def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        await self._operation.close()


class LiveFiles(OffersFunctions):
    """Provide the file operations of every live sandbox, and the functions that its programs may call."""

    file_timeout_s = FILE_S  # at most the sandbox's own
    clock_slack_ns = 0  # how far the workspace's clock may lag behind init's

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
        named = self._named(path)
        operation = FileOperation(
            link.open("files", do=do, path=named, timeout_s=timeout_s, **arguments), path, content, self.file_timeout_s
        )
        try:
            yield operation
        finally:
            await operation.close()

    def _named(self, path: str) -> str | dict[str, str]:
        if not path or "\0" in path:
            raise InvalidRequest(f"path: {path!r} is not valid; give text without NUL characters")
        try:
            return pack_text(self.absolute(path))
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
                raise _late(path, self.file_timeout_s) from error

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

    async def read_path(self, path: str, *, max_bytes: int, offset: int = 0, count: int | None = None) -> bytes:
        """Return a file, or `count` bytes of it from `offset` on. Raises SandboxFileTooLarge beyond `max_bytes`."""
        _, data = await self.file(
            "read",
            path,
            max_bytes=_natural("max_bytes", max_bytes),
            offset=_natural("offset", offset),
            count=_count(count),
        )
        return data

    async def read_stream(self, path: str, *, offset: int = 0, count: int | None = None) -> AsyncIterator[bytes]:
        """Yield a file piece by piece at the reader's pace; close the iterator to stop earlier."""
        offset, count = _natural("offset", offset), _count(count)
        async with (
            self._outgoing_turns,
            self._operation("read", path, timeout_s=None, offset=offset, count=count) as operation,
        ):
            while piece := await operation.read():
                yield piece
            await operation.answer()

    async def write_path(
        self, path: str, data: Content, *, how: str = "replace", mode: int | None = None, parents: bool = True
    ) -> None:
        """Write a file and create missing folders above it: `how` is `replace`, `append` or `new`.

        `data` may be an iterator, which is consumed no faster than the sandbox writes.
        """
        await self.file("write", path, content=data, how=how, mode=_count(mode), parents=parents)

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

    async def stat_path(self, path: str) -> FileInfo:
        """Describe the file or folder at a path."""
        answer, _ = await self.file("stat", path)
        return _file_info(answer, path)

    async def list_path(self, path: str, *, recursive: bool = False) -> Sequence[FileInfo]:
        """Describe the entries of a folder, sorted by name; with `recursive`, those below it, too."""
        _, data = await self.file("list", path, max_bytes=MOST_LIST_BYTES, entries=MOST_ENTRIES, recursive=recursive)
        if len(data) <= MOST_LINE_BYTES:
            return list(read_rows(data, path))
        return await asyncio.to_thread(lambda: list(read_rows(data, path)))

    async def make_folder(self, path: str, *, parents: bool = True) -> None:
        await self.file("make_folder", path, parents=parents)

    async def move_path(self, path: str, target: str, *, replaces: bool = False) -> None:
        await self.file("move", path, target=self._named(target), replaces=replaces)

    async def remove_path(self, path: str, *, recursive: bool = False) -> None:
        await self.file("remove", path, recursive=recursive)

    async def chmod_path(self, path: str, mode: int) -> None:
        """Set the permission bits of a file or a folder."""
        await self.file("chmod", path, mode=_natural("mode", mode))

    async def pack_path(self, path: str, take: Callable[[bytes], None]) -> int:
        """Pass a folder or file as a tar archive to `take`, piece by piece; return the number of files left out."""
        async with self._outgoing_turns, self._packing(path) as operation:
            while piece := await operation.read():
                take(piece)
            return _skipped(await operation.answer())

    async def pack_stream(
        self, path: str, *, max_bytes: int | None = None, note_skipped: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[bytes]:
        """Yield a tar archive at the reader's pace, and report the number of files left out at the end.

        Archives larger than `max_bytes` are refused.
        """
        async with self._outgoing_turns, self._packing(path, max_bytes=_count(max_bytes)) as operation:
            while piece := await operation.read():
                yield piece
            note_skipped(_skipped(await operation.answer()))

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
    async def watch_path(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileWatch]:
        """Watch a folder or file; the returned object yields every change from then on."""
        if self._watches >= MOST_WATCHES:
            raise InvalidRequest(f"path: {MOST_WATCHES} watches of this sandbox are open; close one before another")
        self._watches += 1
        try:
            async with self._operation("watch", path, timeout_s=None, recursive=recursive) as operation:
                watch = FileWatch(operation, path)
                try:
                    async with asyncio.timeout(self.file_timeout_s):
                        await watch._begin()
                except TimeoutError as error:
                    raise _late(path, self.file_timeout_s) from error
                try:
                    yield watch
                finally:
                    await watch.close()
        finally:
            self._watches -= 1


def _natural(name: str, value: int) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidRequest(f"{name}: {value!r} is not valid; give an integer from 0 on")
    return value


def _count(value: int | None) -> int | None:
    return None if value is None else _natural("count", value)


def _late(path: str, seconds: float) -> SandboxFileError:
    return SandboxFileError(f"{path}: not finished within {seconds:g} s", path=path, kind="timeout")


def _no_sense(path: str, error: Exception | str) -> SandboxFileError:
    return SandboxFileError(f"{path}: the answer is invalid: {error}", path=path, kind="other")


def _skipped(answer: Mapping[str, Any]) -> int:
    skipped = answer.get("skipped")
    return skipped if isinstance(skipped, int) else 0


def _read_answer(data: bytes, path: str) -> dict[str, Any]:
    try:
        return read_guest_object(data)
    except ValueError as error:
        raise _no_sense(path, error) from error


def _file_error(refused: Mapping[str, Any], path: str) -> SandboxFileError:
    kind = str(refused.get("kind"))[:40]
    try:
        where = unpack_text(refused.get("path")) or path
    except ValueError:
        where = path
    message = REMEDIES.get(kind, str(refused.get("message"))[:1000])
    return FILE_ERRORS.get(kind, SandboxFileError)(f"{where}: {message}", path=where, kind=kind)


def _file_info(row: Mapping[str, Any], path: str) -> FileInfo:
    try:
        return FileInfo(
            name=unpack_text(row["name"]),
            type=_file_type(row["type"]) or "other",
            size=int(row["size"]),
            mode=int(row["mode"]) & 0o7777,
            mtime=float(row["mtime"]),
            uid=int(row["uid"]),
            gid=int(row["gid"]),
            target=unpack_text(row.get("target", "")),
            leads_to=_file_type(row.get("leads_to")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _no_sense(path, error) from error


def _file_type(value: object) -> Any:  # noqa: ANN401 - one of FileType, or None
    return value if value in ("file", "directory", "link", "other") else None


def _file_change(line: Mapping[str, Any], path: str) -> FileChange:
    try:
        kind = line["event"]
        if kind not in CHANGES:
            raise ValueError(f"no change {str(kind)[:40]!r}")
        return FileChange(
            kind=kind,
            path=unpack_text(line["path"]),
            target=unpack_text(line.get("target", "")),
            is_directory=line.get("type") == "directory",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _no_sense(path, error) from error


def read_rows(data: bytes, path: str) -> Iterator[FileInfo]:
    """Yield the entries of a folder, one JSON object a line. Raises SandboxFileError for an invalid line or too
    many.
    """
    lines = data.split(b"\n", MOST_ENTRIES + 1)
    if len(lines) > MOST_ENTRIES + 1:
        raise _no_sense(path, f"more than {MOST_ENTRIES} rows")
    for line in lines:
        if line:
            yield _file_info(_object(line, path), path)


def _object(line: bytes, path: str) -> dict[str, Any]:
    """Parse one line here: lines are short enough not to delay the event loop."""
    if len(line) > MOST_LINE_BYTES:
        raise _no_sense(path, f"a line of {len(line)} bytes")
    try:
        row = _LINE.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise _no_sense(path, error) from error
    if not isinstance(row, dict):
        raise _no_sense(path, "a line holds no object")
    return row


async def _lines(stream: ByteStream, path: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the object on each line of the content."""
    remainder = b""
    while data := await stream.read():
        *lines, remainder = (remainder + data).split(b"\n")
        if len(remainder) > MOST_LINE_BYTES:
            raise _no_sense(path, "a line that does not end")
        for line in lines:
            yield _object(line, path)
