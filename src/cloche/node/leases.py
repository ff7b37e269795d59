"""Which leases a node holds, and which ids it refuses. Pure: the caller gives the time, and ends what belongs to them.

A lease exists from its first valid call. It ends at its end, when it is released, or when the coordinator has been
silent for too long. The id of one that ended is refused as long as a credential for it may be valid.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_LEASES = 1_024
REMEMBER_S = 3_600.0  # a credential that the node has not seen may end so much later
RELEASED, ENDED, SILENT = "it was released", "its time is over", "its coordinator is silent"


class LeaseTable:
    """Hold the ends of leases, in seconds since 1970, by their id."""

    def __init__(self, *, most: int = MOST_LEASES):
        self._most = most
        self._until: dict[str, float] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # until when, and why

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

    def end(self, lease: str, why: str, now: float) -> bool:
        """Refuse a lease from now on; return whether it was held."""
        until = self._until.pop(lease, None)
        _, first_why = self._refused.get(lease, (0.0, why))
        self._refused[lease] = max(until or now, now) + REMEMBER_S, first_why
        return until is not None

    def over(self, now: float) -> list[str]:
        """Return the held leases whose time is over, and forget refused ids whose credentials must be over, too."""
        for lease in [lease for lease, (until, _) in self._refused.items() if until <= now]:
            del self._refused[lease]
        return [lease for lease, until in self._until.items() if until <= now]
