"""The pipes of one run: what the guest reads and writes, seen from the caller's side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cloche.core.events import Event, OutputChunk, Sink, Started, Stream, discard
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause
from cloche.core.told import MAX_TOLD_BYTES, Told, ToldReader

from .streams import StreamReader

DRAIN_S = 0.3
UNHEARD_S = 0.003  # what a short program says waits in its pipes until the end: listening costs more than reading
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
_F_ADD_SEALS = 1033


class Pipes:
    """Hold the descriptors of one run. Use from a running event loop, and close in any case."""

    def __init__(self, stdin: bytes, limits: Limits, kill: Callable[[KillCause], None], sink: Sink):
        self._guest: list[int] = []
        self._readers: dict[str, StreamReader] = {}
        self._told = ToldReader()
        self._listening: asyncio.TimerHandle | None = None
        try:
            self._guest.append(_stdin(stdin))
            for stream in ("stdout", "stderr"):
                self._readers[stream] = self._reader(stream, limits, kill, sink)
            self._readers["value"] = self._new_reader(
                1, MAX_TOLD_BYTES, self._hearer(kill), lambda: kill(KillCause.OUTPUT_LIMIT)
            )
        except BaseException:
            self.close()
            raise

    def _reader(self, stream: Stream, limits: Limits, kill: Callable[[KillCause], None], sink: Sink) -> StreamReader:
        return self._new_reader(
            limits.output_bytes,
            limits.flood_bytes,
            _ignore if sink is discard else lambda data: sink(OutputChunk(stream=stream, data=data)),
            lambda: kill(KillCause.OUTPUT_LIMIT),
        )

    def _new_reader(
        self, limit: int, flood: int, on_chunk: Callable[[bytes], None], on_flood: Callable[[], None]
    ) -> StreamReader:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._guest.append(theirs)
        return StreamReader(ours, limit=limit, flood_limit=flood, on_chunk=on_chunk, on_flood=on_flood)

    def _hearer(self, kill: Callable[[KillCause], None]) -> Callable[[bytes], None]:
        """Return what reads the value as it comes, and ends a run that tells too much."""
        told = self._told

        def hear(data: bytes) -> None:
            was_refused = bool(told.refused)
            told.feed(data)
            if told.refused and not was_refused:
                kill(KillCause.OUTPUT_LIMIT)

        return hear

    def guest_ends(self) -> tuple[int, ...]:
        """Return the guest's ends: standard input, output, error, and the value's pipe."""
        return tuple(self._guest)

    def close_guest_ends(self) -> None:
        """Let go of the guest's ends, so that the pipes end with the guest."""
        while self._guest:
            os.close(self._guest.pop())

    def listen(self) -> None:
        """Read what comes as it comes, from now on; until then the pipes hold it."""
        for reader in self._readers.values():
            reader.listen()

    def listen_soon(self, seconds: float = UNHEARD_S) -> None:
        """Read what comes as it comes, once the program has run for a while."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().call_later(seconds, self.listen)

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
        if self._listening is not None:
            self._listening.cancel()
        self.close_guest_ends()
        for reader in self._readers.values():
            if not reader.has_ended:
                reader.close()

    def kept(self, stream: Stream) -> bytes:
        return self._readers[stream].output.kept()

    @property
    def is_truncated(self) -> bool:
        return self._readers["stdout"].output.is_truncated or self._readers["stderr"].output.is_truncated

    def told(self) -> Told:
        """Return what the guest told of its value, and what it showed."""
        return self._told.told()


def _ignore(data: bytes) -> None:
    """Keep a chunk nowhere else than in the bounded buffer."""


def _stdin(data: bytes) -> int:
    """Return a descriptor to read `data` from: a sealed memory file, so that no amount of it can block anybody."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    import fcntl

    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def started_first(sink: Sink) -> Sink:
    """Hold output back until `Started` was handed on: it comes another way, and may be faster."""
    held: list[Event] | None = []

    def hand_on(event: Event) -> None:
        nonlocal held
        if held is None:
            sink(event)
        elif not isinstance(event, Started):
            held.append(event)
        else:
            early, held = held, None
            for one in (event, *early):
                sink(one)

    return hand_on
