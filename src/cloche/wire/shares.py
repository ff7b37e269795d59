"""A shared bound: all callers together hold at most `most`, and each of them at most a part, three quarters by default.

So one caller cannot exclude the others. There is no individual limit for bytes without an owner, such as a body before
authentication, and for the operator's own browser.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Shares:
    """Count the shares that callers hold of `most`."""

    def __init__(self, most: int, *, most_of_one: int | None = None):
        self.most, self.most_of_one = most, most - most // 4 if most_of_one is None else most_of_one
        self.held = 0
        self._of: Counter[str] = Counter()

    def has_room(self, whose: str | None, count: int = 1) -> bool:
        """Tell whether a caller may hold `count` more."""
        is_within = whose is None or self._of[whose] + count <= self.most_of_one
        return is_within and self.held + count <= self.most

    def take(self, whose: str | None, count: int = 1) -> None:
        """Add to a caller's share, even beyond the bound."""
        self.held += count
        if whose is not None:
            self._of[whose] += count

    def give_back(self, whose: str | None, count: int = 1) -> None:
        """Subtract from a caller's share."""
        self.held -= count
        if whose is not None:
            self._of[whose] -= count
            if not self._of[whose]:
                del self._of[whose]


class Budget:
    """An amount that holders take shares of, first in, first out. A share larger than all of it is taken alone."""

    def __init__(self, most: int):
        self._most, self.held = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait for a share. `give_back` returns it."""
        if not self._waiting and self._has_room(count):
            self.held += count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the share was given to a cancelled waiter
                self.held -= count
            self._give()
            raise

    def give_back(self, count: int) -> None:
        """Give a share back."""
        self.held -= count
        self._give()

    def _has_room(self, count: int) -> bool:
        return not self.held or self.held + count <= self._most

    def _give(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.held += count
                turn.set_result(None)
