"""The output of processes for several readers at once: it is read once, and each reader gets all that comes from then.

A reader that is behind makes the process wait, as a pipe does. One that takes nothing for a while is dropped, so that
neither the process nor the others wait for it. Without a reader the process is let go: the sandbox keeps the last of
its output for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.errors import ClocheError
from cloche.core.processes import ProcessKey
from cloche.core.protocols import OpenStream
from cloche.core.result import Result
from cloche.execution.processes import AsyncProcess

MOST_BEHIND = 1 << 18  # bytes that one reader may be behind before the process waits
ALONE_S, AMONG_OTHERS_S = 60.0, 5.0  # for a reader to take something, while the process waits for it
MOST_READERS = 64  # of one process
Piece = tuple[str, bytes]


class TooSlow(ClocheError):
    """Report that a reader was dropped, or that a process has too many readers."""


class OutputReader:
    """Be one reader: pieces of `stdout` and `stderr` as they come, then the result."""

    def __init__(self, output: SharedOutput):
        self.output, self.behind = output, 0
        self.taken_at = asyncio.get_running_loop().time()
        self._pieces: deque[Piece] = deque()
        self._error: BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None

    @property
    def process(self) -> AsyncProcess:
        """Return the process, for its pid and whether it has a terminal."""
        return self.output.process

    def put(self, name: str, data: bytes) -> None:
        """Add a piece."""
        if not self._pieces:
            self.taken_at = asyncio.get_running_loop().time()
        self._pieces.append((name, data))
        self.behind += len(data)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End it with an error, now."""
        if self._error is None:
            self._error = error
            self._pieces.clear()
            self.behind = 0
            self.wake()

    def wake(self) -> None:
        """Have `next` look again."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self, seconds: float) -> Piece | Result | None:
        """Return the next piece, after all of them the result; None after so many seconds. Raises ClocheError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            if self._error is not None:
                raise self._error
            if self._pieces:
                return self._take()
            if self.output.end is not None:
                return self.output.end
            if loop.time() >= until:
                return None
            self._waiting = loop.create_future()
            timer = loop.call_at(until, self.wake)
            try:
                await self._waiting
            finally:
                timer.cancel()

    def _take(self) -> Piece:
        name, data = self._pieces.popleft()
        while self._pieces and self._pieces[0][0] == name and len(data) < MOST_BEHIND // 4:
            data += self._pieces.popleft()[1]
        self.behind -= len(data)
        self.taken_at = asyncio.get_running_loop().time()
        self.output.note_taken()
        return name, data


class SharedOutput:
    """Read a process, for all of its readers."""

    def __init__(self, process: AsyncProcess, tag: str = ""):
        self.process, self.tag = process, tag
        self.readers: set[OutputReader] = set()
        self.end: Result | None = None
        self.is_over = False
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._read())

    def note_taken(self) -> None:
        """Note that a reader has taken something."""
        self._taken.set()

    def add(self) -> OutputReader:
        """Return a new reader. Raises TooSlow for one too many."""
        if len(self.readers) >= MOST_READERS:
            raise TooSlow(f"process {self.process.id} has {MOST_READERS} readers, the maximum")
        reader = OutputReader(self)
        self.readers.add(reader)
        self._taken.set()  # how long another one is waited for depends on it
        return reader

    async def _read(self) -> None:
        errors = asyncio.ensure_future(self._pass_on("stderr", self.process.stderr))
        try:
            await self._pass_on("stdout", self.process.stdout)
            await errors
            self.end = await self.process.wait()
        except ClocheError as error:  # another client has taken it, or the sandbox has ended
            for reader in list(self.readers):
                reader.fail(error)
        finally:
            self.is_over = True
            errors.cancel()
            for reader in list(self.readers):
                reader.wake()

    async def _pass_on(self, name: str, stream: OpenStream) -> None:
        while data := await stream.read():
            for reader in list(self.readers):
                reader.put(name, data)
            await self._wait_for_readers()

    async def _wait_for_readers(self) -> None:
        """Wait until no reader is too far behind; drop those that take nothing."""
        while late := [reader for reader in self.readers if reader.behind > MOST_BEHIND]:
            seconds = ALONE_S if len(self.readers) == 1 else AMONG_OTHERS_S
            until = min(reader.taken_at for reader in late) + seconds
            self._taken.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._taken.wait()
            except TimeoutError:
                for reader in late:
                    if reader.taken_at + seconds <= asyncio.get_running_loop().time():
                        self.readers.discard(reader)
                        reader.fail(TooSlow(f"this reader was dropped: it has read nothing for {seconds:g} s"))

    async def close(self) -> None:
        """Let the process go on without readers."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if self.end is None:
            await self.process.detach()


class SharedOutputs:
    """Hold the processes of one sandbox that have readers."""

    def __init__(self) -> None:
        self._by_id: dict[str, SharedOutput] = {}
        self._attaching = asyncio.Lock()

    @asynccontextmanager
    async def started(self, process: AsyncProcess, tag: str = "") -> AsyncIterator[OutputReader]:
        """Yield the first reader of a new process."""
        async with self._reader(self._add(process, tag)) as reader:
            yield reader

    @asynccontextmanager
    async def found(self, key: ProcessKey, find: Callable[..., Awaitable[AsyncProcess]]) -> AsyncIterator[OutputReader]:
        """Yield another reader of a process, which `find` attaches to if it has none. Raises InvalidRequest."""
        async with self._attaching:
            output = self._known(key)
            if output is None:
                process = await find(**key)
                output = self._by_id.get(process.id) or self._add(process, str(key.get("tag", "")))
            reader = output.add()
        async with self._reader(output, reader):
            yield reader

    def process(self, process_id: str) -> AsyncProcess | None:
        """Return a process that has readers here."""
        output = self._by_id.get(process_id)
        return None if output is None or output.is_over else output.process

    def _known(self, key: ProcessKey) -> SharedOutput | None:
        ((name, value),) = key.items()
        for output in reversed(self._by_id.values()):
            facts: dict[str, Any] = {"id": output.process.id, "pid": output.process.pid, "tag": output.tag}
            if facts[name] == value and not output.is_over:
                return output
        return None

    def _add(self, process: AsyncProcess, tag: str) -> SharedOutput:
        output = self._by_id[process.id] = SharedOutput(process, tag)
        return output

    @asynccontextmanager
    async def _reader(self, output: SharedOutput, reader: OutputReader | None = None) -> AsyncIterator[OutputReader]:
        reader = reader or output.add()
        try:
            yield reader
        finally:
            output.readers.discard(reader)
            output.note_taken()
            await asyncio.shield(asyncio.ensure_future(self._let_go(output)))

    async def _let_go(self, output: SharedOutput) -> None:
        async with self._attaching:  # nobody attaches to it meanwhile
            if not output.readers and self._by_id.get(output.process.id) is output:
                del self._by_id[output.process.id]
                await output.close()
