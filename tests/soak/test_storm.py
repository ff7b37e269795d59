"""Many runs at once, from threads, from one loop, from inside a running loop: whole, and without a trace."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cloche
from cloche.backends.local.prefork import close_pools
from cloche.blocking import calls
from tests.harness.leaks import Snapshot, wait_for_leftovers

PATIENCE_S = 600
THREADS, RUNS_EACH, AT_ONCE, ROUNDS = 50, 100, 100, 100

pytestmark = pytest.mark.soak


def _run(number: int) -> None:
    result = cloche.run(f"print({number})\n{number}", files={"in": str(number)}, timeout=120)
    assert (result.stdout, result.value, result.stderr) == (f"{number}\n", number, "")


async def _arun(number: int) -> None:
    code = f"open('out', 'w').write('{number}')\nprint(open('in').read())"
    result = await cloche.arun(code, files={"in": str(number)}, timeout=120)
    assert (result.stdout, [record.path for record in result.files]) == (f"{number}\n", ["out"])


def _descriptors() -> int:
    close_pools()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fifty_threads() -> None:
    """Fifty threads that run code at once, a hundred times, each get their own answers, and leave no descriptor."""
    _run(0)
    before = _descriptors()
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(_run, number) for number in range(THREADS * RUNS_EACH)]
        for one in waiting:
            one.result(PATIENCE_S)
    assert _descriptors() <= before + 3 * calls.MOST_LOOPS  # the event loops that are kept for callers' threads


def test_a_hundred_in_one_loop() -> None:
    """A hundred times a hundred calls of arun at once in one loop get their own answers, and leave no descriptor."""

    async def storm() -> tuple[int, int]:
        await _arun(0)
        before = _descriptors()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(ROUNDS):
                await asyncio.gather(*(_arun(number) for number in range(AT_ONCE)))
        return before, _descriptors()

    before, after = asyncio.run(storm())
    assert after <= before


def test_inside_a_running_loop() -> None:
    """A hundred times, blocking calls work inside a running loop, in its thread and others, beside calls of arun."""

    async def mixed() -> None:
        beside = asyncio.gather(*(_arun(number) for number in range(10)))
        threads = asyncio.gather(*(asyncio.to_thread(_run, number) for number in range(10)))
        for number in range(5):
            _run(number)
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await beside
            await threads

    for _ in range(ROUNDS):
        asyncio.run(mixed())


def test_cancelled_storm() -> None:
    """Forty calls that are all cancelled at one moment end, and leave no descriptor and no task."""

    async def storm() -> tuple[int, int]:
        await _arun(0)
        before = _descriptors()
        tasks = [asyncio.ensure_future(cloche.arun("import time; time.sleep(60)")) for _ in range(40)]
        await asyncio.sleep(1.5)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        return before, _descriptors()

    before, after = asyncio.run(storm())
    assert after <= before


def test_two_thousand_from_four_threads() -> None:
    """Two thousand short runs from four threads are all answered, and nothing at all is left on the host."""
    before = Snapshot.take()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda number: cloche.run(f"print({number})").stdout, range(2000)))
    assert outputs == [f"{number}\n" for number in range(2000)]
    assert wait_for_leftovers(before, patience_s=20) == []


def test_memory_does_not_creep() -> None:
    """Three hundred more runs, with files and output, cost the caller no memory that stays."""

    def work(count: int) -> None:
        for _ in range(count):
            result = cloche.run("open('f', 'wb').write(bytes(1 << 20))\nprint('x' * 100_000)")
            assert result.ok

    work(100)
    before, threads = _resident_bytes(), threading.active_count()
    work(300)
    gc.collect()
    grown = _resident_bytes() - before
    assert grown < 6 << 20, f"grown by {grown} bytes"
    assert threading.active_count() <= threads + 1  # the pool may have begun to look at its plan now and then
