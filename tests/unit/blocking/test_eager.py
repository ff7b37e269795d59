"""A coroutine that is run by hand until it has to wait, and becomes a task only then."""

from __future__ import annotations

import asyncio
import contextvars
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from cloche.blocking import calls
from cloche.blocking.loops import EagerLoop, SharedLoop, StartedCoroutine
from tests.harness.processes import interrupted

LONG_S = 60.0
word: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="")


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedLoop]:
    """Give a shared loop of this test's own, and take away the handler with which the test runner ends what hangs."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    made = SharedLoop()
    monkeypatch.setattr(calls, "_shared", made)
    yield made
    made.close()
    signal.signal(signal.SIGALRM, before)


def _wait(seconds: float, future: asyncio.Future[Any]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, EagerLoop)
    loop.wait_briefly(seconds, future, loop.create_future())


async def _answered(delay_s: float | None, wait_s: float) -> tuple[bytes, bool]:
    """Return what somebody sends, by default when waiting was in vain, and whether no task was needed to hear it."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    heard: asyncio.Future[bytes] = loop.create_future()

    def hear() -> None:
        loop.remove_reader(ours)
        heard.set_result(ours.recv(10))

    with ours, theirs:
        loop.add_reader(ours, hear)
        timer = threading.Timer(delay_s or 0, theirs.send, (b"word",))
        if delay_s is not None:
            timer.start()
        _wait(wait_s, heard)
        is_heard = heard.done()
        if delay_s is None:
            timer.start()
        data = await heard
        assert is_heard == (asyncio.current_task() is None)
        timer.join()
        return data, is_heard


def test_what_comes_soon_needs_no_task() -> None:
    """It is heard where it is waited for, and the loop never runs."""
    assert calls.call(lambda: _answered(0.01, LONG_S), is_eager=True) == (b"word", True)


def test_what_takes_longer_goes_on_as_a_task() -> None:
    """With what it knew, and in the context that it had begun in."""

    async def work() -> tuple[str, bool]:
        word.set("kept")
        found = await _answered(None, 0.001)
        return word.get(), found[1]

    assert calls.call(work, is_eager=True) == ("kept", False)
    assert word.get() == ""


def test_others_need_not_wait_for_it() -> None:
    """Who asks the loop for something meanwhile is heard at once, and so is a timer that is due."""

    async def work(arrange: Callable[[], object]) -> float:
        begun = time.monotonic()
        arrange()  # here, for otherwise it might be over before anybody waits
        _wait(LONG_S, asyncio.get_running_loop().create_future())
        waited = time.monotonic() - begun
        await asyncio.sleep(0)
        return waited

    rang = threading.Event()
    set_timer = lambda: asyncio.get_running_loop().call_later(0.05, rang.set)  # noqa: E731
    assert calls.call(lambda: work(set_timer), is_eager=True) < LONG_S / 2
    assert rang.wait(LONG_S)
    another = threading.Timer(0.05, lambda: calls.call(lambda: asyncio.sleep(0)))
    assert calls.call(lambda: work(another.start), is_eager=True) < LONG_S / 2
    another.join(LONG_S)
    assert not another.is_alive()


def test_a_loop_that_runs_does_not_stand_still() -> None:
    """In a task there is nothing to wait for by hand."""

    async def work() -> None:
        _wait(LONG_S, asyncio.get_running_loop().create_future())

    begun = time.monotonic()
    calls.call(work)
    assert time.monotonic() - begun < LONG_S / 2


def test_failures_come_out_of_either_half() -> None:
    """What a coroutine raises is raised, before it waits and after."""

    async def fail(pause_s: float | None) -> None:
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        raise ValueError("no")

    for pause_s in (None, 0, 0.001):
        with pytest.raises(ValueError, match="no"):
            calls.call(lambda: fail(pause_s), is_eager=True)  # noqa: B023


def test_ctrl_c_ends_what_it_waits_for() -> None:
    """The cancellation arrives where the coroutine waits, and its own waiting afterwards is waited for."""
    said: list[str] = []

    async def work() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        _wait(0.1, asyncio.get_running_loop().create_future())
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            said.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        calls.call(work, is_eager=True)
    assert said == ["cancelled"]
    assert calls.call(lambda: _answered(0, LONG_S), is_eager=True)[0] == b"word"


def test_ctrl_c_ends_the_task_that_it_waits_for() -> None:
    """Also where it came before the coroutine, which was begun by hand, waited for that."""
    said: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            said.append("inner")

    async def work() -> None:
        task = asyncio.ensure_future(inner())
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await task
        finally:
            said.append(f"outer, {task.done()}")

    with pytest.raises(KeyboardInterrupt):
        calls.run(work)
    assert said in (["outer, True"], ["inner", "outer, True"])  # a task that never began ends without a word


@pytest.mark.parametrize("module", [calls], ids=["calls"])
def test_ctrl_c_at_any_moment_leaves_the_turn_free(module: ModuleType) -> None:
    """Wherever it comes, it is raised, and the next call finds the loop as it was."""

    async def work() -> int:
        await asyncio.sleep(0.001)  # while the keeper works off what was handed over
        return threading.get_ident()

    number, came = 0, True
    while came:
        number += 1
        came, was_raised = interrupted(module, number, lambda: calls.call(work, is_eager=True))
        assert was_raised == came, f"at instruction {number}"
        assert any(calls.call(work, is_eager=True) == threading.get_ident() for _ in range(1000)), f"at {number}"
    assert number > 10


def test_what_was_begun_and_never_goes_on_is_closed() -> None:
    """A coroutine that was given up ends as any other does."""
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            ended.append(True)

    loop = EagerLoop(selectors.EpollSelector())
    coroutine = work()
    waits_for = loop.start_eagerly(coroutine)
    StartedCoroutine(coroutine, waits_for).close()
    loop.close()
    assert ended == [True]
