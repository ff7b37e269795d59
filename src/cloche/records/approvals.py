"""Approvals in the database of records: created through the service, listed, decided, followed by version.

It is the queue of `cloche.agent.queue`, whose rules for decisions apply. That module needs no extra.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, func, insert, select, text
from sqlalchemy.orm import Session

from cloche.agent.approval import ApprovalRequest, Decision
from cloche.agent.queue import DECIDE, FORGET, QueueEntry, as_text, entry_of, forgetting
from cloche.agent.queue_file import FIELDS
from cloche.agent.terminal import describe_rules
from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.record import dataclass

from .lists import FEW_ITEMS, MOST_ITEMS
from .tables import APPROVALS

STATUSES = ("waiting", "approved", "denied", "expired")
MOST_CALL_CHARS = 200  # of a call, in a list
MOST_LOOKED_AT = 100  # requests, for the last one of the same tool
_YES = '{"is_approved": true%'  # the beginning of an approval as `agent.queue` writes it
_OF = APPROVALS.c
_COLUMNS = [_OF[name] for name in FIELDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """Hold a client's request. `text` is its stored form."""

    project: str
    asked_by: str
    text: str
    patience_s: float


def ask(session: Session, new: NewRequest) -> QueueEntry:
    """Add a request, and delete those that ended long ago."""
    now = time.time()
    session.execute(text(FORGET), forgetting(now))
    row = insert(APPROVALS).values(
        project=new.project, asked_by=new.asked_by, asked_at=now, expires_at=now + new.patience_s, request=new.text,
        version=select(func.coalesce(func.max(_OF.version), 0) + 1).scalar_subquery(),
    )  # fmt: skip
    number = cast("Any", session.execute(row)).inserted_primary_key[0]
    return find(session, number, project=new.project)


def count_waiting(session: Session, *, asked_by: str) -> int:
    """Return the number of waiting requests of one caller."""
    query = select(func.count()).select_from(APPROVALS).where(_OF.asked_by == asked_by, _condition("waiting"))
    return session.scalar(query) or 0


def count_open(session: Session, *, project: str) -> int:
    """Return the number of waiting requests of a project."""
    query = select(func.count()).select_from(APPROVALS).where(_OF.project == project, _condition("waiting"))
    return session.scalar(query) or 0


def last_change(session: Session, *, project: str) -> str:
    """Return a text that changes with every new, decided or expired request of a project."""
    expired = select(func.count()).select_from(APPROVALS).where(_OF.project == project, _condition("expired"))
    return f"{newest_version(session)}.{session.scalar(expired) or 0}"


def last_of_tool(session: Session, tool: str, *, project: str) -> ApprovalRequest | None:
    """Return the last request for a tool among the latest `MOST_LOOKED_AT`."""
    query = select(*_COLUMNS).where(_OF.project == project).order_by(_OF.id.desc()).limit(MOST_LOOKED_AT)
    entries = (entry_of(tuple(row)) for row in session.execute(query))
    return next((entry.request for entry in entries if entry is not None and entry.request.tool == tool), None)


def find(session: Session, number: int, *, project: str) -> QueueEntry:
    """Return one request. Raises NotFound, also for another project's."""
    query = select(*_COLUMNS).where(_OF.id == number, _OF.project == project)
    row = session.execute(query).first()
    entry = None if row is None else entry_of(tuple(row))
    if entry is None:
        raise NotFound(f"there is no approval {number}; GET /api/approvals lists them")
    return entry


def decide(session: Session, entry: QueueEntry, decision: Decision, *, is_confirming: bool, address: str) -> None:
    """Store a decision about an entry that was read in this write transaction. Raises NotWaiting."""
    session.execute(text(DECIDE), entry.decided(decision, is_confirming=is_confirming, address=address))


def list_approvals(
    session: Session, *, project: str, status: str | None = None, limit: int = FEW_ITEMS, cursor: str | None = None
) -> dict[str, Any]:
    """Return one page in the format of all lists, the newest first. Raises InvalidRequest."""
    if not 1 <= limit <= MOST_ITEMS:
        raise InvalidRequest(f"limit: {limit} is not between 1 and {MOST_ITEMS}")
    query = select(*_COLUMNS).where(_OF.project == project).order_by(_OF.id.desc()).limit(limit + 1)
    if status is not None:
        query = query.where(_condition(status))
    if cursor is not None:
        query = query.where(_OF.id < _number(cursor))
    rows = [tuple(row) for row in session.execute(query)]
    entries = [entry for row in rows[:limit] if (entry := entry_of(row)) is not None]
    return {
        "items": [as_wire(entry) for entry in entries],
        "nextCursor": str(rows[limit - 1][0]) if rows[limit:] else None,
    }


