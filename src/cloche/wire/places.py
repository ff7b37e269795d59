"""A fair semaphore: a caller with many runs does not keep those of other callers waiting."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Places:
    """A number of places. Waiting callers get them in turn (round-robin).

    One caller never gets the last place, if there are several, nor more than `most_of_one`: its long runs cannot block
    all others.
    """

    def __init__(self, count: int, *, most_of_one: int | None = None):
        self._free = count
        self._most_of_one = max(1, count - 1) if most_of_one is None else most_of_one
        self._has: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # in the order of turns

    async def take(self, whose: str | None) -> None:
        """Wait for a place. `release` gives it back."""
        if self.take_free(whose):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(turn)
        self._give()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the place was given to a cancelled waiter
                self.release(whose)
            raise

    def take_free(self, whose: str | None) -> bool:
        """Take a place if one is free and no caller waits; return whether it was taken."""
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
                ((caller, turns) for caller, turns in self._waiting.items() if self._may_have(caller)), (None, None)
            )
            if turns is None:
                return
            del self._waiting[whose]
            turn = turns.popleft()
            if turns:
                self._waiting[whose] = turns
            if not turn.done():  # a cancelled waiter needs no place
                self._note(whose)
                turn.set_result(None)
