"""How much of something callers hold: all together so much, and each of them three quarters of that.

So no caller's greed keeps the others out. What is nobody's, such as a body before it is known whose it is, and the
operator's own browser have no share of their own.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Count what callers hold of `most`."""

    def __init__(self, most: int):
        self.most, self.most_of_one = most, most - most // 4
        self.held = 0
        self._of: Counter[str] = Counter()

    def has_room(self, whose: str | None, count: int = 1) -> bool:
        """Tell whether a caller may hold so much more."""
        is_within = whose is None or self._of[whose] + count <= self.most_of_one
        return is_within and self.held + count <= self.most

    def take(self, whose: str | None, count: int = 1) -> None:
        """Note that a caller holds so much more, whether there is room or not."""
        self.held += count
        if whose is not None:
            self._of[whose] += count

    def give_back(self, whose: str | None, count: int = 1) -> None:
        """Note that a caller holds so much less."""
        self.held -= count
        if whose is not None:
            self._of[whose] -= count
            if not self._of[whose]:
                del self._of[whose]
