"""A live session, wherever its interpreter lives: cells, their clock, interrupts, and what came of each.

The clock of a cell is kept here. A cell that is over its time is interrupted, as by Ctrl-C, which keeps what the
session knows; one that does not let itself be interrupted is killed with the whole session. Where the interpreter
lives, how it is signalled and how its end is known is what a backend adds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import ClocheError, InvalidRequest, StartFailed
from cloche.core.events import Sink, Started
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, Verdict, decide
from cloche.core.result import EXIT_TIMEOUT, TIMEOUT_NOTE, Output, Result, Status, Usage
from cloche.core.told import MAX_VALUE_BYTES, is_small, read_output

from .drivers import Interrupt, Word
from .exchange import Exchange, Heard
from .noting import noted
from .saving import Changes
from .waiting import finish

INTERRUPT_PATIENCE_S = 3.0
AGAIN_S = 0.5  # between one interrupt and the next, where one may not be enough
LONG_S = 0.01  # a cell that takes longer has its memory watched closely
DRAIN_S = 0.3
START_PATIENCE_S = 60.0
INTERRUPTED = 130
NOTHING = 0  # the number of a cell that is none: what is said before its answer was about the cell before it
_OK = Verdict(status=Status.OK, exit_code=0)
log = logging.getLogger("cloche.sessions")


class LivingSession(ABC):
    """Run one cell at a time; see core.protocols.OpenSession."""

    def __init__(self, language: str, interrupt: Interrupt, limits: Limits):
        self._language, self._interrupts, self._limits = language, interrupt, limits
        self._told_limits = limits.as_dict()
        self._turn = asyncio.Lock()
        self._cause: KillCause | None = None
        self._is_interrupted = self._is_running = self.is_closed = False
        self._has_signalled = False  # since the interpreter last answered to nothing
        self._request_id = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None  # to the cell that runs
        self._sending: asyncio.Future[None] | None = None  # of a cell that the link had no room for
        self._verdict: Verdict | None = None
        self._slowness = 1.0  # how many times longer than usual all takes there, as far as patience goes
        self.start = "cold"
        self.runtime = language

    @property
    @abstractmethod
    def _exchange(self) -> Exchange:
        """Return what talks to the interpreter."""

    @property
    @abstractmethod
    def _end(self) -> asyncio.Future[Any] | None:
        """Return what is done when the interpreter has ended; None before it was started."""

    @abstractmethod
    async def _prepare(self, code: str) -> None:
        """Do what must be done before the next cell, which runs `code`."""

    @abstractmethod
    def _set_pace(self, *, is_busy: bool) -> None:
        """Tell who watches its memory whether a cell runs."""

    @abstractmethod
    def _signal(self, word: Word) -> None:
        """Have the interpreter signalled."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill the interpreter; its end is then heard like any other."""

    @abstractmethod
    async def _stop(self) -> None:
        """See the interpreter out, which has ended or is not heard any more, and wait until its end is known."""

    @abstractmethod
    async def _judge_end(self) -> tuple[Verdict, Usage | None]:
        """Return what is known of the end of the session, in the middle of a cell."""

    @abstractmethod
    def _known_end(self) -> Verdict | None:
        """Return what is known of an end between two cells, without asking anybody."""

    @abstractmethod
    async def _changes(self, timeout_s: float) -> Changes:
        """Return what has changed in the workspace, after a cell that had so long."""

    @abstractmethod
    def _enforcement(self, hits: Mapping[str, int]) -> Enforcement:
        """Return what is enforced here, and which limits were hit."""

    @abstractmethod
    def _place(self) -> Mapping[str, Any]:
        """Return what results say of where this is."""

    @property
    def is_alive(self) -> bool:
        """Tell whether it can still run anything."""
        return self._end is not None and not self._end.done() and not self._exchange.lost.done()

    @property
    def why_ended(self) -> str:
        """Say how it ended, as far as that is known; empty while it lives."""
        return "" if self.is_alive else self._why().strip(" ()")

    @property
    def has_ended(self) -> bool:
        """Tell whether no process of it is left: one that has only closed its link may still be at work."""
        return self.is_closed or self._end is None or self._end.done()

    async def _await_ready(self, end: asyncio.Future[Any]) -> None:
        """Wait until the interpreter says that it is ready. Raises StartFailed, or what `end` failed with."""
        exchange = self._exchange
        waiting: list[asyncio.Future[Any]] = [exchange.ready, exchange.lost, end]
        await asyncio.wait(waiting, timeout=START_PATIENCE_S * self._slowness, return_when=asyncio.FIRST_COMPLETED)
        if not exchange.ready.done():
            raise await self._why_not_started(end)
        self.runtime = str(exchange.ready.result().get("runtime") or self.runtime)[:100]
        exchange.catch_up()
        exchange.renew()
        self._set_pace(is_busy=False)

    async def _why_not_started(self, end: asyncio.Future[Any]) -> ClocheError:
        """Return the error of a session that did not start."""
        if not end.done():
            await asyncio.wait([end], timeout=1.0)
        if end.done() and isinstance(error := end.exception(), ClocheError):
            return error
        self._exchange.catch_up()
        said = self._exchange.kept("stderr").decode("utf-8", "replace").strip()[-400:]
        return StartFailed(f"the {self._language} session did not start{f': {said}' if said else ''}")

    async def run(self, code: str, *, timeout_s: float, sink: Sink) -> Result:
        """Run one cell; see core.protocols.OpenSession."""
        async with self._turn:
            if not self.is_alive:
                raise InvalidRequest(f"this session has ended{self._why()}; restart it, or open another one")
            self._request_id += 1
            self._cause, self._answer, self._sending = None, None, None
            self._is_interrupted, self._is_running = False, True
            try:
                await self._prepare(code)
                if self._has_signalled:
                    await finish(self._settle())
                return await self._run(code, timeout_s, sink)
            finally:
                self._is_running = False

    async def _settle(self) -> None:
        """Wait until the interpreter is done with what the last cell was to hear: an answer may cross an interrupt.

        It answers to nothing after all signals that were sent before, and ignores those.
        """
        exchange, end = self._exchange, self._end
        answer, sending = exchange.ask(NOTHING, "")
        with noted(log, "a session does not answer, as its next cell will show", TimeoutError):
            async with asyncio.timeout(INTERRUPT_PATIENCE_S * self._slowness):
                if sending is not None:
                    await sending
                if end is not None and not answer.done():
                    await _any_of(answer, end, exchange.lost)
        self._has_signalled = False

    async def _run(self, code: str, timeout_s: float, sink: Sink) -> Result:
        exchange = self._exchange
        heard = exchange.begin(sink)
        started = time.monotonic()
        try:
            sink(Started())
            answer, sending = exchange.ask(self._request_id, code)
            self._answer = answer
            self._sending = asyncio.ensure_future(sending) if sending is not None else None
            if self._is_interrupted:
                self._interrupt(None)
            if self._sending is None and await self._comes_soon(answer, timeout_s):
                frame: dict[str, Any] | None = answer.result()
            else:
                frame = await self._outlast(answer, started, timeout_s)
        finally:
            self._is_running = False
        duration = time.monotonic() - started
        if duration > LONG_S:
            self._set_pace(is_busy=False)
        return await self._result(frame, heard, duration, timeout_s)

    async def _comes_soon(self, answer: asyncio.Future[dict[str, Any]], timeout_s: float) -> bool:
        """Tell whether the answer comes while nobody else is waiting for this thread; if not, nobody waited for it."""
        try:
            return self._exchange.wait_briefly(answer, min(timeout_s, LONG_S))
        except BaseException:  # which another thread may raise in this one
            await self._give_up(answer)
            raise

    async def _outlast(
        self, answer: asyncio.Future[dict[str, Any]], started: float, timeout_s: float
    ) -> dict[str, Any] | None:
        """Wait for the answer by the clock; None when the session has ended without one."""
        loop, passed_s = asyncio.get_running_loop(), time.monotonic() - started
        timers = [
            loop.call_later(LONG_S - passed_s, self._hurry),
            loop.call_later(timeout_s - passed_s, self._interrupt, KillCause.TIMEOUT),
        ]
        try:
            if self._sending is not None:
                await asyncio.shield(self._sending)  # what was sent in part would have to be sent in whole all the same
            return await self._wait_for(answer)
        except asyncio.CancelledError:
            await self._give_up(answer)
            raise
        finally:
            for timer in timers:
                timer.cancel()

    async def _give_up(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        """Do to a cell what a time-out does: it is interrupted, and killed only if it resists."""
        self._interrupt(KillCause.CANCELLED)
        try:
            await finish(self._wait_for(answer))
        finally:  # also when it was cancelled once more: else the next cell would have said what this one said
            self._exchange.catch_up()
            self._exchange.renew()
            self._set_pace(is_busy=False)

    def _hurry(self) -> None:
        self._set_pace(is_busy=True)

    async def _wait_for(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        """Wait for the answer or for the session's end; None when it has ended without one."""
        end = self._end
        if end is None:
            return None
        if not answer.done():
            await _any_of(answer, end, self._exchange.lost)
        if answer.done():
            return answer.result()
        await self._stop()
        return None

    def _on_flood(self) -> None:
        """Interrupt who says too much; who does so between two cells is killed."""
        if self._is_running and self._answer is not None:
            self._cause = self._cause or KillCause.OUTPUT_LIMIT  # also of one that has been answered
            self._interrupt(KillCause.OUTPUT_LIMIT)
        else:
            self._cause = KillCause.OUTPUT_LIMIT
            self._kill()

    def _is_at_work(self, request_id: int) -> bool:
        """Tell whether that cell runs and was not answered: who was held up hears first, and heeds clocks then."""
        is_asked = self._answer is not None and not self._answer.done()
        return self._is_running and self._request_id == request_id and is_asked

    def _interrupt(self, cause: KillCause | None) -> None:
        """Interrupt the cell, and kill the session if that does not help."""
        if not self._is_at_work(self._request_id):
            return
        self._cause = self._cause or cause
        request_id, words = self._request_id, self._interrupts.first
        if self._sending is None or self._sending.done():
            self._signal_all(request_id, words)
        else:
            self._sending.add_done_callback(lambda _: self._signal_all(request_id, words))
        patience_s = INTERRUPT_PATIENCE_S * self._slowness
        asyncio.get_running_loop().call_later(patience_s, self._lose_patience, self._request_id)

    def _signal_all(self, request_id: int, words: tuple[Word, ...]) -> None:
        """Signal the interpreter, which has the cell on its link: it need not have begun with it."""
        if not words or not self._is_at_work(request_id):
            return
        self._has_signalled = True
        for word in words:
            self._signal(word)
        asyncio.get_running_loop().call_later(AGAIN_S, self._signal_all, request_id, self._interrupts.again)

    def _lose_patience(self, request_id: int) -> None:
        """Kill what did not let itself be interrupted; its end is then heard like any other."""
        if not self._is_at_work(request_id):
            return
        self._cause = self._cause or KillCause.CANCELLED
        self._kill()

    async def interrupt(self) -> None:
        """Interrupt the cell that runs; see core.protocols.OpenSession."""
        if self._is_running and self._answer is None:
            self._is_interrupted = True  # as soon as it is sent
        elif self._is_at_work(self._request_id):
            self._is_interrupted = True
            self._interrupt(None)

    def _why(self) -> str:
        """Say how it ended, as far as that is known."""
        self._verdict = self._verdict or self._known_end()
        return f" ({self._verdict.status}, exit code {self._verdict.exit_code})" if self._verdict is not None else ""

    async def _result(self, frame: dict[str, Any] | None, heard: Heard, duration: float, timeout_s: float) -> Result:
        exchange, seen = self._exchange, Usage(wall_s=duration)
        if frame is not None:
            exchange.catch_up()
            verdict = self._verdict_of(frame)
        else:
            await exchange.drain(DRAIN_S)
            verdict, used = await self._judge_end()
            self._verdict = verdict
            seen = dataclasses.replace(used, wall_s=duration) if used is not None else seen
        is_truncated = exchange.is_truncated
        out, err = exchange.kept("stdout"), exchange.kept("stderr")
        exchange.renew()
        if verdict.status is Status.TIMEOUT:
            err += (b"" if not err or err.endswith(b"\n") else b"\n") + TIMEOUT_NOTE.encode()
        found = await self._changes(timeout_s)
        value, is_repr, is_cut = _value(frame or {})
        return Result(
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            verdict.exit_code,
            duration,
            truncated=is_truncated,
            timed_out=verdict.status is Status.TIMEOUT,
            status=verdict.status,
            value=value,
            value_is_repr=is_repr,
            outputs=(*heard.outputs, *_shown(frame or {})),
            files=found.records,
            usage=seen,
            enforcement=self._enforcement(verdict.hits),
            stdout_bytes=out,
            stderr_bytes=err,
            save_files=found.save,
            meta=self._meta(frame, duration, is_cut=heard.is_cut or is_cut) | found.meta(),
        )

    def _verdict_of(self, frame: dict[str, Any]) -> Verdict:
        """Judge a cell that was answered: by what we did to it, then by what it says of itself."""
        code = frame.get("exit_code")
        code = code if type(code) is int and 0 <= code <= 255 else 1
        if self._cause is KillCause.TIMEOUT:
            return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT)
        if self._cause is KillCause.OUTPUT_LIMIT:
            return Verdict(status=Status.OUTPUT_LIMIT, exit_code=INTERRUPTED, hits={"output": 1})
        if self._is_interrupted and code:
            return Verdict(status=Status.SIGNALED, exit_code=INTERRUPTED)
        return Verdict(status=Status.ERROR, exit_code=code) if code else _OK

    def _last_verdict(self, seen: Observed) -> Verdict:
        """Judge a cell that ended its session. What was blocked is known of the whole session, not of its last cell."""
        return as_lost(decide(dataclasses.replace(seen, cause=seen.cause or self._cause, denied=0)))

    def _meta(self, frame: dict[str, Any] | None, duration: float, *, is_cut: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "runtime": self._language,
            "versions": {self._language: self.runtime},
            "limits": {**self._told_limits},
            "duration": duration,
            **self._place(),
            "start": self.start,
            "run": self._request_id,
            "state": "kept" if frame is not None else "lost",
        }
        error = (frame or {}).get("error")
        if isinstance(error, dict):
            meta["error"] = {key: str(error[key])[:2000] for key in ("name", "message") if key in error}
        if is_cut:
            meta["outputs_cut"] = True
        if frame is None and self._exchange.refused:
            meta["refused"] = self._exchange.refused[:2000]
        return meta


def as_lost(verdict: Verdict) -> Verdict:
    """Return the verdict on what left in the middle of a cell: even with 0 that is an error."""
    if verdict.status is Status.OK:
        return Verdict(status=Status.ERROR, exit_code=verdict.exit_code, hits=verdict.hits)
    return verdict


def _value(frame: dict[str, Any]) -> tuple[Any, bool, bool]:
    """Return a cell's value, whether it is a repr, and whether it was cut: no driver of ours sends a larger one."""
    value, text = frame.get("value"), frame.get("value_repr")
    if value is not None or not isinstance(text, str):
        return (value, False, False) if is_small(value, MAX_VALUE_BYTES) else (None, False, True)
    return text[:MAX_VALUE_BYTES], True, len(text) > MAX_VALUE_BYTES


def _shown(frame: dict[str, Any]) -> list[Output]:
    output = read_output(frame)
    return [output] if output is not None else []


async def _any_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cheaper than `asyncio.wait`, which every cell would pay for."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not woken.done():
            woken.set_result(None)

    for one in futures:
        one.add_done_callback(wake)
    try:
        await woken
    finally:
        for one in futures:
            one.remove_done_callback(wake)
