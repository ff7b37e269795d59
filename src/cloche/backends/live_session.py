"""A session in a live sandbox: its interpreter is one more process there, and shares everything with the others.

Cells are sent on a separate stream of the process, and answers arrive on another (see `cloche.init.wire`). A cell's
output arrives before its answer, because init forwards them in that order. The end of a session is reported when all
processes that it started have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable, OutcomeUnknown
from cloche.core.events import HeadTail, OutputChunk, Sink, discard, kept_between
from cloche.core.functions import OfferedFunctions
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.record import dataclass
from cloche.core.request import PLAIN_CELL, CellOptions
from cloche.core.result import KillCause, Observed, Result
from cloche.egress.windows import SharedNetwork
from cloche.init import wire

from .cell_outputs import Printed
from .live_calls import CallChannel
from .live_files import LiveFiles
from .live_process import LATE_S, NAMES, LiveProcess, observed_end, usage_of
from .saved_files import Changes
from .session import Session, SessionEnd, SessionLink
from .session_languages import Codec, ControlMessage, Interrupt

if TYPE_CHECKING:
    from .init_link import InitLink, Operation

LINKLESS_S = 1.0  # for an interpreter without a link to end by itself
SIGINT = 2
STREAMS = (wire.STDOUT, wire.STDERR, wire.REPORT, wire.REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """Hold the arguments of `start` for a session's interpreter, and the codec of its link."""

    language: str
    order: Mapping[str, Any]
    new_codec: Callable[[], Codec]
    interrupt: Interrupt
    why_no_forks: str = "sessions of this backend have no checkpoints and no forks"


