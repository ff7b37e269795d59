"""Ask the log: which events are wanted, and a page of them, the newest first.

A page is read from the end of the log, more and more of it until the page is full, up to a bound. What looks at all
events (`cloche audit show`, an export) reads them in order with `Reading` and `Filters.wanted`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

LogEvent = Mapping[str, Any]
MOST_VALUES = 1_000
FIRST_READ, READ_MORE, MOST_READ = 1 << 20, 4, 256 << 20  # bytes of the log, from its end
_CHAIN = frozenset({"v", "seq", "time", "prev", "hash"})  # where no text is looked for
_AGO = re.compile(r"([0-9]{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
# What `status` says of events that are no run's end, and of runs that have none.
_STATUS_OF_KIND = {"approval": "approved", "denial": "denied", "start": "unfinished"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Say which events are wanted; nothing said is all. `text` is looked for in all values, in any case."""

    since: str | None = None
    until: str | None = None
    kinds: Sequence[str] = ()
    statuses: Sequence[str] = ()
    run: str | None = None
    text: str | None = None

    def wanted(self, *, prefix: str = "") -> Callable[[LogEvent], bool]:
        """Return what tells whether an event is wanted. Raises InvalidRequest for a time that is none.

        `prefix` stands before names in errors: `--` on the command line.
        """
        since = instant(self.since, name=f"{prefix}since") if self.since else ""
        until = instant(self.until, name=f"{prefix}until") if self.until else "~"  # after every digit
        text = self.text.casefold() if self.text else ""

        def is_wanted(event: LogEvent) -> bool:
            is_kind = not self.kinds or event["kind"] in self.kinds
            is_status = not self.statuses or status_of(event) in self.statuses
            is_run = self.run is None or event.get("run") == self.run
            is_then = since <= str(event["time"]) < until
            return is_kind and is_status and is_run and is_then and (not text or _has(event, text))

        return is_wanted


def _has(event: LogEvent, text: str) -> bool:
    return any(text in str(value).casefold() for name, value in event.items() if name not in _CHAIN)


def status_of(event: LogEvent) -> str:
    """Return the status of an event, also of one that is no run's end."""
    return str(event.get("status") or _STATUS_OF_KIND.get(str(event["kind"]), ""))


def check_values(folder: str, filters: Filters, *, prefix: str = "") -> None:
    """Refuse a kind or a status that neither Cloche nor any event of the log knows. Raises InvalidRequest."""
    from cloche.core.result import Status

    from .log import KINDS
    from .verify import Reading

    kinds: dict[str, None] = dict.fromkeys(KINDS)
    statuses: dict[str, None] = dict.fromkeys([*Status, "failed", "cancelled", *_STATUS_OF_KIND.values()])
    odd_kinds = [kind for kind in filters.kinds if kind not in kinds]
    odd_statuses = [status for status in filters.statuses if status not in statuses]
    if not odd_kinds and not odd_statuses:
        return
    for line in Reading(folder):  # events that somebody's own code has added
        event = line.fields()
        kinds[str(event["kind"])] = None
        statuses[status_of(event)] = None
        if len(kinds) + len(statuses) > MOST_VALUES:
            return
    for name, odd_values, known_values in (("kind", odd_kinds, kinds), ("status", odd_statuses, statuses)):
        for value in odd_values:
            if value not in known_values:
                listed = ", ".join(known_value for known_value in known_values if known_value)
                raise InvalidRequest(f"{prefix}{name} {value}: no event is called that; use one of {listed}")


def instant(text: str, *, name: str) -> str:
    """Return a moment as events give it: from one (2026-01-31, with a time or without), or how long ago (2h, 7d)."""
    from datetime import UTC, datetime, timedelta

    ago = _AGO.fullmatch(text.strip().lower())
    try:
        if ago is not None:
            moment = datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            moment = datetime.fromisoformat(text.strip())
            moment = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{name} {text}: give a date (2026-01-31, 2026-01-31T12:00), or a time ago (2h, 7d)"
        ) from None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Hold events, the newest first; `before` is the number to go on with, None where there are no more.

    With `is_partial` the log is longer than what one page reads, and older events were not looked at.
    """

    events: Sequence[LogEvent]
    before: int | None
    is_partial: bool


def newest_events(
    folder: str, is_wanted: Callable[[LogEvent], bool], *, limit: int, before: int | None = None
) -> AuditPage:
    """Return the last events that are wanted, of those with a number below `before`. Blocks. Raises AuditFailed."""
    size = FIRST_READ
    while True:
        matching, has_all = _from_end(folder, is_wanted, limit + 1, before, size)
        if has_all or len(matching) > limit or size >= MOST_READ:
            break
        size = min(size * READ_MORE, MOST_READ)
    more = len(matching) > limit
    events = list(matching)[::-1][:limit]
    return AuditPage(events=events, before=int(events[-1]["seq"]) if more else None, is_partial=not (more or has_all))


def _from_end(
    folder: str, is_wanted: Callable[[LogEvent], bool], max_events: int, before: int | None, size: int
) -> tuple[deque[LogEvent], bool]:
    """Return the last events in the last bytes of a log, and whether that was all of it."""
    from .verify import Reading

    reading = Reading(folder, most_bytes=size)
    matching: deque[LogEvent] = deque(maxlen=max_events)
    with closing(reading.lines()) as lines:
        for line in lines:
            if before is not None and line.link.seq >= before:
                break
            event = line.fields()
            if is_wanted(event):
                matching.append(event)
    return matching, not reading.is_part
