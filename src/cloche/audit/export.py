"""Events as text for other programs: JSON Lines (as in the log), JSON, CSV. A generator, so a log may have any
length.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence

from .query import LogEvent

FORMATS = ("jsonl", "json", "csv")
# The columns of CSV; other fields of an event are in a last column, as JSON.
COLUMNS = (
    "seq", "time", "kind", "status", "exit_code", "duration_s", "what", "language", "backend", "level", "code_sha256",
    "tool", "risk", "by", "approved_by", "reason", "run", "call", "door", "uid", "pid", "prev", "hash",
)  # fmt: skip


def texts_of(events: Iterable[LogEvent], form: str) -> Iterator[str]:
    """Yield the text of an export in pieces; `form` is one of FORMATS."""
    yield from _csv(events) if form == "csv" else _json(events, is_list=form == "json")


def _csv(events: Iterable[LogEvent]) -> Iterator[str]:
    yield _csv_line((*COLUMNS, "more"))
    for event in events:
        more = {name: value for name, value in event.items() if name not in COLUMNS and name != "v"}
        yield _csv_line([*(event.get(name) for name in COLUMNS), json.dumps(more) if more else None])


def _json(events: Iterable[LogEvent], *, is_list: bool) -> Iterator[str]:
    before, between, after = ("[\n", ",\n", "\n]\n") if is_list else ("", "\n", "\n")
    is_first = True
    for event in events:
        yield (before if is_first else between) + json.dumps(event, separators=(",", ":"))
        is_first = False
    yield after if not is_first else "[]\n" if is_list else ""


def _csv_line(values: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(map(_cell, values))
    return line.getvalue().encode("utf-8", "backslashreplace").decode()  # lone surrogates


def _cell(value: object) -> object:
    # Spreadsheets evaluate a cell that begins with one of these as a formula (OWASP: CSV injection).
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
