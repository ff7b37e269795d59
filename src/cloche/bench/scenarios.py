"""The scenarios of `cloche bench`: a plain subprocess, bubblewrap, and `print(1)` in each of Cloche's kinds of start.

An event is one row of a table: contestants that are measured in turns, and the reference that they are compared to. To
measure something new, write a function that yields contestants and add an event; the events of the project's own
benchmark are in `bench/`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import cloche
from cloche.config.options import SandboxOptions
from cloche.core.record import dataclass, field
from cloche.core.result import Result, Status

from .harness import BenchmarkFailed, Case, Measurement, SkippedCase, no_preparation, timed

CODE = "print(1)"
WARM_TIMEOUT_S = 30.0
COMMAND_S = 120.0
PLAIN = "plain subprocess"
BUBBLEWRAP = "bubblewrap"
COLD, WARM, OPEN = "cloche, cold", "cloche, warm", "cloche, open sandbox"
ON_DEMAND = "cloche, on demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSize:
    """Hold the size of the benchmark. `runs` is the number of runs at full speed."""

    rounds: int
    runs: int


Cases = Iterator[Case | SkippedCase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Describe one scenario. `enter` yields its cases and registers their clean-up on the stack.

    `share` of the requested rounds are run, but at least `least`. `reference` names the case that the others are
    compared to. `also` is measured after all cases, each under its own name in the report.
    """

    name: str
    title: str
    enter: Callable[[Any, ExitStack], Cases]  # a `BenchSize`, or what else the caller measures with
    reference: str = PLAIN
    share: float = 1.0
    least: int = 1
    at_full_speed: tuple[str, ...] = ()
    speed_limit_s: float = 30.0  # most seconds at full speed per case
    also: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    looks_at_memory: bool = False  # of warm processes, after all turns

    def rounds(self, requested: int) -> int:
        return max(min(requested, self.least), int(requested * self.share))


def smallest_program(_: BenchSize, stack: ExitStack) -> Cases:
    """Yield cases of print(1): no isolation, bubblewrap, and Cloche cold, warm and in an open sandbox, in two ways."""
    yield plain()
    yield bubblewrap()
    yield cold()
    yield warm()
    sandbox, arguments = _opened(stack)
    yield open_sandbox(sandbox, arguments)
    yield on_demand(sandbox, arguments)


EVENTS = (
    Scenario(name="print", title="print(1)", enter=smallest_program, at_full_speed=(PLAIN, WARM), looks_at_memory=True),
)


def plain() -> Case:
    """Return the call without any isolation."""
    command = [sys.executable, "-c", CODE]
    return Case(
        name=PLAIN,
        call="subprocess.run([python, '-c', 'print(1)'], capture_output=True)",
        measure=timed(partial(output_of, command)),
    )


def bubblewrap() -> Case | SkippedCase:
    """Return a call of bubblewrap with a jail's namespaces and view of the host."""
    program = shutil.which("bwrap")
    if program is None:
        return SkippedCase(name=BUBBLEWRAP, reason="bwrap is not installed here")
    command = [program, *_bubblewrap_options(), sys.executable, "-c", CODE]
    return Case(
        name=BUBBLEWRAP,
        call="subprocess.run(['bwrap', '--unshare-all', ...the jail's view of the host, python, '-c', 'print(1)'])",
        measure=timed(partial(output_of, command)),
        is_optional=True,
    )


def cold() -> Case:
    """Return a call that starts a new interpreter and builds its jail from nothing."""
    return library_call(COLD, "cloche.run('print(1)', warm=False)", CODE, b"1\n", {"warm": False})


def warm() -> Case:
    """Return a call in a jail that was built ahead."""
    return library_call(WARM, "cloche.run('print(1)')", CODE, b"1\n", {})


def measure_warm() -> Callable[[], Measurement]:
    """Return a run that may start warm."""
    return partial(_run, partial(cloche.run, CODE))


def library_call(name: str, call: str, code: str, expected: bytes, options: SandboxOptions) -> Case:
    """Return one call of the library; one that may start warm first waits, outside the turns, until a run started
    warm.
    """
    measure = partial(_run, partial(cloche.run, code, **options))
    prepare = partial(wait_until_warm, measure) if options.get("warm", True) else no_preparation
    return Case(name=name, call=call, measure=measure, expected=expected, prepare=prepare)


def _opened(stack: ExitStack) -> tuple[cloche.Sandbox, str]:
    # One control group serves all turns, so the default half of a processor would throttle the later ones.
    cpus = min(2, os.cpu_count() or 1)
    return stack.enter_context(cloche.Sandbox(live=False, cpus=cpus)), f"cloche.Sandbox(live=False, cpus={cpus})"


def open_sandbox(sandbox: cloche.Sandbox, arguments: str) -> Case:
    """Return a further run of one sandbox, whose next process waits in a jail around its workspace."""
    return Case(
        name=OPEN,
        call=f"sandbox.run('print(1)') of one {arguments}",
        measure=partial(_run, partial(sandbox.run, CODE)),
    )


def on_demand(sandbox: cloche.Sandbox, arguments: str) -> Case:
    """Return a run that directly follows another one, so that its process is forked on demand."""

    def measure() -> Measurement:
        sandbox.run(CODE)
        return _run(partial(sandbox.run, CODE))

    call = f"the second of two sandbox.run('print(1)') without a pause, of one {arguments}"
    return Case(name=ON_DEMAND, call=call, measure=measure)


def _run(call: Callable[[], Result]) -> Measurement:
    started = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - started
    if result.status is not Status.OK:
        raise BenchmarkFailed(f"Cloche reports {result.status}: {result.stderr[:200]}")
    return Measurement(elapsed * 1000, result.stdout_bytes, str(result.meta.get("start", "")))


def wait_until_warm(measure: Callable[[], Measurement]) -> None:
    """Run until a run starts warm; if none does, the report shows how they started."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    while measure().start in ("", "cold") and time.monotonic() < deadline:
        time.sleep(0.05)


def output_of(command: list[str], env: dict[str, str] | None = None, folder: str | None = None) -> bytes:
    """Return a command's output. Raises BenchmarkFailed with its last lines, or TimeoutExpired."""
    completed = subprocess.run(
        command, capture_output=True, check=False, env=env, cwd=folder, stdin=subprocess.DEVNULL, timeout=COMMAND_S
    )
    if completed.returncode != 0:
        raise BenchmarkFailed(f"exit code {completed.returncode}: {completed.stderr.decode(errors='replace')[-300:]}")
    return completed.stdout


def _bubblewrap_options() -> list[str]:
    visible = {"/usr", sys.prefix, sys.base_prefix}
    binds = [argument for path in sorted(visible) for argument in ("--ro-bind", path, path)]
    links = [
        argument
        for path in ("/bin", "/sbin", "/lib", "/lib64")
        if os.path.islink(path)
        for argument in ("--symlink", os.readlink(path), path)
    ]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds, *links, "--tmpfs", "/workspace"]
    return ["--unshare-all", *mounts, "--chdir", "/workspace", "--clearenv", "--die-with-parent", "--new-session"]
