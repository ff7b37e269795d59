"""Sandboxes and sessions without a block, of the local backend: what keeps them, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import cloche
from tests.harness.processes import wait_for_word

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]


def word() -> str:
    """Return an argument of `sleep` by which the process is found outside."""
    return f"1000.{os.getpid()}{time.monotonic_ns()}"


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when something is so."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_session_that_is_collected_ends_and_its_sandbox_goes_on() -> None:
    """Its interpreter is ended, with a warning; another session is not, and none is where a block has the sandbox."""
    sandbox = cloche.Sandbox().open()
    other, session = sandbox.session(), sandbox.session(idle_timeout="1h")
    other.run("x = 1")
    folder = f"/proc/{session.run('import os; os.getpid()').value}"
    assert sandbox.exists(folder)
    with pytest.warns(ResourceWarning, match="session was not closed"):
        del session
    wait_until(lambda: not sandbox.exists(folder))
    assert other.run("x").value == 1
    with sandbox:
        folder = f"/proc/{sandbox.session().run('import os; os.getpid()').value}"
        assert sandbox.exists(folder)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_session_keeps_its_sandbox(checkpoints: bool, tmp_path: Path) -> None:
    """The sandbox goes on as long as anybody has the session, or a fork of it, and no longer, also while it records."""
    sandbox, sleeping = cloche.Sandbox(audit=tmp_path / "audit").open(), word()
    sandbox.start(["sleep", sleeping])
    session = sandbox.session(checkpoints=checkpoints)
    session.run("x = 2")
    del sandbox
    if checkpoints:
        (fork,) = session.fork()
        session.close()
        session = fork
        del fork
    assert session.run("x").value == 2
    wait_for_word(sleeping)
    with warnings.catch_warnings(action="ignore"):  # who records one keeps what it is of
        del session
        wait_for_word(sleeping, is_there=False)


def test_attaching_without_a_block_ends_with_close_and_when_it_is_collected() -> None:
    """Either lets go of the sandbox, which goes on."""
    name = f"held-{os.getpid()}"
    with cloche.Sandbox(name=name, keep="1m") as sandbox:
        attached = cloche.Sandbox.attach(name).open()
        attached.write_file("a", "1")
        attached.close()
        with pytest.warns(ResourceWarning, match="not closed") as heard:  # noqa: PT031
            assert cloche.Sandbox.attach(name).open().read_file("a") == b"1"
            wait_until(lambda: bool(heard))  # what was called may have it a moment longer
        assert sandbox.read_file("a") == b"1"
        sandbox.kill()


def test_closing_while_it_is_used_ends_that() -> None:
    """A run raises that its sandbox is gone, a cell ends, and `close` waits for nothing else."""
    came: list[object] = []
    sandbox = cloche.Sandbox().open()
    session = sandbox.session()
    running = threading.Event()

    def run() -> None:
        try:
            sandbox.run("print('up', flush=True); import time; time.sleep(1000)", on_output=lambda *_: running.set())
        except cloche.OutcomeUnknown as error:
            came.append(type(error))

    def run_cell() -> None:
        cell = session.run("import time; time.sleep(1000)")
        came.append(cell.status)

    threads = [threading.Thread(target=run), threading.Thread(target=run_cell)]
    for thread in threads:
        thread.start()
    assert running.wait(30)
    sandbox.close()
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, came)) == ["<class 'cloche.core.errors.OutcomeUnknown'>", "signaled"]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_whose_event_loop_was_closed_ends_when_it_is_collected() -> None:
    """Nothing can be awaited any more, so its descriptors are closed, which ends all."""
    sleeping = word()

    async def opened() -> cloche.AsyncSandbox:
        sandbox = await cloche.AsyncSandbox().open()
        await sandbox.start(["sleep", sleeping])
        return sandbox

    loop = asyncio.new_event_loop()
    sandbox = loop.run_until_complete(opened())
    wait_for_word(sleeping)
    loop.close()
    del sandbox
    gc.collect()
    wait_for_word(sleeping, is_there=False)
