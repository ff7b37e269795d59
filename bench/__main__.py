"""Measure a cold run against no isolation and against bubblewrap: `python -m bench [--rounds N] [--json FILE]`.

The contestants run in a process of a fresh virtual environment, so that no package of the development environment
slows any of them: plain, bubblewrap with the same namespaces, the library's cold call, and the whole command line.
They take turns, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET_RATIO = 1.3  # a cold library call over bubblewrap with the same namespaces, p50


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="cloche-bench-", dir="/var/tmp") as folder:
        place = Path(folder) / "venv"  # the folder itself is closed to others, which no user's environment is
        venv.create(place, with_pip=False, symlinks=True)
        report = _measure(place / "bin" / "python", options.rounds)
    _print(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="turns of every contestant (default 100)")
    parser.add_argument("--json", help="write the raw figures to this file")
    return parser.parse_args()


def _measure(python: Path, rounds: int) -> dict[str, object]:
    """Run the contest in the fresh environment; Cloche and what it imports come in by path, after start-up."""
    paths = [str(HERE.parent / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    program = [str(python), str(HERE / "contest.py"), str(rounds), os.pathsep.join(paths)]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    report: dict[str, object] = json.loads(done.stdout)
    return report


def _print(report: dict[str, object]) -> None:
    rows = report["rows"]
    assert isinstance(rows, dict)
    print(f"{'':24}{'p50 ms':>10}{'p99 ms':>10}{'/ plain':>10}{'/ bubblewrap':>14}")
    for name, row in rows.items():
        against = [
            row["p50"] / rows[other]["p50"] if other in rows else float("nan") for other in ("plain", "bubblewrap")
        ]
        print(f"{name:24}{row['p50']:>10.2f}{row['p99']:>10.2f}{against[0]:>10.2f}{against[1]:>14.2f}")
    speeds = report["runs_per_second"]
    assert isinstance(speeds, dict)
    for name, speed in speeds.items():
        print(f"{name}, 4 threads: {speed:.0f} runs a second, {speed / speeds['plain']:.2f} x plain")
    if "bubblewrap" in rows:
        ratio = rows["cold library call"]["p50"] / rows["bubblewrap"]["p50"]
        print(f"target: cold library call at most {TARGET_RATIO} x bubblewrap; measured {ratio:.2f}")
    else:
        print("bubblewrap is missing (apt-get install bubblewrap): no ratio against it")


if __name__ == "__main__":
    sys.exit(main())
