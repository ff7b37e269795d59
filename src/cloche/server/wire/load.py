"""How much all wires of a worker may hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..problems import Refused

MOST_CONNECTIONS = 32  # each with a window for every channel of its calls
MOST_HELD = 128 << 20  # bytes of fields that came in pieces


@dataclass(slots=True)
class WireLoad:
    """Count what all wires of a worker hold together: connections, and bytes of fields that came in pieces."""

    connections: int = 0
    held: int = 0

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Count a connection for the body. Raises Refused (503) for one too many."""
        if self.connections >= MOST_CONNECTIONS:
            raise Refused(
                503, "busy", f"{MOST_CONNECTIONS} wires are open already; one carries many calls at once",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1

    def hold(self, size: int) -> None:
        """Count bytes that are held. Raises Refused (503) where there are too many."""
        if self.held + size > MOST_HELD:
            raise Refused(503, "busy", "other calls hold all memory there is for them", headers={"Retry-After": "2"})
        self.held += size
