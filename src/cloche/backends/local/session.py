"""A live session of the local backend: an interpreter in a jail of its own, in the workspace of its sandbox.

It is one long run: the same helper, reaper, walls and limits; what is added is a link on which the interpreter is
given cells. The clock of a cell is kept here. A cell that is over its time is interrupted, as by Ctrl-C, which keeps
what the session knows; one that does not let itself be interrupted is killed with the whole session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cloche.core.errors import ClocheError, InvalidRequest, StartFailed
from cloche.core.events import Sink, Started
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, Verdict, decide
from cloche.core.result import EXIT_TIMEOUT, TIMEOUT_NOTE, Output, Result, Status, Usage

from .connection import Connection
from .dialogue import Dialogue, Heard, read_output
from .reports import finish, observed, usage

if TYPE_CHECKING:
    from .sandbox import LocalOpenSandbox
    from .session_program import SessionProgram

INTERRUPT_PATIENCE_S = 3.0
LONG_S = 0.01  # a cell that takes longer has its memory watched closely
DRAIN_S = 0.3
START_PATIENCE_S = 60.0
FOR_EVER_S = 1e9
INTERRUPTED = 130


class LocalSession:
    """Run one cell at a time; see core.protocols.OpenSession."""

    def __init__(self, sandbox: LocalOpenSandbox, program: SessionProgram, limits: Limits):
        self._sandbox, self._program, self._limits = sandbox, program, limits
        self._dialogue = Dialogue(limits, program.new_codec(), self._on_flood)
        self._connection: Connection | None = None
        self._end: asyncio.Future[dict[str, Any]] | None = None
        self._turn = asyncio.Lock()
        self._cause: KillCause | None = None
        self._is_interrupted = False
        self._is_running = False
        self._request_id = 0
        self._verdict: Verdict | None = None
        self.start = "cold"
        self.runtime = program.language.name

    @property
    def is_alive(self) -> bool:
        return self._end is not None and not self._end.done() and not self._dialogue.lost.done()

    async def open(
        self, connection: Connection, send: Callable[[list[int]], None], end: Coroutine[Any, Any, dict[str, Any]]
    ) -> None:
        """Send the run that the session is, with `send`, and wait until the interpreter says that it is ready."""
        self._connection = connection
        send(self._dialogue.guest_ends())
        self._dialogue.close_guest_ends()
        self._end = asyncio.ensure_future(end)
        waiting = [self._dialogue.ready, self._dialogue.lost, self._end]
        await asyncio.wait(waiting, timeout=START_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._dialogue.ready.done():
            raise await self._why_not_started()
        self.runtime = str(self._dialogue.ready.result().get("runtime") or self.runtime)[:100]
        self._dialogue.catch_up()
        self._dialogue.renew()
        connection.tell("pace", is_busy=False)

    async def _why_not_started(self) -> ClocheError:
        """Return the error of a session that did not start."""
        end = self._end
        if end is not None and end.done() and isinstance(error := end.exception(), ClocheError):
            return error
        self._dialogue.catch_up()
        said = self._dialogue.kept("stderr").decode("utf-8", "replace").strip()[-400:]
        return StartFailed(f"the {self._program.language.name} session did not start{f': {said}' if said else ''}")

    async def run(self, code: str, *, timeout_s: float, sink: Sink) -> Result:
        """Run one cell; see core.protocols.OpenSession."""
        async with self._turn:
            if not self.is_alive:
                raise InvalidRequest(f"this session has ended{self._why()}; restart it, or open another one")
            return await self._run(code, timeout_s, sink)

    async def _run(self, code: str, timeout_s: float, sink: Sink) -> Result:
        self._request_id += 1
        self._cause, self._is_interrupted, self._is_running = None, False, True
        heard = self._dialogue.begin(sink)
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(LONG_S, self._set_pace), loop.call_later(timeout_s, self._on_timeout)]
        try:
            sink(Started())
            answer = await self._dialogue.ask(self._request_id, code)
            frame = await self._wait_for(answer)
        except asyncio.CancelledError:
            await self._stop(KillCause.CANCELLED)
            raise
        finally:
            for timer in timers:
                timer.cancel()
            self._is_running = False
        duration = time.monotonic() - started
        if duration > LONG_S and self._connection is not None:
            self._connection.tell("pace", is_busy=False)
        return await self._result(frame, heard, duration)

    async def _wait_for(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        """Wait for the answer or for the session's end; None when it has ended without one."""
        if self._end is None:
            return None
        lost = self._dialogue.lost
        if not answer.done():
            woken: asyncio.Future[None] = answer.get_loop().create_future()

            def wake(_: object) -> None:
                if not woken.done():
                    woken.set_result(None)

            ends = (answer, self._end, lost)
            for one in ends:
                one.add_done_callback(wake)
            try:
                await woken
            finally:
                for one in ends:
                    one.remove_done_callback(wake)
        if answer.done():
            return answer.result()
        await self._stop(None)
        return None

    async def _stop(self, cause: KillCause | None) -> None:
        """End the session, in a way that a cancelled caller cannot cut short."""
        if self._connection is None or self._end is None:
            return
        if not self._end.done():
            self._connection.kill(cause or self._cause or KillCause.CANCELLED) if cause or self._cause else None
            if not (cause or self._cause):  # its link is gone; give the kernel's word a moment, then end it
                await asyncio.wait([self._end], timeout=1.0)
                if not self._end.done():
                    self._connection.kill(KillCause.CANCELLED)
        with contextlib.suppress(Exception):
            await finish(self._end)

    def _set_pace(self) -> None:
        if self._connection is not None:
            self._connection.tell("pace", is_busy=True)

    def _on_timeout(self) -> None:
        self._interrupt(KillCause.TIMEOUT)

    def _on_flood(self) -> None:
        self._interrupt(KillCause.OUTPUT_LIMIT)

    def _interrupt(self, cause: KillCause | None) -> None:
        """Interrupt the cell, and kill the session if that does not help."""
        if not self._is_running or self._connection is None:
            return
        self._cause = self._cause or cause
        self._connection.tell("interrupt")
        asyncio.get_running_loop().call_later(INTERRUPT_PATIENCE_S, self._lose_patience, self._request_id)

    def _lose_patience(self, request_id: int) -> None:
        if self._is_running and self._request_id == request_id and self._connection is not None:
            self._connection.kill(self._cause or KillCause.CANCELLED)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs; see core.protocols.OpenSession."""
        if self._is_running:
            self._is_interrupted = True
            self._interrupt(None)

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.kill(KillCause.CANCELLED)
                if self._end is not None:
                    with contextlib.suppress(Exception):
                        await finish(self._end)
                await finish(connection.close())
        finally:
            self._dialogue.close()

    def _why(self) -> str:
        return f" ({self._verdict.status}, exit code {self._verdict.exit_code})" if self._verdict is not None else ""

    async def _result(self, frame: dict[str, Any] | None, heard: Heard, duration: float) -> Result:
        is_kept = frame is not None
        seen = Usage(wall_s=duration)
        if frame is not None:
            self._dialogue.catch_up()
            verdict = self._verdict_of(frame)
        else:
            await self._dialogue.drain(DRAIN_S)
            ended = self._ended()
            verdict = self._verdict = self._last_verdict(ended)
            seen = dataclasses.replace(usage(ended), wall_s=duration) if ended else seen
        is_truncated = self._dialogue.is_truncated
        out, err = self._dialogue.kept("stdout"), self._dialogue.kept("stderr")
        self._dialogue.renew()
        if verdict.status is Status.TIMEOUT:
            err += (b"" if not err or err.endswith(b"\n") else b"\n") + TIMEOUT_NOTE.encode()
        found = await self._sandbox.collected()
        value, is_repr = _value(frame or {})
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
            files=found.changed if found else (),
            usage=seen,
            enforcement=self._sandbox.enforcement_with(verdict.hits),
            stdout_bytes=out,
            stderr_bytes=err,
            save_files=self._sandbox.saver(found) if found else None,
            meta=self._meta(duration, is_kept=is_kept, is_cut=heard.is_cut, error=(frame or {}).get("error")),
        )

    def _ended(self) -> dict[str, Any]:
        if self._end is None or not self._end.done() or self._end.cancelled() or self._end.exception() is not None:
            return {}
        return self._end.result()

    def _verdict_of(self, frame: dict[str, Any]) -> Verdict:
        """Judge a cell that was answered: by what we did to it, then by what it says of itself."""
        code = frame.get("exit_code")
        code = code if isinstance(code, int) and 0 <= code <= 255 else 1
        if self._cause is KillCause.TIMEOUT:
            return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT)
        if self._cause is KillCause.OUTPUT_LIMIT:
            return Verdict(status=Status.OUTPUT_LIMIT, exit_code=INTERRUPTED, hits={"output": 1})
        if self._is_interrupted and code:
            return Verdict(status=Status.SIGNALED, exit_code=INTERRUPTED)
        return Verdict(status=Status.ERROR if code else Status.OK, exit_code=code)

    def _last_verdict(self, ended: dict[str, Any]) -> Verdict:
        """Judge a cell that ended its session."""
        verdict = decide(observed(ended)) if ended else decide(Observed(signal=9))
        if verdict.status is Status.OK:  # it left on its own, in the middle of a cell
            return Verdict(status=Status.ERROR, exit_code=verdict.exit_code, hits=verdict.hits)
        return verdict

    def _meta(self, duration: float, *, is_kept: bool, is_cut: bool, error: object) -> dict[str, Any]:
        name = self._program.language.name
        meta: dict[str, Any] = {
            "runtime": name,
            "versions": {name: self.runtime},
            "limits": self._limits.as_dict(),
            "duration": duration,
            "backend": "local",
            "level": str(self._sandbox.level),
            "start": self.start,
            "run": self._request_id,
            "state": "kept" if is_kept else "lost",
        }
        if isinstance(error, dict):
            meta["error"] = {key: str(error[key])[:2000] for key in ("name", "message") if key in error}
        if is_cut:
            meta["outputs_cut"] = True
        return meta


def _value(frame: dict[str, Any]) -> tuple[Any, bool]:
    if "value" in frame:
        return frame["value"], False
    text = frame.get("value_repr")
    return (text, True) if isinstance(text, str) else (None, False)


def _shown(frame: dict[str, Any]) -> list[Output]:
    output = read_output(frame)
    return [output] if output is not None else []
