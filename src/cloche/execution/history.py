"""What a session has run: the last cells, bounded in number and in characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from cloche.core.record import dataclass
from cloche.core.result import Result

MOST_ENTRIES = 1000
MOST_CHARS = 4_000_000  # of code: who sends cells may be somebody else than whose memory this is


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """Remember one run of a session: its code, and what came of it in one line."""

    code: str
    status: str
    summary: str
    duration: float


class History:
    """Hold entries, the oldest first, and forget those beyond the bounds."""

    def __init__(self, entries: Iterable[HistoryEntry] = ()):
        self._entries = deque(entries)
        self._chars = sum(len(entry.code) for entry in self._entries)

    def __iter__(self) -> Iterator[HistoryEntry]:
        return iter(self._entries)

    def remember(self, code: str, result: Result) -> None:
        """Add a cell that has been run."""
        entry = HistoryEntry(
            code=code, status=str(result.status), summary=result.summary(max_chars=200), duration=result.duration
        )
        self._entries.append(entry)
        self._chars += len(code)
        while len(self._entries) > MOST_ENTRIES or (self._chars > MOST_CHARS and len(self._entries) > 1):
            self._chars -= len(self._entries.popleft().code)
