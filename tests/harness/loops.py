"""Event loops for tests: one that ends a test which hangs, and one whose clock can be put forward."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

LONG_S = 60.0
HELD_S, ATTEMPTS = 0.05, 5
T = TypeVar("T")


def in_loop(claim: Callable[[], Awaitable[T]]) -> T:
    """Run what a test claims, not for ever, and return what it returns."""

    async def run() -> T:
        async with asyncio.timeout(LONG_S):
            return await claim()

    return asyncio.run(run())


def check_loop(claim: Callable[[], Awaitable[float]]) -> None:
    """Check that a loop is held for less than `HELD_S` seconds, which `claim` measures.

    The quietest of several attempts counts: what else the machine does only adds.
    """
    held_s = [in_loop(claim)]
    while min(held_s) >= HELD_S:
        assert len(held_s) < ATTEMPTS, held_s
        held_s.append(in_loop(claim))


class HastyLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        """Return its time in seconds."""
        return super().time() + self.ahead_s

    async def hurry(self, work: asyncio.Future[bytes]) -> bytes:
        """Return what becomes of this while minutes pass in no time."""
        while not work.done():
            self.ahead_s += 0.1
            await asyncio.sleep(0)
        return work.result()


def in_hasty_loop(claim: Callable[[HastyLoop], Awaitable[None]]) -> None:
    """Run what a test claims in such a loop."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HastyLoop)
        await claim(loop)

    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        runner.run(run())
