"""Coroutines of somebody's package, called from any thread: in one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class OwnLoop:
    """Call coroutines from any thread, in one loop; a forked child has another one.

    `margin_s` is how long is waited for the end of what is over its time.
    """

    def __init__(self, name: str, *, margin_s: float):
        self._name, self._margin_s = name, margin_s
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def __call__(self, make: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """Return what comes of what `make` makes, in the loop. Raises TimeoutError, and whatever that raises."""
        return self.result_of(self.begin(make, timeout_s), timeout_s)

    def begin(self, make: Callable[[], Awaitable[T]], timeout_s: float | None) -> Future[T]:
        """Begin what `make` makes, in the loop; it ends by itself after so long."""

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await make()

        return asyncio.run_coroutine_threadsafe(bounded(), self.loop())

    def result_of(self, future: Future[T], timeout_s: float | None) -> T:
        """Wait for what was begun. Raises TimeoutError where it has not ended by itself."""
        try:
            return future.result(None if timeout_s is None else timeout_s + self._margin_s)
        except TimeoutError:
            future.cancel()
            raise

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of this process, which runs."""
        with self._turn:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop
