"""Sessions: a cell, opening, checkpoint, rollback, fork, and memory.

Every turn with a large session begins the same way, not measured: it is rolled back to its first checkpoint, which
removes what the turn before left, and runs one cell, so that there is something to roll back. Results are checked, and
forks closed, after the turn.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import cloche
from cloche.bench.harness import (
    KIB,
    THREADS,
    BenchmarkFailed,
    Case,
    Measurement,
    SkippedCase,
    memory_of,
    processes_below,
    reason_of,
)
from cloche.bench.scenarios import PLAIN, Cases, Scenario, measure_warm, plain, wait_until_warm
from cloche.core.errors import ClocheError
from cloche.core.result import Result, Status

from .setting import Setting

if TYPE_CHECKING:
    from cloche.sync import Session

CELL = "x = 1; x"
SESSION, OPENED = "cloche, session cell", "cloche, session opened"
TABLE_CELL = "cloche, session shows a DataFrame"
ROLLBACK, FORK, CHECKPOINT = "cloche, rollback", "cloche, fork(1)", "cloche, checkpoint"
LARGE_ROWS = 65_536_000  # of eight bytes each
LARGE_MEMORY, LARGE_NEEDS_BYTES = "2g", 3 << 30
LARGE_CODE = f"import numpy, pandas\nlarge = pandas.DataFrame({{'a': numpy.random.rand({LARGE_ROWS})}})\nlen(large)"
IDLE_SESSIONS, CROWD_NEEDS_BYTES = 20, 8 << 30
FIRST = "first"
SETTLE_S = 0.5


def live_session(_: Setting, stack: ExitStack) -> Cases:
    """Enter a cell of a session that is open, and the opening of another one."""
    yield plain()
    yield cell(stack)
    yield Case(
        name=OPENED,
        call="cloche.Sandbox(live=False), entered, and its session(); closed afterwards, untimed",
        measure=_open_and_close,
        prepare=partial(wait_until_warm, measure_warm()),
    )


def cell(stack: ExitStack) -> Case:
    """Return a cell with a value, whose look is captured, in a session that stays open."""
    wait_until_warm(measure_warm())  # so that it is forked, as all but the first session of a process are
    session = _open(stack)
    return Case(name=SESSION, call=f"session.run({CELL!r})", measure=partial(_take_cell, session))


def session_with_data(_: Setting, stack: ExitStack) -> Cases:
    """Enter what is done with a session that holds a DataFrame of 500 MB, and one that shows a small DataFrame."""
    yield plain()
    missing = [name for name in ("numpy", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        yield SkippedCase(name="sessions with data", reason=f"{missing[0]} is not installed here (pip install pandas)")
        return
    yield _table(stack)
    free = available_bytes()
    if free < LARGE_NEEDS_BYTES:
        yield SkippedCase(name=ROLLBACK, reason=f"{_gib(LARGE_NEEDS_BYTES)} of memory must be free; {_gib(free)} are")
        return
    large = LargeSession(stack)
    for name, turn, call in (
        (ROLLBACK, large.roll_back, f"session.rollback({FIRST!r}), 500 MB in memory, after one more cell"),
        (FORK, large.fork, "session.fork(1), 500 MB in memory; closed afterwards, untimed"),
        (CHECKPOINT, large.checkpoint, "session.checkpoint('later'), 500 MB in memory"),
    ):
        yield Case(name=name, call=call, measure=turn)


class LargeSession:
    """Hold a session with 500 MB in its memory, and take turns with it."""

    def __init__(self, stack: ExitStack):
        self._session = _open(stack, memory=LARGE_MEMORY)
        _check(self._session.run(LARGE_CODE), LARGE_ROWS)
        self._session.checkpoint(FIRST)
        self._turns = 0

    def roll_back(self) -> Measurement:
        """Go back, and look that the cell's variable is gone."""
        self._begin()
        ms = _ms(lambda: self._session.rollback(FIRST))
        _check(self._session.run("'turn' in globals()"), False)
        return Measurement(ms, self._rows(self._session))

    def fork(self) -> Measurement:
        """Fork, and look that the fork knows what the session knew."""
        self._begin()
        forks: list[Session] = []
        ms = _ms(lambda: forks.extend(self._session.fork(1)))
        with closing(forks[0]) as fork:
            _check(fork.run("turn"), self._turns)
            return Measurement(ms, self._rows(fork))

    def checkpoint(self) -> Measurement:
        """Set another checkpoint, and look that the session goes on."""
        self._begin()
        ms = _ms(lambda: self._session.checkpoint("later"))
        return Measurement(ms, self._rows(self._session))

    def _begin(self) -> None:
        self._session.rollback(FIRST)
        self._turns += 1
        _check(self._session.run(f"turn = {self._turns}; turn"), self._turns)

    def _rows(self, session: Session) -> bytes:
        _check(session.run("len(large)"), LARGE_ROWS)
        return b"1\n"


def idle_memory(_setting: Setting) -> dict[str, Any]:
    """Return what a session costs that waits for its next cell, in MiB of PSS: the mean of twenty."""
    with ExitStack() as stack:
        before = descendants()
        try:
            for _ in range(IDLE_SESSIONS):
                _check(_open(stack).run(CELL), 1)
            return crowd_report(before, IDLE_SESSIONS)
        except PermissionError:
            return {"reason": "only root may look into these processes (they are closed to others on purpose)"}


