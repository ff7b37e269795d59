"""A coroutine in the caller's thread: results, interrupts, and when it is not done that way."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cloche.blocking import calls
from cloche.blocking.loops import EagerLoop
from cloche.core.loops import become_task
from tests.harness.processes import interrupted


@pytest.fixture(autouse=True)
def _no_alarm() -> Iterator[None]:
    """Take away the handler with which the test runner ends what hangs."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def handler() -> Iterator[Callable[[int], None]]:
    """Return a function that installs a handler of the caller's own, until the test ends."""
    before: dict[int, object] = {}

    def install(number: int) -> None:
        before[number] = signal.signal(number, lambda *_: None)

    yield install
    for number, old in before.items():
        signal.signal(number, old)  # type: ignore[arg-type]  # what `signal` returned it takes


async def answer(value: int) -> int:
    """Return a value after a turn of the loop."""
    await asyncio.sleep(0)
    return value


def test_it_returns_what_it_returns() -> None:
    """Value and error are those of the coroutine."""
    assert calls.run(answer, 7) == 7

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        calls.run(fail)
    assert calls.run(answer, 8) == 8


def test_loops_are_used_again_and_few_are_kept() -> None:
    """One caller after the other uses one loop; of many at once no more are kept than that."""
    loops = {calls.run(_loop) for _ in range(5)}
    assert len(loops) == 1
    together = threading.Barrier(20)

    def one() -> None:
        calls.run(_meet, together)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(calls._idle_loops) == calls.MOST_LOOPS


async def _loop() -> int:
    return id(asyncio.get_running_loop())


async def _meet(together: threading.Barrier) -> None:
    together.wait(20)


def test_it_is_not_possible_inside_a_loop() -> None:
    """A thread whose own loop runs cannot run another one."""

    async def ask() -> bool:
        return calls.can_run_inline()

    assert calls.can_run_inline()
    assert not asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_handler_of_the_caller_s_own_goes_the_other_way(handler: Callable[[int], None], number: int) -> None:
    """It might raise in the middle of our work; other threads have no handlers."""
    handler(number)
    assert not calls.can_run_inline()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(calls.can_run_inline()))
    thread.start()
    thread.join(60)
    assert found == [True]


def test_an_interrupt_ends_the_work_first() -> None:
    """Ctrl-C cancels the coroutine, waits for its end, and is then raised; the handler is Python's own again."""
    said: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            said.append("cleared up")

    with pytest.raises(KeyboardInterrupt):
        calls.run(work)
    assert said == ["cleared up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert calls.run(answer, 1) == 1


def test_an_interrupt_cancels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes while it is being arranged whom it shall cancel, which would be told of it twice."""
    cancelled: list[int] = []
    set_wakeup_fd = calls._signal.set_wakeup_fd

    def interrupt(*args: int, **options: bool) -> int:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        before: int = set_wakeup_fd(*args, **options)
        return before

    async def work() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                cancelled.append(1)

    loop = EagerLoop(selectors.DefaultSelector())
    monkeypatch.setattr(calls._signal, "set_wakeup_fd", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calls.run_on_loop(lambda: loop, lambda _: None, work, is_eager=True)
    loop.close()
    assert cancelled == [1]


def test_an_interrupt_that_comes_late_is_raised_all_the_same() -> None:
    """A coroutine that ends in spite of it is no reason to lose it."""

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 5

    with pytest.raises(KeyboardInterrupt):
        calls.run(work)
    assert calls.run(answer, 2) == 2


@pytest.mark.parametrize("most_kept", [calls.MOST_LOOPS, 0], ids=["kept", "closed"])
def test_an_interrupt_at_any_instruction_is_raised_and_leaves_nothing(
    most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C comes in between, it is raised; loop, handler and coroutine are as they were or were never."""
    calls._close_idle_loops()
    monkeypatch.setattr(calls, "MOST_LOOPS", most_kept)
    calls.run(answer, 1)
    number, came = 0, True
    while came:
        number += 1
        came, was_raised = interrupted(calls, number, lambda: calls.run(answer, 2))
        assert was_raised == came, f"at instruction {number}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
        assert len(calls._idle_loops) == calls._loop_count, f"a loop was lost at instruction {number}"
        assert not any(asyncio.all_tasks(loop) for loop in calls._idle_loops)
        assert calls.run(answer, 3) == 3
    assert number > 100


def test_an_interrupt_that_ends_no_waiting_is_heard_all_the_same() -> None:
    """The kernel may give a signal to another thread, or just before the loop begins to wait."""

    async def work() -> None:
        thread = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
        thread.start()
        await asyncio.sleep(30)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        calls.run(work)
    assert time.monotonic() - started < 20


def test_a_descriptor_of_the_caller_s_own_hears_of_signals_as_before() -> None:
    """What a caller has set with `set_wakeup_fd` is left alone."""
    mine, other = socket.socketpair()
    mine.setblocking(False)
    before = signal.set_wakeup_fd(mine.fileno())
    try:
        assert calls.run(answer, 4) == 4
        assert signal.set_wakeup_fd(mine.fileno()) == mine.fileno()
    finally:
        signal.set_wakeup_fd(before)
        mine.close()
        other.close()


def test_a_loop_that_cannot_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller without descriptors fails, and later ones run in their own threads as before."""

    def refuse(selector: selectors.BaseSelector) -> EagerLoop:
        selector.close()
        raise OSError(errno.EMFILE, "no descriptor")

    calls._close_idle_loops()
    with monkeypatch.context() as patch:
        patch.setattr(calls, "EagerLoop", refuse)
        for _ in range(calls.MOST_LOOPS + 1):
            with pytest.raises(OSError, match="no descriptor"):
                calls.run(answer, 5)
    assert calls.can_run_inline()
    assert calls.run(answer, 5) == 5


def test_who_waits_for_nothing_needs_no_task() -> None:
    """It runs to its end by hand; who asks for a task has one from then on."""

    async def look() -> list[bool]:
        found = [asyncio.current_task() is not None]
        await become_task()
        found.append(asyncio.current_task() is not None)
        async with asyncio.timeout(60):
            await become_task()
        return found

    async def end_at_once() -> object:
        return asyncio.current_task()

    assert calls.run(look) == [False, True]
    assert calls.run(end_at_once) is None


def test_a_loop_awaits_what_runs_in_the_shared_one() -> None:
    """Value and error come back, and the caller's own loop goes on meanwhile."""

    async def fail() -> None:
        raise KeyError("x")

    async def main() -> list[int]:
        with pytest.raises(KeyError):
            await calls.call_from_loop(fail)
        return await asyncio.gather(*(calls.call_from_loop(lambda n=n: answer(n)) for n in range(20)))

    assert asyncio.run(main()) == list(range(20))
    assert calls.call(lambda: answer(3)) == 3


def test_who_gives_up_awaiting_does_so_when_the_work_has_ended() -> None:
    """However often the caller is cancelled, the coroutine is cancelled once, and its clearing up is waited for."""
    ended: list[str] = []

    async def main() -> None:
        begun, may_end = asyncio.Event(), threading.Event()
        here = asyncio.get_running_loop()

        async def work() -> None:
            here.call_soon_threadsafe(begun.set)
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.to_thread(may_end.wait)
                ended.append("work")

        task = asyncio.create_task(calls.call_from_loop(work))
        await begun.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert ended == ["work"]


def test_a_forked_child_starts_without() -> None:
    """The parent's loops are not the child's: it makes its own."""
    calls.run(answer, 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not calls._idle_loops and calls.run(answer, 3) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
