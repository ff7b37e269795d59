"""A sandbox that is open without a block: when it is ended, and by whom."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import cloche
from cloche.core.result import Result
from cloche.testing.fake import FakeBackend

AT_EXIT = """
import asyncio, cloche, contextlib, threading
from cloche.testing import FakeBackend
class Loud(FakeBackend):
    @contextlib.asynccontextmanager
    async def open(self, policy, limits):
        try: yield None
        finally:
            await asyncio.sleep(0.01)
            print('closed', flush=True)
"""
EXITS = {
    "a blocking one": "sandbox = cloche.Sandbox(backend=Loud()).open()",
    "a loop that stands still": (
        "loop = asyncio.new_event_loop()\nsandbox = loop.run_until_complete(cloche.AsyncSandbox(backend=Loud()).open())"
    ),
    "a loop in another thread": (
        "loop = asyncio.new_event_loop()\n"
        "threading.Thread(target=loop.run_forever, daemon=True).start()\n"
        "opening = cloche.AsyncSandbox(backend=Loud()).open()\n"
        "sandbox = asyncio.run_coroutine_threadsafe(opening, loop).result()"
    ),
    "asyncio.run": (
        "async def main(): global sandbox; sandbox = await cloche.AsyncSandbox(backend=Loud()).open()\n"
        "asyncio.run(main())"
    ),
}


@pytest.fixture(autouse=True)
def _settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of these tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def answers(count: int = 9) -> FakeBackend:
    """Return a backend that answers `count` runs with their number."""
    return FakeBackend([Result(str(number), "", 0, 0.0) for number in range(count)])


def is_open(backend: FakeBackend) -> bool:
    """Tell whether the last sandbox that was opened still is."""
    return backend.sandboxes[-1].is_open


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop go on until something is so."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - what it is about has no event
            await asyncio.sleep(0)


def test_a_sandbox_is_opened_at_once_and_ended_by_close() -> None:
    """It is open when `open` returns it, closed once however often that is asked for, and can be opened again."""
    backend = answers()
    sandbox = cloche.Sandbox(backend=backend).open()
    assert is_open(backend)
    assert sandbox.run("x").stdout == "0"
    sandbox.close()
    sandbox.close()
    assert not is_open(backend)
    with pytest.raises(cloche.InvalidRequest, match=r"not open.*open\(\)"):
        sandbox.run("x")
    assert sandbox.open().run("x").stdout == "1"
    sandbox.close()


def test_an_async_sandbox_is_opened_at_once_and_ended_by_close() -> None:
    """Two who close it at once wait for the same end."""
    backend = answers()

    async def scenario() -> None:
        sandbox = await cloche.AsyncSandbox(backend=backend).open()
        assert (await sandbox.run("x")).stdout == "0"
        await asyncio.gather(sandbox.close(), sandbox.close())
        assert not is_open(backend)
        await sandbox.close()

    asyncio.run(scenario())


def test_one_that_is_open_is_not_opened_again() -> None:
    """That is an error, after which it is as open as before; its block ends it."""
    backend = answers()
    sandbox = cloche.Sandbox(backend=backend).open()
    with pytest.raises(cloche.InvalidRequest, match="already open"):
        sandbox.open()
    with sandbox as same:
        assert same is sandbox
        assert sandbox.run("x").stdout == "0"
        with pytest.raises(cloche.InvalidRequest, match="already open"), sandbox:
            pass
        assert is_open(backend)
    assert not is_open(backend)


def test_closing_in_the_block_ends_it_at_once() -> None:
    """The end of the block then finds nothing to do."""
    backend = answers()

    async def scenario() -> None:
        async with cloche.AsyncSandbox(backend=backend) as sandbox:
            await sandbox.close()
            assert not is_open(backend)

    with cloche.Sandbox(backend=backend) as sandbox:
        sandbox.close()
        assert not is_open(backend)
    asyncio.run(scenario())


def test_one_that_is_collected_is_closed_with_a_warning() -> None:
    """Also in a cycle, by a collector that runs in another thread."""
    backend = answers()

    async def scenario() -> None:
        holds: list[object] = [await cloche.AsyncSandbox(backend=backend).open()]
        with pytest.warns(ResourceWarning, match="sandbox of backend 'fake' was not closed"):
            holds.clear()
        await until(lambda: not is_open(backend))
        holds = [await cloche.AsyncSandbox(backend=backend).open()]
        holds.append(holds)
        del holds
        with pytest.warns(ResourceWarning, match="not closed"):
            await asyncio.to_thread(gc.collect)
        await until(lambda: not is_open(backend))

    asyncio.run(scenario())
    with pytest.warns(ResourceWarning, match="not closed"):
        cloche.Sandbox(backend=backend).open()
    cloche.Sandbox(backend=backend).open().close()  # after which the loop has done what it was told
    assert not any(sandbox.is_open for sandbox in backend.sandboxes)


@pytest.mark.parametrize("how", EXITS)
def test_the_end_of_the_interpreter_closes_it(how: str, tmp_path: Path) -> None:
    """It is closed to its end, in its own loop, and nothing is said of it."""
    done = subprocess.run(
        [sys.executable, "-W", "error:a sandbox", "-c", AT_EXIT + EXITS[how]],
        capture_output=True, text=True, check=False, timeout=30, cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("closed\n", "")


def test_the_end_of_its_event_loop_closes_it() -> None:
    """After `asyncio.run` the object is one that is not open."""
    backend = answers()

    async def scenario() -> cloche.AsyncSandbox:
        return await cloche.AsyncSandbox(backend=backend).open()

    sandbox = asyncio.run(scenario())
    assert not is_open(backend)
    with pytest.raises(cloche.InvalidRequest, match="not open"):
        asyncio.run(sandbox.run("x"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_closes_nothing() -> None:
    """Neither its `close` nor its collector reaches the parent's sandbox, or warns."""
    backend = answers()
    sandbox, dropped = cloche.Sandbox(backend=backend).open(), [cloche.Sandbox(backend=backend).open()]
    pid = os.fork()
    if pid == 0:
        heard: list[object] = []
        sys.unraisablehook = heard.append
        sandbox.close()
        dropped.clear()
        gc.collect()
        os._exit(len(heard))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sandbox.run("x").stdout == "0"
    assert dropped[0].run("x").stdout == "1"
    sandbox.close()
    dropped[0].close()


def test_one_whose_opening_is_cancelled_is_closed() -> None:
    """It may be opened later."""
    entered = threading.Event()

    class Slow(FakeBackend):
        def open(self, policy: object, limits: object) -> object:  # type: ignore[override]
            entered.set()
            return super().open(policy, limits)  # type: ignore[arg-type]

    backend = Slow()

    async def scenario() -> None:
        sandbox = cloche.AsyncSandbox(backend=backend)
        opening = asyncio.ensure_future(sandbox.open())
        await until(entered.is_set)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not is_open(backend)
        await (await sandbox.open()).close()

    asyncio.run(scenario())


def test_one_that_could_not_be_made_says_nothing_when_it_is_collected() -> None:
    """An error in its arguments is all that comes of it."""
    with pytest.raises(cloche.InvalidRequest, match="memory"):
        cloche.Sandbox(memory="much")
    gc.collect()
