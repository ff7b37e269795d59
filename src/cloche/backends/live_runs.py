"""Runs in a live sandbox, for every backend: code or a command as one more process, and its `Result`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche.core.events import Sink
from cloche.core.frames import GuestReportReader
from cloche.core.loops import finish
from cloche.core.record import dataclass
from cloche.core.request import Request
from cloche.core.result import KillCause, Result
from cloche.init import wire

from .live_process import LiveProcess, usage_of
from .results import make_result

if TYPE_CHECKING:
    from .live import LiveSandbox

MOST_INLINE_BYTES = 1 << 18  # of a program's files, sent within its order


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Say how a request is run: the arguments of `start`, and the content of its input files by path.

    `notes` returns the entries of the result's meta for a run of the given seconds.
    """

    order: Mapping[str, Any]
    inputs: Mapping[str, bytes]
    notes: Callable[[float], Awaitable[Mapping[str, Any]]]


def argv_of(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return one command that compiles and then runs a program; output of compilers goes to standard error."""
    if len(commands) == 1:
        return list(commands[0])
    *compile_steps, last = map(shlex.join, commands)
    return ["sh", "-c", " && ".join([*(f"{step} 1>&2" for step in compile_steps), f"exec {last}"])]


def streams_of(request: Request, *, has_report: bool, calls: bool) -> list[int]:
    """Return the streams of a program; without an input stream, its input is empty."""
    inputs, reports = [wire.STDIN] if request.stdin else [], [wire.REPORT] if has_report or calls else []
    return [*inputs, wire.STDOUT, wire.STDERR, *reports, *([wire.HOST_CALLS, wire.HOST_ANSWERS] if calls else [])]


async def with_files(
    sandbox: LiveSandbox, order: dict[str, Any], files: Iterable[tuple[str, int, bytes]]
) -> dict[str, Any]:
    """Return an order that carries files by path and mode; large files are written first."""
    rows = list(files)
    if sum(len(data) for *_, data in rows) <= MOST_INLINE_BYTES:
        order["files"] = [[path, mode, data.hex()] for path, mode, data in rows]
    else:
        for path, mode, data in rows:
            await sandbox.write_path(path, data, mode=mode)
    return order


async def run_to_end(sandbox: LiveSandbox, request: Request, run: LiveRun, sink: Sink, *, timeout_s: float) -> Result:
    """Start a program, wait for its end and return its result. Cancellation kills it first."""
    link, limits = await sandbox.connected(), sandbox.limits
    since = await sandbox.clock_ns(request.collect)
    process = LiveProcess(link.open("start", waits=True, **run.order), limits, sink, timeout_s=timeout_s)
    reader = GuestReportReader()
    process.network = sandbox.network
    process.on_report = lambda data: _read_report(reader, process, data)
    calls = process.open_calls(sandbox.functions)
    try:
        await sandbox.begun(process)
        ended = await _attend(process, request.stdin)
    finally:
        if calls is not None:
            await finish(calls.wait_closed())
    await process.note_traffic()
    changes = await sandbox.collect_files(
        request.collect, since=since, timeout_s=timeout_s, max_bytes=limits.disk_bytes, inputs=run.inputs
    )
    report, usage = reader.report(), usage_of(ended)
    return make_result(
        process.verdict(ended, report.refused),
        stdout=process.kept[wire.STDOUT].joined(),
        stderr=process.kept[wire.STDERR].joined(),
        is_truncated=any(output.is_truncated for output in process.kept.values()),
        value=report.value,
        value_is_repr=report.is_repr,
        outputs=report.outputs,
        usage=usage,
        enforcement=sandbox.enforcement,
        changes=changes,
        meta={
            **await run.notes(usage.wall_s),
            "backend": sandbox.backend,
            **report.notes(),
            **(calls.calls.notes() if calls is not None else {}),
            **process.traffic.notes(is_shared=True),
        },
    )


def _read_report(reader: GuestReportReader, process: LiveProcess, data: bytes) -> None:
    was_refused = bool(reader.refused)
    reader.feed(data)
    if reader.refused and not was_refused:
        process.kill(KillCause.OUTPUT_LIMIT)


async def _attend(process: LiveProcess, stdin: bytes) -> Mapping[str, Any]:
    """Send a process its input and wait for its end; return the report."""
    sending = asyncio.create_task(_send_stdin(process, stdin)) if stdin else None
    try:
        return await process.end()
    except asyncio.CancelledError:
        await finish(process.close())
        raise
    finally:
        if sending is not None:
            sending.cancel()


async def _send_stdin(process: LiveProcess, data: bytes) -> None:
    if await process.write(data):
        process.close_stdin()
