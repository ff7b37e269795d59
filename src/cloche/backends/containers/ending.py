"""End what must end: first by the first process of its container, and when that does not answer, with the container.

Who kills containers may not answer either: then this one is given up, and nobody knows what becomes of it.
Both are done in threads of their own: those that a loop shares may all be waiting for other containers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from cloche.core.outcome import KillCause

from .container import Container

BEGIN_S = 120.0  # for a program to start, once all that it needs was sent
LIFT_S = 0.25  # for the first process to see the guest out with the processor quota that there is
SETTLE_S = 5.0  # for the first process to see the guest out when it was told to
GIVE_UP_S = 10.0  # for the container to be gone when it was to be killed
log = logging.getLogger("cloche.containers")


class Ending:
    """Kill one program for a reason. Use from one event loop, and close in any case."""

    def __init__(self, container: Container[Any]):
        self._container = container
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._starting: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.cause: KillCause | None = None

    def expect_start(self) -> None:
        """Wait so long for the program to start, and then no longer: its container is killed."""
        if self._is_closed:
            return
        self._starting = self._loop.call_later(BEGIN_S, self._kill_container)
        self._timers.append(self._starting)

    def expect(self, timeout_s: float) -> None:
        """Begin to count."""
        if self._starting is not None:
            self._starting.cancel()
        self._timers.append(self._loop.call_later(timeout_s, self.kill, KillCause.TIMEOUT))

    def kill(self, cause: KillCause) -> None:
        """Kill the program for a reason; the first reason counts."""
        if self.cause is None:
            self.cause = cause
            self._begin(self._container.kill_guest)
            self._timers.append(self._loop.call_later(LIFT_S, self._begin, self._container.lift_quota))
            self._timers.append(self._loop.call_later(SETTLE_S, self._kill_container))

    def _kill_container(self) -> None:
        self._begin(self._container.kill)
        self._timers.append(self._loop.call_later(GIVE_UP_S, self._container.give_up))

    def _begin(self, kill: Callable[[], None]) -> None:
        threading.Thread(target=_kill, args=(kill,), name="cloche-container-kill", daemon=True).start()

    def close(self) -> None:
        """Stop counting."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()


def _kill(kill: Callable[[], None]) -> None:
    try:
        kill()
    except Exception as error:
        log.warning("a container that is to end may still run: it could not be killed: %s", error)
