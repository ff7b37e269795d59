"""What a session in a container says and hears: frames of its link and pieces of its streams, on the container's link.

They arrive in the container's reading thread, where all is bounded, and are handed to the caller's event loop in order:
what a cell printed is there before its end is known.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from cloche.core.errors import StartFailed
from cloche.core.events import Sink, Stream, discard
from cloche.core.limits import Limits

from ..exchange import MAX_HEARD_BYTES, Codec, Exchange
from ..waiting import finish
from .container import Container
from .running import ENDED, FAILED, STREAMS, Outputs, read_object, read_report

SAID = b"l"
SMALL_BYTES = 32 * 1024
SLICE_S = 0.005  # for what has come, before others have their turn in the loop


class Hearing(Exchange):
    """Talk to a session's interpreter. `end` is done when it, or its container, is gone; `report` says how it ended."""

    def __init__(self, limits: Limits, codec: Codec, on_flood: Callable[[], None], container: Container[Any]):
        super().__init__(codec, on_flood)
        self._container = container
        self._outputs = Outputs(limits, discard, self._post, on_flood)
        self._turn = threading.Lock()
        self._passed_bytes = 0
        self._inbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_attended = False
        self.end: asyncio.Future[None] = self._loop.create_future()
        self.report: dict[str, Any] | None = None

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the reading thread. Raises ValueError for one that makes no sense."""
        if tag in STREAMS:
            self._outputs.take(STREAMS[tag], body)
        elif tag == SAID:
            self._pass(body)
        elif tag == ENDED:
            self.report = read_report(body)
            self._post(self._settle, "the interpreter has ended")
        elif tag == FAILED:
            self._post(self._fail, str(read_object(body).get("why")))

    def lose(self) -> None:
        """Learn that nothing more will come; in the reading thread."""
        self._post(self._settle, "the container is gone")

    def _pass(self, body: bytes) -> None:
        """Hand on what the interpreter said, up to more than anybody listens to."""
        if not body:
            self._post(self._lose, "the interpreter has closed its link")
            return
        with self._turn:
            is_too_much = self._passed_bytes > MAX_HEARD_BYTES
            self._passed_bytes += len(body)
        if not is_too_much:
            self._post(self._hear_unless_lost, body)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, unless that is closed, after all that was posted before."""
        with self._turn:
            self._inbox.append((function, arguments))
            was_attended, self._is_attended = self._is_attended, True
        if not was_attended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._attend)

    def _attend(self) -> None:
        """Call what was posted, and between two slices of time let others have their turn."""
        until = time.monotonic() + SLICE_S
        try:
            while self._inbox and time.monotonic() < until:
                function, arguments = self._inbox.popleft()
                function(*arguments)
        finally:
            with self._turn:
                self._is_attended = bool(self._inbox)
            if self._is_attended:
                self._loop.call_soon(self._attend)

    def _hear_unless_lost(self, data: bytes) -> None:
        if not self.lost.done():
            self._hear(data)

    def _settle(self, reason: str) -> None:
        self._lose(reason)
        if not self.end.done():
            self.end.set_result(None)

    def _fail(self, why: str) -> None:
        """Learn that the session could not be started."""
        if not self.end.done():
            self.end.set_exception(StartFailed(f"the session did not start: {why}", step="session"))
            self.end.exception()  # whoever waits for its start is told; else nobody needs to be
        self._lose(why)

    def _send(self, data: bytes) -> Awaitable[None] | None:
        if len(data) >= SMALL_BYTES:
            return finish(asyncio.to_thread(self._tell, data))
        self._tell(data)
        return None

    def _tell(self, data: bytes) -> None:
        try:
            self._container.tell(data)
        except OSError as error:
            self._post(self._lose, f"the container is gone: {error}")

    def _hand_on_to(self, sink: Sink) -> None:
        with self._turn:
            self._passed_bytes = 0
        self._outputs.hand_on_to(sink)

    def _renew_streams(self) -> None:
        with self._turn:
            self._passed_bytes = 0
        self._outputs.renew()

    def kept(self, stream: Stream) -> bytes:
        """Return what is kept of a stream since it was renewed."""
        return self._outputs.kept(stream)

    @property
    def is_truncated(self) -> bool:
        """Tell whether something of the output was left out."""
        return self._outputs.is_truncated

    def catch_up(self) -> None:
        """Do nothing: what was said before an answer has come before it."""

    async def drain(self, patience_s: float) -> None:
        """Do nothing: what was said before the end has come before it."""
