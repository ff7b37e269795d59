"""Approval requests in a SQLite file: one process waits, another one lists and decides.

Requests and decisions outlive the process that asked. A request whose process is gone is closed at its deadline, as a
no. Closed requests are kept for a month, at most a thousand of them, as history and to show the changes since the last
request. The file is that of the user's records, which the service shows; `queue_file` knows it.

A `Gate` stores two rows for a critical call. A client of the service has one row (`asked_by` is set), which takes two
decisions: it waits until the first is confirmed.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, replace

from .approval import PATIENCE_S, ApprovalRequest, Decision, Risk, changes_between, check_patience
from .queue_file import FIELDS, check_owner, default_path, make_folder, make_table, opened

POLL_S, MAX_POLL_S = 0.05, 0.5
RETENTION_S, MOST_CLOSED = 30 * 86_400.0, 1_000  # of what has ended
DEFAULT_PROJECT = "default"
ON_THIS_MACHINE = "this machine"  # where a decision came from that came by no address
log = logging.getLogger("cloche.agent")
# In the words of `sqlite3` and of SQLAlchemy alike: `cloche.records.approvals` has the same queue. Each change has a
# number of its own, which rises; the highest is never deleted.
FORGET = """
DELETE FROM approvals WHERE expires_at < :now AND version < (SELECT MAX(version) FROM approvals) AND (
    asked_at < :oldest OR id <= (SELECT id FROM approvals ORDER BY id DESC LIMIT 1 OFFSET :most)
)"""
NEXT_VERSION = "(SELECT COALESCE(MAX(version), 0) + 1 FROM approvals)"
DECIDE = f"""
UPDATE approvals SET decision = :decision, first_decision = :first_decision, decided_at = :decided_at,
    decided_from = :decided_from, version = {NEXT_VERSION} WHERE id = :id"""  # noqa: S608
_ASK = f"""
INSERT INTO approvals (project, asked_at, expires_at, request, version)
VALUES (:project, :now, :ends, :request, {NEXT_VERSION})"""  # noqa: S608
_CLOSE = f"""
UPDATE approvals SET expires_at = MIN(expires_at, :now), version = {NEXT_VERSION}
WHERE id = :id AND decision IS NULL"""  # noqa: S608
_LAST_OF_TOOL = """
WHERE id = (
    SELECT MAX(id) FROM approvals
    WHERE project = ? AND CASE WHEN json_valid(request) THEN json_extract(request, '$.tool') END = ?
)"""


class NotWaiting(InvalidRequest):
    """Report a decision about what does not wait for one (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDecision:
    """Hold the yes that awaits its confirmation: by which key, when (seconds since 1970), from which address."""

    by: str
    reason: str
    at: float
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """Hold one request of the queue: its number, its beginning and end (seconds since 1970), the decision or None.

    `asked_by` is the key of the service's client, None for a process of this machine; `decided_from` an address.
    """

    number: int
    asked_at: float
    expires_at: float
    request: ApprovalRequest
    decision: Decision | None = None
    project: str = DEFAULT_PROJECT
    asked_by: str | None = None
    first_decision: FirstDecision | None = None
    decided_at: float | None = None
    decided_from: str | None = None
    version: int = 0

    @property
    def state(self) -> str:
        """Return `waiting`, `approved`, `denied`, or `expired`, which is a no."""
        if self.decision is not None:
            return "approved" if self.decision.is_approved is True else "denied"
        return "waiting" if time.time() < self.expires_at else "expired"

    @property
    def takes_two(self) -> bool:
        """Tell whether this row itself is approved and then confirmed."""
        return self.asked_by is not None and self.request.risk is Risk.CRITICAL

    def decided(self, decision: Decision, *, is_confirming: bool, address: str = ON_THIS_MACHINE) -> dict[str, Any]:
        """Return the parameters of DECIDE. Raises NotWaiting, also for a first decision where a confirmation is due."""
        if self.state != "waiting":
            raise not_waiting(self.number)
        now, first = time.time(), self.first_decision
        is_first = self.takes_two and decision.is_approved and first is None
        if is_first and is_confirming:
            raise NotWaiting(f"approval {self.number} was not approved yet, so there is nothing to confirm")
        if self.takes_two and decision.is_approved and not is_first and not is_confirming:
            by = first.by if first is not None else ""
            raise NotWaiting(f"approval {self.number} was approved by {by}, and must be confirmed now")
        if is_first:
            first = FirstDecision(by=decision.by, reason=decision.reason, at=now, address=address)
        return {
            "id": self.number,
            "first_decision": None if first is None else json.dumps({name: getattr(first, name) for name in _FIRST}),
            "decision": None if is_first else json.dumps(as_dict(decision)),
            "decided_at": None if is_first else now,
            "decided_from": None if is_first else address[:64],
        }


_FIRST = ("by", "reason", "at", "address")


def not_waiting(number: int) -> NotWaiting:
    """Return the error for a decision that comes too late, or is about nothing."""
    return NotWaiting(f"no approval {number} waits; it was decided about, or its time is over")


class ApprovalQueue:
    """Keep approvals in a file, by default that of the user's records; pass it as `approve=`.

    `patience_s` is the time that each waits. A process that may write to the file may decide: it is made for its owner
    alone, and refused if others may write to it, replace it, or put a journal beside it, so /tmp is no place for it.
    Raises InvalidRequest for that, for another user's file, and for a file that is no such queue.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, patience_s: float = PATIENCE_S):
        self._path, self._patience_s = os.path.realpath(path or default_path()), check_patience(patience_s)
        if path is None:
            make_folder(os.path.dirname(self._path))
        make_table(self._path)

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Ask, and wait for the decision."""
        asking = asyncio.ensure_future(asyncio.to_thread(self._ask, request))
        try:
            number = await asyncio.shield(asking)
            pause_s = POLL_S
            while (decision := await asyncio.to_thread(self._decision, number)) is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        except asyncio.CancelledError:
            with suppress(sqlite3.Error):  # it closes at its deadline, then
                await asyncio.to_thread(self._close, await asking)
            raise
        return decision

    def waiting(self) -> list[QueueEntry]:
        """Return what waits for a decision, the oldest first."""
        return self._entries("WHERE decision IS NULL AND expires_at > ?", time.time())

    def entries(self) -> list[QueueEntry]:
        """Return waiting and ended requests, the oldest first."""
        return self._entries("")

    def entry(self, number: int) -> QueueEntry:
        """Return one by its number. Raises InvalidRequest for an unknown or removed one."""
        entries = self._entries("WHERE id = ?", number) if number < 1 << 63 else []
        if not entries:
            raise InvalidRequest(f"there is no approval {number} in {self._path}; `cloche approvals list` shows them")
        return entries[0]

    def _entries(self, which: str, *values: object) -> list[QueueEntry]:
        with opened(self._path) as database:
            return self._read(database, which, *values)

    def _read(self, database: sqlite3.Connection, which: str, *values: object) -> list[QueueEntry]:
        query = f"SELECT {', '.join(FIELDS)} FROM approvals {which} ORDER BY id"  # noqa: S608
        return [entry for row in database.execute(query, values) if (entry := entry_of(row)) is not None]

    def decide(self, number: int, decision: Decision, *, is_confirming: bool = False) -> None:
        """Decide about a waiting request. Raises NotWaiting for an unknown or ended number.

        A critical one from the service is approved, and then approved again with `is_confirming`.
        """
        with opened(self._path) as database:
            database.execute("BEGIN IMMEDIATE")
            entries = self._read(database, "WHERE id = ?", number)
            if not entries:
                raise not_waiting(number)
            database.execute(DECIDE, entries[0].decided(decision, is_confirming=is_confirming))

    def _ask(self, request: ApprovalRequest) -> int:
        now = time.time()
        check_owner(self._path)
        request = replace(request, changes=request.changes or self._changes(request))
        row = {"project": DEFAULT_PROJECT, "now": now, "ends": now + self._patience_s, "request": as_text(request)}
        with opened(self._path) as database:
            database.execute(FORGET, forgetting(now))
            return int(database.execute(_ASK, row).lastrowid or 0)

    def _changes(self, request: ApprovalRequest) -> str:
        """Compare with the last request for this tool, from any process."""
        if request.is_confirmation:
            return ""
        last = self._entries(_LAST_OF_TOOL, DEFAULT_PROJECT, request.tool)
        return changes_since(last[0].request, request) if last else ""

    def _decision(self, number: int) -> Decision | None:
        with opened(self._path) as database:
            text, expires_at = database.execute(
                "SELECT decision, expires_at FROM approvals WHERE id = ?", (number,)
            ).fetchone()
        if text is not None:
            return _read_decision(text)
        if time.time() >= expires_at:
            return Decision(is_approved=False, by="time-out", reason=f"no answer within {self._patience_s:g} s")
        return None

    def _close(self, number: int) -> None:
        """Expire a request whose process has gone."""
        with opened(self._path) as database:
            database.execute(_CLOSE, {"now": time.time(), "id": number})


def forgetting(now: float) -> dict[str, Any]:
    """Return the parameters of FORGET."""
    return {"now": now, "oldest": now - RETENTION_S, "most": MOST_CLOSED}


def changes_since(last: ApprovalRequest, request: ApprovalRequest) -> str:
    """Return what changed since a request that went through the file."""
    return changes_between(last, _read_request(as_text(request)))


def entry_of(row: Sequence[Any]) -> QueueEntry | None:
    """Return the entry of a row (FIELDS); None for one that cannot be read, which shall hide no other."""
    fields = dict(zip(FIELDS, row, strict=True))
    try:
        first, request = _read_first(fields["first_decision"]), _read_request(fields["request"])
        return QueueEntry(
            number=fields["id"], project=str(fields["project"]), asked_by=fields["asked_by"],
            asked_at=float(fields["asked_at"]), expires_at=float(fields["expires_at"]),
            request=request if first is None else replace(request, is_confirmation=True), first_decision=first,
            decision=_read_decision(fields["decision"]), decided_at=fields["decided_at"],
            decided_from=fields["decided_from"], version=int(fields["version"]),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError) as error:
        log.warning("approval %s cannot be read: %s", fields["id"], error)
        return None


def as_text(request: ApprovalRequest) -> str:
    """Return a request as the file has it."""
    return json.dumps(_with_enum_names(_request_as_dict(request)), default=str)


def _with_enum_names(value: Any) -> Any:  # noqa: ANN401 - plain data
    """Return plain data with names instead of numbers for enumerations."""
    if isinstance(value, Mapping):
        return {str(name): _with_enum_names(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_enum_names(item) for item in value]
    return str(value) if isinstance(value, enum.Enum) else value


def _request_as_dict(request: ApprovalRequest) -> dict[str, Any]:
    return {
        "tool": request.tool, "risk": int(request.risk), "arguments": dict(request.arguments),
        "rules": dict(request.rules), "changes": request.changes, "is_confirmation": request.is_confirmation,
    }  # fmt: skip


def _read_request(text: str) -> ApprovalRequest:
    data = json.loads(text, parse_constant=str)  # NaN is no JSON, for whoever reads it next
    request = ApprovalRequest(**{**data, "risk": Risk(data["risk"])})
    kinds = {"tool": str, "arguments": dict, "rules": dict, "changes": str, "is_confirmation": bool}
    for name, kind in kinds.items():
        if not isinstance(getattr(request, name), kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    return request


def _read_first(text: str | None) -> FirstDecision | None:
    if text is None:
        return None
    data: Any = json.loads(text)
    return FirstDecision(
        by=str(data["by"]), reason=str(data["reason"]), at=float(data["at"]), address=str(data["address"])
    )


def _read_decision(text: str | None) -> Decision | None:
    if text is None:
        return None
    data: Any = json.loads(text)
    if not isinstance(data, dict) or any(not isinstance(data.get(name, ""), str) for name in ("by", "reason")):
        raise TypeError("by and reason are text")
    return Decision(**data)


def as_dict(decision: Decision) -> dict[str, Any]:
    """Return a decision as plain data, as the queue holds it and the command line prints it."""
    kept = {name: True for name in ("is_for_folder", "is_once") if getattr(decision, name) is True}  # of a host alone
    return {**{name: getattr(decision, name) for name in ("is_approved", "by", "reason", "is_remembered")}, **kept}
