"""The first runs of a process: what keeps later ones warm begins beside them; forks in their midst hold nobody."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cloche
from cloche.backends.host import measure_host
from cloche.backends.local import helper_ends
from cloche.backends.local.prefork import close_pools, pool_for
from cloche.core.policy import Policy
from cloche.forkserver.pool import Pool
from cloche.jail.setup import launch

FOREVER_S, SOON_S = 60, 25.0


@pytest.fixture(autouse=True)
def nothing_is_warm() -> Iterator[None]:
    """Begin and end with nothing that is kept warm."""
    close_pools()
    yield
    close_pools()


async def _wait_until_ready(pool: Pool) -> None:
    deadline = time.monotonic() + SOON_S
    while not pool.is_ready():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_long_first_run_is_not_waited_for() -> None:
    """The template begins while the first run goes on, though not before it: then there is none yet."""
    pool = pool_for(Policy(), measure_host())
    first = asyncio.create_task(cloche.arun(f"import time; time.sleep({FOREVER_S})"))
    try:
        while pool._latest is None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        assert pool._template is None
        await _wait_until_ready(pool)
        assert not first.done()
    finally:
        first.cancel()
        await asyncio.wait([first])


def test_a_process_that_runs_one_program_starts_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared for later runs by a short first one, until time has passed or the second one comes."""
    monkeypatch.setattr("cloche.forkserver.pool.BEGIN_S", FOREVER_S)
    monkeypatch.setattr("cloche.backends.local.sandbox.BEGIN_S", FOREVER_S)
    pool = pool_for(Policy(), measure_host())
    assert cloche.run("print(1)").ok
    assert pool._template is None
    assert cloche.run("print(1)").ok
    assert pool._template is not None


def test_a_first_run_imports_little() -> None:
    """What a run alone does not need is not imported for it: archives, what lives, sessions, file names."""
    unwanted = (
        "platformdirs", "platform", "pathlib", "urllib.parse", "glob", "dataclasses", "tarfile", "tempfile",
        "cloche.sync", "cloche.execution.sandbox", "cloche.backends.live", "cloche.backends.local.session",
    )  # fmt: skip
    program = (
        "import sys, cloche; assert cloche.run('print(1)', warm=False).ok; "
        f"print([name for name in {unwanted} if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cloche.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_first_command_imports_no_archives() -> None:
    """A live sandbox, and from which nothing is copied out, needs no archives either."""
    program = (
        "import sys, cloche\nwith cloche.Sandbox(live=True) as sandbox: assert sandbox.exec(['true']).ok\n"
        "print([name for name in ('dataclasses', 'tarfile', 'tempfile', 'random') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cloche.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_a_session_that_comes_first_has_the_pool_begin() -> None:
    """It is itself no run that could end."""
    pool = pool_for(Policy(), measure_host())
    async with cloche.AsyncSandbox(live=False) as sandbox, await sandbox.session() as session:
        assert (await session.run("1 + 1")).value == 2
        await _wait_until_ready(pool)


@contextmanager
def _forked() -> Iterator[None]:
    """Have a child that was forked here, and does nothing."""
    child = os.fork()
    if child == 0:
        time.sleep(FOREVER_S)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_fork_in_the_midst_of_a_start_does_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked while a process is started would have the pipe on which that start is waited for."""
    begun, real = threading.Event(), subprocess._fork_exec  # type: ignore[attr-defined]

    def start_slowly(*args: object) -> int:
        begun.set()
        time.sleep(0.3)
        return real(*args)  # type: ignore[no-any-return]

    def start() -> None:
        process, link = launch.start_helper(sys.executable)
        done.set()
        link.shutdown(socket.SHUT_WR)
        link.close()
        process.wait()

    monkeypatch.setattr(subprocess, "_fork_exec", start_slowly)
    done, thread = threading.Event(), threading.Thread(target=start)
    thread.start()
    assert begun.wait(SOON_S)
    with _forked():
        assert done.wait(SOON_S), "the start waited for the end of a child that has nothing to do with it"
    thread.join()


def test_a_forked_child_does_not_keep_what_its_parent_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that began cold moves on, and the template ends, while children have copies of their sockets."""
    monkeypatch.setattr(helper_ends, "CLOSE_TIMEOUT_S", FOREVER_S)  # else a helper that does not hear is killed at last
    with cloche.Sandbox(live=False) as sandbox:
        sandbox.write_file("kept", b"x")
        with _forked():
            started = time.monotonic()
            start = "cold"
            while start == "cold":
                start = sandbox.run("print(open('kept').read())").meta["start"]
                assert time.monotonic() - started < SOON_S
    with _forked():
        started = time.monotonic()
        close_pools()
        assert time.monotonic() - started < SOON_S


def test_a_forked_child_that_leaves_a_sandbox_leaves_it_to_its_parent() -> None:
    """Leaving the blocks in the child, a session's too, closes nothing, and waits for nothing."""
    with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
        sandbox.write_file("kept", b"x")
        session.run("x = 5")
        child = os.fork()
        if child == 0:
            try:
                session.__exit__(None, None, None)
                sandbox.__exit__(None, None, None)
            finally:
                os._exit(0)
        deadline = time.monotonic() + SOON_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child waits for a task that it does not have")
            time.sleep(0.01)
        assert session.run("x").value == 5
        assert sandbox.read_file("kept") == b"x"
        assert sandbox.run("print(open('kept').read())").stdout == "x\n"
