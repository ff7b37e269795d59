"""Query the log: filters for events, and pages of matching events, newest first.

A page is read from the end of the log, in growing pieces until the page is full, up to a limit. Readers of all events
(`cloche audit show`, an export) use `Reading` and `Filters.wanted`.
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
FIRST_READ, READ_MORE, MOST_READ = 1 << 20, 4, 256 << 20  # bytes from the end of the log; a factor; bytes
_CHAIN = frozenset({"v", "seq", "time", "prev", "hash"})  # members that a text search skips
_AGO = re.compile(r"([0-9]{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
# The status of events other than the end of a run.
_STATUS_OF_KIND = {"approval": "approved", "denial": "denied", "start": "unfinished"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions for events; without any, all events match. `text` is searched for in all values, case-
    insensitively.
    """

    since: str | None = None
    until: str | None = None
    kinds: Sequence[str] = ()
    statuses: Sequence[str] = ()
    run: str | None = None
    text: str | None = None

    def wanted(self, *, prefix: str = "") -> Callable[[LogEvent], bool]:
        """Return a predicate for events. Raises InvalidRequest for an invalid time.

        `prefix` precedes names in errors: `--` on the command line.
        """
        since = instant(self.since, name=f"{prefix}since") if self.since else ""
        until = instant(self.until, name=f"{prefix}until") if self.until else "~"  # sorts after every digit
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
    """Return the status of an event; events other than the end of a run have one by their kind."""
    return str(event.get("status") or _STATUS_OF_KIND.get(str(event["kind"]), ""))


def check_values(folder: str, filters: Filters, *, prefix: str = "") -> None:
    """Refuse a kind or status that neither Cloche nor any event of the log uses. Raises InvalidRequest."""
    from cloche.core.result import Status

    from .log import KINDS
    from .verify import Reading

    kinds: dict[str, None] = dict.fromkeys(KINDS)
    statuses: dict[str, None] = dict.fromkeys([*Status, "failed", "cancelled", *_STATUS_OF_KIND.values()])
    odd_kinds = [kind for kind in filters.kinds if kind not in kinds]
    odd_statuses = [status for status in filters.statuses if status not in statuses]
    if not odd_kinds and not odd_statuses:
        return
    for line in Reading(folder):  # the user's own code may have added other kinds
        event = line.fields()
        kinds[str(event["kind"])] = None
        statuses[status_of(event)] = None
        if len(kinds) + len(statuses) > MOST_VALUES:
            return
    for name, odd_values, known_values in (("kind", odd_kinds, kinds), ("status", odd_statuses, statuses)):
        for value in odd_values:
            if value not in known_values:
                listed = ", ".join(known_value for known_value in known_values if known_value)
                raise InvalidRequest(f"{prefix}{name} {value}: there is no such event; use one of {listed}")


def instant(text: str, *, name: str) -> str:
    """Return a time in the format of events, from a date (2026-01-31, with or without a time) or an age (2h, 7d)."""
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
    """Events, newest first; `before` is the number for the next page, None on the last one.

    With `is_partial`, the log is longer than one query reads, and older events were not examined.
    """

    events: Sequence[LogEvent]
    before: int | None
    is_partial: bool


def newest_events(
    folder: str, is_wanted: Callable[[LogEvent], bool], *, limit: int, before: int | None = None
) -> AuditPage:
    """Return the last matching events with a number below `before`. Blocks. Raises AuditFailed."""
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
    """Return the last matching events in the last bytes of a log, and whether these were the whole log."""
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
