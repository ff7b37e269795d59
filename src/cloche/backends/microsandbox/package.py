"""The package `microsandbox`: found when it is needed, and talked to from threads.

All of its calls are coroutines, and what they return belongs to the loop that they ran in. So there is one loop, in a
thread of its own, for everything.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable

NAME = "microsandbox"
INSTALL = 'Install the extra that brings it: "pip install cloche[microsandbox]".'
T = TypeVar("T")


def find_package() -> Any:
    """Return the package. Raises BackendUnavailable with the remedy."""
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise BackendUnavailable(
            f'backend "microsandbox": the package {NAME} cannot be imported ({error}).', remedy=INSTALL
        ) from error


class Caller:
    """Call coroutines from any thread, in one loop."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def __call__(self, make: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """Return what comes of what `make` makes, in the loop. Raises TimeoutError, and whatever that raises."""

        async def made() -> T:
            return await make()

        future = asyncio.run_coroutine_threadsafe(made(), self._running_loop())
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._turn:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="cloche-microsandbox", daemon=True).start()
            return self._loop


call = Caller()
