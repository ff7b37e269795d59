"""Measure cases interleaved with a reference, so that a slow phase of the machine affects both; memory and leaks, too.

Absolute times say more about the machine than about a case. So the reference is measured before each measurement of
another case: each case finds the machine as the reference left it, not as another case did, whose deferred work the
kernel may still be doing. Each case is measured several times in a row, as real callers run, in several blocks.

Besides time: the memory of idle pools, and leaks. The process is a subreaper while it measures, so that orphans of
Cloche stay its children (prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from cloche.execution.registry import backend_named
from cloche.jail.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from cloche.testing.conformance.subject import leaks, status_of

from ..core.record import dataclass, field
from .burst import burst

THREADS = 4
BLOCKS = 5  # all turns, and the runs from several threads, are split into this many
WARM_UP_ROUNDS = 3
Did = TypeVar("Did")
SETTLE_S = 0.5  # slots build their next jail and clear up after the last guest
LEAK_TIMEOUT_S = 10.0
KIB = 1024
PR_GET_CHILD_SUBREAPER = 37


class BenchmarkFailed(Exception):
    """Report that a case which must work failed."""


class Measurement(NamedTuple):
    """Hold the milliseconds of one measurement, its output, and how the sandbox started, if that is known."""

    ms: float
    output: bytes
    start: str = ""


def no_preparation() -> None:
    """Prepare nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describe one case. Readers see `call`: exactly the code that is measured.

    `prepare` is called once, untimed, before the first measurement. An optional case that fails is left out, with its
    error as the reason; the failure of any other case ends the benchmark. `at_full_speed(runs, threads, limit_s)`
    returns runs and seconds, for a case that runs in a separate process.
    """

    name: str
    call: str
    measure: Callable[[], Measurement]
    expected: bytes = b"1\n"
    prepare: Callable[[], None] = no_preparation
    is_optional: bool = False
    at_full_speed: Callable[[int, int, float], tuple[int, float]] | None = None

    def measure_checked(self) -> Measurement:
        """Measure once and check the output. Raises BenchmarkFailed."""
        measurement = self.measure()
        if measurement.output != self.expected:
            raise BenchmarkFailed(f"{self.name} printed {measurement.output[:200]!r}")
        return measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCase:
    """Name a case that cannot be measured here, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class Times:
    """Collect the milliseconds of one case, the difference of each to the reference, and how the sandboxes started.

    For the reference itself, the times of all its measurements.
    """

    ms: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    starts: Counter[str] = field(default_factory=Counter)

    def add(self, measurement: Measurement, reference: Measurement | None) -> None:
        """Add a measurement, and its difference to that of the reference just before."""
        self.ms.append(measurement.ms)
        self.over.extend([measurement.ms - reference.ms] if reference else [])
        self.starts.update([measurement.start] if measurement.start else [])


def timed(work: Callable[[], bytes]) -> Callable[[], Measurement]:
    """Return a function that measures `work`."""

    def measure() -> Measurement:
        started = time.perf_counter()
        output = work()
        return Measurement((time.perf_counter() - started) * 1000, output)

    return measure


def measure_interleaved(
    cases: Sequence[Case], rounds: int, *, reference: str = "", warm_up: int = WARM_UP_ROUNDS
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return the times of every case that worked, and the reason why each of the others did not.

    The case named `reference` is measured before each measurement of another one. The others are measured in blocks, a
    fifth of all in a row, each time in another order.
    """
    times = {case.name: Times() for case in cases}
    left_out: dict[str, str] = {}
    first = next((case for case in cases if case.name == reference and len(cases) > 1), None)
    chance = random.Random(len(cases))  # noqa: S311 - the same orders every time
    order = [case for case in cases if case is not first]
    for case in cases:
        _attempt(case, left_out, case.prepare)
    for _ in range(warm_up):
        for case in cases:
            _attempt(case, left_out, case.measure_checked)
    for block in range(BLOCKS):
        chance.shuffle(order)
        for case in order:
            for _ in range(rounds // BLOCKS + (block < rounds % BLOCKS)):
                before = _attempt(first, left_out, first.measure_checked) if first else None
                measurement = _attempt(case, left_out, case.measure_checked)
                if first and before:
                    times[first.name].add(before, before)
                if measurement:
                    times[case.name].add(measurement, measurement if case.name == reference else before)
    return {name: seconds for name, seconds in times.items() if name not in left_out}, left_out


def _attempt(case: Case, left_out: dict[str, str], work: Callable[[], Did]) -> Did | None:
    """Call `work` for a case, unless it is left out; an optional case that fails is left out from then on."""
    if case.name in left_out:
        return None
    try:
        return work()
    except Exception as error:
        if not case.is_optional:
            raise
        left_out[case.name] = reason_of(error)
        return None


def reason_of(error: Exception) -> str:
    """Return an error as one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def row(times: Times, reference: Times | None) -> dict[str, Any]:
    """Return the figures of one case; `over` is the median difference to the reference's measurement just before."""
    ordered = sorted(times.ms)
    facts: dict[str, Any] = {
        "p50": statistics.median(ordered),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
        "min": ordered[0],
        "rounds": len(ordered),
    }
    if reference is not None:
        facts["ratio"] = facts["p50"] / statistics.median(reference.ms)
        facts["over"] = statistics.median(times.over)
    if times.starts:
        facts["starts"] = dict(times.starts)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in facts.items()}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie; with few values the largest one."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def full_speed(
    cases: Sequence[Case], runs: int, limit_s: float, *, threads: int = THREADS
) -> dict[str, dict[str, Any]]:
    """Return how many runs a second several threads of one process get done, or why it could not be measured.

    Their blocks alternate, so that a slow phase of the machine hits all of them. Raises BenchmarkFailed.
    """
    sums = {case.name: (0, 0.0) for case in cases}
    failed: dict[str, dict[str, Any]] = {}
    chance, order = random.Random(len(cases)), list(cases)  # noqa: S311 - the same orders every time
    for block in range(BLOCKS):
        chance.shuffle(order)
        for case in order:
            share = runs // BLOCKS + (block < runs % BLOCKS)
            if case.name in failed or not share:
                continue
            measure = case.at_full_speed or partial(burst, case.measure_checked)
            try:
                for _ in range(WARM_UP_ROUNDS if block == 0 else 1):
                    case.measure_checked()
                finished, seconds = measure(share, threads, limit_s / BLOCKS)
            except Exception as error:
                if not case.is_optional:
                    raise
                failed[case.name] = {"reason": reason_of(error)}
                continue
            before = sums[case.name]
            sums[case.name] = before[0] + finished, before[1] + seconds
    rows: dict[str, dict[str, Any]] = {}
    for name, (finished, seconds) in sums.items():
        if name in failed or not finished:
            rows[name] = failed.get(name, {"reason": f"no run was done within {limit_s:.0f} s"})
        else:
            rows[name] = {"runs": finished, "seconds": round(seconds, 3), "per_second": round(finished / seconds, 1)}
    return rows


