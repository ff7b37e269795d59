"""Measure a folder of the host as a workspace: `python -m bench.workspace [--rounds N] [--json FILE]`.

Turn by turn: opening a sandbox with a folder of so many files against one with an empty workspace, each until its first
command has ended; `git status` inside against a bare overlay of the same folder (as root alone: it is mounted here);
pytest of some unit tests of this repository inside against outside. Then the diff of 1,000 changed files among 100,000,
and their commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloche

REPOSITORY = Path(__file__).parents[1]
TESTED = "tests/unit/core"
SIZES, FOLDERS, CHANGED = (1_000, 40_000, 100_000), 400, 1_000
CPUS = float(os.cpu_count() or 1)  # git looks at files in several threads
GIT = ["git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(f"as {'root' if os.geteuid() == 0 else 'an ordinary user'}, {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="bench-workspace-") as folder:
        rows: dict[str, Any] = {}
        trees = {size: _tree(Path(folder) / f"files{size}", size) for size in SIZES}
        for size, tree in trees.items():
            rows |= _measure_opening(tree, size, arguments.rounds)
        rows |= _measure_status(trees[SIZES[-1]], arguments.rounds)
        rows |= _measure_changes(trees[SIZES[-1]], arguments.rounds)
        rows |= _measure_pytest(arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return 0


def _tree(folder: Path, size: int) -> Path:
    """Make a git checkout of so many small files."""
    for number in range(FOLDERS):
        (folder / f"folder{number}").mkdir(parents=True)
    for number in range(size):
        (folder / f"folder{number % FOLDERS}" / f"file{number}.txt").write_text(f"line {number}\n" * 5)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    return folder


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _told(name: str, seconds: list[float], unit: str = "ms") -> dict[str, Any]:
    ordered = sorted(seconds)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    scale = 1000 if unit == "ms" else 1
    print(f"{name:<58} p50 {p50 * scale:9.2f} {unit}   p99 {p99 * scale:9.2f} {unit}")
    return {name: {"p50_s": p50, "p99_s": p99, "rounds": len(ordered)}}


def _in_turns(rounds: int, **works: Callable[[], object]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = _timed(work)
            if number:  # the first one fills caches
                found[name].append(seconds)
    return found


def _measure_opening(tree: Path, size: int, rounds: int) -> dict[str, Any]:
    def opened(**options: Any) -> None:  # noqa: ANN401 - keywords of a sandbox
        with cloche.Sandbox(live=True, **options) as sandbox:
            sandbox.exec(["true"])

    found = _in_turns(rounds, empty=opened, folder=lambda: opened(workspace=tree))
    rows = _told("open an empty sandbox, one command", found["empty"])
    rows |= _told(f"open one with a folder of {size:,} files, one command", found["folder"])
    more = statistics.median(found["folder"]) - statistics.median(found["empty"])
    allowed = 0.1 + 0.2 * max(0, size - 40_000) / 100_000
    print(f"  more: {more:.3f} s ({allowed:.2f})")
    return rows


@contextmanager
def _bare_overlay(tree: Path) -> Iterator[Path]:
    """Mount an overlay of a folder, in the mount namespace of whoever called `unshare`."""
    folder = Path(tempfile.mkdtemp(prefix="bare-overlay-"))
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir()
        layers = f"userxattr,lowerdir={tree},upperdir={folder}/upper,workdir={folder}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, folder / "merged"], check=True)
        try:
            yield folder / "merged"
        finally:
            subprocess.run(["umount", folder / "merged"], check=True)
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def _measure_status(tree: Path, rounds: int) -> dict[str, Any]:
    status = ["git", "status", "--short"]
    host = lambda: subprocess.run(status, cwd=tree, check=True, capture_output=True)  # noqa: E731
    with cloche.Sandbox(workspace=tree, timeout="120s", cpus=CPUS) as sandbox:
        works: dict[str, Callable[[], object]] = {"host": host, "inside": lambda: sandbox.exec(status)}
        if os.geteuid() == 0:
            with _bare_overlay(tree) as merged:
                works["bare"] = lambda: subprocess.run(status, cwd=merged, check=True, capture_output=True)
                found = _in_turns(rounds, **works)
        else:
            found = _in_turns(rounds, **works)
    rows: dict[str, Any] = {}
    for name, seconds in found.items():
        rows |= _told(f"git status of {SIZES[-1]:,} files: {name}", seconds)
    for name in ("bare", "host"):
        if name in found:
            ratio = statistics.median(found["inside"]) / statistics.median(found[name])
            print(f"  inside / {name}: {ratio:.2f}" + (" (1.1)" if name == "bare" else ""))
    return rows


def _measure_changes(tree: Path, rounds: int) -> dict[str, Any]:
    change = f"for i in $(seq 0 {CHANGED - 1}); do echo $1 >> folder$((i % {FOLDERS}))/file$i.txt; done"
    diffs, commits = [], []
    with cloche.Sandbox(workspace=tree, timeout="120s", cpus=CPUS) as sandbox:
        for number in range(min(rounds, 5)):
            result = sandbox.exec(["sh", "-c", change, "sh", str(number)])
            if not result.ok:
                raise SystemExit(result.stderr)
            diffs.append(_timed(sandbox.diff))
            diff = sandbox.diff()
            if len(diff.changes) != CHANGED:
                raise SystemExit(f"{len(diff.changes)} changes, not {CHANGED}")
            commits.append(_timed(lambda: sandbox.commit(diff)))  # noqa: B023 - called at once
    rows = _told(f"diff of {CHANGED:,} changed files among {SIZES[-1]:,} (1 s)", diffs)
    return rows | _told("commit of them (2 s)", commits)


def _measure_pytest(rounds: int) -> dict[str, Any]:
    """Run unit tests of a clone of this repository, whose environment is the one that runs us."""
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="bench-clone-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", REPOSITORY, clone], check=True)
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTED]
        env = {"PYTHONPATH": str(clone / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        with cloche.Sandbox(workspace=clone, timeout="300s", memory="2g", pids=256, cpus=CPUS) as sandbox:
            found = _in_turns(
                min(rounds, 5),
                outside=lambda: subprocess.run(
                    words, cwd=clone, check=True, capture_output=True, env={**os.environ, **env}
                ),
                inside=lambda: _checked(sandbox.exec(words, env=env)),
            )
    rows = _told(f"pytest {TESTED}: outside", found["outside"]) | _told(f"pytest {TESTED}: inside", found["inside"])
    ratio = statistics.median(found["inside"]) / statistics.median(found["outside"])
    print(f"  inside / outside: {ratio:.2f} (1.3)")
    return rows


def _checked(result: cloche.Result) -> None:
    if not result.ok:
        raise SystemExit(f"pytest inside: {result.status}\n{result.stdout[-3000:]}\n{result.stderr[-1000:]}")


if __name__ == "__main__":
    sys.exit(main())
