"""Who may connect: bounds on the connections of strangers, which have shown no valid credential yet. Pure.

Theory of operation: anyone who reaches the port can connect, from a holder's address, too. So strangers hold no place
against others: where they have all places, of the node or of their address, another one takes the place of the one that
has come least far, the oldest among these. One who has a credential needs milliseconds to show it, and a connection
with a valid call counts no longer as a stranger's but as its holder's: a lease or the coordinator. A lease has few, and
fewer the more there are; the coordinator always has some. An address with many wrong credentials has none for a while,
unless valid ones came from there.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MOST_CONNECTIONS, MOST_STRANGERS, MOST_OF_ADDRESS = 512, 64, 32
MOST_OF_HOLDER = 16  # twice what a client opens
FREE_FOR_ONE = 8  # a lease has no more connections than so many times fewer than are free
MOST_WRONG, WRONG_S = 20, 10.0  # wrong credentials of an address, and the time in which they count
KNOWN_S = 600.0  # after a valid credential
MOST_ADDRESSES = 1_024
COORDINATOR = "coordinator"


class Stranger(Protocol):
    """A connection without a valid call; `stage` is how far it has come."""

    stage: int


class Admission:
    """Count connections, and the wrong credentials of addresses."""

    def __init__(self, *, most: int = MOST_CONNECTIONS, most_strangers: int = MOST_STRANGERS):
        self._most, self._most_strangers = most, most_strangers
        self._strangers: dict[str, dict[Stranger, None]] = {}  # by address, the oldest first
        self._of_holder: Counter[str] = Counter()
        self._wrong: dict[str, tuple[float, int]] = {}  # since when, and how many
        self._known: dict[str, float] = {}  # when an address last showed a valid credential

    @property
    def strangers(self) -> int:
        """Return the number of connections without a valid call."""
        return sum(map(len, self._strangers.values()))

    def admits(self, address: str, now: float) -> bool:
        """Tell whether another connection of an address is accepted."""
        return not self.is_suspect(address, now) or now - self._known.get(address, -KNOWN_S) < KNOWN_S

    def is_suspect(self, address: str, now: float) -> bool:
        """Tell whether an address has shown too many wrong credentials."""
        since, count = self._wrong.get(address, (now, 0))
        return count >= MOST_WRONG and now - since < WRONG_S

    def opened(self, address: str, stranger: Stranger) -> Stranger | None:
        """Count a new connection; return the one that loses its place to it."""
        own = self._strangers.get(address, {})
        crowd = None
        if len(own) >= MOST_OF_ADDRESS:
            crowd = address
        elif self.strangers >= self._most_strangers:
            crowd = max(self._strangers, key=lambda name: len(self._strangers[name]))
        loser = None if crowd is None else min(self._strangers[crowd], key=lambda other: other.stage)
        if crowd is not None and loser is not None:
            self._drop(crowd, loser)
        self._strangers.setdefault(address, {})[stranger] = None
        return loser

    def has_room(self, holder: str) -> bool:
        """Tell whether a holder may have another connection."""
        free = self._most - self._of_holder.total()
        most = MOST_OF_HOLDER if holder == COORDINATOR else min(MOST_OF_HOLDER, free // FREE_FOR_ONE)
        return self._of_holder[holder] < most

    def held(self, address: str, stranger: Stranger, before: str | None, holder: str, now: float) -> None:
        """Count a connection as a holder's; `before` is the one that it had, None for a stranger's."""
        self.closed(address, stranger, before)
        self._of_holder[holder] += 1
        if address not in self._known and len(self._known) >= MOST_ADDRESSES:
            del self._known[next(iter(self._known))]
        self._known[address] = now

    def closed(self, address: str, stranger: Stranger, holder: str | None) -> None:
        """Count a connection no longer; without effect for one that has lost its place."""
        if holder is None:
            self._drop(address, stranger)
            return
        self._of_holder[holder] -= 1
        if not self._of_holder[holder]:
            del self._of_holder[holder]

    def _drop(self, address: str, stranger: Stranger) -> None:
        own = self._strangers.get(address, {})
        own.pop(stranger, None)
        if not own:
            self._strangers.pop(address, None)

    def note_wrong(self, address: str, now: float) -> None:
        """Count a wrong credential."""
        since, count = self._wrong.get(address, (now, 0))
        if now - since >= WRONG_S:
            since, count = now, 0
        if address not in self._wrong and len(self._wrong) >= MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[address] = since, count + 1
