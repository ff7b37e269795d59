"""One process of a live sandbox at the caller's end: its streams, its end, and the reports about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import (
    BackendUnavailable,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    SandboxFileNotFound,
    StartFailed,
)
from cloche.core.events import HeadTail, OutputChunk, Sink, Started, Stream, discard
from cloche.core.functions import OfferedFunctions
from cloche.core.guest_json import decode
from cloche.core.limits import Limits
from cloche.core.processes import Detached, ProcessInfo, ProcessRequest
from cloche.core.record import replace
from cloche.core.result import KillCause, Observed, Result, Usage, Verdict, decide
from cloche.egress.client import Traffic
from cloche.egress.windows import SharedNetwork, Window
from cloche.init import wire

from .init_link import Operation, OperationFailed, failure_of
from .live_calls import CallChannel
from .live_streams import ByteStream
from .results import make_result, run_notes
from .saved_files import Changes

START_S = 60.0  # for the sandbox to report a process's start
LATE_S, LATE_ROUNDS = 10.0, 4  # after a time-out, for the sandbox to report the end
MOST_NUMBER = 1e18
MOST_LISTED = 4096  # characters of a command's description in the list of processes
NAMES: dict[int, Stream] = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


class LiveProcess:
    """Hold one process: its streams and its end. See core.protocols.OpenProcess."""

    def __init__(
        self,
        channel: Operation,
        limits: Limits,
        sink: Sink | None = None,
        *,
        timeout_s: float | None = None,
        make_result: Callable[[LiveProcess, Mapping[str, Any]], Result] | None = None,
    ):
        """Pass its output to `sink` and buffer as much as a result holds; without a sink, the caller reads the streams.

        init kills the process after `timeout_s`. If init does not report that in time, the sandbox is closed.
        """
        self._channel, self._limits = channel, limits
        self._timeout_s, self._make_result = timeout_s, make_result
        self.id, self.pid, self.is_terminal = "", 0, False
        self._is_announced = False
        self.stdout, self.stderr = ByteStream(channel, wire.STDOUT), ByteStream(channel, wire.STDERR)
        self.kept = {wire.STDOUT: HeadTail(limits.output_bytes), wire.STDERR: HeadTail(limits.output_bytes)}
        self._sink = sink
        self.on_report: Callable[[bytes], None] = lambda _: None
        self.calls: CallChannel | None = None
        # For sandboxes that can report why they ended by themselves: returns an event like `exit`, or None.
        self.on_loss: Callable[[], Awaitable[dict[str, Any] | None]] | None = None
        # Seconds that the sandbox was paused in total, and before this process began: pauses extend the time-out.
        self.paused_s: Callable[[], Awaitable[float]] | None = None
        self.paused_before_s = 0.0
        self._cause: KillCause | None = None
        self._end: asyncio.Task[dict[str, Any]] | None = None
        self._is_detached = False
        # The sandbox's network, and its traffic while this process ran, of all processes.
        self.network: SharedNetwork | None = None
        self.traffic = Traffic()
        self._window: Window | None = None
        channel.on_data = self._take

    def open_calls(self, functions: OfferedFunctions | None) -> CallChannel | None:
        """Serve its calls of the caller's functions, if there are any."""
        self.calls = None if functions is None else CallChannel(self._channel, functions)
        return self.calls

    async def begin(self) -> None:
        """Wait until the process has started. Raises StartFailed, OutcomeUnknown."""
        self._window = self.network.open_window() if self.network is not None else None
        try:
            async with asyncio.timeout(START_S) as waiting:
                started = await self._channel.event()
                if started.get("event") == "waiting":  # for room
                    longest_s = wire.LONGEST_WAIT_S if self._timeout_s is None else self._timeout_s
                    waiting.reschedule(asyncio.get_running_loop().time() + longest_s + START_S)
                    started = await self._channel.event()
        except TimeoutError as error:
            self._channel.abandon("it did not report the start of a process")
            raise OutcomeUnknown("the sandbox did not answer, and was closed; the process may have run") from error
        except OperationFailed as error:
            raise not_started(error) from error
        self.id, self.pid = str(started.get("id", "")), int(number_of(started.get("pid")))
        self.is_terminal = started.get("is_terminal") is True
        self._announce()
        self._started_at = monotonic()
        self._end = asyncio.get_running_loop().create_task(self._wait_for_end())
        self._end.add_done_callback(_retrieve)

    def _announce(self) -> None:
        if self._sink is not None and self._sink is not discard and not self._is_announced:
            self._is_announced = True
            self._sink(Started())

    def _take(self, stream: int, data: memoryview) -> None:
        if stream in self.kept and self._sink is None:
            (self.stdout if stream == wire.STDOUT else self.stderr).put(bytes(data))
            return
        if stream == wire.HOST_CALLS and self.calls is not None:
            self.calls.receive(data)
            return
        self._channel.grant(stream, len(data))
        if stream == wire.REPORT:
            self.on_report(bytes(data))
        elif stream in self.kept:
            self._keep(stream, bytes(data))

    def _keep(self, stream: int, data: bytes) -> None:
        output = self.kept[stream]
        was_flooded = output.total > self._limits.flood_bytes
        output.add(data)
        if was_flooded:
            return
        if self._sink is not None and self._sink is not discard:
            self._announce()
            self._sink(OutputChunk(stream=NAMES[stream], data=data))
        if output.total > self._limits.flood_bytes:
            self.kill(KillCause.OUTPUT_LIMIT)

    async def write(self, data: bytes) -> bool:
        """Write to its standard input at its pace; return False if the process has ended."""
        return await self._channel.send(wire.STDIN, data)

    def close_stdin(self) -> None:
        """Close its standard input; on a terminal, as Ctrl-D does."""
        self._channel.end(wire.STDIN)

    def signal(self, number: int, to: str = "process") -> None:
        """Send a signal to the process, to its `group`, or to its whole `tree`."""
        self._channel.ask(do="signal", number=number, to=to)

    def resize(self, rows: int, columns: int) -> None:
        self._channel.ask(do="resize", rows=rows, columns=columns)

    def kill(self, cause: KillCause | None = None) -> None:
        """Kill the process and all its descendants."""
        if self._cause is None:
            self._cause = cause
        self._channel.ask(do="kill", cause=str(cause or ""))
        if self.id:  # also kills remaining children if the process has ended, or its end is being reported
            self._channel.end_by_id(self.id)

    def detach(self) -> None:
        self._is_detached = True
        self._channel.ask(do="keep")
        self._channel.close()
        self._end_streams()

    async def _wait_for_end(self) -> dict[str, Any]:
        try:
            ended = await self._channel.event()
            with contextlib.suppress(OperationFailed):
                await self._channel.closed
            return ended
        except OutcomeUnknown:
            end_report = await self.on_loss() if self.on_loss is not None else None
            if end_report is None:
                raise
            return end_report
        finally:
            self._end_streams()

    def _end_streams(self) -> None:
        self.stdout.put_end()
        self.stderr.put_end()

    async def end(self) -> dict[str, Any]:
        """Wait for its end and return the report. Raises StartFailed, OutcomeUnknown."""
        if self._end is None:
            raise InternalError("a process that was not started was waited for")
        if self._timeout_s is not None:
            await self._keep_time(self._end, self._timeout_s)
        try:
            return await asyncio.shield(self._end)
        except OperationFailed as error:
            if error.kind == "start":
                raise not_started(error) from error
            if error.kind == "replaced":
                raise Detached(f"process {self.id}: {error}") from error
            if self._is_detached:
                raise Detached(f"process {self.id} was detached; attach to it by its id") from error
            raise OutcomeUnknown(f"the end of the process is not known: {error}") from error

    async def _keep_time(self, end: asyncio.Task[dict[str, Any]], timeout_s: float) -> None:
        """Wait for its end; close the sandbox if the end is late. Unread output delays the report, which is not
        counted as late.
        """
        ends_at = self._started_at + timeout_s
        await asyncio.wait([end], timeout=ends_at - monotonic())
        rounds = 0
        while not end.done():
            await asyncio.wait([end], timeout=LATE_S / LATE_ROUNDS)
            rounds = rounds + 1 if self.stdout.is_empty and self.stderr.is_empty else 0
            # Several rounds, because this loop itself may have been blocked.
            if rounds >= LATE_ROUNDS and not end.done():
                paused_s = await self.paused_s() if self.paused_s is not None else 0.0
                if monotonic() >= ends_at + paused_s - self.paused_before_s + LATE_S:
                    self._channel.abandon("it did not end a process after its time-out")
                    return
                rounds = 0

    async def note_traffic(self) -> None:
        """Record the network's traffic up to now, once."""
        window, self._window = self._window, None
        if window is not None and self.network is not None:
            self.traffic = await self.network.close_window(window)

    async def result(self, *, takes_output: bool = True) -> Result:
        """Wait for its end and return its result; see core.protocols.OpenProcess."""
        if self._make_result is None:
            raise InternalError("a process without a sandbox was waited for")
        if takes_output and self._sink is None:
            for number, stream in ((wire.STDOUT, self.stdout), (wire.STDERR, self.stderr)):
                if not stream.is_read:
                    stream.divert(self.kept[number].add)
        ended = await self.end()
        await self.note_traffic()
        return self._make_result(self, ended)

    async def wait(self) -> Verdict:
        """Wait for its end and return the verdict. Raises StartFailed, OutcomeUnknown."""
        return self.verdict(await self.end())

    def verdict(self, ended: Mapping[str, Any], refused: str = "") -> Verdict:
        observed = replace(observed_end(ended, self._cause), network_refused=self.traffic.refused)
        return decide(observed.with_refusal(refused))

    async def close(self) -> None:
        """Kill it unless it has ended or was detached, and wait for the report."""
        if self._end is None or self._end.done() or self._is_detached:
            return
        self.kill(KillCause.CANCELLED)
        for stream in (self.stdout, self.stderr):
            stream.divert(lambda _: None)
        await asyncio.wait([self._end], timeout=LATE_S)
        self._channel.close()