def many_sessions(setting: Setting) -> dict[str, Any]:
    """Open as many sessions as asked for, let each of them answer while all are open, and return time and memory."""
    count, free = setting.sessions, available_bytes()
    if count == 0:
        return {}
    if free < CROWD_NEEDS_BYTES:
        return {"reason": f"{_gib(CROWD_NEEDS_BYTES)} of memory must be free; {_gib(free)} are"}
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as threads:
        before = descendants()
        try:
            started = time.perf_counter()
            sessions = list(threads.map(lambda _: _open(stack), range(count)))
            opened = time.perf_counter()
            results = threads.map(lambda numbered: numbered[1].run(f"{numbered[0]} + 1"), enumerate(sessions))
            for number, result in enumerate(results):
                _check(result, number + 1)
            times = {"open_s": round(opened - started, 2), "answer_s": round(time.perf_counter() - opened, 2)}
            return {**times, **crowd_report(before, count)}
        except (ClocheError, BenchmarkFailed, OSError) as error:
            return {"reason": reason_of(error)}


def available_bytes() -> int:
    """Return the memory that can still be had on this machine."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    return int(rows["MemAvailable"].split()[0]) * KIB


def crowd_report(before: frozenset[int], count: int) -> dict[str, Any]:
    """Return the memory of all processes that were not there before; the sums are those of `count` sessions."""
    time.sleep(SETTLE_S)
    found = memory_of(before)
    return {
        "sessions": count,
        "session_mib": round(found["pss_mib"] / count, 2),
        "session_private_mib": round(found["private_mib"] / count, 2),
        "processes_per_session": round(found["processes"] / count, 1),
        "all_mib": found["pss_mib"],
    }


def descendants() -> frozenset[int]:
    """Return the processes below this one, when what is forked for a session is all that is new."""
    wait_until_warm(measure_warm())
    time.sleep(SETTLE_S)
    return frozenset(processes_below(os.getpid()))


def _open(stack: ExitStack, **options: Any) -> Session:  # noqa: ANN401 - some of SandboxOptions
    # The default, half a processor, would throttle long measurements.
    sandbox = stack.enter_context(cloche.Sandbox(live=False, cpus=min(2, os.cpu_count() or 1), **options))
    return sandbox.session()


def _take_cell(session: Session) -> Measurement:
    results: list[Result] = []
    ms = _ms(lambda: results.append(session.run(CELL)))
    if [output.data.get("text/plain") for output in results[0].outputs] != ["1"]:
        raise BenchmarkFailed(f"a cell with the value 1 showed {results[0].outputs!r}"[:300])
    return Measurement(ms, f"{results[0].value}\n".encode(), str(results[0].meta.get("start", "")))


def _open_and_close() -> Measurement:
    with ExitStack() as stack:
        sessions: list[Session] = []
        ms = _ms(lambda: sessions.append(stack.enter_context(cloche.Sandbox(live=False)).session()))
        result = sessions[0].run("print(1)")
        return Measurement(ms, result.stdout_bytes, str(result.meta.get("start", "")))


def _table(stack: ExitStack) -> Case:
    """Return a cell that shows a small DataFrame, whose HTML is captured."""
    session = _open(stack, memory="1g")
    session.run("import pandas\ntable = pandas.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]})")

    def measure() -> Measurement:
        results: list[Result] = []
        ms = _ms(lambda: results.append(session.run("table")))
        shown = [output.data.get("text/html") or "" for output in results[0].outputs]
        if len(shown) != 1 or "<table" not in str(shown[0]):
            raise BenchmarkFailed(f"a DataFrame showed {results[0].outputs!r} {results[0].stderr}"[:300])
        return Measurement(ms, b"1\n")

    return Case(name=TABLE_CELL, call="session.run('table'), a small DataFrame", measure=measure)


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def _check(result: Result, value: object) -> None:
    if result.status is not Status.OK or result.value != value:
        raise BenchmarkFailed(
            f"a session answered {result.value!r}, not {value!r}: {result.status} {result.stderr[:200]}"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def session_lines(event: dict[str, Any]) -> Iterator[str]:
    """Yield a line on the memory of sessions and one on many of them, where they were looked at."""
    idle, many = event.get("idle", {}), event.get("crowd", {})
    if "reason" in idle:
        yield f"memory of an idle session: not measured: {idle['reason']}"
    elif idle:
        yield "memory of an idle session: " + _MEMORY.format_map(idle)
    if "reason" in many:
        yield f"many sessions at once: left out: {many['reason']}"
    elif many:
        yield "many sessions at once: " + _MANY_SESSIONS_LINE.format_map(many) + "; " + _MEMORY.format_map(many)


_MEMORY = (
    "{session_mib} MiB PSS each ({session_private_mib} MiB its own, {processes_per_session} processes, "
    "{sessions} sessions), all {all_mib} MiB"
)
_MANY_SESSIONS_LINE = "opened in {open_s} s, one answer of each in {answer_s} s"

SESSION_EVENTS = (
    Scenario(
        name="session", title="a live session", enter=live_session, reference=PLAIN,
        also={"idle": idle_memory, "crowd": many_sessions},
    ),
    Scenario(name="data", title="a live session with data", enter=session_with_data, share=0.2, least=5),
)  # fmt: skip
