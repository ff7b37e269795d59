"""Call coroutines of a third-party package from any thread: in one event loop, in a separate thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class OwnLoop:
    """Call coroutines from any thread in one loop; a forked child starts another one.

    `margin_s` is the time to wait for a coroutine to end after its time-out.
    """

    def __init__(self, name: str, *, margin_s: float):
        self._name, self._margin_s = name, margin_s
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def __call__(self, make: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """Run the awaitable that `make` returns, in the loop; return its result. Raises TimeoutError, and its
        exceptions.
        """
        return self.result_of(self.begin(make, timeout_s), timeout_s)

    def begin(self, make: Callable[[], Awaitable[T]], timeout_s: float | None) -> Future[T]:
        """Start the awaitable that `make` returns, in the loop, with a time-out."""

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await make()

        return asyncio.run_coroutine_threadsafe(bounded(), self.loop())

    def result_of(self, future: Future[T], timeout_s: float | None) -> T:
        """Wait for a started call. Raises TimeoutError if it does not end despite its own time-out."""
        try:
            return future.result(None if timeout_s is None else timeout_s + self._margin_s)
        except TimeoutError:
            future.cancel()
            raise

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return this process's loop, starting it if necessary."""
        with self._turn:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop
