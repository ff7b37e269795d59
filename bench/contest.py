"""Let the contestants take turns; runs inside the fresh environment and prints the figures as JSON."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

sys.path += sys.argv[2].split(os.pathsep)  # after start-up, so that no interpreter of a contestant sees it
cloche = importlib.import_module("cloche")

CODE = "print(1)"
THREADS = 4
WARM_UP_ROUNDS = 3


def main() -> None:
    rounds, paths = int(sys.argv[1]), sys.argv[2].split(os.pathsep)
    times = _take_turns(_contestants(), rounds)
    times |= _take_turns(_living_sandbox(), rounds)
    throughput = {name: _runs_per_second(contestant, rounds * 10) for name, contestant in _at_full_speed().items()}
    # The whole command line takes ten times as long as the others: in their turns it would cool what they warm.
    times |= _take_turns(_command_line(paths), max(5, rounds // 5))
    rows = {name: _row(values) for name, values in times.items()}
    host = {"python": platform.python_version(), "kernel": platform.release(), "processors": os.cpu_count()}
    print(json.dumps({"code": CODE, "rounds": rounds, "host": host, "rows": rows, "runs_per_second": throughput}))


def _take_turns(contestants: dict[str, Callable[[], bytes]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every contestant's turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + WARM_UP_ROUNDS):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            output = contestant()
            elapsed = time.perf_counter() - started
            if output != b"1\n":
                raise SystemExit(f"{name} printed {output!r}")
            if turn >= WARM_UP_ROUNDS:
                times[name].append(elapsed * 1000)
    return times


def _row(values: list[float]) -> dict[str, object]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": statistics.median(ordered), "p99": p99, "min": ordered[0], "ms": [round(v, 3) for v in values]}


def _contestants() -> dict[str, Callable[[], bytes]]:
    """Return the contestants by name; bubblewrap only where it is installed."""
    plain = [sys.executable, "-c", CODE]
    found: dict[str, Callable[[], bytes]] = {"plain": lambda: _output(plain)}
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is not None:
        jailed = [bubblewrap, *_bubblewrap_options(), *plain]
        found["bubblewrap"] = lambda: _output(jailed)
    found["cold library call"] = lambda: cloche.run(CODE, warm=False).stdout_bytes
    found["warm library call"] = _warm_run
    return found


def _warm_run() -> bytes:
    """Run in a sandbox that was made ready ahead; the first turns, which find none yet, are not counted."""
    result = cloche.run(CODE)
    return result.stdout_bytes


def _living_sandbox() -> dict[str, Callable[[], bytes]]:
    """Return the row of a further run in an open sandbox: a jail is forked on demand around its workspace."""
    sandbox = cloche.Sandbox(cpus=2).__enter__()
    atexit.register(sandbox.__exit__, None, None, None)
    return {"run in an open sandbox": lambda: sandbox.run(CODE).stdout_bytes}


def _at_full_speed() -> dict[str, Callable[[], bytes]]:
    plain = [sys.executable, "-c", CODE]
    return {"plain": lambda: _output(plain), "warm library call": _warm_run}


def _runs_per_second(contestant: Callable[[], bytes], runs: int) -> float:
    """Return how many runs a second four threads of this process get done."""
    for _ in range(WARM_UP_ROUNDS):
        contestant()
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        outputs = list(threads.map(lambda _: contestant(), range(runs)))
    elapsed = time.perf_counter() - started
    if set(outputs) != {b"1\n"}:
        raise SystemExit(f"printed {set(outputs)!r}")
    return runs / elapsed


def _command_line(paths: list[str]) -> dict[str, Callable[[], bytes]]:
    """Return the row without a target: a new process that imports the command line and runs once."""
    command = [sys.executable, "-m", "cloche", "run", "-c", CODE]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return {"whole command line": lambda: _output(command, env)}


def _output(command: list[str], env: dict[str, str] | None = None) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, env=env).stdout


def _bubblewrap_options() -> list[str]:
    """Return the same namespaces and the same view of the host that a jail has."""
    shown = {"/usr", sys.prefix, sys.base_prefix}
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    links = [
        word
        for path in ("/bin", "/sbin", "/lib", "/lib64")
        if os.path.islink(path)
        for word in ("--symlink", os.readlink(path), path)
    ]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds, *links, "--tmpfs", "/workspace"]
    return ["--unshare-all", *mounts, "--chdir", "/workspace", "--clearenv", "--die-with-parent", "--new-session"]


if __name__ == "__main__":
    main()
