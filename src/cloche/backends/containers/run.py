"""One run in a container, or a request about files: its frames, its time-out and kill, and its result.

Frames arrive in the container's reading thread. Output is bounded there; everything else is passed to the caller's
event loop, where the result is made (`result_of`).

A program that must end is first killed by its container's first process. If that does not answer, the container is
killed. The daemon or monitor that kills containers may not answer either; then the container counts as lost, and its
state is unknown. Both kills use their own threads, because the threads of the loop's executor may all be waiting for
other containers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Control, Enforcement, State
from cloche.core.errors import SandboxFileError, SandboxFileNotFound, SandboxFileRefused, SandboxFileTooLarge
from cloche.core.events import HeadTail, OutputChunk, PlanStep, Sink, Started, Stream, discard
from cloche.core.frames import GuestReport, GuestReportReader
from cloche.core.limits import Limits
from cloche.core.record import dataclass, replace
from cloche.core.request import InputFile
from cloche.core.result import FileRecord, KillCause, Observed, Result, Usage, decide
from cloche.egress.client import Traffic

from ..archive import MAX_FILES, MAX_PATH_CHARS, ByteRange, Spool, keep, unpack
from ..results import make_result, run_notes
from ..saved_files import REASONS, Changes, Until, in_thread
from .container import DATA, DONE, ENDED, FAILED, STARTED, STREAMS, VALUE, Container, read_object
from .program import Program

MOST = 1 << 53  # bound of all numbers in a report
_ERRORS: dict[str, type[SandboxFileError]] = {
    "not_found": SandboxFileNotFound,
    "too_large": SandboxFileTooLarge,
    "refused": SandboxFileRefused,
    "full": SandboxFileRefused,
}
log = logging.getLogger("cloche.containers")
ASK_S = 15.0
ANSWER_S = 120.0  # time-out of a request about files
BEGIN_S = 120.0  # for a program to start, after everything was sent
LIFT_S = 0.25  # for the first process to end the guest with its normal CPU quota
GUEST_KILL_S = 5.0  # for the first process to end the guest after a kill frame
GIVE_UP_S = 10.0  # for the container to end after its kill


class Lost(Exception):
    """Raised when the container ended before it had answered."""


class Outputs:
    """Bounded output of two streams. `take` runs in the reading thread, all other methods in the loop."""

    def __init__(self, limits: Limits, sink: Sink, post: Callable[..., None], on_flood: Callable[[], object]):
        self._limits, self._sink, self._post, self._on_flood = limits, sink, post, on_flood
        self._turn = threading.Lock()
        self._kept: dict[Stream, HeadTail] = {stream: HeadTail(limits.output_bytes) for stream in STREAMS.values()}

    def take(self, stream: Stream, data: bytes) -> None:
        """Add a piece. Called in the reading thread."""
        with self._turn:
            output = self._kept[stream]
            was_flooded = output.total > self._limits.flood_bytes
            output.add(data)
            if was_flooded:
                return
            if self._sink is not discard:
                self._post(self._sink, OutputChunk(stream=stream, data=data))
            if output.total > self._limits.flood_bytes:
                self._post(self._on_flood)

    def kept_bytes(self, stream: Stream) -> bytes:
        """Return the kept output of a stream."""
        return self._kept[stream].joined()

    @property
    def is_truncated(self) -> bool:
        return any(output.is_truncated for output in self._kept.values())


class FileRequest:
    """Receive one answer: data, then DONE or FAILED."""

    def __init__(self, max_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.spool = Spool(max_bytes)
        self.answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    def receive(self, tag: bytes, body: bytes) -> None:
        """Handle one frame, in the reading thread. Raises ValueError for an invalid one."""
        if tag == DATA:
            self.spool.add(body)
        elif tag == DONE:
            self.post(self._set_answer, read_object(body), None)
        elif tag == FAILED:
            self.post(self._set_answer, {}, _error(read_object(body)))

    def lose(self) -> None:
        """Handle the end of the link, in the reading thread."""
        self.post(self._set_answer, {}, Lost())

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, unless the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_answer(self, answer: dict[str, Any], error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(error)


class RunListener(FileRequest):
    """Receive the frames of one run.

    In the loop, `kill` is called when the run must end, and `on_start` when it begins.
    """

    def __init__(self, limits: Limits, sink: Sink, kill: Callable[[KillCause], None], on_start: Callable[[], None]):
        super().__init__(limits.disk_bytes)
        self._sink, self._on_start = sink, on_start
        self.outputs = Outputs(limits, sink, self.post, lambda: kill(KillCause.OUTPUT_LIMIT))
        self._report_reader, self._kill = GuestReportReader(), kill
        self.plan: tuple[PlanStep, ...] = ()
        self.report: dict[str, Any] | None = None
        self.has_started = False

    def receive(self, tag: bytes, body: bytes) -> None:
        """Handle one frame, in the reading thread."""
        if tag in STREAMS:
            self.outputs.take(STREAMS[tag], body)
        elif tag == STARTED and not self.has_started:
            self.has_started = True
            self.post(self._begin)
        elif tag == VALUE:
            self._receive_value(body)
        elif tag == ENDED and self.report is None:
            self.report = read_report(body)
        else:
            super().receive(tag, body)

    def _receive_value(self, data: bytes) -> None:
        was_refused = bool(self._report_reader.refused)
        self._report_reader.feed(data)
        if self._report_reader.refused and not was_refused:
            self.post(self._kill, KillCause.OUTPUT_LIMIT)

    def _begin(self) -> None:
        self._on_start()
        self._sink(Started(plan=self.plan))

    def guest_report(self) -> GuestReport:
        """Return the guest's value and displays."""
        return self._report_reader.report()


