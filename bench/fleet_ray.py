"""Measure a fleet on Ray, as root: `python -m bench.fleet_ray [--turns N] [--losses N] [--leases N] [--json FILE]`.

Needs the packages of requirements/frameworks/ray.txt. Three Ray nodes of this machine (tests/harness/ray_cluster.py),
each with half a processor. In turns, as many at once: programs by `cloche.map` with `backend="ray"`, and as tasks of
Ray with `subprocess.run([python, "-c", ...])`; runs a second by the clock, and processor time of the nodes and the
caller. Then how long it takes until a session, a single run and the fleet notice that a node is dead, or its cable cut.
Then the memory of the coordinator and of Ray's head over leases.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloche
from cloche.core.errors import NodeLost
from cloche.core.events import Event, Started
from cloche.fleets.ray import cluster
from cloche.fleets.ray.fleet import RayFleet
from tests.harness import fleet_calls
from tests.harness.namespace_calls import order
from tests.harness.ray_cluster import RayCluster

AT_ONCE, OF_TURN, NODES = 6, 150, 3  # half of the processors of three nodes hold six runs; Ray's tasks take six CPUs
SLEEP, BEGUN_S, PATIENCE_S = "import time; time.sleep(1000)", 2.0, 60.0
WARM_LEASES = 4_000
TARGETS = {"programs a second": 1.8, "noticed, s": 5.0, "grown, MiB": 20.0}


def by_map(codes: Sequence[str]) -> list[str]:
    """Run programs over the fleet, which keeps a lease for each worker."""
    return [result.stdout for result in cloche.map(codes, backend="ray", concurrency=AT_ONCE)]


def by_tasks(codes: Sequence[str]) -> list[str]:
    """Run programs as tasks of Ray, each in a plain process."""
    ray = cluster.imported()

    def run(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    remote = ray.remote(run)
    return list(ray.get([remote.remote(code) for code in codes]))


def throughput(groups: Sequence[str], turns: int) -> list[dict[str, float]]:
    """Return runs a second and a run's processor time at the nodes and here, of each turn but the first."""
    cluster.join()
    variants: dict[str, Callable[[Sequence[str]], list[str]]] = {"fleet": by_map, "tasks": by_tasks}
    codes = [f"print({number})" for number in range(OF_TURN)]
    rows = []
    for turn in range(1 + turns):
        row: dict[str, float] = {}
        for name in variants if turn % 2 else reversed(variants):
            used_s, own_s, began = processor_s(groups), time.process_time(), time.perf_counter()
            assert variants[name](codes) == [f"{number}\n" for number in range(OF_TURN)]
            seconds = {
                "nodes": processor_s(groups) - used_s, "caller": time.process_time() - own_s,
            }  # fmt: skip
            row[name] = OF_TURN / (time.perf_counter() - began)
            row |= {f"{name}, {side}, ms": used / OF_TURN * 1e3 for side, used in seconds.items()}
        rows.append(row)
    return rows[1:]


def processor_s(groups: Sequence[str]) -> float:
    """Return the processor time of the nodes."""
    return sum(map(_of_group, map(Path, groups)))


