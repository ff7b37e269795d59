"""Measure `cloche.check` against warm runs: `python -m bench.grading [--rounds N]`.

A program with 20 cases, by calls and by standard input, takes turns with 20 warm runs of the same program, so that a
slow moment hits all of them. What is wanted: at most 1.1 of the runs' time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import cloche
from cloche.bench.harness import percentile

CASES, WARM_UP = 20, 3
FUNCTION = "def add(a, b):\n    return a + b\n"
READER = f"{FUNCTION}print(add(*map(int, input().split())))\n"


def _run_all() -> None:
    for number in range(CASES):
        assert cloche.run(READER, stdin=f"{number} 2\n").stdout == f"{number + 2}\n"


def _check_calls() -> None:
    cases = [{"call": "add", "args": [number, 2], "result": number + 2} for number in range(CASES)]
    assert cloche.check(FUNCTION, cases).passed


def _check_input() -> None:
    cases = [{"stdin": f"{number} 2\n", "stdout": f"{number + 2}\n"} for number in range(CASES)]
    assert cloche.check(READER, cases).passed


CONTESTANTS: Mapping[str, Callable[[], None]] = {"runs": _run_all, "input": _check_input, "calls": _check_calls}


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each contestant's turns."""
    took: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(WARM_UP + rounds):
        for name, contestant in CONTESTANTS.items():
            begun = time.perf_counter()
            contestant()
            if number >= WARM_UP:
                took[name].append((time.perf_counter() - begun) * 1000)
    return took


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m bench.grading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="turns of each (default 50)")
    took = measure(parser.parse_args().rounds)
    p50 = {name: percentile(sorted(times), 0.5) for name, times in took.items()}
    for name, times in took.items():
        fastest = min(times) / min(took["runs"])
        share = f"{p50[name] / p50['runs']:.2f} of the runs ({fastest:.2f} at best)"
        print(f"{CASES} cases, {name}: p50 {p50[name]:.1f} ms, {share}")


if __name__ == "__main__":
    main()
