"""A process of a sandbox at a service: one call carries it, with its streams on the call's channels."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import ClocheError, InvalidRequest, OutcomeUnknown
from cloche.core.events import HeadTail, OutputChunk, Sink, Started, Stream, discard
from cloche.core.limits import Limits
from cloche.core.processes import Detached
from cloche.core.record import replace
from cloche.core.result import KillCause, Result, Status

from ..live_control import NOT_READ
from ..live_streams import ByteStream, EmptyStream
from .calls import SandboxCalls
from .connections import begin, outcome
from .results import ResultReader
from .wire import ERR, IN, OUT, Call

log = logging.getLogger("cloche.live")
START_S = 60.0  # wait for a process's start
LATE_S, LATE_ROUNDS = 10.0, 4  # wait for the service's report after a time-out
MOST_WRITE = 1 << 19  # bytes of one write to a terminal
NAMES: dict[int, Stream] = {OUT: "stdout", ERR: "stderr"}


class RemoteProcess:
    """One process; see core.protocols.OpenProcess."""

    def __init__(
        self, sandbox: SandboxCalls, limits: Limits, sink: Sink | None, *, timeout_s: float | None = None,
        has_terminal: bool = False, cwd: str | None = None,
    ):  # fmt: skip
        self._sandbox, self._limits, self._sink = sandbox, limits, sink
        self._timeout_s, self._has_terminal, self._cwd = timeout_s, has_terminal, cwd or ""
        self.id, self.pid = "", 0
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = {OUT: HeadTail(limits.output_bytes), ERR: HeadTail(limits.output_bytes)}
        self._cause: KillCause | None = None
        self._is_detached = self._is_announced = self._has_input_ended = False
        self._started_at = 0.0
        self._end: asyncio.Task[dict[str, Any]] | None = None
        self._call: Call | None = None

    async def begin(self, verb: str, fields: Mapping[str, Any]) -> None:
        """Begin the call and wait for the process's start. Raises StartFailed, OutcomeUnknown, InvalidRequest."""
        account = self._sandbox.account
        call = self._call = await begin(account, verb, fields, on_event=self._hear)
        self.stdout, self.stderr = ByteStream(call, OUT), ByteStream(call, ERR)
        call.on_data, call.on_end = self._take, self._take_end
        call.closed.add_done_callback(self._note_over)
        try:
            await asyncio.wait([self._started], timeout=START_S + (self._timeout_s or 0.0))  # the process may be queued
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([call.closed], timeout=account.cancel_s)
            raise
        if not self.id and not call.closed.done():
            call.cancel()
            raise OutcomeUnknown(f"the service did not report the start of a process. {self._sandbox.where()}")
        if not self.id:
            await outcome(
                call, account, "a process was started", timeout_s=START_S, path=self._cwd, where=self._sandbox.where()
            )
            raise OutcomeUnknown(f"a process ended without a start. {self._sandbox.where()}")
        self._announce()
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        self._end = loop.create_task(self._wait_for_end(call))
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())

    # What comes.

    def _note_over(self, _: object) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _hear(self, name: str, data: Mapping[str, Any]) -> None:
        if name == "started" and not self._started.done():
            self.id = str(data.get("id"))[:256]
            pid = data.get("pid")
            self.pid = pid if type(pid) is int else 0
            self._started.set_result(None)

    def _announce(self) -> None:
        if self._sink is not None and self._sink is not discard and not self._is_announced:
            self._is_announced = True
            self._sink(Started())

    def _take(self, channel: int, data: bytes) -> None:
        if self._sink is None:
            (self.stdout if channel == OUT else self.stderr).put(data)
            return
        assert self._call is not None  # noqa: S101 - data arrives from this call
        self._call.grant(channel, len(data))
        output = self._kept[channel]
        was_flooded = output.total > self._limits.flood_bytes
        output.add(data)
        if was_flooded:
            return
        if self._sink is not discard:
            self._announce()
            self._sink(OutputChunk(stream=NAMES[channel], data=data))
        if output.total > self._limits.flood_bytes:
            self.kill(KillCause.OUTPUT_LIMIT)

    def _take_end(self, channel: int) -> None:
        (self.stdout if channel == OUT else self.stderr).put_end()

    # What is done with it.

    async def write(self, data: bytes) -> bool:
        """Write to standard input; returns False if it is closed."""
        if self._call is None or self._has_input_ended:
            return False
        if not self._has_terminal:
            return await self._call.send(IN, data)
        for offset in range(0, len(data), MOST_WRITE):
            encoded = base64.b64encode(data[offset : offset + MOST_WRITE]).decode()
            await self._sandbox.ask_inside("process.write", {"process": self.id, "base64": encoded})
        return not self._call.closed.done()

    def close_stdin(self) -> None:
        """Close standard input; on a terminal, like Ctrl-D."""
        if self._has_terminal:
            self._soon("process.write", text="", end=True)
        elif self._call is not None and not self._has_input_ended:
            self._has_input_ended = True
            self._call.end(IN)

    def signal(self, number: int, to: str = "process") -> None:
        """Send a signal to the process, to its `group`, or to its whole `tree`."""
        self._soon("process.signal", signal=number, to=to)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        self._soon("process.resize", rows=rows, columns=columns)

    def kill(self, cause: KillCause | None = None) -> None:
        """Kill the process and all of its descendants."""
        if self._cause is None:
            self._cause = cause
        self._soon("process.kill")

    def detach(self) -> None:
        """Let the process continue without a client."""
        self._is_detached = True
        self._soon("process.detach")
        self.stdout.put_end()
        self.stderr.put_end()

    def _soon(self, verb: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        self._sandbox.do_soon(verb, {"process": self.id, **fields})

    # How it ends.

    async def _wait_for_end(self, call: Call) -> dict[str, Any]:
        sandbox = self._sandbox
        try:
            return await outcome(
                call, sandbox.account, f"process {self.id} ran", timeout_s=None, path=self._cwd, where=sandbox.where()
            )
        finally:
            self.stdout.put_end()
            self.stderr.put_end()

    async def _ended(self) -> dict[str, Any]:
        assert self._end is not None  # noqa: S101 - it has begun
        if self._timeout_s is not None:
            await self._keep_time(self._end, self._timeout_s)
        answer = await asyncio.shield(self._end)
        if answer.get("isDetached") is True:
            raise Detached(f"process {self.id} was detached; attach to it by its id")
        return answer

    async def _keep_time(self, end: asyncio.Task[dict[str, Any]], timeout_s: float) -> None:
        """Wait for the process's end, and kill it if the end is late.

        Unread output and a pause delay the report of an end, so that time does not count.
        """
        await asyncio.wait([end], timeout=self._started_at + timeout_s - asyncio.get_running_loop().time())
        rounds = 0
        while not end.done():
            await asyncio.wait([end], timeout=LATE_S / LATE_ROUNDS)
            rounds = rounds + 1 if self.stdout.is_empty and self.stderr.is_empty else 0
            if rounds < LATE_ROUNDS or end.done():
                continue
            rounds = 0
            if not await self._sandbox.is_paused():
                self.kill(KillCause.TIMEOUT)
                await asyncio.wait([end], timeout=LATE_S)
                if not end.done() and self._call is not None:
                    self._call.cancel()
                    raise OutcomeUnknown(
                        f"the service did not end process {self.id} after its time-out. {self._sandbox.where()}"
                    )

    async def result(self, *, takes_output: bool = True) -> Result:
        """Wait for the end and return the result; see core.protocols.OpenProcess."""
        if takes_output and self._sink is None:
            for channel, stream in ((OUT, self.stdout), (ERR, self.stderr)):
                if not stream.is_read:
                    stream.divert(self._kept[channel].add)
        answer = await self._ended()
        reader = ResultReader(self._sandbox.account, self._limits)
        return self._with_output(reader.read(answer, sandbox=self._sandbox.id))

    def _with_output(self, reported: Result) -> Result:
        """Return the result with the output of the streams, followed by text that the service added."""
        outputs = {channel: output.joined() for channel, output in self._kept.items()}
        out, err = outputs[OUT] + reported.stdout_bytes, outputs[ERR]
        if reported.stderr_bytes:
            err += (b"" if not err or err.endswith(b"\n") else b"\n") + reported.stderr_bytes
        result = replace(
            reported, stdout=out.decode("utf-8", "replace"), stderr=err.decode("utf-8", "replace"), stdout_bytes=out,
            stderr_bytes=err,
            truncated=reported.truncated or any(output.is_truncated for output in self._kept.values()),
        )  # fmt: skip
        result.meta["process"] = self.id
        if self._cause is KillCause.OUTPUT_LIMIT and result.status in (Status.SIGNALED, Status.ERROR):
            result.status, result.exit_code = Status.OUTPUT_LIMIT, 137
            hits = {**result.enforcement.hits, str(Status.OUTPUT_LIMIT): 1}
            result.enforcement = replace(result.enforcement, hits=hits)
        return result

    async def close(self) -> None:
        """Kill the process unless it has ended or was detached, and wait for the report of its end."""
        if self._end is None or self._end.done() or self._is_detached:
            return
        self.kill(KillCause.CANCELLED)
        for stream in (self.stdout, self.stderr):
            stream.divert(lambda _: None)
        await asyncio.wait([self._end], timeout=LATE_S)
        if not self._end.done() and self._call is not None:
            self._call.cancel()


class RemoteControl:
    """One process without its output; see `OpenLiveSandbox.control_process`."""

    is_terminal, has_input = False, True  # as far as it is known here

    def __init__(self, sandbox: SandboxCalls, id: str, pid: int):  # noqa: A002 - as the process's own property
        self._sandbox, self.id, self.pid = sandbox, id, pid
        self.stdout, self.stderr = EmptyStream(), EmptyStream()

    async def write(self, data: bytes) -> bool:
        """Write to standard input; returns False if it is closed."""
        is_read = True
        for offset in range(0, len(data), MOST_WRITE):
            encoded = base64.b64encode(data[offset : offset + MOST_WRITE]).decode()
            answer = await self._sandbox.ask_inside("process.write", {"process": self.id, "base64": encoded})
            is_read = answer.get("isRead") is True
        return is_read

    def close_stdin(self) -> None:
        """Close standard input; on a terminal, like Ctrl-D."""
        self._soon("process.write", text="", end=True)

    def signal(self, number: int, to: str = "process") -> None:
        """Send a signal to the process, to its `group`, or to its whole `tree`."""
        self._soon("process.signal", signal=number, to=to)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        self._soon("process.resize", rows=rows, columns=columns)

    def kill(self, cause: KillCause | None = None) -> None:
        """Kill the process and all of its descendants."""
        del cause
        self._soon("process.kill")

    def detach(self) -> None:
        """Do nothing: nothing is held."""

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    async def result(self, *, takes_output: bool = True) -> Result:
        """Raise InvalidRequest: only its reader learns of its end."""
        del takes_output
        raise InvalidRequest(NOT_READ)

    def _soon(self, verb: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        self._sandbox.do_soon(verb, {"process": self.id, **fields})


def not_there(error: ClocheError) -> InvalidRequest:
    """Return the error for a process that does not exist."""
    return InvalidRequest(f"process: {error}")
