"""An event loop whose time jumps to the next timer when nothing is ready: seconds pass at once, and always equally."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
MOST_S = 100_000.0  # of virtual time; a test that waits for ever fails


class _Selector(selectors.SelectSelector):
    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is left that could wake this loop")
            self.passed_s += timeout
            if self.passed_s > MOST_S:
                raise RuntimeError("this loop waits for ever")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Run without waiting; only for code whose input and output are in this process."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time."""
        return self._virtual.passed_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
