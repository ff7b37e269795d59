"""Debug namespaces of a worker, set by its arguments, its environment and the database."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping

from cloche.core.debugging import NAMESPACES, VARIABLE, DebugState, read_namespaces, switch
from cloche.core.errors import RecordsFailed
from cloche.core.record import replace

POLL_S = 0.5  # half of the documented second
log = logging.getLogger("cloche.service")


class Debugging:
    """Switch the loggers of this process. Raises InvalidRequest for an unknown namespace in CLOCHE_DEBUG."""

    def __init__(self, *, is_all: bool = False):
        namespaces = frozenset(NAMESPACES) if is_all else frozenset()
        self.state = DebugState(argument=namespaces, environment=read_namespaces(os.environ.get(VARIABLE, "")))
        switch(self.state.on)

    def use(self, stored: Mapping[str, bool]) -> DebugState:
        """Apply the stored namespaces, and return the resulting state."""
        if stored != self.state.stored:
            before, self.state = self.state.on, replace(self.state, stored=dict(stored))
            switch(self.state.on)
            if self.state.on != before:
                log.warning("debug namespaces that are on: %s", ", ".join(sorted(self.state.on)) or "none")
        return self.state

    async def follow(self, read: Callable[[], Awaitable[Mapping[str, bool]]]) -> None:
        """Apply the stored namespaces every `POLL_S` until cancelled. `read` reads them outside the event loop."""
        is_failing = False
        while True:
            try:
                self.use(await read())
                is_failing = False
            except Exception as error:  # keep polling: the next read may succeed
                if not is_failing:
                    why = str(error) if isinstance(error, RecordsFailed) else type(error).__name__
                    log.warning("debug namespaces could not be changed: %s", why)
                is_failing = True
            await asyncio.sleep(POLL_S)
