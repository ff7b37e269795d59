"""How many connections there may be, and how long one may take to say what it wants.

Whoever reaches the port needs no token to connect. What they can hold is bounded, so that descriptors are left for the
sandboxes, and given up in the end.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
MOST_BACKLOG = 128
HEAD_S = 15.0  # a client that has not sent the head of a request by then will not
BODY_S = 60.0  # nor the rest of it by then: 4 MiB at most, which is 70 kB a second


def most_connections() -> int:
    """Return how many connections may be open at once: a quarter of the descriptors that this process may have."""
    return _share(4, MOST_CONNECTIONS)


def backlog() -> int:
    """Return how many connections may wait: as many are accepted in one go, before any is counted."""
    return _share(8, MOST_BACKLOG)


def _share(part: int, most: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // part))


class BoundedProtocol(H11Protocol):
    """Speak HTTP on one connection of not too many; one that stays without a request, or within one, is closed."""

    most: int = MOST_CONNECTIONS
    head_s: float = HEAD_S
    body_s: float = BODY_S
    _looking: asyncio.TimerHandle | None = None
    _receiving: asyncio.TimerHandle | None = None  # while a body comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_one_too_many = len(self.connections) >= self.most
        super().connection_made(cast("asyncio.Transport", transport))
        if is_one_too_many:
            cast("asyncio.Transport", transport).abort()
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._looking, self._receiving):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take what came, and bound the time between the head of a request and its end, however it trickles in."""
        before: Any = self.cycle
        super().handle_events()
        is_receiving = self.conn.their_state is h11.SEND_BODY
        if self._receiving is not None and (not is_receiving or self.cycle is not before):
            self._receiving.cancel()
            self._receiving = None
        if is_receiving and self._receiving is None:
            self._receiving = self.loop.call_later(self.body_s, self.transport.close)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self.head_s, self._look, self._idle_after())

    def _idle_after(self) -> object:
        """Return what was answered last, None before the first request; something new while one is being answered."""
        cycle: Any = self.cycle
        return cycle if cycle is None or cycle.response_complete else object()

    def _look(self, before: object) -> None:
        """Close the connection, after what is still to be sent, when it was idle at the last look and ever since."""
        if self._idle_after() is before:
            self.transport.close()
        else:
            self._look_later()


def bounded() -> type[BoundedProtocol]:
    """Return the protocol with the bounds of this process."""
    return type("Bounded", (BoundedProtocol,), {"most": most_connections()})
