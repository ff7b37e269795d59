"""Read a guest's streams: bounded in memory, drained to the end whatever comes.

A guest that writes faster than anybody reads must neither block the kill nor grow the caller, so reading never
stops; beyond the limit only a head and a tail are kept, and beyond the flood limit nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cloche.core.bounded import HeadTail

CHUNK_BYTES = 65_536
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


def ignore(data: bytes) -> None:
    """Keep a chunk nowhere else than in the bounded buffer."""
