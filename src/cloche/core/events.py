"""Reports while Cloche works: events of a run, progress of slow work, and output within bounds.

Events are frozen values; a sink is a plain function that gets each of them. Progress is for work that takes long enough
to be watched: a backend calls `report_progress`, and a front end adds a function to `progress_sinks`. `HeadTail` keeps
the head and the tail of a stream, and counts all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .record import dataclass, field
from .result import Output, Result

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Say that the guest's code began to run."""

    plan: tuple[PlanStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """Describe one applied step of the jail's set-up, and the seconds it took."""

    name: str
    description: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Carry bytes the guest wrote, in order per stream."""

    stream: Stream
    data: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed:
    """Carry a rich output that a session's code displayed.

    `replaces` is the place, in the list of the cell's outputs, of the one that it replaces; None where it is appended.
    `is_value` says that it is the value of a cell that runs as in a notebook.
    """

    output: Output
    replaces: int | None = None
    is_value: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Say that a session's code removed what its cell had displayed: the list of outputs is empty again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRefused:
    """Say that the rules refused connections (to port 53: a name), how many, and why; told when the run has ended."""

    host: str
    port: int
    why: str
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSent:
    """Say that the placeholder of a secret went to a host as it is, how often, and why; told when the run has ended."""

    host: str
    port: int
    why: str
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Carry the result; the last event of a run."""

    result: Result


Event = Started | OutputChunk | Displayed | Cleared | NetworkRefused | PlaceholderSent | Ended
Sink = Callable[[Event], None]


def discard(event: Event) -> None:
    """Drop an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Report how far a piece of work is, in bytes; a `total` of 0 is not known yet. The last one has `is_over`."""

    what: str
    done: int = 0
    total: int = 0
    is_over: bool = False


ProgressSink = Callable[[Progress], None]
progress_sinks: list[ProgressSink] = []


def report_progress(progress: Progress) -> None:
    """Call every progress sink; may be called in any thread."""
    for watch in tuple(progress_sinks):
        watch(progress)


BETWEEN_BYTES = 64 * 1024  # of each stream of a session, between two cells, or less where a cell may print less


class HeadTail:
    """Keep the first and the last half of `limit` bytes, or the last `limit` of them, and count all."""

    def __init__(self, limit: int, *, keeps_head: bool = True):
        self._head_bytes = max(1, limit // 2) if keeps_head else 0
        self._tail_bytes = self._head_bytes or limit
        self.limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._before, self._has_gap = b"", False
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        free = self.limit - len(self._head) if not self._tail else 0
        if free > 0:
            self._head += data[:free]
            data = data[free:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self.limit:
                del self._tail[: -self.limit]

    def followed(self, limit: int) -> HeadTail:
        """Return a `HeadTail` for later output with its own limit; the bytes held here come first, uncounted."""
        after = HeadTail(limit)
        after._before, after._has_gap = self.joined(), self.is_truncated
        return after

    @property
    def is_truncated(self) -> bool:
        return self._has_gap or self.total > self.limit

    def joined(self) -> bytes:
        """Return everything, or head, a line that says how much is missing, and tail."""
        if not self.total:
            return self._before
        if self.total <= self.limit:
            return self._before + self._head + self._tail
        head, tail = bytes(self._head[: self._head_bytes]), bytes((self._head + self._tail)[-self._tail_bytes :])
        missing = self.total - len(head) - len(tail)
        between = b"\n" if head else b""
        return self._before + head + between + f"[cloche: {missing} bytes left out]\n".encode() + tail


def kept_between(limit: int) -> HeadTail:
    """Return a `HeadTail` for the end of a stream between two cells; it keeps `limit` bytes."""
    return HeadTail(min(BETWEEN_BYTES, limit), keeps_head=False)
