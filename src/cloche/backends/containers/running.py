"""One conversation with a container, seen from the caller's event loop: a run, or a request about files.

Frames arrive in the container's reading thread. Output is bounded there; everything else is handed to the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from cloche.core.bounded import HeadTail
from cloche.core.errors import SandboxFileError, SandboxFileNotFound, SandboxFileRefused, SandboxFileTooLarge
from cloche.core.events import OutputChunk, PlanStep, Sink, Started, Stream, discard
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause
from cloche.core.told import MAX_TOLD_BYTES

from .archive import Spool

STARTED, OUT, ERR, VALUE, ENDED, DATA, DONE, FAILED = b"s", b"o", b"e", b"v", b"r", b"D", b"k", b"x"
STREAMS: dict[bytes, Stream] = {OUT: "stdout", ERR: "stderr"}
_ERRORS: dict[str, type[SandboxFileError]] = {
    "not_found": SandboxFileNotFound,
    "too_large": SandboxFileTooLarge,
    "refused": SandboxFileRefused,
    "full": SandboxFileRefused,
}


class Lost(Exception):
    """Say that the container went away before it had answered."""


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
            self.post(self._settle, _object(body), None)
        elif tag == FAILED:
            self.post(self._settle, {}, _error(_object(body)))

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
        self._limits, self._sink, self._kill, self._on_start = limits, sink, kill, on_start
        self._outputs = {tag: HeadTail(limits.output_bytes) for tag in STREAMS}
        self._told = bytearray()
        self.plan: tuple[PlanStep, ...] = ()
        self.report: dict[str, Any] | None = None
        self.has_started = False

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the reading thread."""
        if tag in STREAMS:
            self._take_output(tag, body)
        elif tag == STARTED:
            self.has_started = True
            self.post(self._begin)
        elif tag == VALUE:
            self._told += body[: MAX_TOLD_BYTES + 1 - len(self._told)]
        elif tag == ENDED:
            self.report = _object(body)
        else:
            super().hear(tag, body)

    def _begin(self) -> None:
        self._on_start()
        self._sink(Started(plan=self.plan))

    def _take_output(self, tag: bytes, body: bytes) -> None:
        output = self._outputs[tag]
        was_flooded = output.total > self._limits.flood_bytes
        output.add(body)
        if was_flooded:
            return
        if self._sink is not discard:
            self.post(self._sink, OutputChunk(stream=STREAMS[tag], data=body))
        if output.total > self._limits.flood_bytes:
            self.post(self._kill, KillCause.OUTPUT_LIMIT)

    def kept(self, tag: bytes) -> bytes:
        """Return what is kept of a stream."""
        return self._outputs[tag].kept()

    @property
    def is_truncated(self) -> bool:
        return any(output.is_truncated for output in self._outputs.values())

    def told(self) -> bytes:
        """Return what the guest told of its value."""
        return bytes(self._told) if len(self._told) <= MAX_TOLD_BYTES else b""


def _object(body: bytes) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("the container sent what is no object")
    return found


def _error(body: dict[str, Any]) -> SandboxFileError:
    path = str(body.get("path"))
    kind = _ERRORS.get(str(body.get("kind")), SandboxFileRefused)
    return kind(f"{path!r}: {body.get('why')}; links are not followed", path=path)
