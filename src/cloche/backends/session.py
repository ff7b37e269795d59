"""A live session on any transport: cells, their time-out, interrupts, and the result of each.

Theory of operation: `Session` is the same for all backends. Each backend supplies a `SessionTransport`, which carries
bytes, signals and the interpreter's end. A `SessionLink` parses frames without I/O: the transport feeds it the received
bytes, and `Session` asks it for the bytes of the next cell.

The time-out of a cell is enforced here. A cell that exceeds it is interrupted, as by Ctrl-C, which keeps the session's
state. If the interrupt has no effect, the whole session is killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from cloche.core.enforcement import Enforcement
from cloche.core.errors import ClocheError, InvalidRequest, StartFailed
from cloche.core.events import Sink, Started, discard
from cloche.core.frames import encode, read_output
from cloche.core.guest_json import TooLarge
from cloche.core.limits import Limits
from cloche.core.loops import any_of, become_task, finish
from cloche.core.record import dataclass, replace
from cloche.core.request import PLAIN_CELL, CellOptions
from cloche.core.result import (
    EXIT_TIMEOUT,
    KillCause,
    Observed,
    Result,
    Status,
    Usage,
    Verdict,
    decide,
)
from cloche.core.suppressed import suppress_logged
from cloche.egress.client import Traffic
from cloche.egress.windows import SharedNetwork, Window

from .cell_outputs import CellOutputs, Printed
from .results import error_notes, make_result, value_of
from .saved_files import Changes
from .session_languages import Codec, ControlMessage, Interrupt

MIB = 1024 * 1024
MAX_RECEIVED_BYTES = 64 * MIB  # from one cell's beginning to the next: all displayed outputs, and a value
INTERRUPT_TIMEOUT_S = 3.0
AGAIN_S = 0.5  # between repeated interrupts, if one may not suffice
LONG_S = 0.01  # the memory of a longer cell is sampled often
START_TIMEOUT_S = 60.0
LEAST_LATER_S = 0.05  # between two looks at the time-out of a cell whose sandbox was paused
INTERRUPTED = 130
NOTHING = 0  # the number of the empty request: signals sent before its answer were for the cell before it
_OK = Verdict(status=Status.OK, exit_code=0)
log = logging.getLogger("cloche.sessions")


class SessionLink:
    """Encode requests to one interpreter and parse its answers; no I/O. Use from one event loop.

    The guest controls every received byte. So input is bounded, its shape is checked, and no decision about security
    rests on it. Unknown kinds of frames go to `on_other`. Input that cannot be parsed ends the session. So does too
    much input, and then `on_flood` is called. `ready` holds the interpreter's first message, `lost` the reason why no
    more is received; `on_lost` is called at once when `lost` is set.
    """

    def __init__(
        self,
        codec: Codec,
        on_flood: Callable[[], None],
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_other: Callable[[dict[str, Any]], None] = lambda _: None,
    ):
        self._loop = asyncio.get_running_loop()
        self._codec, self.on_flood, self._on_lost, self._on_other = codec, on_flood, on_lost, on_other
        self._outputs, self._received_bytes = CellOutputs(), 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.refused = ""  # the reason why reading stopped, if the interpreter caused it
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.lost: asyncio.Future[str] = self._loop.create_future()

    def begin(self, sink: Sink = discard) -> CellOutputs:
        """Begin a new cell, or, without a sink, the time between two cells."""
        self._outputs, self._received_bytes = CellOutputs(sink=sink), 0
        self._codec.renew()
        return self._outputs

    def ask(
        self, request_id: int, code: str, options: CellOptions = PLAIN_CELL
    ) -> tuple[asyncio.Future[dict[str, Any]], bytes]:
        """Return the future of a cell's answer, and the bytes to send. Raises InvalidRequest if the code cannot be
        encoded.
        """
        try:
            data = self._codec.encode_run(request_id, code, options)
        except ValueError as error:
            raise InvalidRequest(f"code: {error}") from error
        return self.expect(request_id), data

    def expect(self, request_id: int) -> asyncio.Future[dict[str, Any]]:
        """Return the future of a request's answer."""
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[request_id] = answer
        return answer

    def receive(self, data: bytes) -> None:
        """Parse bytes from the interpreter, unless the link is lost."""
        if self.lost.done():
            return
        self._received_bytes += len(data)
        try:
            if self._received_bytes > MAX_RECEIVED_BYTES:
                raise TooLarge(f"there are more than {MAX_RECEIVED_BYTES} bytes")
            for frame in self._codec.feed(data):
                self._take(frame)
        except TooLarge as error:
            self.refused = f"the interpreter sent more than one cell may send: {error}"
            self.lose(self.refused)
            self.on_flood()
        except (ValueError, RecursionError) as error:
            self.refused = f"the interpreter sent an invalid message: {error}"
            self.lose(self.refused)

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame.get("op")
        if kind == "done":
            request_id = frame.get("id")
            answer = self._answers.pop(request_id, None) if isinstance(request_id, int) else None
            if answer is not None and not answer.done():
                answer.set_result(frame)
        elif kind == "display":
            self._outputs.add(frame)
        elif kind == "clear":
            self._outputs.clear(frame)
        elif kind == "cut":
            self._outputs.is_cut = True
        elif kind == "ready" and not self.ready.done():
            self.ready.set_result(frame)
        else:
            self._on_other(frame)

    def lose(self, reason: str) -> None:
        """Record that no more will be received; the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self._on_lost()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """Hold how an interpreter ended and the resources it used, if known; `lost` is the reason if nothing more is
    known.
    """

    observed: Observed
    usage: Usage | None = None
    lost: str = ""


class SessionTransport(Protocol):
    """Carry bytes, output, signals and the end of one interpreter. Used from one event loop, by one `Session`.

    No method raises because the interpreter is gone: `link.lost` and `end` report that. `prepare`, `stop`,
    `observe_end` and `close` may be cancelled at each await. The opener of a transport closes its session in any case.
    """

    on_flood: Callable[[], None]  # called when the interpreter prints or sends too much; set by the session

    @property
    def link(self) -> SessionLink:
        """Return the link of the interpreter; a rollback or fork replaces it."""
        ...

    @property
    def end(self) -> asyncio.Future[Any] | None:
        """Return the future that is done when none of its processes is left; None before the start. It may hold a
        ClocheError.
        """
        ...

    @property
    def slowness(self) -> float:
        """Return the factor by which every time allowed to the interpreter is multiplied."""
        ...

    async def prepare(self, code: str, *, was_signalled: bool) -> None:
        """Prepare the next cell, which runs `code`.

        If the interpreter `was_signalled` since it last answered the empty request, all signals must be on their way to
        it when this returns. May raise a ClocheError; the cell is then not run.
        """
        ...

    def begin(self, sink: Sink) -> None:
        """Pass output on as it arrives, starting with the output since the last `collect`."""
        ...

    def send(self, data: bytes) -> Awaitable[None] | None:
        """Send all of `data`, or return an awaitable for the remainder; cancelling that may lose the link."""
        ...

    def collect(self, *, is_up_to_date: bool = False) -> Printed:
        """Return the output since the last `collect`, unread output included, and empty the buffers.

        `is_up_to_date` says that the loop has just handled every ready descriptor and nothing has happened since.
        """
        ...

    def send_control(self, control: ControlMessage) -> None:
        """Have the interpreter's supervisor send a signal, or check memory more or less often."""
        ...

    def kill(self, cause: KillCause) -> None:
        """Kill the interpreter; `end` or `link.lost` reports the end as usual."""
        ...

    async def stop(self, cause: KillCause | None) -> None:
        """Wait for the end of an interpreter that has ended or lost its link; kill it if it still runs.

        `cause` is the reason why the session killed it, if it did.
        """
        ...

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:
        """Return the facts about an end during a cell, and read the last output."""
        ...

    def known_end(self) -> Observed | str:
        """Return the facts about an end between two cells, without I/O; or a text, empty if there is none."""
        ...

    async def close(self) -> None:
        """Kill and remove everything; called once, and not cancelled."""
        ...


