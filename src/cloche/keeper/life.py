"""The life of a sandbox: how much time is left, what happens when it is over, and pauses, in which it stands still.

Pure: each call is given the time, and nothing happens here.
"""

from __future__ import annotations

ENDS, PAUSES, KEEPS_FILES = AT_END = ("end", "pause", "pause-files")


class Life:
    """Count the time of one sandbox. `lifetime_s` None: it has no end.

    `is_paused` is what was asked for last; `has_memory` tells whether the processes of before the pause go on after it.
    """

    def __init__(self, now: float, lifetime_s: float | None, at_end: str = ENDS):
        self.began_at, self.lifetime_s, self.at_end = now, lifetime_s, at_end
        self.is_paused, self.has_memory = False, True
        self.paused_s, self.paused_at = 0.0, 0.0  # before the last pause began, and when that was
        self._left_s, self._since = lifetime_s, now  # how much time was left, at a time; it does not fall in a pause

    def left_s(self, now: float) -> float | None:
        """Return the seconds that are left."""
        if self._left_s is None or self.is_paused:
            return self._left_s
        return max(0.0, self._left_s - (now - self._since))

    def all_paused_s(self, now: float) -> float:
        """Return the seconds of all pauses."""
        return self.paused_s + (now - self.paused_at if self.is_paused else 0.0)

    @property
    def ends_at(self) -> float | None:
        """Return when its time is over; None in a pause."""
        return None if self._left_s is None or self.is_paused else self._since + self._left_s

    def pause(self, now: float, *, has_memory: bool = True) -> None:
        """Stop the clock."""
        self.has_memory = has_memory and (self.has_memory or not self.is_paused)
        if not self.is_paused:
            self._left_s = self.left_s(now)
            self.is_paused, self.paused_at = True, now

    def resume(self, now: float) -> None:
        """Start the clock. A sandbox that was paused because its time was over gets the whole time again."""
        if self.is_paused:
            self.paused_s += now - self.paused_at
            self.is_paused, self.has_memory, self._since = False, True, now
            self._left_s = self._left_s or self.lifetime_s

    def renew(self, now: float, left_s: float, *, only_extends: bool = False) -> None:
        """Set the seconds that are left, or with `only_extends` raise them to so many."""
        left_before = self.left_s(now)
        if only_extends and (left_before is None or left_before >= left_s):
            return
        self._left_s, self._since, self.lifetime_s = left_s, now, left_s
