"""Events of a fleet for several readers, each of which may be slow."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from cloche.core.fleet import FleetEvent

MOST_EVENTS = 1000  # kept for a reader; a slower one misses the oldest


class EventReader:
    """Iterate over the events since it was made. It ends when the fleet is closed."""

    def __init__(self) -> None:
        self._events: deque[FleetEvent] = deque(maxlen=MOST_EVENTS)
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, event: FleetEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        """End after the events that are there."""
        self._is_closed = True
        self._changed.set()

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> FleetEvent:
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


class EventReaders:
    """The readers of a fleet; one that its user forgets is gone."""

    def __init__(self) -> None:
        self._readers: weakref.WeakSet[EventReader] = weakref.WeakSet()

    def open(self) -> EventReader:
        """Return a new reader."""
        reader = EventReader()
        self._readers.add(reader)
        return reader

    def put(self, event: FleetEvent) -> None:
        """Give all readers an event."""
        for reader in list(self._readers):
            reader.put(event)

    def close(self) -> None:
        """End all readers."""
        for reader in list(self._readers):
            reader.close()
