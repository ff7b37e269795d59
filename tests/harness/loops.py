"""Event loops for tests: one that ends a test which hangs, and one whose clock can be put forward."""

import asyncio
from collections.abc import Awaitable, Callable

LONG_S = 60.0


def in_loop(claim: Callable[[], Awaitable[None]]) -> None:
    """Run what a test claims, not for ever."""

    async def run() -> None:
        async with asyncio.timeout(LONG_S):
            await claim()

    asyncio.run(run())


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
