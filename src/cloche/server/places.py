"""Places for what runs, given in turn to those who wait: a caller's many runs let another one's few pass."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Places:
    """Hold so many places. Of callers who wait, each gets one before any gets a second.

    Of several places one is never for who has all the others: what runs for long keeps nobody else waiting.
    """

    def __init__(self, count: int):
        self._free, self._most_of_one = count, max(1, count - 1)
        self._has: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # whose turn it is comes first

    async def take(self, whose: str | None) -> None:
        """Wait for a place; `release` it then."""
        if self.take_free(whose):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(turn)
        self._give()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it was given, and nobody takes it
                self.release(whose)
            raise

    def take_free(self, whose: str | None) -> bool:
        """Take a place where one is free and nobody waits; return whether."""
        is_free = self._free > 0 and not self._waiting and self._may_have(whose)
        if is_free:
            self._note(whose)
        return is_free

    def release(self, whose: str | None) -> None:
        """Give a place back."""
        self._free += 1
        self._has[whose] -= 1
        if not self._has[whose]:
            del self._has[whose]
        self._give()

    def _may_have(self, whose: str | None) -> bool:
        return self._has[whose] < self._most_of_one

    def _note(self, whose: str | None) -> None:
        self._free -= 1
        self._has[whose] += 1

    def _give(self) -> None:
        while self._free:
            whose, turns = next(
                ((one, turns) for one, turns in self._waiting.items() if self._may_have(one)), (None, None)
            )
            if turns is None:
                return
            del self._waiting[whose]
            turn = turns.popleft()
            if turns:
                self._waiting[whose] = turns
            if not turn.done():  # who has gone meanwhile needs none
                self._note(whose)
                turn.set_result(None)
