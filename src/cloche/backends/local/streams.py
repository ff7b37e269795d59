"""Read a guest's streams: bounded in memory, drained to the end whatever comes.

A guest that writes faster than anybody reads must neither block the kill nor grow the caller, so reading never
stops; beyond the limit only a head and a tail are kept, and beyond the flood limit nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cloche.core.bounded import HeadTail
from cloche.core.events import OutputChunk, Sink, Stream, discard

CHUNK_BYTES = 65_536
DRAIN_S = 0.3
PIPE_BYTES = 1 << 20  # the most that an ordinary user lets a pipe hold, unless the host says otherwise


class StreamReader:
    """Read one pipe to its end on the running event loop."""

    def __init__(
        self,
        fd: int,
        *,
        limit: int,
        flood_limit: int,
        on_chunk: Callable[[bytes], None],
        on_flood: Callable[[], None],
    ):
        self.output = HeadTail(limit)
        self._fd, self._flood_limit = fd, flood_limit
        self._on_chunk, self._on_flood = on_chunk, on_flood
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] | None = None
        self._is_listening = self.has_ended = False
        os.set_blocking(fd, False)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Return what is done when the stream has ended; few ever wait for it."""
        if self._ended is None:
            self._ended = self._loop.create_future()
            if self._fd < 0:
                self._ended.set_result(None)
        return self._ended

    def listen(self) -> None:
        """Read from now on whatever comes, as it comes."""
        if not self._is_listening and self._fd >= 0:
            self._is_listening = True
            self._loop.add_reader(self._fd, self._read)

    def renew(self) -> None:
        """Begin anew with what comes from now on, for a stream that outlives a run."""
        self._on_chunk = ignore
        if self.output.total:
            self.output = HeadTail(self.output.limit)

    def hand_on_to(self, on_chunk: Callable[[bytes], None]) -> None:
        """Hand on what comes, and first what has come since it began anew."""
        self._on_chunk = on_chunk
        if self.output.total:
            on_chunk(self.output.kept())

    def _read(self) -> None:
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        else:
            self._take(data)

    def finish(self, *, is_quiet: bool = False) -> bool:
        """Read what is there without waiting; tell whether that was the stream's end, or nobody writes to it any more.

        No more than a pipe can hold: somebody who still writes, faster than we read, would keep us here for ever.
        """
        last = self.output.total + PIPE_BYTES
        while self._fd >= 0 and self.output.total < last:
            before = self.output.total
            self._read()
            if self.output.total == before and self._fd >= 0:
                return is_quiet
        return self._fd < 0

    def _take(self, data: bytes) -> None:
        was_flooded = self.output.total > self._flood_limit
        self.output.add(data)
        if was_flooded:
            return
        self._on_chunk(data)
        if self.output.total > self._flood_limit:
            self._on_flood()

    def close(self) -> None:
        """Stop reading and close the pipe; the stream counts as ended."""
        if self._fd >= 0:
            if self._is_listening:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd, self.has_ended = -1, True
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class StreamSet:
    """Hold the pipes that a guest writes to: our ends, and the guest's until it has them. Close it in any case."""

    def __init__(self) -> None:
        self._guest: list[int] = []
        self._readers: dict[str, StreamReader] = {}

    def _new_pipe(self) -> int:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._guest.append(theirs)
        return ours

    def _add_reader(
        self, name: str, limit: int, flood_limit: int, on_chunk: Callable[[bytes], None], on_flood: Callable[[], None]
    ) -> None:
        self._readers[name] = StreamReader(
            self._new_pipe(), limit=limit, flood_limit=flood_limit, on_chunk=on_chunk, on_flood=on_flood
        )

    def close_guest_ends(self) -> None:
        """Close the guest's ends, so that the pipes end with the guest."""
        while self._guest:
            os.close(self._guest.pop())

    async def drain(self, *, is_quiet: bool = False) -> None:
        """Read what is still in the pipes. Everything that could write is dead; a bound is there all the same.

        Where it `is_quiet`, all that could write does so no more, though it may yet hold its ends.
        """
        self.close_guest_ends()
        open_ones = [reader for reader in self._readers.values() if not reader.finish(is_quiet=is_quiet)]
        for reader in open_ones:
            reader.listen()
        if open_ones:
            await asyncio.wait([reader.ended for reader in open_ones], timeout=DRAIN_S)

    def close(self) -> None:
        """Close both ends of all pipes."""
        self.close_guest_ends()
        for reader in self._readers.values():
            if not reader.has_ended:
                reader.close()

    def kept(self, stream: Stream) -> bytes:
        """Return what is kept of a stream."""
        return self._readers[stream].output.kept()

    @property
    def is_truncated(self) -> bool:
        """Tell whether something of the output was left out."""
        return self._readers["stdout"].output.is_truncated or self._readers["stderr"].output.is_truncated


def to_sink(stream: Stream, sink: Sink) -> Callable[[bytes], None]:
    """Return what hands the pieces of a stream on."""
    return ignore if sink is discard else lambda data: sink(OutputChunk(stream=stream, data=data))


def ignore(data: bytes) -> None:
    """Keep a chunk nowhere else than in the bounded buffer."""