def read_report(body: bytes) -> dict[str, Any]:
    """Return a first process's report of an end, times in seconds. Raises ValueError if it is impossible."""
    report, counters = read_object(body), ("oom_kills", "pids_hits", "unreachable")
    status, counts = report.get("wait_status"), [report.get(name) or 0 for name in counters]
    times = [report.get("wall_s"), *(report.get(name) or 0 for name in ("cpu_user_s", "cpu_system_s"))]
    is_possible = (
        isinstance(status, int)
        and 0 <= status < 1 << 16
        and all(isinstance(count, int) and abs(count) < MOST for count in counts)
        and all(isinstance(seconds, int | float) and abs(seconds) < MOST for seconds in times)
    )
    if not is_possible:
        raise ValueError(f"the container reports an end that cannot be: {report!r:.200}")
    return report


def _error(body: dict[str, Any]) -> SandboxFileError:
    path = str(body.get("path"))
    kind = _ERRORS.get(str(body.get("kind")), SandboxFileRefused)
    return kind(f"{path!r}: {body.get('why')}; links are not followed", path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended, and the resources that it used."""

    observed: Observed
    usage: Usage


class WorkspaceHashes:
    """The hashes of a workspace's files. Paths are bytes: as str they can take four times the memory.

    Number and bytes are bounded. The oldest entries are forgotten first; a forgotten file is at worst reported as
    changed once more.
    """

    def __init__(self) -> None:
        self._hashes: dict[bytes, str] = {}

    def note(self, files: Sequence[InputFile]) -> None:
        """Record files that the caller wrote."""
        self._hashes |= {_key(file.path): hashlib.sha256(file.data).hexdigest() for file in files}

    async def changes(
        self, spool: Spool, input_hashes: Mapping[str, str], answer: Mapping[str, Any], until: Until
    ) -> Changes:
        """Return the changes that a run made, from the files that it sent back."""
        return await in_thread(until, lambda: self._changes(spool, input_hashes, answer, until))

    def _changes(
        self, spool: Spool, input_hashes: Mapping[str, str], answer: Mapping[str, Any], until: Until
    ) -> Changes:
        before = self._hashes | {_key(path): sha256 for path, sha256 in input_hashes.items()}
        gone_paths = spool.take_names(answer.get("gone_bytes"))
        ranges, left_out = unpack(spool, until)
        changed = [path for path, byte_range in ranges.items() if before.get(_key(path)) != byte_range.sha256]
        if answer.get("is_whole") and not until.has_ended:
            before = {}
        for path in gone_paths:
            before.pop(_key(path), None)
        self._hashes = _bounded(ranges, before)
        records = tuple(
            FileRecord(path=path, size=ranges[path].size, sha256=ranges[path].sha256) for path in sorted(changed)
        )
        skipped, partial = answer.get("skipped"), answer.get("partial")
        reasons = {reason for reason in partial if isinstance(reason, str)} if isinstance(partial, list) else set[str]()
        return Changes(
            records=records,
            skipped=left_out + (skipped if isinstance(skipped, int) else 0),
            partial=REASONS & (reasons | {"time"} if until.has_ended else reasons),
            save=keep(spool, ranges, records),
        )


def _key(path: str) -> bytes:
    return path.encode("utf-8", "surrogatepass")


def _bounded(ranges: Mapping[str, ByteRange], before: dict[bytes, str]) -> dict[bytes, str]:
    """Return the entries to remember, newest last: all current ones, and as many of `before` as fit."""
    hashes = {_key(path): byte_range.sha256 for path, byte_range in ranges.items()}
    room = MAX_PATH_CHARS - sum(map(len, hashes))
    remembered: list[tuple[bytes, str]] = []
    for path, sha256 in reversed(before.items()):
        if path in hashes:
            continue
        room -= len(path)
        if room < 0 or len(hashes) + len(remembered) >= MAX_FILES:
            break
        remembered.append((path, sha256))
    return dict(reversed(remembered)) | hashes


async def observed_end(
    container: Container[Any], report: Mapping[str, Any] | None, cause: KillCause | None, timeout_s: float = 0.0
) -> End | None:
    """Return how a run ended that had `timeout_s`; None if the container ended for an unknown reason.

    A caller that notices an end late may take it for a time-out. The first process's report then decides.
    """
    if report is not None:
        if cause is KillCause.TIMEOUT and not report.get("cause") and report["wall_s"] <= timeout_s:
            cause = None
        return reported_end(report, cause)
    if container.is_given_up:
        return None
    if cause is not None:
        return End(observed=Observed(cause=cause), usage=Usage())
    observed = await observed_by_guest(container)
    return End(observed=observed, usage=Usage()) if observed is not None else None


async def observed_by_guest(container: Container[Any]) -> Observed | None:
    """Return how a container ended if the guest caused it and that is known in time, else None."""
    try:
        async with asyncio.timeout(ASK_S):  # a daemon that is shutting down may never answer
            return await asyncio.to_thread(container.end_by_guest)
    except TimeoutError:
        log.debug("the reason of a container's end is not known in time")
        return None


def reported_end(report: Mapping[str, Any], cause: KillCause | None = None) -> End:
    """Return the end that the first process reported."""
    return End(observed=_observed(report, cause), usage=_usage(report))


def _observed(report: Mapping[str, Any], cause: KillCause | None) -> Observed:
    status = int(report["wait_status"])
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    own = {"out_of_memory": KillCause.OUT_OF_MEMORY, "timeout": KillCause.TIMEOUT}
    causes = [
        possible_cause for possible_cause in (cause, own.get(str(report.get("cause")))) if possible_cause is not None
    ]
    return Observed(
        exit_code=os.WEXITSTATUS(status) if signal is None else None,
        signal=signal,
        cause=min(causes, key=list(KillCause).index, default=None),
        oom_kills=max(0, int(report.get("oom_kills") or 0)),
        pids_hits=max(0, int(report.get("pids_hits") or 0)),
        workspace_full=bool(report.get("full")),
        denied=max(0, int(report.get("unreachable") or 0)),
    )


def _usage(report: Mapping[str, Any]) -> Usage:
    peak = report.get("peak_bytes")
    return Usage(
        wall_s=float(report["wall_s"]),
        cpu_user_s=_number(report.get("cpu_user_s")),
        cpu_system_s=_number(report.get("cpu_system_s")),
        peak_memory_bytes=int(peak) if isinstance(peak, int) else None,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def result_of(
    end: End,
    listener: RunListener,
    changes: Changes,
    *,
    program: Program,
    limits: Limits,
    enforcement: Enforcement,
    traffic: Traffic,
    notes: Mapping[str, Any],
) -> Result:
    """Return the result. `notes` are the backend's entries for `meta`."""
    guest_report = listener.guest_report()
    observed = replace(end.observed, network_refused=traffic.refused).with_refusal(guest_report.refused)
    if enforcement[Control.NETWORK].state is not State.ENFORCED:
        observed = replace(observed, denied=0)  # without an enforced network policy, a missing route is not a denial
    common = run_notes(program.engine, program.version, limits, enforcement, end.usage.wall_s)
    return make_result(
        decide(observed),
        stdout=listener.outputs.kept_bytes("stdout"),
        stderr=listener.outputs.kept_bytes("stderr"),
        is_truncated=listener.outputs.is_truncated,
        value=guest_report.value,
        value_is_repr=guest_report.is_repr,
        outputs=guest_report.outputs,
        usage=end.usage,
        enforcement=enforcement,
        changes=changes,
        meta={**common, **notes, **guest_report.notes(), **traffic.notes()},
    )


class KillTimer:
    """Kill one program for a cause. For one event loop; must be closed.

    `kill_guest` asks the first process to kill it.
    """

    def __init__(self, container: Container[Any], kill_guest: Callable[[], None] | None = None):
        self._container, self._kill_guest = container, kill_guest or container.kill_guest
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._starting: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.cause: KillCause | None = None

    def expect_start(self) -> None:
        """Kill the container if the program does not start within `BEGIN_S`."""
        if self._is_closed:
            return
        self._starting = self._loop.call_later(BEGIN_S, self._kill_container)
        self._timers.append(self._starting)

    def expect(self, timeout_s: float) -> None:
        """Start the program's time-out."""
        if self._starting is not None:
            self._starting.cancel()
        self._timers.append(self._loop.call_later(timeout_s, self.kill, KillCause.TIMEOUT))

    def kill(self, cause: KillCause) -> None:
        """Kill the program. The first cause is kept."""
        if self.cause is None:
            self.cause = cause
            self._begin(self._kill_guest)
            self._timers.append(self._loop.call_later(LIFT_S, self._begin, self._container.lift_quota))
            self._timers.append(self._loop.call_later(GUEST_KILL_S, self._kill_container))

    def _kill_container(self) -> None:
        self._begin(self._container.kill)
        self._timers.append(self._loop.call_later(GIVE_UP_S, self._container.give_up))

    def _begin(self, kill: Callable[[], None]) -> None:
        threading.Thread(target=_kill, args=(kill,), name="cloche-container-kill", daemon=True).start()

    def close(self) -> None:
        """Cancel all timers."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()


def _kill(kill: Callable[[], None]) -> None:
    try:
        kill()
    except Exception as error:
        log.warning("a container that is to end may still run: it could not be killed: %s", error)
