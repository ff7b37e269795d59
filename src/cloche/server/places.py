"""Places for what runs, given in turn to those who wait: a caller's many runs let another one's few pass."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """Hold so many places. Of callers who wait, each gets one before any gets a second."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # whose turn it is comes first

    async def take(self, whose: str | None) -> None:
        """Wait for a place; `release` it then."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(turn)
        self._give()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it was given, and nobody takes it
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self._free += 1
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            whose = next(iter(self._waiting))
            turns = self._waiting.pop(whose)
            turn = turns.popleft()
            if turns:
                self._waiting[whose] = turns
            if not turn.done():  # who has gone meanwhile needs none
                self._free -= 1
                turn.set_result(None)
