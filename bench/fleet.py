"""Measure runs on a node of a fleet: `python -m bench.fleet [--rounds N] [--seconds N] [--json FILE]`.

The fleet is this machine: its coordinator is in this process, its node is `cloche node` as a child, and each call goes
over TLS. In turns with the library: a run after a rest of 10 ms; runs with 8 in flight; the processor time of the
process that serves. Then a lease that is taken, used for one run and given back, against the run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cloche
from cloche.core.fleet import LeaseSpec
from tests.harness.fleets import LocalFleetBackend, node_pid

CODE, WARM_UP, REST_S, IN_FLIGHT, BLOCKS = "print(1)", 30, 0.01, 8, 5
_TICKS = os.sysconf("SC_CLK_TCK")
TARGETS = {
    "a run, p50": 2.2, "processor time": 1.6, "8 in flight, runs a second": -0.65, "lease and release, ms": 6.0,
}  # fmt: skip


async def rested(backend: LocalFleetBackend, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each run, in turns, each after a rest."""
    times: dict[str, list[float]] = {"library": [], "node": []}
    for turn in range(WARM_UP + rounds):
        for name, kind in (("library", "local"), ("node", backend)):
            await asyncio.sleep(REST_S)
            began = time.perf_counter()
            result = await cloche.arun(CODE, backend=kind)
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - began)
            assert result.stdout == "1\n", result
    return times


async def in_flight(kind: Any, seconds: float) -> tuple[int, float]:  # noqa: ANN401 - a backend or its name
    """Return the number of runs and the seconds that they took, with so many at once."""
    began, done = time.perf_counter(), 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await cloche.arun(CODE, backend=kind)
            done += 1

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return done, time.perf_counter() - began


def processor_s(pid: int) -> float:
    """Return the processor time of a process alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS  # proc(5): utime, stime


async def blocks(backend: LocalFleetBackend, seconds: float) -> list[dict[str, float]]:
    """Return runs a second and milliseconds of a run's processor time, of the library's process and of the node's."""
    rows: list[dict[str, float]] = []
    for _ in range(BLOCKS):
        row: dict[str, float] = {}
        for name, kind, pid in (("library", "local", os.getpid()), ("node", backend, node_pid())):
            before = processor_s(pid)
            count, took_s = await in_flight(kind, seconds)
            row |= {name: count / took_s, f"{name} ms": (processor_s(pid) - before) / count * 1e3}
        rows.append(row)
    return rows


async def leases(backend: LocalFleetBackend, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a run on a lease that is kept, and of one that is taken for it; no release is awaited."""
    spec, times = LeaseSpec(cpus=0.5, memory_bytes=256 << 20), dict[str, list[float]](kept=[], taken=[])
    for turn in range(WARM_UP + rounds):
        for name in times:
            await asyncio.sleep(REST_S)
            began = time.perf_counter()
            if name == "taken":
                held = await backend.leases.take_new(spec)
                await cloche.arun(CODE, backend=backend)
                backend.leases.give_back(held, is_used_up=True)
            else:
                await cloche.arun(CODE, backend=backend)
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="turns of single runs (default 300)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block with 8 in flight (default 4)")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    backend = LocalFleetBackend()
    backend.share = 2.0
    try:
        report: dict[str, Any] = {
            "rested": asyncio.run(rested(backend, options.rounds)),
            "blocks": asyncio.run(blocks(backend, options.seconds)),
            "leases": asyncio.run(leases(backend, options.rounds)),
        }
    finally:
        backend.leases.close()
    show(report)
    if options.json:
        Path(options.json).write_text(f"{json.dumps(report)}\n")
    return 0


def show(report: dict[str, Any]) -> None:
    """Print medians, p99 and each ratio with its target; a negative target is a lower bound."""
    print(f"as {'root' if os.geteuid() == 0 else 'an ordinary user'}, {os.cpu_count()} processors")
    medians: dict[str, float] = {}
    for name, times in {**report["rested"], **report["leases"]}.items():
        medians[name] = statistics.median(times) * 1e3
        p99 = statistics.quantiles(times, n=100)[98] * 1e3
        print(f"{name:8} p50 {medians[name]:7.2f} ms   p99 {p99:7.2f} ms")
    middle = {name: statistics.median(row[name] for row in report["blocks"]) for name in report["blocks"][0]}
    for name, value in middle.items():
        print(f"8 in flight: {name:10} {value:8.2f}")
    figures = (
        medians["node"] / medians["library"], middle["node ms"] / middle["library ms"],
        middle["node"] / middle["library"], medians["taken"] - medians["kept"],
    )  # fmt: skip
    for (name, target), figure in zip(TARGETS.items(), figures, strict=True):
        is_met = figure <= target if target > 0 else figure >= -target
        print(f"{name}: {figure:.2f} ({abs(target):g}{'' if is_met else ', missed'})")


if __name__ == "__main__":
    sys.exit(main())
