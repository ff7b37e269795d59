"""One conversation with a container, seen from the caller's event loop: a run, or a request about files.

Frames arrive in the container's reading thread. Output is bounded there; everything else is handed to the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from cloche.core.bounded import HeadTail
from cloche.core.decoding import as_text, decode
from cloche.core.errors import SandboxFileError, SandboxFileNotFound, SandboxFileRefused, SandboxFileTooLarge
from cloche.core.events import OutputChunk, PlanStep, Sink, Started, Stream, discard
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause
from cloche.core.told import Told, ToldReader

from .archive import Spool

STARTED, OUT, ERR, VALUE, ENDED, DATA, DONE, FAILED = b"s", b"o", b"e", b"v", b"r", b"D", b"k", b"x"
STREAMS: dict[bytes, Stream] = {OUT: "stdout", ERR: "stderr"}
MOST = 1 << 53  # that any number in a report can be
MOST_BYTES, MOST_PARTS = 65_536, 100  # of what a first process says of itself
_ERRORS: dict[str, type[SandboxFileError]] = {
    "not_found": SandboxFileNotFound,
    "too_large": SandboxFileTooLarge,
    "refused": SandboxFileRefused,
    "full": SandboxFileRefused,
}


class Lost(Exception):
    """Say that the container went away before it had answered."""


class Outputs:
    """Keep what two streams say, within bounds; filled in the reading thread, everything else in the loop."""

    def __init__(self, limits: Limits, sink: Sink, post: Callable[..., None], on_flood: Callable[[], object]):
        self._limits, self._sink, self._post, self._on_flood = limits, sink, post, on_flood
        self._turn = threading.Lock()
        self._kept = self._empty()

    def _empty(self) -> dict[Stream, HeadTail]:
        return {stream: HeadTail(self._limits.output_bytes) for stream in STREAMS.values()}

    def take(self, stream: Stream, data: bytes) -> None:
        """Take a piece; in the reading thread."""
        with self._turn:
            output = self._kept[stream]
            was_flooded = output.total > self._limits.flood_bytes
            output.add(data)
            if was_flooded:
                return
            if self._sink is not discard:
                self._post(self._sink, OutputChunk(stream=stream, data=data))
            if output.total > self._limits.flood_bytes:
                self._post(self._on_flood)

    def hand_on_to(self, sink: Sink) -> None:
        """Hand on what comes, and first what has come since it was renewed."""
        with self._turn:
            self._sink = sink
            for stream, output in self._kept.items():
                if output.total and sink is not discard:
                    sink(OutputChunk(stream=stream, data=output.kept()))

    def renew(self) -> None:
        """Keep nothing of what has come so far, and hand on nothing of what comes."""
        with self._turn:
            self._sink, self._kept = discard, self._empty()

    def kept(self, stream: Stream) -> bytes:
        """Return what is kept of a stream."""
        return self._kept[stream].kept()

    @property
    def is_truncated(self) -> bool:
        return any(output.is_truncated for output in self._kept.values())


class Conversation:
    """Hear one answer: data, then what was done, or why not."""

    def __init__(self, max_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.spool = Spool(max_bytes)
        self.answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the reading thread. Raises ValueError for one that makes no sense."""
        if tag == DATA:
            self.spool.add(body)
        elif tag == DONE:
            self.post(self._settle, read_object(body), None)
        elif tag == FAILED:
            self.post(self._settle, {}, _error(read_object(body)))

    def lose(self) -> None:
        """Learn that nothing more will come; in the reading thread."""
        self.post(self._settle, {}, Lost())

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, unless that is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _settle(self, answer: dict[str, Any], error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(error)


class Running(Conversation):
    """Hear one run. `kill` is called in the loop when the run must end, `on_start` when it begins."""

    def __init__(self, limits: Limits, sink: Sink, kill: Callable[[KillCause], None], on_start: Callable[[], None]):
        super().__init__(limits.disk_bytes)
        self._sink, self._on_start = sink, on_start
        self.outputs = Outputs(limits, sink, self.post, lambda: kill(KillCause.OUTPUT_LIMIT))
        self._told, self._kill = ToldReader(), kill
        self.plan: tuple[PlanStep, ...] = ()
        self.report: dict[str, Any] | None = None
        self.has_started = False

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the reading thread."""
        if tag in STREAMS:
            self.outputs.take(STREAMS[tag], body)
        elif tag == STARTED and not self.has_started:
            self.has_started = True
            self.post(self._begin)
        elif tag == VALUE:
            self._hear_value(body)
        elif tag == ENDED and self.report is None:
            self.report = read_report(body)
        else:
            super().hear(tag, body)

    def _hear_value(self, data: bytes) -> None:
        was_refused = bool(self._told.refused)
        self._told.feed(data)
        if self._told.refused and not was_refused:
            self.post(self._kill, KillCause.OUTPUT_LIMIT)

    def _begin(self) -> None:
        self._on_start()
        self._sink(Started(plan=self.plan))

    def told(self) -> Told:
        """Return what the guest told of its value, and what it showed."""
        return self._told.told()


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object that a frame holds, small as all of ours are. Raises ValueError.

    Where a guest could write to this link, as it can on some gVisor, it shall not keep us.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"the container said {len(body)} bytes at once, of at most {MOST_BYTES}")
    found, _ = decode(as_text(body), MOST_PARTS, mends_text=True)
    if not isinstance(found, dict):
        raise ValueError("the container sent what is no object")
    return found


def read_report(body: bytes) -> dict[str, Any]:
    """Return what a first process says of its program's end, times in seconds. Raises ValueError where it cannot be."""
    found, counters = read_object(body), ("oom_kills", "pids_hits", "unreachable")
    status, counts = found.get("wait_status"), [found.get(name) or 0 for name in counters]
    times = [found.get("wall_s"), *(found.get(name) or 0 for name in ("cpu_user_s", "cpu_system_s"))]
    is_possible = (
        isinstance(status, int)
        and 0 <= status < 1 << 16
        and all(isinstance(one, int) and abs(one) < MOST for one in counts)
        and all(isinstance(one, int | float) and abs(one) < MOST for one in times)
    )
    if not is_possible:
        raise ValueError(f"the container tells of an end that cannot be: {found!r:.200}")
    return found


def _error(body: dict[str, Any]) -> SandboxFileError:
    path = str(body.get("path"))
    kind = _ERRORS.get(str(body.get("kind")), SandboxFileRefused)
    return kind(f"{path!r}: {body.get('why')}; links are not followed", path=path)
