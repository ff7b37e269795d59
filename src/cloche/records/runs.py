"""Runs of a service: a row is written before the code starts, and its result afterwards, so that none is lost.

The row's `worker` (`workers.py`) runs it; `recover` closes the runs of workers that have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from sqlalchemy import CursorResult, Table, bindparam, delete, insert, null, select, update
from sqlalchemy.orm import Session

from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .database import Database
from .ids import check_id, moment, now
from .statements import Encoded, Statement, Statements
from .tables import StoredRun
from .workers import is_gone

UNFINISHED = ("queued", "running")
MOST_RUNS = 100_000  # that are kept
LOST = "the service ended during this run; the effects of the run are unknown"

# Of each request.
_TABLE = cast("Table", StoredRun.__table__)
_COLUMNS = tuple(_TABLE.c.keys())
_BEGIN = Statement(insert(_TABLE), columns=_COLUMNS)
_FINISH = Statement(
    update(_TABLE)
    .where(_TABLE.c.id == bindparam("run_id"))
    .values(status=bindparam("new_status"), ended_at=bindparam("now"), document=bindparam("new_document"))
)
_GIVE_KEY_BACK = Statement(update(_TABLE).where(_TABLE.c.id == bindparam("run_id")).values(idempotency_key=null()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Hold one run: its owner, and its document in the wire's format, which lacks the result before the end."""

    id: str
    project: str
    status: str
    created_at: str
    ended_at: str | None
    session_id: str | None
    api_key: str | None
    request_sha256: bytes | None
    document: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data in the wire's format."""
        return {
            "id": self.id, "status": self.status, "createdAt": self.created_at, "endedAt": self.ended_at,
            "sessionId": self.session_id, "apiKey": self.api_key, **self.document,
        }  # fmt: skip


def begin(
    *, id: str, project: str, worker: str, session_id: str | None, api_key: str | None,  # noqa: A002
    idempotency_key: str | None, request_sha256: bytes | None, summary: Mapping[str, Any],
    asked: Mapping[str, Any] | None = None,
) -> Statements:  # fmt: skip
    """Return the statements that add a `queued` row. `asked` is the stored part of its request.

    They raise IntegrityError if this caller has already used the idempotency key.
    """
    row = {
        "id": id, "project": project, "created_at": now(), "status": "queued", "worker": worker,
        "session_id": session_id, "api_key": api_key, "idempotency_key": idempotency_key, "ended_at": None,
        "request_sha256": request_sha256, "document": dict(summary), "asked": asked,
    }  # fmt: skip
    return Statements((_BEGIN, row))


def note_running(session: Session, *, id: str) -> None:  # noqa: A002
    """Set a queued run to `running`."""
    session.execute(update(StoredRun).where(StoredRun.id == id, StoredRun.status == "queued").values(status="running"))


def finish(*, id: str, status: str, document: Encoded | Mapping[str, Any]) -> Statements:  # noqa: A002
    """Return the statements that store the end of a run."""
    return Statements((_FINISH, {"run_id": id, "new_status": status, "now": now(), "new_document": document}))


def give_key_back(*, id: str) -> Statements:  # noqa: A002
    """Return the statements that release the idempotency key of a run that never ran."""
    return Statements((_GIVE_KEY_BACK, {"run_id": id}))


def find(session: Session, run_id: str, *, project: str) -> RunFacts:
    """Return one run. Raises NotFound, also for another project's."""
    row = session.get(StoredRun, check_id(run_id, "run"))
    if row is None or row.project != project:
        raise NotFound(f"there is no run {escape_name(run_id)}; GET /api/runs lists them")
    return facts(row)


def asked_for(session: Session, run_id: str, *, project: str) -> Mapping[str, Any] | None:
    """Return the stored part of a run's request, if any. Raises NotFound, also for another project's."""
    find(session, run_id, project=project)
    return session.scalar(select(StoredRun.asked).where(StoredRun.id == run_id))


def unfinished_worker(session: Session, run_id: str) -> str | None:
    """Return the worker of an unfinished run, None for any other."""
    return session.scalar(select(StoredRun.worker).where(StoredRun.id == run_id, StoredRun.status.in_(UNFINISHED)))


def find_repeated(session: Session, *, project: str, api_key: str | None, idempotency_key: str) -> RunFacts | None:
    """Return the earlier run with the same idempotency key."""
    query = select(StoredRun).where(
        StoredRun.project == project, StoredRun.api_key == api_key, StoredRun.idempotency_key == idempotency_key
    )
    row = session.scalars(query).first()
    return None if row is None else facts(row)


def facts(row: StoredRun) -> RunFacts:
    """Return a row as plain values."""
    return RunFacts(
        id=row.id, project=row.project, status=row.status, created_at=row.created_at, ended_at=row.ended_at,
        session_id=row.session_id, api_key=row.api_key, request_sha256=row.request_sha256, document=row.document,
    )  # fmt: skip


def forget_old(session: Session, *, retention_s: float, max_runs: int = MOST_RUNS) -> int:
    """Delete runs that ended before the retention, and the oldest beyond `max_runs`; return their number."""
    before = moment(time.time() - retention_s)
    ended = delete(StoredRun).where(StoredRun.status.not_in(UNFINISHED))
    count = cast("CursorResult[Any]", session.execute(ended.where(StoredRun.ended_at < before))).rowcount
    oldest_kept = session.scalar(select(StoredRun.id).order_by(StoredRun.id.desc()).offset(max_runs - 1).limit(1))
    if oldest_kept is not None:
        count += cast("CursorResult[Any]", session.execute(ended.where(StoredRun.id < oldest_kept))).rowcount
    return count


def recover(database: Database, is_gone: Callable[[str], bool] = is_gone) -> int:
    """Close the runs of workers that have ended, as `error` with the reason; return their number."""
    with database.reading() as session:
        names = session.scalars(select(StoredRun.worker).where(StoredRun.status.in_(UNFINISHED)).distinct()).all()
    ended_workers = [name for name in names if is_gone(name)]
    if not ended_workers:
        return 0
    with database.writing() as session:
        rows = session.scalars(
            select(StoredRun).where(StoredRun.status.in_(UNFINISHED), StoredRun.worker.in_(ended_workers))
        ).all()
        for row in rows:
            row.status, row.ended_at, row.document = "error", now(), {**row.document, "error": LOST}
        return len(rows)


def check_idempotency_key(text: str | None) -> str | None:
    """Return the key. Raises InvalidRequest for an empty or too long one."""
    if text is not None and not 1 <= len(text) <= 255:
        raise InvalidRequest("Idempotency-Key: give 1 to 255 characters")
    return text
