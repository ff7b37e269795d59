"""A shared bound: all callers together hold at most `most`, and each of them at most three quarters of it.

So one caller cannot exclude the others. There is no individual limit for bytes without an owner, such as a body before
authentication, and for the operator's own browser.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Count the shares that callers hold of `most`."""

    def __init__(self, most: int):
        self.most, self.most_of_one = most, most - most // 4
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
