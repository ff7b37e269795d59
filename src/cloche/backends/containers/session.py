"""The transport of a live session, whose interpreter has a container to itself.

A session is one long run: the same first process, isolation and limits, plus a link over which the interpreter gets
cells. After its end the container is left and holds the workspace like that of any run, unless the container itself has
ended.

Frames of the interpreter and pieces of its streams arrive in the container's reading thread, where all of them are
bounded. They are passed to the caller's event loop in order, so a cell's output arrives before its end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from cloche.core.errors import StartFailed
from cloche.core.events import Sink, discard
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.result import KillCause, Observed
from cloche.core.suppressed import suppress_logged

from ..cell_outputs import Printed
from ..saved_files import Changes
from ..session import MAX_RECEIVED_BYTES, SessionEnd, SessionLink
from ..session_languages import ControlMessage
from .container import ENDED, FAILED, SMALL_BYTES, STREAMS, Container, read_object
from .program import SessionProgram
from .run import GIVE_UP_S, GUEST_KILL_S, KillTimer, Outputs, observed_end, read_report, reported_end

FROM_SESSION = b"l"
SLICE_S = 0.005  # maximum time of received data in the loop before other callbacks run
LINKLESS_S = 1.0  # for an interpreter that lost its link to end by itself
GONE_S = GIVE_UP_S + 1.0  # for an interpreter to end after its container was killed
log = logging.getLogger("cloche.containers")


class SessionOwner(Protocol):
    """The sandbox that holds a session's workspace."""

    def take_back(self, container: Container[Any]) -> None:
        """Take over the container of an ended session."""
        ...

    async def changes_in(self, container: Container[Any], timeout_s: float) -> Changes:
        """Return the files that changed, after a cell with a limit of `timeout_s`."""
        ...


