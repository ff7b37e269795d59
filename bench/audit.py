"""Measure what the audit log adds to a warm run: `python -m bench.audit [--rounds N]`.

Two sandboxes take turns in one process, one with a log and one without, so that a slow moment hits both.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import cloche
from cloche.bench.harness import percentile

WARM_UP = 30


def measure(rounds: int, folder: str) -> dict[str, list[float]]:
    """Return the milliseconds of each run, `without` and `with` a log in the folder."""
    took: dict[str, list[float]] = {"without": [], "with": []}
    with cloche.Sandbox(live=False, audit=False) as without, cloche.Sandbox(live=False, audit=folder) as logged:
        for number in range(WARM_UP + rounds):
            for name, sandbox in (("without", without), ("with", logged)):
                begun = time.perf_counter()
                sandbox.run("print(1)")
                if number >= WARM_UP:
                    took[name].append((time.perf_counter() - begun) * 1000)
    return took


def main() -> None:
    """Print a line for each, and the difference."""
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="runs of each (default 2000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took = measure(options.rounds, f"{folder}/log")
    p50 = {name: percentile(sorted(times), 0.5) for name, times in took.items()}
    for name, times in took.items():
        print(f"warm run {name:8} audit: p50 {p50[name]:.3f} ms, p90 {percentile(sorted(times), 0.9):.3f} ms")
    print(f"the log adds {p50['with'] - p50['without']:.3f} ms at the median")


if __name__ == "__main__":
    main()
