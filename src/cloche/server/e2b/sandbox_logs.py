"""Logs of sandboxes: what was done with them, since this worker began. The newest lines are kept, up to a bound."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.records.ids import moment

from .calls import Call, Row, e2b_id
from .errors import E2BError
from .log_lines import LEVELS, MOST_LINES, LogLine


def chosen(lines: Iterable[LogLine], given: Mapping[str, str]) -> list[LogLine]:
    """Return the lines that the parameters of version 2 ask for. Raises E2BError."""
    limit, cursor = _number(given, "limit", MOST_LINES), _number(given, "cursor", None)
    direction, level = given.get("direction", "forward"), given.get("level", LEVELS[0])
    if direction not in ("forward", "backward"):
        raise E2BError(400, "direction: give forward or backward")
    if level not in LEVELS:
        raise E2BError(400, f"level: give one of {', '.join(LEVELS)}")
    is_forward, search = direction == "forward", given.get("search", "")
    found = [
        line for line in lines
        if LEVELS.index(line.level) >= LEVELS.index(level) and search in line.message
        and (cursor is None or (line.milliseconds >= cursor if is_forward else line.milliseconds < cursor))
    ]  # fmt: skip
    return (found if is_forward else found[::-1])[: min(limit or 0, MOST_LINES)]


def _number(given: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    text = given.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise E2BError(400, f"{name}: give a whole number")
    return int(text)


def _entry(line: LogLine) -> dict[str, Any]:
    return {
        "timestamp": moment(line.milliseconds / 1000), "message": line.message, "level": line.level,
        "fields": dict(line.fields),
    }  # fmt: skip


def _as_line(entry: Mapping[str, Any]) -> str:
    """Return an entry as one line of JSON, which E2B's command line reads."""
    return json.dumps({"level": entry["level"], "logger": "cloche", "message": entry["message"], **entry["fields"]})


async def logs(call: Call) -> Response:
    """Return the lines of a sandbox, as version 1 does."""
    _, facts = await call.sandbox("read", "read")
    given = call.request.query_params
    start, limit = _number(given, "start", 0) or 0, _number(given, "limit", MOST_LINES)
    lines = [line for line in call.e2b.logs.of(e2b_id(facts.id)) if line.milliseconds >= start]
    entries = [_entry(line) for line in lines[: min(limit or 0, MOST_LINES)]]
    shown = [{"timestamp": entry["timestamp"], "line": _as_line(entry)} for entry in entries]
    return JSONResponse({"logs": shown, "logEntries": entries})


async def logs_v2(call: Call) -> Response:
    """Return the lines of a sandbox from a cursor on, in milliseconds since 1970."""
    _, facts = await call.sandbox("read", "read")
    lines = chosen(call.e2b.logs.of(e2b_id(facts.id)), call.request.query_params)
    return JSONResponse({"logs": [_entry(line) for line in lines]})


ROWS = (
    Row(method="GET", path="/sandboxes/{sandbox_id}/logs", handler=logs),
    Row(method="GET", path="/v2/sandboxes/{sandbox_id}/logs", handler=logs_v2),
)
