"""The history of a session: its last cells, bounded in number and in characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from cloche.core.record import dataclass
from cloche.core.result import Result

MOST_ENTRIES = 1000
MOST_CHARS = 4_000_000  # of code: a service holds the history of its clients' cells in its own memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One cell of a session: its code, and its outcome in one line."""

    code: str
    status: str
    summary: str
    duration: float


class History:
    """Entries, the oldest first. Entries beyond the limits are dropped."""

    def __init__(self, entries: Iterable[HistoryEntry] = ()):
        self._entries = deque(entries)
        self._chars = sum(len(entry.code) for entry in self._entries)

    def __iter__(self) -> Iterator[HistoryEntry]:
        return iter(self._entries)

    def remember(self, code: str, result: Result) -> None:
        """Add a cell that has run."""
        entry = HistoryEntry(
            code=code, status=str(result.status), summary=result.summary(max_chars=200), duration=result.duration
        )
        self._entries.append(entry)
        self._chars += len(code)
        while len(self._entries) > MOST_ENTRIES or (self._chars > MOST_CHARS and len(self._entries) > 1):
            self._chars -= len(self._entries.popleft().code)