class LiveTransport:
    """Carry one interpreter in a live sandbox; see backends.session.SessionTransport."""

    def __init__(
        self,
        channel: Operation,
        limits: Limits,
        codec: Codec,
        *,
        slowness: float = 1.0,
        functions: OfferedFunctions | None = None,
    ):
        self._channel, self._limits, self.slowness = channel, limits, slowness
        self._calls = None if functions is None else CallChannel(channel, functions)
        self._process = LiveProcess(channel, limits)
        channel.on_data, channel.on_end = self._take, self._take_end
        self.on_flood: Callable[[], None] = lambda: None
        self.link = SessionLink(codec, self._flood)
        self._sink: Sink = discard
        self._kept = self._between()
        self._end: asyncio.Task[dict[str, Any]] | None = None
        self._lost = ""
        self._ungranted: dict[int, int] | None = None  # bytes of each stream that are held back, if any are
        self.late_s = LATE_S  # for its end to be reported

    def _between(self) -> dict[int, HeadTail]:
        return {stream: kept_between(self._limits.output_bytes) for stream in NAMES}

    def _flood(self) -> None:
        self.on_flood()

    async def start(self) -> asyncio.Future[dict[str, Any]]:
        """Wait until the process has started, and return the future of its end. Raises StartFailed, OutcomeUnknown."""
        await self._process.begin()
        self._end = asyncio.get_running_loop().create_task(self._attend())
        # Retrieved, so that asyncio does not log it.
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())
        return self._end

    async def _attend(self) -> dict[str, Any]:
        """Wait for the end and return the report. Raises StartFailed, OutcomeUnknown."""
        try:
            return await self._process.end()
        except OutcomeUnknown as error:
            self._lost = str(error)
            raise
        finally:
            self.link.lose("the interpreter has ended")
            if self._calls is not None:
                self._calls.close()

    @property
    def end(self) -> asyncio.Future[dict[str, Any]] | None:
        return self._end

    async def prepare(self, code: str, *, was_signalled: bool) -> None:
        """Do nothing: nothing is built per cell, and signals travel in order with the cells."""

    def call_notes(self) -> Mapping[str, Any]:
        return self._calls.calls.notes() if self._calls is not None else {}

    def begin(self, sink: Sink) -> None:
        self._sink = sink
        if self._calls is not None:
            self._calls.calls.renew()
        self._kept = {stream: output.followed(self._limits.output_bytes) for stream, output in self._kept.items()}
        for stream, head_tail in self._kept.items():
            if sink is not discard and (before := head_tail.joined()):
                sink(OutputChunk(stream=NAMES[stream], data=before))

    def collect(self, *, is_up_to_date: bool = False) -> Printed:  # noqa: ARG002 - it always is
        """Return the printed output; the output that arrived before an answer was taken before it."""
        outputs, self._kept, self._sink = self._kept, self._between(), discard
        return Printed(
            stdout=outputs[wire.STDOUT].joined(),
            stderr=outputs[wire.STDERR].joined(),
            is_truncated=any(output.is_truncated for output in outputs.values()),
        )

    def send(self, data: bytes) -> Awaitable[None] | None:
        return None if self._channel.send_at_once(wire.REQUESTS, data) else self._send(data)

    async def _send(self, data: bytes) -> None:
        try:
            if await self._channel.send(wire.REQUESTS, data):
                await self._channel.settle(wire.REQUESTS)
        except asyncio.CancelledError:
            self.link.lose("a cell was sent only in part")
            raise

    def send_control(self, control: ControlMessage) -> None:
        tag, body = control
        if tag == "interrupt":
            self._process.signal(SIGINT, "group")
        elif tag == "pace":
            self._channel.ask(do="rest", is_resting=not body["is_busy"])
        elif tag == "signal":
            self._process.signal(body["number"], "group" if body["to_group"] else "process")

    def kill(self, cause: KillCause) -> None:
        if self._end is None or not self._end.done():
            self._process.kill(cause)

    async def stop(self, cause: KillCause | None) -> None:
        if self._end is None:
            return
        if cause is None and not self._end.done():
            await asyncio.wait([self._end], timeout=LINKLESS_S)
        self.kill(cause or KillCause.CANCELLED)  # without its link it cannot be used, even if it lives
        await finish(asyncio.wait([self._end], timeout=self.late_s))

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:
        ended = self._ended()
        if ended:
            return SessionEnd(observed=observed_end(ended), usage=usage_of(ended))
        return SessionEnd(observed=Observed(cause=cause), lost=self._lost or "its end was not reported in time")

    def known_end(self) -> Observed | str:
        ended = self._ended()
        return observed_end(ended) if ended else self._lost

    def _ended(self) -> dict[str, Any]:
        end = self._end
        if end is None or not end.done() or end.cancelled() or end.exception() is not None:
            return {}
        return end.result()

    async def close(self) -> None:
        try:
            if self._end is not None and not self._end.done():
                self.kill(KillCause.CANCELLED)
                await asyncio.wait([self._end], timeout=self.late_s)
        finally:
            self._channel.close()
            if self._calls is not None:
                await self._calls.wait_closed()

    def hold_output(self, *, is_held: bool) -> None:
        """Have the interpreter wait once a window of further output has come, or go on."""
        if is_held:
            self._ungranted = self._ungranted or {}
            return
        ungranted, self._ungranted = self._ungranted, None
        for stream, count in (ungranted or {}).items():
            self._channel.grant(stream, count)

    def _take(self, stream: int, data: memoryview) -> None:
        if stream == wire.HOST_CALLS and self._calls is not None:
            self._calls.receive(data)
            return
        if self._ungranted is not None and stream in NAMES:
            self._ungranted[stream] = self._ungranted.get(stream, 0) + len(data)
        else:
            self._channel.grant(stream, len(data))
        if stream == wire.REPORT:
            self.link.receive(bytes(data))
        elif stream in NAMES:
            self._keep(stream, bytes(data))

    def _take_end(self, stream: int) -> None:
        if stream == wire.REPORT:
            self.link.lose("the interpreter has closed its link")

    def _keep(self, stream: int, data: bytes) -> None:
        output = self._kept[stream]
        was_flooded = output.total > self._limits.flood_bytes
        output.add(data)
        if was_flooded:
            return
        if self._sink is not discard:
            self._sink(OutputChunk(stream=NAMES[stream], data=data))
        if output.total > self._limits.flood_bytes:
            self.on_flood()