def _retrieve(end: asyncio.Task[dict[str, Any]]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it as never retrieved."""
    if not end.cancelled():
        end.exception()


def not_started(error: OperationFailed) -> Exception:
    """Return the exception for a process that could not be started."""
    if error.details.get("step") == "cwd":
        return SandboxFileNotFound(f"cwd: {error}", path=str(error.details.get("path", "")))
    if error.details.get("step") == "user":
        return InvalidRequest(f"user: {error}")
    if error.kind == "pids":
        return StartFailed(
            "the sandbox has reached its limit on processes; end some, or open it with more `pids`", step="pids"
        )
    if error.kind == "paused":
        return InvalidRequest(str(error))
    if error.kind in ("too_many", "unsupported"):
        return BackendUnavailable(str(error))
    return StartFailed(str(error), step=str(error.details.get("step") or error.kind), errno=error.details.get("errno"))


def observed_end(ended: Mapping[str, Any], cause: KillCause | None = None) -> Observed:
    """Read the report of a process's end."""
    status = ended.get("status")
    reported_cause = ended.get("cause")
    if cause is None and reported_cause in tuple(KillCause):
        cause = KillCause(reported_cause)
    if not isinstance(status, int):
        return Observed(cause=cause)
    status &= 0xFFFF
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if signal is None else None
    pids_hits, denied = (int(number_of(ended.get(name))) for name in ("pids_hits", "denied"))
    return Observed(
        exit_code=code, signal=signal, cause=cause, pids_hits=pids_hits, denied=denied,
        workspace_full=bool(ended.get("is_full")),
    )  # fmt: skip


def usage_of(ended: Mapping[str, Any]) -> Usage:
    """Read the resources that a process used."""
    reported = ended.get("usage")
    figures = reported if isinstance(reported, dict) else {}

    return Usage(
        wall_s=number_of(figures.get("wall_s")),
        cpu_user_s=number_of(figures.get("user_s")),
        cpu_system_s=number_of(figures.get("system_s")),
        peak_memory_bytes=int(number_of(figures.get("most_kib"))) * 1024,
    )


def number_of(value: object) -> float:
    """Return a number reported by a sandbox; 0.0 if it is no number or out of range."""
    return float(value) if isinstance(value, int | float) and abs(value) < MOST_NUMBER else 0.0


def command_error(channel_error: dict[str, Any] | None, message: str, *, process: str | None) -> Exception:
    """Return the exception for a command that did not start, or whose end is unknown.

    `process` is its id, None if it did not start. `channel_error` is the error of its channel, None if the sandbox is
    lost; `message` then gives the reason.
    """
    if channel_error is None:
        return OutcomeUnknown(message)
    error = failure_of(channel_error)
    if process is None or error.kind == "start":
        return not_started(error)
    if error.kind == "replaced":
        return Detached(f"process {process}: {error}")
    return OutcomeUnknown(f"the end of the process is not known: {error}")


def command_result(
    verdict: Verdict,
    ended: Mapping[str, Any],
    *,
    kept: Mapping[int, HeadTail],
    limits: Limits,
    enforcement: Enforcement,
    notes: Mapping[str, Any],
) -> Result:
    """Return the result of a command, from the report of its end and its kept output."""
    usage = usage_of(ended)
    dropped = ended.get("dropped")
    return make_result(
        verdict,
        stdout=kept[wire.STDOUT].joined(),
        stderr=kept[wire.STDERR].joined(),
        is_truncated=any(output.is_truncated for output in kept.values()) or bool(dropped),
        value=None,
        value_is_repr=False,
        outputs=(),
        usage=usage,
        enforcement=enforcement,
        changes=Changes(),
        meta={
            **run_notes(None, "", limits, enforcement, usage.wall_s),
            **notes,
            **({"dropped_bytes": dropped} if isinstance(dropped, int) and dropped else {}),
        },
    )


def process_info(row: Mapping[str, Any]) -> ProcessInfo:
    """Read a row of the list of processes."""
    status = row.get("status")
    verdict = decide(observed_end(row)) if isinstance(status, int) else None
    argv, cwd, env = _listed(row.get("listed"))
    return ProcessInfo(
        id=str(row.get("id", "")),
        pid=int(number_of(row.get("pid"))),
        command=str(row.get("command", "")),
        age=number_of(row.get("started_s")),
        exit_code=verdict.exit_code if verdict else None,
        status=verdict.status if verdict else None,
        printed=int(number_of(row.get("printed"))),
        is_attached=row.get("is_attached") is True,
        is_stopped=row.get("is_stopped") is True,
        tag=str(row.get("tag", "")),
        argv=argv,
        cwd=cwd,
        env=env,
    )


def describe_request(request: ProcessRequest) -> str:
    """Return what the list of processes has of a request: if that is long, the program alone."""
    text = json.dumps([list(request.argv), request.cwd, dict(request.env)], separators=(",", ":"))
    return text if len(text) <= MOST_LISTED else json.dumps([[request.argv[0][:256]], None, {}])


def _listed(text: object) -> tuple[tuple[str, ...], str | None, Mapping[str, str]]:
    """Read that again, from a sandbox."""
    if not isinstance(text, str) or not 0 < len(text) <= MOST_LISTED:
        return (), None, {}
    try:
        (argv, cwd, env), _ = decode(text, MOST_LISTED, mends_text=True)
        return tuple(map(str, argv)), cwd if cwd is None else str(cwd), {str(name): str(env[name]) for name in env}
    except (ValueError, TypeError, KeyError):
        return (), None, {}
