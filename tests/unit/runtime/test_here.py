"""A coroutine in the caller's thread: results, interrupts, and when it is not done that way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from cloche.runtime import here


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
    assert here.run(answer(7)) == 7

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        here.run(fail())
    assert here.run(answer(8)) == 8


def test_loops_are_used_again_and_few_are_kept() -> None:
    """One caller after the other uses one loop; of many at once no more are kept than that."""
    loops = {here.run(_loop()) for _ in range(5)}
    assert len(loops) == 1
    together = threading.Barrier(20)

    def one() -> None:
        here.run(_meet(together))

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(here._kept) == here.MOST_KEPT


async def _loop() -> int:
    return id(asyncio.get_running_loop())


async def _meet(together: threading.Barrier) -> None:
    together.wait(20)


def test_it_is_not_possible_inside_a_loop() -> None:
    """A thread whose own loop runs cannot run another one."""

    async def ask() -> bool:
        return here.is_possible()

    assert here.is_possible()
    assert not asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_handler_of_the_caller_s_own_goes_the_other_way(handler: Callable[[int], None], number: int) -> None:
    """It might raise in the middle of our work; other threads have no handlers."""
    handler(number)
    assert not here.is_possible()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(here.is_possible()))
    thread.start()
    thread.join(10)
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
        here.run(work())
    assert said == ["cleared up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert here.run(answer(1)) == 1


def test_an_interrupt_that_comes_late_is_raised_all_the_same() -> None:
    """A coroutine that ends in spite of it is no reason to lose it."""

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 5

    with pytest.raises(KeyboardInterrupt):
        here.run(work())
    assert here.run(answer(2)) == 2


def test_a_forked_child_starts_without() -> None:
    """The parent's loops are not the child's: it makes its own."""
    here.run(answer(1))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not here._kept and here.run(answer(3)) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
