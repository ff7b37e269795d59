"""The pipes of one run: what the guest reads and writes, seen from the caller's side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cloche.core.events import Event, Sink, Started, Stream
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause
from cloche.core.told import MAX_TOLD_BYTES, Told, ToldReader

from .streams import StreamSet, to_sink

UNHEARD_S = 0.003  # what a short program says waits in its pipes until the end: listening costs more than reading
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
_F_ADD_SEALS = 1033


class Pipes(StreamSet):
    """Hold the descriptors of one run. Use from a running event loop, and close in any case."""

    def __init__(self, stdin: bytes, limits: Limits, kill: Callable[[KillCause], None], sink: Sink):
        super().__init__()
        self._told = ToldReader()
        self._listening: asyncio.TimerHandle | None = None

        def on_flood() -> None:
            kill(KillCause.OUTPUT_LIMIT)

        try:
            self._guest.append(_stdin(stdin))
            streams: tuple[Stream, ...] = ("stdout", "stderr")
            for stream in streams:
                self._add_reader(stream, limits.output_bytes, limits.flood_bytes, to_sink(stream, sink), on_flood)
            self._add_reader("value", 1, MAX_TOLD_BYTES, self._hearer(kill), on_flood)
        except BaseException:
            self.close()
            raise

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

    def listen(self) -> None:
        """Read what comes as it comes, from now on; until then the pipes hold it."""
        for reader in self._readers.values():
            reader.listen()

    def listen_soon(self, seconds: float = UNHEARD_S) -> None:
        """Read what comes as it comes, once the program has run for a while."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().call_later(seconds, self.listen)

    def close(self) -> None:
        """Close them all."""
        if self._listening is not None:
            self._listening.cancel()
        super().close()

    def told(self) -> Told:
        """Return what the guest told of its value, and what it showed."""
        return self._told.told()


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