class LiveSession(Session):
    """Run one cell at a time; methods that need a clone raise and say how to open a session that can be cloned."""

    def __init__(
        self,
        sandbox: LiveFiles,
        transport: LiveTransport,
        program: LiveProgram,
        limits: Limits,
        *,
        enforcement: Enforcement,
        notes: Mapping[str, Any],
    ):
        super().__init__(
            transport, self._collected, language=program.language, interrupt=program.interrupt, limits=limits,
            enforcement=enforcement, notes=notes,
        )  # fmt: skip
        self._opened_in, self._why_no_forks = sandbox, program.why_no_forks
        self.call_notes, self.paused_s = transport.call_notes, sandbox.own_paused_s
        self.hold_output = transport.hold_output
        self.start_timeout_s = min(self.start_timeout_s, limits.timeout_s)
        self._most_bytes = limits.disk_bytes
        self._cells = asyncio.Lock()  # cells take turns
        self._patterns: tuple[str, ...] = ()  # of the files to include in this cell's result
        self._since = 0

    async def run(self, code: str, *, timeout_s: float, sink: Sink, options: CellOptions = PLAIN_CELL) -> Result:
        """Run a cell; its result has no files."""
        return await self.run_collecting(code, timeout_s=timeout_s, sink=sink, collect=(), options=options)

    async def run_collecting(
        self, code: str, *, timeout_s: float, sink: Sink, collect: tuple[str, ...], options: CellOptions = PLAIN_CELL
    ) -> Result:
        """Run a cell; see core.protocols.SupportsCollecting."""
        await self._opened_in.note_cell(code)
        async with self._cells:
            self._patterns, self._since = collect, await self._opened_in.clock_ns(collect)
            return await super().run(code, timeout_s=timeout_s, sink=sink, options=options)

    async def _collected(self, timeout_s: float) -> Changes:
        return await self._opened_in.collect_files(
            self._patterns, since=self._since, timeout_s=timeout_s, max_bytes=self._most_bytes
        )

    @property
    def sandbox(self) -> LiveFiles:
        return self._opened_in

    async def checkpoint(self, name: str) -> None:  # noqa: ARG002
        """Raise InvalidRequest, saying how to open a session with checkpoints."""
        self._refuse()

    async def rollback(self, name: str) -> None:  # noqa: ARG002
        """Raise InvalidRequest, as `checkpoint` does."""
        self._refuse()

    async def fork(self, count: int) -> list[LiveSession]:  # noqa: ARG002
        """Raise InvalidRequest, as `checkpoint` does."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BackendUnavailable(self._why_no_forks)


async def open_live_session(
    sandbox: LiveFiles,
    link: InitLink,
    program: LiveProgram,
    limits: Limits,
    *,
    enforcement: Enforcement,
    notes: Mapping[str, Any],
    slowness: float = 1.0,
    network: SharedNetwork | None = None,
) -> LiveSession:
    """Start an interpreter over a sandbox's link, and wait until it is ready. Raises StartFailed, OutcomeUnknown."""
    functions = sandbox.functions
    streams = STREAMS if functions is None else (*STREAMS, wire.HOST_CALLS, wire.HOST_ANSWERS)
    channel = link.open("start", waits=True, **program.order, streams=streams)
    transport = LiveTransport(channel, limits, program.new_codec(), slowness=slowness, functions=functions)
    session = LiveSession(sandbox, transport, program, limits, enforcement=enforcement, notes=notes)
    session.network = network
    try:
        await session.await_ready(await transport.start())
    except BaseException:
        await finish(session.close())
        raise
    return session
