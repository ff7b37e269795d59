"""Who may connect: bounds on the connections of strangers, which have shown no valid credential yet. Pure.

Anyone who reaches the port can connect. Strangers have a part of all connections, an address a part of those, and an
address with many wrong credentials none for a while. A connection with a valid call counts no longer as a stranger's,
but as its holder's: a lease or the coordinator, each of which has few.
"""

from __future__ import annotations

from collections import Counter

MOST_CONNECTIONS, MOST_STRANGERS, MOST_OF_ADDRESS = 512, 64, 32
MOST_OF_HOLDER = 16  # twice what a client opens
MOST_WRONG, WRONG_S = 20, 10.0  # wrong credentials of an address, and the time in which they count
MOST_ADDRESSES = 1_024


class Admission:
    """Count connections, and the wrong credentials of addresses."""

    def __init__(self, *, most: int = MOST_CONNECTIONS, most_strangers: int = MOST_STRANGERS):
        self._most, self._most_strangers = most, min(most_strangers, most)
        self.open = 0
        self._strangers: Counter[str] = Counter()
        self._of_holder: Counter[str] = Counter()
        self._wrong: dict[str, tuple[float, int]] = {}  # since when, and how many

    @property
    def strangers(self) -> int:
        """Return the number of connections without a valid call."""
        return self._strangers.total()

    def admits(self, address: str, now: float) -> bool:
        """Tell whether another connection of an address is accepted."""
        has_room = self.open < self._most and self.strangers < self._most_strangers
        return has_room and self._strangers[address] < MOST_OF_ADDRESS and not self.is_suspect(address, now)

    def is_suspect(self, address: str, now: float) -> bool:
        """Tell whether an address has shown too many wrong credentials."""
        since, count = self._wrong.get(address, (now, 0))
        return count >= MOST_WRONG and now - since < WRONG_S

    def opened(self, address: str) -> None:
        """Count a new connection, a stranger's."""
        self.open += 1
        self._strangers[address] += 1

    def has_room(self, holder: str) -> bool:
        """Tell whether a holder may have another connection."""
        return self._of_holder[holder] < MOST_OF_HOLDER

    def held(self, address: str, before: str | None, holder: str) -> None:
        """Count a connection as a holder's; `before` is the one that it had, None for a stranger's."""
        self._count_less(address, before)
        self._of_holder[holder] += 1

    def closed(self, address: str, holder: str | None) -> None:
        """Count a connection no longer."""
        self.open -= 1
        self._count_less(address, holder)

    def _count_less(self, address: str, holder: str | None) -> None:
        counts, name = (self._strangers, address) if holder is None else (self._of_holder, holder)
        counts[name] -= 1
        if not counts[name]:
            del counts[name]

    def note_wrong(self, address: str, now: float) -> None:
        """Count a wrong credential."""
        since, count = self._wrong.get(address, (now, 0))
        if now - since >= WRONG_S:
            since, count = now, 0
        if address not in self._wrong and len(self._wrong) >= MOST_ADDRESSES:
            self._wrong.clear()
        self._wrong[address] = since, count + 1
