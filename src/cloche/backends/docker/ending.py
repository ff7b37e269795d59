"""End what must end: first by the first process of its container, and when that does not answer, with the container."""

from __future__ import annotations

import asyncio

from cloche.core.outcome import KillCause

from .container import Container

SETTLE_S = 5.0  # for the first process to see the guest out when it was told to


class Ending:
    """Kill one program for a reason. Use from one event loop, and close in any case."""

    def __init__(self, container: Container):
        self._container = container
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self.cause: KillCause | None = None

    def expect(self, timeout_s: float) -> None:
        """Begin to count."""
        self._timers.append(self._loop.call_later(timeout_s, self.kill, KillCause.TIMEOUT))

    def kill(self, cause: KillCause) -> None:
        """Kill the program for a reason; the first reason counts."""
        if self.cause is None:
            self.cause = cause
            self._loop.run_in_executor(None, self._container.kill_guest)
            self._timers.append(self._loop.call_later(SETTLE_S, self._kill_container))

    def _kill_container(self) -> None:
        self._loop.run_in_executor(None, self._container.kill)

    def close(self) -> None:
        """Stop counting."""
        for timer in self._timers:
            timer.cancel()