class Session:
    """Run one cell at a time; see core.protocols.OpenSession."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(
        self,
        transport: SessionTransport,
        changes: Callable[[float], Awaitable[Changes]],
        *,
        language: str,
        interrupt: Interrupt,
        limits: Limits,
        enforcement: Enforcement,
        notes: Mapping[str, Any],
    ):
        """Take the transport, a function that returns the workspace's changes after a cell, and `notes` for `meta`.

        `changes` gets the time-out of the cell in seconds.
        """
        self._transport, self._changes = transport, changes
        self._language, self._interrupts = language, interrupt
        self._told_limits, self._enforcement, self._notes = limits.as_dict(), enforcement, notes
        self._turn = asyncio.Lock()
        self._cause: KillCause | None = None
        self._is_interrupted = self._is_running = self.is_closed = False
        self._has_signalled = False  # since the interpreter last answered the empty request
        self._request_id = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None  # to the running cell
        self._sending: asyncio.Future[None] | None = None  # of a cell that did not fit into the link's buffer
        self._verdict: Verdict | None = None
        self.network: SharedNetwork | None = None
        self.owns_network = False  # the network is then closed with the session
        self._window: Window | None = None
        self._traffic = Traffic()  # of the current cell, of all processes
        # Returns the entries for a cell's meta about its calls of the caller's functions.
        self.call_notes: Callable[[], Mapping[str, Any]] = dict
        self.paused_s: Callable[[], float] = float  # in all, of its sandbox
        self.start = str(notes.get("start", "cold"))
        self.runtime = language
        transport.on_flood = self._on_flood

    @property
    def is_alive(self) -> bool:
        end = self._transport.end
        return end is not None and not end.done() and not self._transport.link.lost.done()

    @property
    def why_ended(self) -> str:
        """Return how it ended, as far as known; empty while it lives."""
        return "" if self.is_alive else self._why().strip(" ()")

    @property
    def has_ended(self) -> bool:
        """Tell whether none of its processes is left: an interpreter that only closed its link may still run."""
        end = self._transport.end
        return self.is_closed or end is None or end.done()

    async def await_ready(self, end: asyncio.Future[Any]) -> None:
        """Wait until the interpreter is ready; `end` is its end. Raises StartFailed, or the exception of `end`."""
        transport, link = self._transport, self._transport.link
        waiting: list[asyncio.Future[Any]] = [link.ready, link.lost, end]
        timeout_s = self.start_timeout_s * transport.slowness
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not link.ready.done():
            raise await self._why_not_started(end)
        self.runtime = str(link.ready.result().get("runtime") or self.runtime)[:100]
        self._collect()
        self._set_pace(is_busy=False)

    async def _why_not_started(self, end: asyncio.Future[Any]) -> ClocheError:
        if not end.done():
            await asyncio.wait([end], timeout=1.0)
        if end.done() and isinstance(error := end.exception(), ClocheError):
            return error
        stderr_tail = self._collect().stderr.decode("utf-8", "replace").strip()[-400:]
        late = "" if end.done() else f" in {self.start_timeout_s * self._transport.slowness:g} s"
        return StartFailed(
            f"the {self._language} session did not start{late}{f': {stderr_tail}' if stderr_tail else ''}"
        )

    def _collect(self, *, is_up_to_date: bool = False) -> Printed:
        """Return the output up to now; later output belongs to the next cell."""
        printed = self._transport.collect(is_up_to_date=is_up_to_date)
        self._transport.link.begin()
        return printed

    def _set_pace(self, *, is_busy: bool) -> None:
        """Tell the supervisor, which samples memory, whether a cell runs."""
        self._transport.send_control(("pace", {"is_busy": is_busy}))

    async def run(self, code: str, *, timeout_s: float, sink: Sink, options: CellOptions = PLAIN_CELL) -> Result:
        """Run one cell; see core.protocols.OpenSession."""
        async with self._turn:
            if not self.is_alive:
                raise InvalidRequest(f"this session has ended{self._why()}; restart it, or open another one")
            self._request_id += 1
            self._cause, self._answer, self._sending = None, None, None
            self._is_interrupted, self._is_running = False, True
            try:
                await self._transport.prepare(code, was_signalled=self._has_signalled)
                if self._has_signalled:
                    await finish(self._settle())
                return await self._run(code, timeout_s, sink, options)
            finally:
                self._is_running = False

    async def _settle(self) -> None:
        """Wait until the interpreter has received all signals of the last cell: an answer may cross an interrupt.

        It answers the empty request after all signals sent before, and ignores those.
        """
        link = self._transport.link
        answer, data = link.ask(NOTHING, "")
        sending = self._transport.send(data)
        with suppress_logged(log, "a session does not answer; its next cell will report that", TimeoutError):
            async with asyncio.timeout(INTERRUPT_TIMEOUT_S * self._transport.slowness):
                if sending is not None:
                    await sending
                if (end := self._transport.end) is not None and not answer.done():
                    await any_of(answer, end, link.lost)
        self._has_signalled = False

    async def _run(self, code: str, timeout_s: float, sink: Sink, options: CellOptions) -> Result:
        self._traffic = Traffic()
        if self.network is None:
            return await self._run_cell(code, timeout_s, sink, options)
        self._window = self.network.open_window()
        return await self._run_cell(code, timeout_s, sink, options)

    async def _note_traffic(self) -> None:
        window, self._window = self._window, None
        if window is not None and self.network is not None:
            self._traffic = await self.network.close_window(window)

    async def _run_cell(self, code: str, timeout_s: float, sink: Sink, options: CellOptions) -> Result:
        transport, link = self._transport, self._transport.link
        outputs = link.begin(sink)
        started = time.monotonic()
        is_soon = False
        try:
            sink(Started())
            transport.begin(sink)
            answer, data = link.ask(self._request_id, code, options)
            sending = transport.send(data)
            self._answer = answer
            self._sending = asyncio.ensure_future(sending) if sending is not None else None
            if self._is_interrupted:
                self._interrupt(None)
            if self._sending is None and await self._comes_soon(answer, timeout_s):
                is_soon = True
                frame: dict[str, Any] | None = answer.result()
            else:
                frame = await self._outlast(answer, started, timeout_s)
        finally:
            self._is_running = False
        duration = time.monotonic() - started
        if duration > LONG_S:
            self._set_pace(is_busy=False)
        await self._note_traffic()
        if frame is None:
            return await self._lost_result(outputs, duration, timeout_s)
        printed = self._collect(is_up_to_date=is_soon)  # first: the output read here may exceed the flood limit
        await self._release_tasks(frame)
        notes = error_notes(frame, has_traceback=options.is_notebook)
        return await self._result(
            frame, self._verdict_of(frame), Usage(wall_s=duration), outputs, printed, notes, timeout_s
        )

    async def _comes_soon(self, answer: asyncio.Future[dict[str, Any]], timeout_s: float) -> bool:
        """Wait briefly for the answer inside the running loop, if it has no other work; tell whether the answer
        came.
        """
        wait_briefly = getattr(asyncio.get_running_loop(), "wait_briefly", None)  # without leaving this coroutine
        if wait_briefly is None:
            return False
        try:
            wait_briefly(min(timeout_s, LONG_S), answer, self._transport.link.lost)
        except BaseException:  # another thread may raise it here (PyThreadState_SetAsyncExc)
            await self._give_up(answer)
            raise
        return answer.done()

    async def _outlast(
        self, answer: asyncio.Future[dict[str, Any]], started: float, timeout_s: float
    ) -> dict[str, Any] | None:
        """Wait for the answer within the time-out; None if the session has ended without an answer."""
        loop, passed_s = asyncio.get_running_loop(), time.monotonic() - started
        timers = [
            loop.call_later(LONG_S - passed_s, lambda: self._set_pace(is_busy=True)),
            loop.call_later(timeout_s - passed_s, self._end_in_time, self._request_id, self.paused_s()),
        ]
        try:
            if self._sending is not None:
                await asyncio.shield(self._sending)  # a partly sent cell must be sent to its end in any case
            return await self._wait_for(answer)
        except asyncio.CancelledError:
            await self._give_up(answer)
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _end_in_time(self, request_id: int, paused_before_s: float) -> None:
        """Interrupt a cell whose time is up. Pauses of its sandbox since it began extend the time."""
        if not self._is_at_work(request_id):
            return
        left_s = (paused_s := self.paused_s()) - paused_before_s
        if left_s <= 0:
            self._interrupt(KillCause.TIMEOUT)
            return
        loop, later_s = asyncio.get_running_loop(), max(left_s, LEAST_LATER_S)
        loop.call_later(later_s, self._end_in_time, request_id, paused_s)

    async def _give_up(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        """Treat a cancelled cell as a time-out does: interrupt it, and kill it only if it resists."""
        self._interrupt(KillCause.CANCELLED)
        frame = None
        try:
            frame = await finish(self._wait_for(answer))
        finally:  # also when cancelled again: else this cell's output would count as the next one's
            self._collect()
            self._set_pace(is_busy=False)
            if frame is not None:
                await self._release_tasks(frame)

    async def _wait_for(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        """Wait for the answer or the session's end; None if it has ended without an answer."""
        end = self._transport.end
        if end is None:
            return None
        if not answer.done():
            await any_of(answer, end, self._transport.link.lost)
        if answer.done():
            return answer.result()
        await self._transport.stop(self._cause)
        return None

    async def _release_tasks(self, frame: Mapping[str, Any]) -> None:
        """Resume the asyncio tasks that a cell has left; their output from now on belongs to the next cell."""
        if frame.get("has_tasks") is not True:
            return
        sending = self._transport.send(encode({"op": "collected"}))
        if sending is not None:
            await become_task()
            with suppress_logged(log, "a session does not read; its next cell will report that", TimeoutError):
                async with asyncio.timeout(INTERRUPT_TIMEOUT_S * self._transport.slowness):
                    await sending

    def _on_flood(self) -> None:
        """Interrupt a cell that sends or prints too much; between two cells, kill the interpreter."""
        if self._is_running and self._answer is not None:
            self._cause = self._cause or KillCause.OUTPUT_LIMIT  # also for a cell that has been answered
            self._interrupt(KillCause.OUTPUT_LIMIT)
        else:
            self._cause = KillCause.OUTPUT_LIMIT
            self._transport.kill(KillCause.OUTPUT_LIMIT)

    def _is_at_work(self, request_id: int) -> bool:
        """Tell whether that cell still runs without an answer. After a delay of this loop, an answer counts before
        a timer.
        """
        is_asked = self._answer is not None and not self._answer.done()
        return self._is_running and self._request_id == request_id and is_asked

    def _interrupt(self, cause: KillCause | None) -> None:
        """Interrupt the cell, and kill the session if that has no effect."""
        if not self._is_at_work(self._request_id):
            return
        self._cause = self._cause or cause
        request_id, controls = self._request_id, self._interrupts.first
        if self._sending is None or self._sending.done():
            self._signal_all(request_id, controls)
        else:
            self._sending.add_done_callback(lambda _: self._signal_all(request_id, controls))
        timeout_s = INTERRUPT_TIMEOUT_S * self._transport.slowness
        asyncio.get_running_loop().call_later(timeout_s, self._kill_if_unanswered, self._request_id)

    def _signal_all(self, request_id: int, controls: tuple[ControlMessage, ...]) -> None:
        """Signal the interpreter, which has received the cell but may not have begun it."""
        if not controls or not self._is_at_work(request_id):
            return
        self._has_signalled = True
        for control in controls:
            self._transport.send_control(control)
        asyncio.get_running_loop().call_later(AGAIN_S, self._signal_all, request_id, self._interrupts.again)

    def _kill_if_unanswered(self, request_id: int) -> None:
        if not self._is_at_work(request_id):
            return
        self._cause = self._cause or KillCause.CANCELLED
        self._transport.kill(self._cause)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs; see core.protocols.OpenSession."""
        if self._is_running and self._answer is None:
            self._is_interrupted = True  # as soon as it is sent
        elif self._is_at_work(self._request_id):
            self._is_interrupted = True
            self._interrupt(None)

    async def close(self) -> None:
        """Kill all its processes; the sandbox keeps the files."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.owns_network and self.network is not None:
            self.network.close()  # before the descriptor is gone: closing a container closes it, too
        await finish(self._transport.close())

    def _why(self) -> str:
        if self._verdict is None:
            known_end = self._transport.known_end()
            if isinstance(known_end, str):
                return f" ({known_end})" if known_end else ""
            self._verdict = self._last_verdict(known_end)
        return f" ({self._verdict.status}, exit code {self._verdict.exit_code})"

    def _verdict_of(self, frame: dict[str, Any]) -> Verdict:
        """Return the verdict on an answered cell: the session's own action counts first, then the answer."""
        code = frame.get("exit_code")
        code = code if type(code) is int and 0 <= code <= 255 else 1
        if self._cause is KillCause.TIMEOUT:
            return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT)
        if self._cause is KillCause.OUTPUT_LIMIT:
            return Verdict(status=Status.OUTPUT_LIMIT, exit_code=INTERRUPTED, hits={"output": 1})
        if self._is_interrupted and code:
            return Verdict(status=Status.SIGNALED, exit_code=INTERRUPTED)
        hits = {"network": self._traffic.refused} if self._traffic.refused else {}
        if code:
            return Verdict(status=Status.DENIED if hits else Status.ERROR, exit_code=code, hits=hits)
        return Verdict(status=Status.OK, exit_code=0, hits=hits) if hits else _OK

    def _last_verdict(self, observed: Observed) -> Verdict:
        """Return the verdict on a cell that ended its session: an error even with exit code 0.

        The number of blocked calls is known only for the whole session, so it does not count against its last cell.
        """
        refused = self._traffic.refused
        verdict = decide(replace(observed, cause=observed.cause or self._cause, denied=0, network_refused=refused))
        if verdict.status is Status.OK:
            return Verdict(status=Status.ERROR, exit_code=verdict.exit_code, hits=verdict.hits)
        return verdict

    async def _lost_result(self, outputs: CellOutputs, duration: float, timeout_s: float) -> Result:
        end = await self._transport.observe_end(self._cause)
        self._verdict = self._last_verdict(end.observed)
        usage = replace(end.usage or Usage(), wall_s=duration)
        details = {"lost": end.lost, "refused": self._transport.link.refused[:2000]}
        notes = {name: text for name, text in details.items() if text}
        return await self._result(None, self._verdict, usage, outputs, self._collect(), notes, timeout_s)

    async def _result(
        self,
        frame: dict[str, Any] | None,
        verdict: Verdict,
        usage: Usage,
        outputs: CellOutputs,
        printed: Printed,
        notes: Mapping[str, Any],
        timeout_s: float,
    ) -> Result:
        printed = outputs.left_of(printed, frame or {})
        changes = await self._changes(timeout_s)
        value, is_repr, is_cut = value_of(frame or {})
        last = read_output(frame or {})
        meta: dict[str, Any] = {
            "runtime": self._language,
            "versions": {self._language: self.runtime},
            "limits": {**self._told_limits},
            "duration": usage.wall_s,
            **self._notes,
            "level": str(self._enforcement.level),
            "start": self.start,
            "run": self._request_id,
            "state": "kept" if frame is not None else "lost",
            **notes,
            **self.call_notes(),
            **self._traffic.notes(is_shared=True),
        }
        if outputs.is_cut or is_cut:
            meta["outputs_cut"] = True
        return make_result(
            verdict,
            stdout=printed.stdout,
            stderr=printed.stderr,
            is_truncated=printed.is_truncated,
            value=value,
            value_is_repr=is_repr,
            outputs=(*outputs.outputs, *([last] if last is not None else ())),
            usage=usage,
            enforcement=self._enforcement,
            changes=changes,
            meta=meta,
        )
