"""Who may connect: bounds on the connections of strangers, which have shown no valid credential yet. Pure.

Anyone who reaches the port can connect. Strangers have a part of all connections, an address a part of those, and an
address with many wrong credentials none for a while. A connection with a valid call counts no longer as a stranger's.
"""

from __future__ import annotations

from collections import Counter

MOST_CONNECTIONS, MOST_STRANGERS, MOST_OF_ADDRESS = 512, 64, 32
MOST_WRONG, WRONG_S = 20, 10.0  # wrong credentials of an address, and the time in which they count
MOST_ADDRESSES = 1_024


class Admission:
    """Count connections, and the wrong credentials of addresses."""

    def __init__(self, *, most: int = MOST_CONNECTIONS, most_strangers: int = MOST_STRANGERS):
        self._most, self._most_strangers = most, min(most_strangers, most)
        self.open = 0
        self._strangers: Counter[str] = Counter()
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

    def known(self, address: str) -> None:
        """Count a stranger's connection no longer as one."""
        self._strangers[address] -= 1
        if not self._strangers[address]:
            del self._strangers[address]

    def closed(self, address: str, *, was_known: bool) -> None:
        """Count a connection no longer."""
        self.open -= 1
        if not was_known:
            self.known(address)

    def note_wrong(self, address: str, now: float) -> None:
        """Count a wrong credential."""
        since, count = self._wrong.get(address, (now, 0))
        if now - since >= WRONG_S:
            since, count = now, 0
        if address not in self._wrong and len(self._wrong) >= MOST_ADDRESSES:
            self._wrong.clear()
        self._wrong[address] = since, count + 1
