"""What crosses on the way, at hundreds of random moments: every run after it is answered, and no file is lost."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.errors import ClocheError
from cloche.core.result import Status
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.processes import run_pooled

PROMPTLY_S = 30.0
ROOT = Path(__file__).parents[2]
FLOOD = "import os; os.write(1, b'x' * 60000)"
# Programs that end in all ways, at once or not for long.
CODES = (
    "print(1)",
    "import time; time.sleep(100)",
    "open('g', 'a').write('x')",
    FLOOD,
    "import socket; socket.socket()",
    "raise SystemExit(3)",
    "import os; os.kill(os.getpid(), 9)",
)
Sandbox = cloche.AsyncSandbox
# What may be cancelled in a sandbox, and how often it is tried.
BEGIN: tuple[tuple[int, Callable[[Sandbox, str], Coroutine[Any, Any, object]]], ...] = (
    (6, lambda sandbox, code: sandbox.run(code)),
    (1, lambda sandbox, _: sandbox.run(argv=["ls"])),
    (1, lambda sandbox, _: sandbox.write_file("h", b"x" * 1_000_000)),
    (1, lambda sandbox, _: sandbox.session()),
    (1, lambda sandbox, _: sandbox.session("bash")),
)

pytestmark = pytest.mark.soak


@pytest.fixture
def draw() -> random.Random:
    """Return a source of chance, whose seed is said."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


async def promptly(work: Coroutine[Any, Any, Any]) -> Any:
    """Wait for it, as long as nothing can take that is not stuck."""
    async with asyncio.timeout(PROMPTLY_S):
        return await work


async def cut(work: Coroutine[Any, Any, object], draw: random.Random) -> None:
    """Begin something, and cancel it some turns of the loop or some milliseconds later, if it has not ended by then."""
    task = asyncio.ensure_future(work)
    if draw.random() < 0.5:
        for _ in range(draw.randrange(25)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(draw.random() * draw.choice([0.002, 0.006, 0.02]))
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=PROMPTLY_S)
    assert done, "what was cancelled goes on"
    assert task.cancelled() or task.exception() is None


async def time_out(sandbox: Sandbox, draw: random.Random) -> None:
    """Let a run be killed by the clock, perhaps in its first millisecond."""
    result = await promptly(sandbox.run("import time; time.sleep(100)", timeout=draw.choice([0.001, 0.003, 0.02])))
    assert result.status is Status.TIMEOUT


def test_five_hundred_runs_cancelled_at_any_moment(draw: random.Random) -> None:
    """The next run gets its own answer, also when several were cancelled at once."""

    async def cancel() -> None:
        for number in range(500):
            stale = [cut(cloche.arun(draw.choice(CODES)), draw) for _ in range(draw.choice([1, 1, 2, 3]))]
            await promptly(asyncio.gather(*stale))  # type: ignore[arg-type]  # a future is as good as a coroutine
            assert (await promptly(cloche.arun(f"print({number})"))).stdout == f"{number}\n"

    run_pooled("1")
    asyncio.run(cancel())


def test_two_hundred_sandboxes_whose_work_is_cancelled(draw: random.Random) -> None:
    """After runs, sessions, files and time-outs that were cut short, in any order, a sandbox has its files."""

    async def cancel() -> None:
        for _ in range(200):
            async with Sandbox(live=False) as sandbox:
                await promptly(sandbox.run("open('f', 'w').write('kept')"))
                for number in range(draw.randrange(1, 9)):
                    if draw.random() < 0.2:
                        await time_out(sandbox, draw)
                    else:
                        (begin,) = draw.choices([one for _, one in BEGIN], [often for often, _ in BEGIN])
                        await cut(begin(sandbox, draw.choice(CODES)), draw)
                    if draw.random() < 0.6:
                        result = await promptly(sandbox.run(f"print({number}, open('f').read())"))
                        assert result.stdout == f"{number} kept\n"

    before = Snapshot.take()
    run_pooled("1")
    asyncio.run(cancel())
    assert wait_for_leftovers(before, patience_s=20) == []


def test_three_hundred_floods(tmp_path: Path) -> None:
    """Who says too much with its last breath delays nobody."""
    (tmp_path / "c.yaml").write_text("sandbox:\n  flood_limit: 20KB\n  output_limit: 10KB\n")

    async def flood() -> None:
        for number in range(300):
            assert (await promptly(cloche.arun(FLOOD, config=tmp_path / "c.yaml"))).status in (
                Status.OK,
                Status.OUTPUT_LIMIT,
            )
            assert (await promptly(cloche.arun(f"print({number})"))).stdout == f"{number}\n"

    run_pooled("1")
    asyncio.run(flood())


def test_two_hundred_sandboxes_close_under_a_run(draw: random.Random) -> None:
    """At any moment of a run its sandbox can be closed; the run ends with an error of ours, and nothing is left."""

    async def close() -> None:
        for _ in range(200):
            sandbox = Sandbox(live=False)
            await sandbox.__aenter__()
            for _ in range(draw.randrange(3)):
                await promptly(sandbox.run("1"))
            running = asyncio.ensure_future(sandbox.run("import time; time.sleep(100)"))
            await asyncio.sleep(draw.random() * 0.02)
            await promptly(sandbox.__aexit__(None, None, None))
            done, _ = await asyncio.wait([running], timeout=PROMPTLY_S)
            assert done, "the run goes on"
            assert isinstance(running.exception(), ClocheError)

    before = Snapshot.take()
    descriptors = len(os.listdir("/proc/self/fd"))
    run_pooled("1")
    asyncio.run(close())
    assert wait_for_leftovers(before, patience_s=20) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8


def test_a_thousand_interrupts() -> None:
    """Ctrl-C at any moment of a call in the caller's own thread is raised, and the next run is answered."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.harness.programs.interrupted_caller", "1000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1000 interrupts\n"
