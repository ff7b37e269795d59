"""One operation on files of a live sandbox, and a watch, at the caller's end; see `live_files`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.errors import SandboxFileError
from cloche.core.processes import FileChange
from cloche.init import wire

from .file_answers import (
    MOST_LINE_BYTES,
    file_change,
    file_error,
    late,
    no_sense,
    path_of,
    read_answer,
    read_lines,
)
from .init_link import Operation, OperationFailed
from .live_streams import ByteStream

MOST_ANSWER_BYTES = 1 << 17
SYNCED = "synced"  # the line of a watch that ends an answer to `FileWatch.so_far`
Content = bytes | bytearray | memoryview | AsyncIterable[bytes]


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
            raise late(self._path, self._stall_s) from error

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
            is_user = error.details.get("step") == "user"
            kind = "user" if is_user else "pids" if error.kind == "pids" else "other"
            raise SandboxFileError(f"{self._path}: {error}", path=self._path, kind=kind) from error
        if not self._answer:
            message = f"{self._path}: the operation ended before it was complete"
            raise SandboxFileError(message, path=self._path, kind="timeout")
        answer = read_answer(bytes(self._answer), self._path)
        refused = answer.get("error")
        if isinstance(refused, dict):
            raise file_error(refused, self._path)
        return answer

    async def close(self) -> None:
        """Cancel the operation, finished or not."""
        self._channel.close()
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)


class FileWatch:
    """Yield changes below a watched path until it is closed or gone; a slow reader gets the change `lost`."""

    def __init__(self, operation: FileOperation, path: str, requests: asyncio.Queue[bytes]):
        self._operation, self._path, self._requests = operation, path, requests
        self._lines = read_lines(operation.incoming, path)
        self._is_closed = asyncio.Event()
        self._asked = self._synced = 0
        # Once it has begun: whether a folder is watched, and its absolute path.
        self.is_directory, self.folder = False, ""

    async def begin(self) -> None:
        """Wait until it is set up. Raises SandboxFileError."""
        first = await anext(self._lines, None)
        if first is None:
            await self._operation.answer()
        if first is None or first.get("event") != "watching":
            raise SandboxFileError(f"{self._path}: the answer is invalid", path=self._path, kind="other")
        self.is_directory, self.folder = first.get("type") == "directory", path_of(first, self._path, "target")

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self._changes()

    async def _changes(self) -> AsyncIterator[FileChange]:
        async for line in self._lines:
            if not self._is_sync(line):
                yield file_change(line, self._path)
        if not self._is_closed.is_set():
            await self._operation.answer()

    async def so_far(self) -> Sequence[FileChange]:
        """Return all changes that were made until now and not read yet, without waiting for others."""
        self._asked += 1
        number, changes = self._asked, list[FileChange]()
        self._requests.put_nowait(b"?")
        async for line in self._lines:
            if not self._is_sync(line):
                changes.append(file_change(line, self._path))
            elif self._synced >= number:
                return changes
        if not changes and not self._is_closed.is_set():
            await self._operation.answer()
        return changes

    def _is_sync(self, line: Mapping[str, Any]) -> bool:
        is_sync = line.get("event") == SYNCED
        self._synced += is_sync
        return is_sync

    async def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        await self._operation.close()


async def each(requests: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """Yield what comes to a queue, without end."""
    while True:
        yield await requests.get()


async def first_line(operation: FileOperation, path: str) -> tuple[bytes, bytes, bytes]:
    """Return the first line of content, the end of the line, and what follows. Raises SandboxFileError without one."""
    data = b""
    while b"\n" not in data:
        piece = await operation.read()
        if not piece or len(data) > MOST_LINE_BYTES:
            await operation.answer()
            raise no_sense(path, "its first line is missing")
        data += piece
    return data.partition(b"\n")


async def rest(operation: FileOperation, data: bytes) -> AsyncIterator[bytes]:
    """Yield content that has come, and what follows it."""
    if data:
        yield data
    while piece := await operation.read():
        yield piece
    await operation.answer()
