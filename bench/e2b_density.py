"""Measure how many idle sandboxes there is room for: `python -m bench.e2b_density [--sandboxes N]`, as root.

E2B's own SDK opens sandboxes with a network at one `cloche serve --e2b`, and a Python context in some of them. They are
left alone for a while, until the worker has detached from them. Then the memory of all processes of the service is
added up (PSS), by kind, and each sandbox must answer `commands.run("true")`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from e2b_code_interpreter import AsyncSandbox

from tests.harness.e2b import serving, variables

AT_ONCE, LIFE_S = 8, 3 * 3600
ROOM = 8 / 7  # of the service, of which one key has seven eighths
# Words of a command line, and the kind of process that has them. A fork of the fork server has the words of that.
KINDS = {"keeper.process": "keeper", "cloche.egress": "egress process", "subordinate_ids.main": "mapper"}
INSIDE = "helper, init, guests"


def main() -> int:
    options = _options()
    words = ("--network", "open", "--sandboxes", str(round(options.sandboxes * ROOM) + 1))
    with (
        tempfile.TemporaryDirectory(prefix="bench-e2b-") as folder,
        serving(Path(folder), *words) as e2b,
        variables(e2b),
    ):
        report = asyncio.run(_measure(options, e2b.service.process.pid))
    _show(report)
    if options.json:
        options.json.write_text(f"{json.dumps(report)}\n")
    return 0 if report["answers"] == options.sandboxes else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.e2b_density", description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=400, help="how many are open at once (default 400)")
    parser.add_argument("--contexts", type=int, default=50, help="in how many of them is a Python context (default 50)")
    parser.add_argument("--rest", type=float, default=75.0, help="seconds for which they are left alone (default 75)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


async def _measure(options: argparse.Namespace, service: int) -> dict[str, Any]:
    before = _available_bytes()
    sandboxes: list[AsyncSandbox] = []

    async def create() -> None:
        sandboxes.append(await AsyncSandbox.create(timeout=LIFE_S))

    async def open_context(sandbox: AsyncSandbox) -> None:
        assert (await sandbox.run_code("1 + 1")).text == "2"

    async def answer(sandbox: AsyncSandbox) -> None:
        assert (await sandbox.commands.run("true")).exit_code == 0

    report: dict[str, Any] = {"sandboxes": options.sandboxes, "contexts": options.contexts}
    report["create_s"] = await _each([create] * options.sandboxes)
    with_context = sandboxes[: options.contexts]
    report["context_s"] = await _each([partial(open_context, sandbox) for sandbox in with_context])
    await asyncio.sleep(options.rest)
    report["processes"], report["pss_bytes"] = _memory(service)
    report["machine_bytes"] = before - _available_bytes()
    report["answer_s"] = await _each([partial(answer, sandbox) for sandbox in sandboxes])
    report["answers"] = len(report["answer_s"])
    await _each([sandbox.kill for sandbox in sandboxes])
    return report


async def _each(works: Iterable[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Do all works, some at once; return the seconds of each that succeeded."""
    places, times = asyncio.Semaphore(AT_ONCE), []

    async def timed(work: Callable[[], Awaitable[Any]]) -> None:
        async with places:
            began = time.perf_counter()
            try:
                await work()
            except Exception as error:
                print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                times.append(time.perf_counter() - began)

    await asyncio.gather(*map(timed, works))
    return times


def _memory(service: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of processes and their proportional memory by kind, of a service and all below it."""
    parents = {
        int(pid): int(_read(pid, "stat").rpartition(")")[2].split()[1]) for pid in os.listdir("/proc") if pid.isdigit()
    }
    below = {service}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    counts: Counter[str] = Counter()
    amounts: defaultdict[str, int] = defaultdict(int)
    for pid in below:
        rollup = _read(str(pid), "smaps_rollup")
        if "\nPss:" in rollup:
            kind = "service" if pid == service else _kind(_read(str(pid), "cmdline"))
            counts[kind] += 1
            amounts[kind] += int(rollup.partition("\nPss:")[2].split()[0]) << 10
    return dict(counts), dict(amounts)


def _kind(command: str) -> str:
    return next((kind for words, kind in KINDS.items() if words in command), INSIDE)


def _read(pid: str, name: str) -> str:
    try:
        return Path("/proc", pid, name).read_text(errors="replace")
    except OSError:
        return ") Z 0"


def _available_bytes() -> int:
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable"))


def _show(report: dict[str, Any]) -> None:
    count, total = report["sandboxes"], sum(report["pss_bytes"].values())
    print(f"{report['answers']} of {count} answer; {report['contexts']} have a Python context")
    for name in ("create_s", "context_s", "answer_s"):
        times = sorted(report[name])
        print(
            f"{name:10} p50 {statistics.median(times) * 1e3:6.1f} ms, p99 {times[int(len(times) * 0.99)] * 1e3:6.1f} ms"
        )
    print(f"memory: {total / 2**20:.0f} MiB (PSS), {total / count / 2**20:.1f} each; the machine has "
          f"{report['machine_bytes'] / 2**20:.0f} MiB less")  # fmt: skip
    for kind, amount in sorted(report["pss_bytes"].items(), key=lambda row: -row[1]):
        number = report["processes"][kind]
        print(f"  {kind:22} {number:5} processes, {amount / 2**20:7.0f} MiB, {amount / number / 2**20:6.2f} each")


if __name__ == "__main__":
    raise SystemExit(main())
