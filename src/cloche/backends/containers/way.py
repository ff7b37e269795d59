"""What nobody waits for makes way: new containers, and the removal of old ones, come after runs in warm containers.

Either takes a daemon many times the work of a short run, which would wait for a processor at each of its steps. So they
begin when no such run is under way and none has just ended, or after a bounded time whatever happens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 0.03  # after a run: who asks for another one at once, asks by then
MOST_S = 0.25  # much less than a container takes to start


class Way:
    """Count the runs that others make way for. For use from any thread."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._turn = threading.Condition()
        self._under_way = 0
        self._ended_at = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let others make way."""
        with self._turn:
            self._under_way += 1
        try:
            yield
        finally:
            with self._turn:
                self._under_way -= 1
                self._ended_at = time.monotonic()
                self._turn.notify_all()

    def make(self, most_s: float = MOST_S) -> None:
        """Wait until it is free, or for so long."""
        deadline = time.monotonic() + most_s
        with self._turn:
            while (left_s := self._until(deadline) - time.monotonic()) > 0:
                self._turn.wait(left_s)

    def _until(self, deadline: float) -> float:
        return deadline if self._under_way else min(deadline, self._ended_at + QUIET_S)


way = Way()
