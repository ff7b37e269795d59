"""How many interpreters go on between calls, and which one is put away when another one needs its place.

Theory of operation: `choose` is pure. Given who is there and who wants in, it names the one to put away. Of those that
do not work just now that is the least recently used one of the owner who has most, so that nobody puts away what
another one keeps within an equal share. What waits, and what ends an interpreter, happens after it has returned.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cloche.core.errors import InvalidRequest

MOST_INTERPRETERS = 16
IDLE_S = 1800.0
log = logging.getLogger("cloche.agent")


class Tenant(Protocol):
    """Be what stays in a room between its calls. `used_at` is the time of the last one, in seconds."""

    owner: str | None
    is_busy: bool
    used_at: float

    @property
    def is_alive(self) -> bool:
        """Tell whether it holds anything; what does not, needs no room."""
        ...

    async def put_away(self, why: str) -> None:
        """End it, unless it has begun to work meanwhile; `why` is for whoever comes back to it."""
        ...


T = TypeVar("T", bound=Tenant)


def choose(there: Sequence[T], owner: str | None) -> T | None:
    """Return which one makes room for another of `owner`'s; None where all that could are at work."""
    counts = Counter(one.owner for one in there)
    own = counts[owner]
    counts[owner] += 1

    def may_go(one: T) -> bool:
        return not one.is_busy and (one.owner == owner or own == 0 or counts[one.owner] > own + 1)

    return min(filter(may_go, there), key=lambda one: (-counts[one.owner], one.used_at), default=None)


class Room:
    """Bound how many interpreters are alive at once, over all toolboxes that share it, in one event loop.

    There are at most `most`, and one that was not used for `idle_s` seconds is ended. Raises InvalidRequest for
    numbers that are none.
    """

    def __init__(self, *, most: int = MOST_INTERPRETERS, idle_s: float = IDLE_S):
        if most < 1:
            raise InvalidRequest(f"most: {most!r} is no number of interpreters; give 1 or more")
        if not 0 < idle_s < math.inf:
            raise InvalidRequest(f"idle_s: {idle_s!r} is no time to wait; give seconds, such as 1800")
        self.most, self.idle_s = most, float(idle_s)
        self._there: list[Tenant] = []
        self._waiting: list[asyncio.Future[None]] = []

    def share_of(self, owner: str | None) -> Share:
        """Return what a toolbox of an owner's takes as `live`: where there is no room, owners have equal shares."""
        return Share(room=self, owner=owner)

    @asynccontextmanager
    async def stay(self, tenant: Tenant) -> AsyncIterator[None]:
        """Have room for a tenant while it works and, if it is still alive then, until it is put away.

        Waits while everything that could be put away is at work.
        """
        leaving = await self._enter(tenant)
        try:
            if leaving is not None:
                await self._put_away(leaving)
            yield
        finally:
            tenant.is_busy, tenant.used_at = False, time.monotonic()
            self._prune()

    def leave(self, tenant: Tenant) -> None:
        """Give up a tenant's place."""
        if tenant in self._there:
            self._there.remove(tenant)
            self._wake()

    async def _enter(self, tenant: Tenant) -> Tenant | None:
        """Take a place for a tenant; return who has to go for it."""
        while True:
            self._there = [one for one in self._there if one.is_busy or one.is_alive]
            is_new = tenant not in self._there
            leaving = choose(self._there, tenant.owner) if is_new and len(self._there) >= self.most else None
            if not is_new or leaving is not None or len(self._there) < self.most:
                break
            await self._change()
        if leaving is not None:
            self._there.remove(leaving)
        if is_new:
            self._there.append(tenant)
        tenant.is_busy = True
        return leaving

    async def _put_away(self, tenant: Tenant) -> None:
        try:
            await tenant.put_away(
                f"it was put away as the one that was used least recently, to make room: at most {self.most} are kept"
            )
        except Exception:  # not the affair of whose call this is; the other one's sandbox closes it in the end
            log.exception("an interpreter could not be put away")

    async def _change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _prune(self) -> None:
        self._there = [one for one in self._there if one.is_busy or one.is_alive]
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Say where a toolbox keeps its interpreters, and in whose name."""

    room: Room
    owner: str | None = None