def _of_group(group: Path) -> float:
    if (usage := group / "cpuacct.usage").exists():  # control groups of version 1
        return int(usage.read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6  # usage_usec


def noticed(how: str) -> dict[str, float]:
    """Lose a node, by `kill` or `cut`; return its number, and after how many seconds each of three noticed."""
    return asyncio.run(_noticed(how))


async def _noticed(how: str) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        opened = [cloche.AsyncSandbox(backend="ray", live=True, cpus=0.3) for _ in range(NODES)]
        sandboxes = [await stack.enter_async_context(sandbox) for sandbox in opened]
        hosts = [fleet_calls.sandbox_host(await sandbox.exec(shell="true")) for sandbox in sandboxes]
        host = next(host for host in hosts if host != fleet_calls.HEAD)
        session = await sandboxes[hosts.index(host)].session()
        fleet = RayFleet()
        stack.push_async_callback(fleet.close)
        tasks = {
            "session": [asyncio.create_task(_at_end(session.run(SLEEP, timeout=2000)))],
            "single run": await _runs_on(host, fleet),
            "fleet": [asyncio.create_task(_at_end(_lost(fleet)))],
        }
        await asyncio.sleep(BEGUN_S)
        began, number = time.monotonic(), int(host.rpartition(".")[2])
        await asyncio.to_thread(order, how, number)
        seconds = {name: await _first(each) - began for name, each in tasks.items()}
    return {"number": number, **seconds}


async def _runs_on(host: str, fleet: RayFleet) -> list[asyncio.Task[float]]:
    """Start runs until the node of that address has one, beside the sandbox there; return all of them."""
    runs, begun = list[asyncio.Task[float]](), list[Event]()
    async with asyncio.timeout(PATIENCE_S):
        while await _leases_at(host, fleet) < 2:
            work = cloche.arun(SLEEP, backend="ray", cpus=0.2, timeout=2000, on_event=begun.append)
            runs.append(asyncio.create_task(_at_end(work)))
            while sum(isinstance(event, Started) for event in begun) < len(runs):  # noqa: ASYNC110 - on another machine
                await asyncio.sleep(0.1)
    return runs


async def _leases_at(host: str, fleet: RayFleet) -> int:
    return next(node.leases for node in await fleet.nodes() if host == urlsplit(node.address).hostname)


async def _lost(fleet: RayFleet) -> None:
    async for event in fleet.watch():
        if event.kind == "node-lost":
            return


async def _at_end(work: Coroutine[Any, Any, object]) -> float:
    """Return when some work has ended, by itself or as lost."""
    with contextlib.suppress(NodeLost):
        await work
    return time.monotonic()


async def _first(tasks: Sequence[asyncio.Task[float]]) -> float:
    """Return when the first one ended, and cancel the others."""
    done, others = await asyncio.wait(tasks, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return min(task.result() for task in done)


def losses(nodes: RayCluster, how: str, count: int) -> list[dict[str, float]]:
    """Lose so many nodes, one after the other; a new one joins after each."""
    rows, fresh = [], max(nodes.pids) + 1
    for number in range(fresh, fresh + count):
        row = nodes.call(noticed, how)
        lost = int(row.pop("number"))
        rows.append(row)
        if how == "cut":
            nodes.kill(lost)
        nodes.start(number)
        nodes.call(fleet_calls.ready_nodes, NODES)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_ray", description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help=f"of {OF_TURN} programs on each side (default 20)")
    parser.add_argument("--losses", type=int, default=5, help="of a node, by each of two ways (default 5)")
    parser.add_argument("--leases", type=int, default=100_000, help="whose memory is measured (default 100000)")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with RayCluster() as nodes:
        nodes.start(1)
        nodes.start(*range(2, NODES + 1))
        nodes.call(fleet_calls.up, NODES)
        if options.turns:
            report["throughput"] = nodes.call(throughput, nodes.groups, options.turns)
            show_throughput(report["throughput"])
        if options.leases:
            report["leases"] = nodes.call(fleet_calls.memory_over_leases, WARM_LEASES, options.leases)
            show_leases(report["leases"], options.leases)
        for how in ("kill", "cut") if options.losses else ():
            report[how] = losses(nodes, how, options.losses)
            show_losses(report[how], how)
    if options.json:
        Path(options.json).write_text(f"{json.dumps(report)}\n")
    return 0


def show_throughput(rows: Sequence[dict[str, float]]) -> None:
    """Print medians, and the ratio of each turn."""
    print(f"{os.cpu_count()} processors, {NODES} nodes, {AT_ONCE} at once, {len(rows)} turns")
    for name in rows[0]:
        print(f"{name:18} {statistics.median(row[name] for row in rows):8.1f}")
    for name, values in {
        "programs a second": [row["fleet"] / row["tasks"] for row in rows],
        "processor time of the nodes": [row["fleet, nodes, ms"] / row["tasks, nodes, ms"] for row in rows],
    }.items():
        least, most = min(values), max(values)
        wanted = f", wanted {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"fleet / tasks, {name}: {statistics.median(values):.2f} ({least:.2f} to {most:.2f}{wanted})")


def show_losses(rows: Sequence[dict[str, float]], how: str) -> None:
    """Print the median and the most of each."""
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(
            f"{how}, {name}: noticed after {statistics.median(values):.1f} s, at most {max(values):.1f} s "
            f"of {len(values)} (wanted {TARGETS['noticed, s']:g})"
        )


def show_leases(rows: Sequence[dict[str, float]], count: int) -> None:
    """Print the memory of each process before and after."""
    before, after = rows
    for name in before:
        print(
            f"{name}: {before[name]:.1f} MiB, after {count} leases {after[name]:.1f}: "
            f"{after[name] - before[name]:+.1f} (wanted {TARGETS['grown, MiB']:g})"
        )


if __name__ == "__main__":
    from bench.fleet_ray import main as run  # nodes import the functions of this module by this name

    sys.exit(run())
