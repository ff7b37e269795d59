"""The lines of sandboxes' logs, in memory: the newest of each sandbox, as long as it lives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from cloche.core.record import dataclass, field

MOST_LINES, MOST_CHARS = 1_000, 4_096  # of one sandbox, and of one line
LEVELS = ("debug", "info", "warn", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Hold one line, and when it was written (milliseconds since 1970)."""

    milliseconds: int
    message: str
    level: str = "info"
    fields: Mapping[str, str] = field(default_factory=dict)


class LogLines:
    """Hold the lines of all sandboxes, by E2B's id."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[LogLine]] = {}

    def add(self, sandbox_id: str, message: str, *, level: str = "info", **fields: str) -> None:
        """Add a line."""
        lines = self._lines.setdefault(sandbox_id, deque(maxlen=MOST_LINES))
        milliseconds = time.time_ns() // 1_000_000
        lines.append(LogLine(milliseconds=milliseconds, message=message[:MOST_CHARS], level=level, fields=fields))

    def of(self, sandbox_id: str) -> list[LogLine]:
        """Return the lines of a sandbox, the oldest first."""
        return list(self._lines.get(sandbox_id, ()))

    def forget(self, sandbox_id: str) -> None:
        """Drop the lines of a sandbox that has ended."""
        self._lines.pop(sandbox_id, None)
