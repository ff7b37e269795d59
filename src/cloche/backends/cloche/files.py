"""Files of a sandbox at a service: each operation is one call, its content on the call's channels.

A reader grants credit as it consumes content; a writer sends as fast as the sandbox writes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.errors import (
    BackendUnavailable,
    ClocheError,
    InvalidRequest,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
)
from cloche.core.languages import is_program_file
from cloche.core.loops import finish
from cloche.core.processes import OWN_RIGHTS, ByteRange, FileChange, FileInfo, FilePart, FileRights, part_of
from cloche.core.remote import RemoteAccount
from cloche.core.request import InputFile
from cloche.core.result import FileRecord, SaveFiles

from ..archive import Spool, pack
from ..file_answers import CHANGES
from ..live_files import FILE_S, check_metadata
from ..live_streams import ByteStream
from ..remote.failures import Failure, remote_error
from .calls import SandboxCalls
from .connections import begin, outcome
from .fields import mode_field, path_fields
from .results import files_saver
from .wire import IN, JSON, OUT, Call

MOST_PACKED = 32 << 20  # maximum size of files written as one archive
FETCHED_AT_ONCE = 8
FETCH_S = 600.0  # for all files of a result
Content = bytes | bytearray | memoryview | AsyncIterable[bytes]


class RemoteFiles(SandboxCalls):
    """Operations on files; see core.file_protocols."""

    # Content out.

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content."""
        return await self.read_path(path, max_bytes=max_bytes)

    async def read_path(
        self, path: str, *, max_bytes: int, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> bytes:
        """Return a file's content or a part of it. Raises SandboxFileTooLarge."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(FILE_S):
                async for piece in self.read_stream(path, offset=offset, count=count, by=by):
                    size += len(piece)
                    if size > max_bytes:
                        raise SandboxFileTooLarge(
                            f"{path}: it has more than {max_bytes} bytes", path=path, kind="too_large"
                        )
                    pieces.append(piece)
        except TimeoutError as error:
            raise SandboxFileError(f"{path}: not finished within {FILE_S:g} s", path=path, kind="timeout") from error
        return b"".join(pieces)

    async def read_stream(
        self, path: str, *, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces; close the iterator to stop earlier."""
        async with contextlib.aclosing(self._pieces(path, offset=offset, count=count, by=by)) as pieces:
            async for piece in pieces:
                yield piece

    def _pieces(
        self, path: str, *, offset: int = 0, count: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncGenerator[bytes]:
        fields = {**path_fields(path), **_rights(by), "offset": _natural("offset", offset)}
        if count is not None:
            fields["count"] = _natural("count", count)
        return self._content("file.read", path, fields)

    @asynccontextmanager
    async def reading(
        self, path: str, *, byte_range: ByteRange | None = None, by: FileRights = OWN_RIGHTS
    ) -> AsyncIterator[tuple[FilePart, AsyncIterator[bytes]]]:
        """Yield the facts of a file, or of a range of it, and its content piece by piece."""
        info = await self.stat_path(path, by=by)
        if info.type == "link" and info.real:
            info = await self.stat_path(info.real, by=by)
        part = part_of(info, byte_range)
        async with contextlib.aclosing(self._pieces(path, offset=part.offset, count=part.count, by=by)) as pieces:
            yield part, pieces

    async def pack_path(self, path: str, take: Callable[[bytes], None]) -> int:
        """Pass a folder as a tar archive to `take`; return the number of files left out."""
        left_out: list[int] = []
        async for piece in self.pack_stream(path, note_skipped=left_out.append):
            take(piece)
        return sum(left_out)

    async def pack_stream(
        self, path: str, *, max_bytes: int | None = None, note_skipped: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[bytes]:
        """Yield a folder as a tar archive. Raises SandboxFileTooLarge beyond `max_bytes`."""
        size = 0

        def note(answer: Mapping[str, Any]) -> None:
            left_out = answer.get("leftOut")
            note_skipped(left_out if type(left_out) is int and left_out >= 0 else 0)

        async for piece in self._content("file.pack", path, path_fields(path), note):
            size += len(piece)
            if max_bytes is not None and size > max_bytes:
                raise SandboxFileTooLarge(f"{path}: more than {max_bytes} bytes", path=path, kind="too_large")
            yield piece

    async def changes_stream(
        self,
        root: str,
        *,
        since: int | None,
        max_bytes: int,
        max_entries: int,
        skip: Sequence[str] = (),
        note_answer: Callable[[Mapping[str, Any]], None],
    ) -> AsyncIterator[bytes]:
        """Yield the changes in a copy of a folder; see core.changes.SupportsChanges."""
        if since is None or skip:
            raise InvalidRequest("workspace: a service reports the changes in a copy of a folder, and in a whole one")
        fields = {**path_fields(root), "since": since, "most": max_bytes, "entries": max_entries}

        def note(answer: Mapping[str, Any]) -> None:
            note_answer({**answer, "too_many": answer.get("tooMany")})

        async for piece in self._content("file.changes", root, fields, note):
            yield piece

    async def _content(
        self,
        verb: str,
        path: str,
        fields: Mapping[str, Any],
        note: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> AsyncGenerator[bytes]:
        call = await begin(self.account, verb, {"sandbox": self.id, **fields})
        stream = incoming(call, OUT)
        size = 0
        try:
            while piece := await stream.read():
                size += len(piece)
                yield piece
            answer = await outcome(call, self.account, "a file was read", timeout_s=FILE_S, path=path)
            if answer.get("size") != size:
                raise remote_error(
                    self.account.provider, Failure.BAD_ANSWER, detail="content is missing", account=self.account
                )
            note(answer)
        finally:
            call.cancel()

    async def fetched(
        self, records: Sequence[FileRecord], max_bytes: int
    ) -> tuple[tuple[FileRecord, ...], SaveFiles | None]:
        """Return those of a result's files that are unchanged since, and the function that saves them."""
        spool, unchanged, loop = Spool(max_bytes), list[FileRecord](), asyncio.get_running_loop()
        ends = loop.time() + FETCH_S
        batch, batch_bytes = list[FileRecord](), 0
        for record in records:
            if record.size > max_bytes - spool.size - batch_bytes or loop.time() > ends:
                continue
            if batch and (len(batch) == FETCHED_AT_ONCE or batch_bytes + record.size > MOST_PACKED):
                unchanged += await self._fetch_all(batch, spool)
                batch, batch_bytes = [], 0
            if record.size > MOST_PACKED:
                unchanged += [record] if await self._fetch(record, spool) else []
            else:
                batch.append(record)
                batch_bytes += record.size
        unchanged += await self._fetch_all(batch, spool)
        return tuple(unchanged), files_saver(spool, unchanged)

    async def _fetch_all(self, records: Sequence[FileRecord], spool: Spool) -> list[FileRecord]:
        """Add small files to a spool; return those that are unchanged."""

        async def fetched(record: FileRecord) -> bytes | None:
            try:
                return await self.read_path(record.path, max_bytes=record.size)
            except SandboxFileError:
                return None

        unchanged = []
        for record, data in zip(records, await asyncio.gather(*map(fetched, records)), strict=True):
            if data is not None and _is(record, data):
                await asyncio.to_thread(spool.add, data)
                unchanged.append(record)
        return unchanged

    async def _fetch(self, record: FileRecord, spool: Spool) -> bool:
        """Add a large file to a spool, piece by piece; tell whether it is unchanged."""
        before, digest = spool.size, hashlib.sha256()
        with contextlib.suppress(SandboxFileError, TimeoutError):
            async with asyncio.timeout(FILE_S), contextlib.aclosing(self._pieces(record.path)) as pieces:
                async for piece in pieces:
                    if spool.size - before + len(piece) > record.size:
                        break
                    digest.update(piece)
                    await finish(asyncio.to_thread(spool.add, piece))
                else:
                    if spool.size - before == record.size and digest.hexdigest() == record.sha256:
                        return True
        await asyncio.to_thread(spool.cut, before)
        return False

    # Content in.

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders."""
        await self.write_path(path, data)

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Create or replace all files: small ones as one archive."""
        if len(files) > 1 and sum(len(file.data) for file in files) <= MOST_PACKED:
            await self.unpack_path("/workspace", await asyncio.to_thread(pack, files))
            return
        for file in files:
            await self.write_path(file.path, file.data, mode=file.mode)

    async def write_path(
        self,
        path: str,
        data: Content,
        *,
        how: str = "replace",
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> str:
        """Write a file, and return its path. An iterator is consumed only as fast as the sandbox writes."""
        fields: dict[str, Any] = {**path_fields(path), **_rights(by), "how": how}
        if mode is not None:
            fields["mode"] = mode_field(mode)
        if metadata is not None:
            fields["metadata"] = check_metadata(metadata)
        return _name(await self._send("file.write", path, fields, data), "path") or path

    async def write_paths(
        self,
        files: Sequence[tuple[str, bytes]],
        *,
        metadata: Mapping[str, str] | None = None,
        by: FileRights = OWN_RIGHTS,
    ) -> Sequence[str]:
        """Write several files, one after the other; return their paths."""
        return [await self.write_path(path, data, metadata=metadata, by=by) for path, data in files]

    async def unpack_path(self, path: str, archive: Content) -> None:
        """Unpack a tar archive into a folder."""
        await self._send("file.unpack", path, path_fields(path), archive)

    async def _send(self, verb: str, path: str, fields: Mapping[str, Any], data: Content) -> Mapping[str, Any]:
        call = await begin(self.account, verb, {"sandbox": self.id, **fields})
        try:
            if isinstance(data, bytes | bytearray | memoryview):
                async with asyncio.timeout(FILE_S):
                    await call.send(IN, memoryview(data))
            else:
                async for piece in data:
                    if not await call.send(IN, piece):
                        break
            call.end(IN)
            return await outcome(
                call, self.account, "a file was written", timeout_s=FILE_S, path=path, where=self.where()
            )
        except TimeoutError as error:
            raise SandboxFileError(f"{path}: not finished within {FILE_S:g} s", path=path, kind="timeout") from error
        finally:
            call.cancel()

    # The rest.

    async def stat_path(self, path: str, *, by: FileRights = OWN_RIGHTS) -> FileInfo:
        """Describe the entry at a path."""
        return self._info(await self.ask_inside("file.stat", {**path_fields(path), **_rights(by)}, path=path))

    async def list_path(
        self, path: str, *, recursive: bool = False, depth: int | None = None, by: FileRights = OWN_RIGHTS
    ) -> Sequence[FileInfo]:
        """Describe the entries of a folder."""
        levels = {} if depth is None else {"depth": depth}
        fields = {**path_fields(path), **_rights(by), **levels, "recursive": recursive}
        answer = await self.ask_inside("file.list", fields, path=path)
        rows = answer.get("items")
        if answer.get("isPartial") is True:
            raise SandboxFileTooLarge(f"{path}: it has more entries than a service lists", path=path, kind="too_large")
        return [self._info(row) for row in rows] if isinstance(rows, list) else []

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        rows = await self.list_path(path, recursive=True)
        prefix = "" if path in (".", "") else f"{path.rstrip('/')}/"
        paths = (f"{prefix}{row.name}" for row in rows if row.type == "file")
        return tuple(file_path for file_path in paths if not is_program_file(file_path))

    async def make_folder(
        self, path: str, *, parents: bool = True, is_new: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Make a folder, and describe it."""
        new = {"isNew": True} if is_new else {}
        fields = {**_text(path, "path"), **_rights(by), **new, "parents": parents}
        return self._info(await self.ask_inside("file.makeFolder", fields, path=path))

    async def move_path(
        self, path: str, target: str, *, replaces: bool = False, parents: bool = False, by: FileRights = OWN_RIGHTS
    ) -> FileInfo:
        """Rename a file or a folder, and describe it."""
        above = {"parents": True} if parents else {}
        ends = {**_text(path, "path"), **_text(target, "target")}
        fields = {**ends, **_rights(by), **above, "replace": replaces}
        return self._info(await self.ask_inside("file.move", fields, path=path))

    async def remove_path(
        self, path: str, *, recursive: bool = False, may_be_gone: bool = False, by: FileRights = OWN_RIGHTS
    ) -> None:
        """Remove a file or a folder."""
        fields = {**path_fields(path), **_rights(by), "recursive": recursive}
        with contextlib.suppress(*([SandboxFileNotFound] if may_be_gone else [])):
            await self.ask_inside("file.remove", fields, path=path)

    async def compose_path(self, path: str, sources: Sequence[str], *, by: FileRights = OWN_RIGHTS) -> str:
        """Write the contents of files as one, remove them, and return its path."""
        named = [_text(source, "sources")["sources"] for source in sources]
        fields = {**_text(path, "path"), **_rights(by), "sources": named}
        return _name(await self.ask_inside("file.compose", fields, path=path), "path") or path

    async def disk_used(self) -> int:
        """Return how many bytes the files take."""
        used = (await self.ask_inside("file.space", {}, path="/")).get("used")
        return used if isinstance(used, int) else 0

    @asynccontextmanager
    async def watch_path(
        self,
        path: str,
        *,
        recursive: bool = False,
        is_exact: bool = False,
        describes: bool = False,
        by: FileRights = OWN_RIGHTS,
    ) -> AsyncIterator[RemoteWatch]:
        """Watch a folder or a file."""
        watch = RemoteWatch(self.account, path, self._info)
        more = {"isExact": is_exact, "describes": describes} if is_exact else {}
        call = await begin(
            self.account, "file.watch",
            {"sandbox": self.id, **path_fields(path), **_rights(by), **more, "recursive": recursive},
            on_event=watch.take,
        )  # fmt: skip
        watch.follow(call)
        try:
            await watch.begin()
            yield watch
        finally:
            watch.end()
            call.cancel()

    def _info(self, row: Any) -> FileInfo:  # noqa: ANN401 - any JSON
        try:
            return FileInfo(
                name=_name(row, "name"), type=_type(row["type"]) or "other", size=int(row["size"]),
                mode=int(row["mode"], 8) & 0o7777, mtime=float(row["mtime"]), uid=int(row["uid"]), gid=int(row["gid"]),
                target=_name(row, "target"), leads_to=_type(row.get("leadsTo")), owner=str(row.get("owner", "")),
                group=str(row.get("group", "")), path=_name(row, "path"), real=_name(row, "real"),
                target_mode=int(row.get("targetMode", "0"), 8) & 0o7777,
                metadata={str(key): str(value) for key, value in (row.get("metadata") or {}).items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise remote_error(
                self.account.provider, Failure.BAD_ANSWER, detail="this does not describe a file", account=self.account
            ) from error


class RemoteWatch:
    """Iterate over changes. If they are not read, the service waits, and further changes are reported as `lost`."""

    def __init__(self, account: RemoteAccount, path: str, info: Callable[[Any], FileInfo]):
        self._account, self._path, self._info = account, path, info
        self.is_directory, self.folder = True, path  # as a service says it that knows
        self._changes: deque[tuple[FileChange, int]] = deque()
        self._more = asyncio.Event()
        self._has_begun = self._is_over = False
        self._call: Call | None = None

    def follow(self, call: Call) -> None:
        """Set the call that sends the events."""
        self._call, call.keeps_events = call, True
        call.closed.add_done_callback(lambda _: self._more.set())

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """Queue an event; its credit is granted when it is read."""
        size = self._call.event_size if self._call is not None else 0
        if name == "change":
            self._changes.append((self._change(data), size))
        else:
            self._has_begun = self._has_begun or name == "watching"
            self.is_directory = data.get("isDirectory") is not False
            self.folder = _name(data, "folder") or self.folder
            if self._call is not None:
                self._call.grant(JSON, size)
        self._more.set()

    def _change(self, row: Mapping[str, Any]) -> FileChange:
        """Return a change; a malformed one counts as `lost`."""
        try:
            if row["kind"] not in CHANGES:
                raise ValueError
            entry = row.get("entry")
            return FileChange(
                kind=row["kind"], path=_name(row, "path"), target=_name(row, "target"),
                is_directory=row.get("isDirectory") is True, entry=None if entry is None else self._info(entry),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, ClocheError):
            return FileChange(kind="lost", path="")

    async def so_far(self) -> Sequence[FileChange]:
        """Raise BackendUnavailable: a service tells changes as they come."""
        raise BackendUnavailable("watch: a service does not say which changes there are so far; iterate over them")

    async def begin(self) -> None:
        """Wait until the watch has started. Raises SandboxFileError."""
        assert self._call is not None  # noqa: S101 - it follows one
        try:
            async with asyncio.timeout(FILE_S):
                while not self._has_begun and not self._call.closed.done():
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError as error:
            raise SandboxFileError(
                f"{self._path}: not finished within {FILE_S:g} s", path=self._path, kind="timeout"
            ) from error
        if not self._has_begun:
            await outcome(self._call, self._account, "a folder was watched", timeout_s=FILE_S, path=self._path)

    def end(self) -> None:
        """End the iteration."""
        self._is_over = True
        self._more.set()

    async def __aiter__(self) -> AsyncIterator[FileChange]:
        assert self._call is not None  # noqa: S101 - it follows one
        while True:
            while self._changes:
                change, size = self._changes.popleft()
                self._call.grant(JSON, size)
                yield change
            if self._is_over:
                return
            if self._call.closed.done():
                await outcome(self._call, self._account, "a folder was watched", timeout_s=FILE_S, path=self._path)
                return
            self._more.clear()
            await self._more.wait()


def incoming(call: Call, channel: int) -> ByteStream:
    """Return a stream of the data on a channel of a call."""
    stream = ByteStream(call, channel)

    def take(number: int, data: bytes) -> None:
        if number == channel:
            stream.put(data)
        else:
            call.grant(number, len(data))

    call.on_data = take
    call.on_end = lambda number: stream.put_end() if number == channel else None
    call.closed.add_done_callback(lambda _: stream.put_end())
    return stream


def _is(record: FileRecord, data: bytes) -> bool:
    return len(data) == record.size and hashlib.sha256(data).hexdigest() == record.sha256


def _natural(name: str, value: int) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidRequest(f"{name}: {value!r} is not valid; give an integer from 0 on")
    return value


def _rights(by: FileRights) -> dict[str, Any]:
    fields = {"user": by.user, "owner": by.owner, "atHome": by.at_home}
    return {name: value for name, value in fields.items() if value}


def _text(path: str, name: str) -> dict[str, str]:
    fields = path_fields(path)
    if "path" not in fields:
        raise InvalidRequest(f"{name}: {path!r} is not UTF-8, which a service does not support here")
    return {name: fields["path"]}


def _name(row: Mapping[str, Any], key: str) -> str:
    encoded = row.get(f"{key}Base64")
    if isinstance(encoded, str):
        return base64.b64decode(encoded).decode("utf-8", "surrogateescape")
    name = row.get(key, "")
    if not isinstance(name, str):
        raise TypeError
    return name


def _type(value: object) -> Any:  # noqa: ANN401 - one of FileType, or None
    return value if value in ("file", "directory", "link", "other") else None