class ContainerTransport:
    """Carry one interpreter in a container; see backends.session.SessionTransport.

    `receive` and `lose` are called in the container's reading thread, all other methods in the loop.
    """

    def __init__(self, owner: SessionOwner, container: Container[Any], program: SessionProgram, limits: Limits):
        self._loop = asyncio.get_running_loop()
        self._owner, self._container, self._program, self._limits = owner, container, program, limits
        self.on_flood: Callable[[], None] = lambda: None
        self.link = SessionLink(program.new_codec(), self._flood)
        self._outputs = Outputs(limits, discard, self._post, self._flood)
        self._turn = threading.Lock()
        self._passed_bytes = 0
        self._inbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_attended = self._is_started = False
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._report: dict[str, Any] | None = None
        self._kill_timer = KillTimer(container)
        self._end.add_done_callback(lambda _: self._kill_timer.close())

    async def start(self) -> asyncio.Future[None]:
        """Start the interpreter and return a future of its end. Raises StartFailed."""
        self._container.listen(self)
        try:
            await finish(asyncio.to_thread(self._container.order, self._program.order(self._limits)))
        except OSError as error:
            why = f"the {self._container.label} was lost before the session began{self._container.last_output()}"
            raise StartFailed(why, step="session") from error
        except asyncio.CancelledError:
            self._is_started = True  # it probably started, and must not outlive its session
            raise
        self._is_started = True
        return self._end

    @property
    def end(self) -> asyncio.Future[None] | None:
        return self._end if self._is_started else None

    @property
    def slowness(self) -> float:
        return self._container.slowness

    async def prepare(self, code: str, *, was_signalled: bool) -> None:
        """Do nothing: an interpreter that ran one cell can run the next, and signals are sent like cells."""

    def begin(self, sink: Sink) -> None:
        with self._turn:
            self._passed_bytes = 0
        self._outputs.hand_on_to(sink)

    def collect(self, *, is_up_to_date: bool = False) -> Printed:  # noqa: ARG002 - output is always up to date
        """Return the output of the cell. Output before an answer was posted to the loop before that answer."""
        kept_bytes = self._outputs.kept_bytes
        printed = Printed(
            stdout=kept_bytes("stdout"), stderr=kept_bytes("stderr"), is_truncated=self._outputs.is_truncated
        )
        with self._turn:
            self._passed_bytes = 0
        self._outputs.renew()
        return printed

    def send(self, data: bytes) -> Awaitable[None] | None:
        if len(data) >= SMALL_BYTES:
            return finish(asyncio.to_thread(self._send, data))
        self._send(data)
        return None

    def _send(self, data: bytes) -> None:
        try:
            self._container.send_to_session(data)
        except OSError as error:
            self._post(self.link.lose, f"the container is gone: {error}")

    def send_control(self, control: ControlMessage) -> None:
        tag, body = control
        with suppress_logged(log, "the container is gone, as its session will say", OSError):
            self._container.send_control(tag, **body)

    def kill(self, cause: KillCause) -> None:
        if not self._end.done():
            self._kill_timer.kill(cause)

    async def stop(self, cause: KillCause | None) -> None:
        if cause is None and self._kill_timer.cause is None and not self._end.done():
            await asyncio.wait([self._end], timeout=LINKLESS_S)
        self.kill(cause or KillCause.CANCELLED)  # without its link the interpreter is unusable
        await finish(asyncio.wait([self._end], timeout=GUEST_KILL_S + GONE_S))

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:
        container = self._container
        end = await observed_end(container, self._report, cause or self._kill_timer.cause)
        if end is None:
            why = f"the {container.label} is gone, for an unknown reason{container.last_output()}"
            return SessionEnd(observed=Observed(), lost=container.why_lost() if container.is_given_up else why)
        return SessionEnd(observed=end.observed, usage=end.usage)

    def known_end(self) -> Observed | str:
        if self._report is not None:
            return reported_end(self._report, self._kill_timer.cause).observed
        return f"its {self._container.label} is gone" if self._container.is_lost else ""

    async def close(self) -> None:
        try:
            if self._is_started:
                self.kill(KillCause.CANCELLED)
                await asyncio.wait([self._end], timeout=GUEST_KILL_S + GONE_S)
        finally:
            self._kill_timer.close()
            self._container.listen(None)
            self._owner.take_back(self._container)

    async def changes(self, timeout_s: float) -> Changes:
        """Return the files that changed in the workspace, after a cell with a limit of `timeout_s`."""
        return await self._owner.changes_in(self._container, timeout_s)

    def receive(self, tag: bytes, body: bytes) -> None:
        """Handle one frame, in the reading thread. Raises ValueError for an invalid one."""
        if tag in STREAMS:
            self._outputs.take(STREAMS[tag], body)
        elif tag == FROM_SESSION:
            self._pass(body)
        elif tag == ENDED:
            self._report = read_report(body)
            self._post(self._note_end, "the interpreter has ended")
        elif tag == FAILED:
            self._post(self._fail, str(read_object(body).get("why")))

    def lose(self) -> None:
        """Handle the end of the link, in the reading thread."""
        self._post(self._note_end, "the container is gone")

    def _pass(self, body: bytes) -> None:
        """Pass on data of the interpreter, up to a bound above the maximum that is ever read."""
        if not body:
            self._post(self.link.lose, "the interpreter has closed its link")
            return
        with self._turn:
            is_too_much = self._passed_bytes > MAX_RECEIVED_BYTES
            self._passed_bytes += len(body)
        if not is_too_much:
            self._post(self.link.receive, body)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, after all that were posted before, unless the loop is closed."""
        with self._turn:
            self._inbox.append((function, arguments))
            was_attended, self._is_attended = self._is_attended, True
        if not was_attended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._attend)

    def _attend(self) -> None:
        """Call the posted functions for at most `SLICE_S`, then yield to other callbacks of the loop."""
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

    def _flood(self) -> None:
        self.on_flood()

    def _note_end(self, reason: str) -> None:
        self.link.lose(reason)
        if not self._end.done():
            self._end.set_result(None)

    def _fail(self, why: str) -> None:
        """Record that the session could not be started."""
        if not self._end.done():
            self._end.set_exception(StartFailed(f"the session did not start: {why}", step="session"))
            self._end.exception()  # mark as retrieved, so that asyncio logs nothing if the start is not awaited
        self.link.lose(why)