class _HasPool(Protocol):
    """Be a backend with a pool that can be emptied."""

    def drain(self) -> None: ...


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the subreaper of all processes below this one until the block ends."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.addressof(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def memory_of_pool() -> dict[str, Any]:
    """Return the memory of waiting processes, in MiB of PSS: shared pages count proportionally, so that sums are true.

    The template is the one direct child; its children are slots, each a helper with its descendants.
    """
    time.sleep(SETTLE_S)
    children = _children()
    templates = [pid for pid in children.get(os.getpid(), []) if children.get(pid)]
    slots = [slot for template in templates for slot in children[template]]
    if not slots:
        return {"reason": "nothing is kept warm here"}
    try:
        own = {pid: _memory(pid) for template in templates for pid in _tree(template, children)}
    except PermissionError:
        return {"reason": "only root may look into these processes (they are closed to others on purpose)"}
    per_slot = [[own[pid] for pid in _tree(slot, children)] for slot in slots]
    return {
        "slots": len(slots),
        "processes_per_slot": round(sum(map(len, per_slot)) / len(slots), 1),
        "slot_mib": _mib(sum(pss for slot in per_slot for pss, _ in slot) / len(slots)),
        "slot_private_mib": _mib(sum(private for slot in per_slot for _, private in slot) / len(slots)),
        "template_mib": _mib(sum(own[template][0] for template in templates)),
        "all_mib": _mib(sum(pss for pss, _ in own.values())),
    }


def processes_below(root: int) -> list[int]:
    """Return the processes that descend from `root`."""
    return _tree(root, _children())[1:]


def memory_of(others: frozenset[int]) -> dict[str, float]:
    """Return the number of processes below this one without `others`, and their memory in MiB of PSS."""
    own = [_memory(pid) for pid in processes_below(os.getpid()) if pid not in others]
    return {
        "processes": len(own),
        "pss_mib": _mib(sum(pss for pss, _ in own)),
        "private_mib": _mib(sum(private for _, private in own)),
    }


def _mib(kib: float) -> float:
    return round(kib / KIB, 2)


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's PSS and its unshared memory, in KiB; zeros if it is gone."""
    rows: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            for line in file:
                fields = line.split()
                if len(fields) == 3 and fields[2] == "kB":
                    rows[fields[0]] = int(fields[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return rows.get("Pss:", 0), rows.get("Private_Clean:", 0) + rows.get("Private_Dirty:", 0)


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := status_of(int(name))):
            children.setdefault(int(status["PPid"]), []).append(int(name))
    return children


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    return [root, *(pid for child in children.get(root, []) for pid in _tree(child, children))]


def drain_pool(name: str = "local") -> None:
    """Empty the pool, so that the next scenario does not pay for the one before."""
    backend = backend_named(name)
    cast(_HasPool, backend).drain()


def leaks_after(before: frozenset[str]) -> list[str]:
    """Empty the pool and return leaks: resources that exist after ten seconds and did not exist before.

    Checked are processes below this one, mounts, control groups and folders with this process's name.
    """
    drain_pool()
    deadline = time.monotonic() + LEAK_TIMEOUT_S
    while True:
        _reap()
        leaked = leaks() - before
        if not leaked or time.monotonic() > deadline:
            return sorted(leaked)
        time.sleep(0.05)


def _reap() -> None:
    for pid in _children().get(os.getpid(), []):
        if status_of(pid).get("State", "").startswith("Z"):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass  # it was reaped meanwhile
