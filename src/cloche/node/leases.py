"""Which leases a node holds, and which ids it refuses. Pure: the caller gives the time, and ends what belongs to them.

A lease exists from its first valid call. It ends at its end, when it is released, or when the coordinator has been
silent for too long. The id of one that ended is refused as long as a credential for it may be valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

MOST_LEASES = 1_024
REMEMBER_S = 3_600.0  # a credential that the node has not seen may end so much later
MARGIN_S = 60.0  # after the end that the coordinator names
RELEASED, ENDED, SILENT = "it was released", "its time is over", "its coordinator is silent"


class LeaseTable:
    """Hold the ends of leases, in seconds since 1970, by their id."""

    def __init__(self, *, most: int = MOST_LEASES):
        self._most = most
        self._until: dict[str, float] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # until when, and why
        self._forgotten: list[tuple[float, str]] = []  # a heap of these times

    def __len__(self) -> int:
        return len(self._until)

    @property
    def until(self) -> Mapping[str, float]:
        """Return the ends of the leases that are held."""
        return self._until

    @property
    def is_full(self) -> bool:
        """Tell whether no further lease is taken."""
        return len(self._until) >= self._most

    def has(self, lease: str) -> bool:
        """Tell whether a lease is held."""
        return lease in self._until

    def why_over(self, lease: str) -> str | None:
        """Return why a lease has ended, None for one that has not."""
        entry = self._refused.get(lease)
        return None if entry is None else entry[1]

    def note(self, lease: str, until: float) -> None:
        """Note the end that a valid credential gives a lease: the latest counts."""
        self._until[lease] = max(until, self._until.get(lease, 0.0))

    def end(self, lease: str, why: str, now: float, *, until: float = 0.0) -> bool:
        """Refuse a lease from now on; return whether it was held.

        `until` is when the last credential for it is over; 0 where that is not known.
        """
        held_until = self._until.pop(lease, None)
        _, first_why = self._refused.get(lease, (0.0, why))
        latest = max(held_until or now, now, until)
        self._refused[lease] = latest + (MARGIN_S if until else REMEMBER_S), first_why
        heappush(self._forgotten, (self._refused[lease][0], lease))
        return held_until is not None

    def over(self, now: float) -> list[str]:
        """Return the held leases whose time is over, and forget refused ids whose credentials must be over, too."""
        while self._forgotten and self._forgotten[0][0] <= now:
            at, lease = heappop(self._forgotten)
            if self._refused.get(lease, (0.0, ""))[0] == at:
                del self._refused[lease]
        return [lease for lease, until in self._until.items() if until <= now]
