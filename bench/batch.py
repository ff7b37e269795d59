"""Measure batches: `python -m bench.batch [--runs N] [--blocks N] [--programs N] [--json FILE]`.

`cloche.map` of so many programs against as many warm runs from threads, at the same number at once, in blocks that take
turns; runs a second by the clock, and processor time of this process and everything that it started. Then the caller's
resident memory over `--programs` more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloche
from cloche.execution.concurrency import default_count
from cloche.hostfs import open_named

CODE, WARM_UP = "print(1)", 200
MEMORY_FROM = 0.1  # of the programs, after which memory is compared: the pools and caches are full by then
_TICKS = os.sysconf("SC_CLK_TCK")
TARGETS = (
    ("map / threads, runs a second", "per_second", 0.9, True),
    ("map / threads, processor time", "processor_ms", 1.1, False),
)


def by_threads(count: int) -> None:
    """Run from as many threads as `map` runs programs at once."""
    with ThreadPoolExecutor(default_count()) as pool:
        for result in pool.map(lambda _: cloche.run(CODE), range(count)):
            assert result.ok


def by_map(count: int) -> None:
    """Run by `cloche.map`."""
    for result in cloche.map(CODE for _ in range(count)):
        assert result.ok


def tree_ticks() -> int:
    """Return the processor time of this process, its living descendants, and the waited-for children of all."""
    parents: dict[int, tuple[int, int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        parents[int(name)] = (int(fields[1]), sum(map(int, fields[11:15])))  # proc(5): ppid; utime to cstime
    tree = {os.getpid()}
    while below := {pid for pid, (parent, _) in parents.items() if parent in tree} - tree:
        tree |= below
    return sum(parents[pid][1] for pid in tree)


def block(run: Callable[[int], None], count: int) -> dict[str, float]:
    """Return the figures of one block."""
    ticks, began = tree_ticks(), time.perf_counter()
    run(count)
    seconds = time.perf_counter() - began
    return {
        "per_second": count / seconds,
        "processor_ms": (tree_ticks() - ticks) / _TICKS * 1000 / count,
    }


def compare(runs: int, blocks: int) -> dict[str, Any]:
    """Return the figures of each block, and the ratio of the medians."""
    variants = {"threads": by_threads, "map": by_map}
    for run in variants.values():
        run(WARM_UP)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(blocks):
        for name, run in variants.items():
            figures[name].append(block(run, runs // blocks))
    ratios = {
        key: statistics.median(figure[key] for figure in figures["map"])
        / statistics.median(figure[key] for figure in figures["threads"])
        for key in ("per_second", "processor_ms")
    }
    return {"blocks": figures, "ratios": ratios}


def resident_mib() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def memory(programs: int) -> dict[str, float]:
    """Return resident memory after a tenth of the programs, its highest value after that, and the difference."""

    def endless() -> Iterator[str]:
        while True:
            yield CODE

    first = highest = 0.0
    with cloche.map(endless()) as results:
        for number, _ in enumerate(results, 1):
            if number % 100 == 0:
                highest = max(highest, resident_mib())
            if number == int(programs * MEMORY_FROM):
                first = highest = resident_mib()
            if number == programs:
                break
    return {"programs": programs, "first_mib": first, "highest_mib": highest, "grown_mib": highest - first}


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="runs of each (default 10,000)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each, in turns (default 5)")
    parser.add_argument("--programs", type=int, default=100_000, help="for memory (default 100,000; 0: not measured)")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    report: dict[str, Any] = compare(options.runs, options.blocks)
    for meaning, key, limit, is_more_better in TARGETS:
        ratio = report["ratios"][key]
        is_met = ratio >= limit if is_more_better else ratio <= limit
        wanted = f"at {'least' if is_more_better else 'most'} {limit}"
        print(f"target: {meaning} {wanted}: {ratio:.2f}, {'met' if is_met else 'missed'}")
    if options.programs:
        report["memory"] = memory(options.programs)
        grown = report["memory"]["grown_mib"]
        print(
            f"target: MiB that the caller grows over {options.programs} programs at most 20: {grown:.1f}, "
            f"{'met' if grown <= 20 else 'missed'}"
        )
    if options.json:
        open_named(options.json, f"{json.dumps(report)}\n".encode()).close()


if __name__ == "__main__":
    main()
