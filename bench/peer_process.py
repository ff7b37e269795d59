"""Run one peer's library in the environment that the peer was installed in, turn by turn.

A program of its own, for an interpreter that has the peer and need not have Cloche: `peer_process.py NAME SETTINGS`.
On its standard input it gets one line per order, `turn` or `burst RUNS THREADS SECONDS`, and answers each with one line
of JSON. It measures the time itself, so that the pipe between the two processes is in no figure. The first answer says
that the peer is set up. End of file closes the peer.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

CODE, CELL = "print(1)", "x = 1; x"
MEMORY_MB, PROCESSES = 256, 64

Settings: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[], str]
Foreign: TypeAlias = Any  # a peer's own type, of which nothing is known here


def main(name: str, settings: Settings) -> None:
    """Set the peer up, then follow orders until the end of the input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a peer prints by itself must not be taken for an answer

    def answer(**said: object) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        started = time.perf_counter()
        with _PEERS[name](settings) as call:
            answer(set_up_s=round(time.perf_counter() - started, 3))
            for line in sys.stdin:
                answer(**_follow(line.split(), call, settings))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")


def _follow(order: list[str], call: Call, settings: Settings) -> dict[str, Any]:
    try:
        if order[0] == "burst":
            burst = runpy.run_path(settings["burst"])["burst"]  # which is Cloche's
            runs, seconds = burst(call, int(order[1]), int(order[2]), float(order[3]))
            return {"runs": runs, "seconds": seconds}
        started = time.perf_counter()
        output = call()
        return {"ms": (time.perf_counter() - started) * 1000, "output": output}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _sandlock(settings: Settings) -> Iterator[Call]:
    sandlock = importlib.import_module("sandlock")
    options = {**_sandlock_options(settings), "max_memory": f"{MEMORY_MB}M", "max_processes": PROCESSES}
    command = [settings["python"], "-c", CODE]
    yield lambda: _sandlock_output(sandlock.Sandbox(**options).run(command, timeout=30))


@contextmanager
def _sandlock_fork(settings: Settings) -> Iterator[Call]:
    """Let it fork this very process, which is what its clones are; a reducer is its way to get at what one prints."""
    sandlock = importlib.import_module("sandlock")
    options = _sandlock_options(settings)

    def call() -> str:
        clones = sandlock.Sandbox(**options, init_fn=lambda: None, work_fn=lambda _: exec(CODE)).fork(1)
        return _sandlock_output(sandlock.Sandbox(**options).reduce(["cat"], clones))

    yield call


def _sandlock_options(settings: Settings) -> dict[str, Any]:
    readable = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev", *settings["shown"]]
    return {"fs_readable": [path for path in dict.fromkeys(readable) if os.path.exists(path)], "clean_env": True}


def _sandlock_output(result: Foreign) -> str:
    return _output(result.stdout.decode(), result.stderr.decode() or str(result.error))


@contextmanager
def _kern_fresh(settings: Settings) -> Iterator[Call]:
    kern = importlib.import_module("kern_sandbox")
    options = _kern_options(settings)
    yield lambda: _kern_output(kern.run_code(CODE, **options))


@contextmanager
def _kern_prewarmed(settings: Settings) -> Iterator[Call]:
    kern = importlib.import_module("kern_sandbox")
    with kern.Sandbox(**_kern_options(settings), prewarm=settings["slots"]) as sandbox:
        yield lambda: _kern_output(sandbox.run_code(CODE))


@contextmanager
def _kern_kernel(settings: Settings) -> Iterator[Call]:
    """Keep one interpreter; what a cell's last expression looks like is captured, and stands for what it prints."""
    kern = importlib.import_module("kern_sandbox")
    with kern.Sandbox(**_kern_options(settings)) as sandbox, sandbox.kernel() as kernel:

        def call() -> str:
            result = kernel.run_code(CELL)
            shown = "".join(f"{one.text}\n" for one in result.results)
            return _output(shown, f"{result.fault} {result.stderr}")

        yield call


def _kern_options(settings: Settings) -> dict[str, Any]:
    return {"image": settings["image"], "memory_mb": MEMORY_MB, "pids": PROCESSES}


def _kern_output(result: Foreign) -> str:
    return _output(result.stdout, f"{result.fault} {result.stderr}")


@contextmanager
def _llm_fresh(settings: Settings) -> Iterator[Call]:
    llm = importlib.import_module("llm_sandbox")

    def call() -> str:
        with llm.SandboxSession(backend=llm.SandboxBackend.DOCKER, **_llm_options(settings)) as session:
            return _llm_output(session.run(CODE))

    yield call


@contextmanager
def _llm_pooled(settings: Settings) -> Iterator[Call]:
    llm, pools = importlib.import_module("llm_sandbox"), importlib.import_module("llm_sandbox.pool")
    config = pools.PoolConfig(min_pool_size=settings["slots"], max_pool_size=settings["slots"])
    pool = pools.create_pool_manager(backend=llm.SandboxBackend.DOCKER, config=config, **_llm_options(settings))

    def call() -> str:
        with llm.SandboxSession(pool=pool, lang="python") as session:
            return _llm_output(session.run(CODE))

    try:
        yield call
    finally:
        pool.close()


def _llm_options(settings: Settings) -> dict[str, Any]:
    """Return its options; SIGKILL, because its container ignores SIGTERM and docker then waits for ten seconds."""
    limits = {"network_mode": "none", "mem_limit": f"{MEMORY_MB}m", "pids_limit": PROCESSES, "stop_signal": "SIGKILL"}
    common = {"lang": "python", "keep_template": True, "skip_environment_setup": True}
    return {**common, "image": settings["image"], "runtime_configs": limits}


@contextmanager
def _llm_bubblewrap(_: Settings) -> Iterator[Call]:
    llm = importlib.import_module("llm_sandbox")

    def call() -> str:
        options = {"lang": "python", "skip_environment_setup": True}
        with llm.SandboxSession(backend=llm.SandboxBackend.BUBBLEWRAP, **options) as session:
            return _llm_output(session.run(CODE))

    yield call


def _llm_output(result: Foreign) -> str:
    return _output(result.stdout, result.stderr)


def _output(stdout: str, trouble: str) -> str:
    """Return what was printed, or raise with what the peer says instead."""
    if stdout != "1\n":
        raise RuntimeError(f"printed {stdout[:100]!r}; {trouble[-300:]}")
    return stdout


_PEERS: dict[str, Any] = {
    "sandlock": _sandlock,
    "sandlock-fork": _sandlock_fork,
    "kern-fresh": _kern_fresh,
    "kern-prewarmed": _kern_prewarmed,
    "kern-kernel": _kern_kernel,
    "llm-fresh": _llm_fresh,
    "llm-pooled": _llm_pooled,
    "llm-bubblewrap": _llm_bubblewrap,
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