def _condition(status: str) -> ColumnElement[bool]:
    """Return the SQL condition for a status. Raises InvalidRequest for an unknown one."""
    if status not in STATUSES:
        raise InvalidRequest(f"status: use one of {', '.join(STATUSES)}")
    is_open = _OF.decision.is_(None)
    now = time.time()
    conditions: Mapping[str, ColumnElement[bool]] = {
        "waiting": is_open & (_OF.expires_at > now),
        "expired": is_open & (_OF.expires_at <= now),
        "approved": _OF.decision.like(_YES),
        "denied": ~is_open & ~_OF.decision.like(_YES),
    }
    return conditions[status]


def _number(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor: give the nextCursor of the page before")
    return int(cursor)


def newest_version(session: Session) -> int:
    """Return the number of the last change."""
    return session.scalar(select(func.max(_OF.version))) or 0


def changed_after(
    session: Session, version: int, *, limit: int, project: str | None = None
) -> tuple[int, Sequence[QueueEntry]]:
    """Return the entries changed since a version, of one project or all, each once with its current state.

    The number in front is the version of the last of them.
    """
    query = select(*_COLUMNS).where(_OF.version > version).order_by(_OF.version).limit(limit)
    if project is not None:
        query = query.where(_OF.project == project)
    rows = [tuple(row) for row in session.execute(query)]
    return rows[-1][-1] if rows else version, [entry for row in rows if (entry := entry_of(row)) is not None]


def waiting(session: Session, *, limit: int, project: str | None = None) -> Sequence[QueueEntry]:
    """Return the waiting requests of one project or all, in the order of their last change."""
    query = select(*_COLUMNS).where(_condition("waiting")).order_by(_OF.version).limit(limit)
    if project is not None:
        query = query.where(_OF.project == project)
    return [entry for row in session.execute(query) if (entry := entry_of(tuple(row))) is not None]


def request_text(request: ApprovalRequest) -> str:
    """Return the stored form of a request."""
    return as_text(request)


def as_wire(entry: QueueEntry, *, is_whole: bool = False) -> dict[str, Any]:
    """Return an entry in the wire's format, with all arguments, rules and changes if `is_whole`."""
    request, decision, first = entry.request, entry.decision, entry.first_decision
    runs_on = request.rules.get("runs_on")
    shown: dict[str, Any] = {
        "id": entry.number,
        "status": entry.state,
        "tool": request.tool,
        "risk": str(request.risk),
        "isConfirmation": request.is_confirmation,
        "runsOn": None if runs_on is None else str(runs_on),
        "call": _call(request),
        "askedBy": entry.asked_by,
        "askedAt": _moment(entry.asked_at),
        "expiresAt": _moment(entry.expires_at),
        "firstDecision": None,
        "decision": None,
    }
    if first is not None:
        shown["firstDecision"] = {
            "by": first.by, "reason": first.reason, "at": _moment(first.at), "from": first.address,
        }  # fmt: skip
    if decision is not None:
        shown["decision"] = {
            "isApproved": decision.is_approved is True, "by": decision.by, "reason": decision.reason,
            "isRemembered": decision.is_remembered is True, "at": _moment(entry.decided_at), "from": entry.decided_from,
        }  # fmt: skip
    if is_whole:
        shown |= {
            "arguments": dict(request.arguments), "rules": dict(request.rules), "rulesInWords": describe_rules(request),
            "changes": request.changes, "fingerprint": request.fingerprint,
        }  # fmt: skip
    return shown


def _call(request: ApprovalRequest) -> str:
    call = request.call
    return call if len(call) <= MOST_CALL_CHARS else f"{call[: MOST_CALL_CHARS - 1]}…"


def _moment(seconds: float | None) -> str | None:
    """Return a time in the format of records, None for None and for a number out of range."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None
