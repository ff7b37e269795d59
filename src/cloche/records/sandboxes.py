"""Sandboxes of a service: their owner, their keeper's name, their labels, and whether they have ended.

A row is written before its sandbox exists, so that every sandbox has an owner. Ended ones are kept for an hour, so that
clients can query them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.orm import Session

from cloche.core.errors import NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .ids import check_id, now
from .tables import StoredSandbox

STARTING, RUNNING, PAUSED, ENDED = STATES = ("starting", "running", "paused", "ended")
KEEPER, WORKER = "keeper", "worker"  # the process that holds a sandbox open
PRIVATE = "e2b"  # of a document, which has the variables of a sandbox that was created by E2B's protocol
KEPT_S = 3_600.0  # how long an ended one is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Hold the idempotency key of a request, and the hash of what is asked for."""

    text: str
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFacts:
    """Hold the facts about one sandbox. `name` is its keeper's name for it, `worker` the attached worker."""

    id: str
    project: str
    name: str
    status: str
    created_at: str
    ended_at: str | None
    api_key: str | None
    worker: str
    document: Mapping[str, Any]

    @property
    def has_run(self) -> bool:
        """Tell whether it was opened."""
        return "backend" in self.document

    @property
    def is_held_by_worker(self) -> bool:
        """Tell whether its worker has it open itself, without a keeper."""
        return self.document.get("heldBy") == WORKER

    def as_dict(self) -> dict[str, Any]:
        """Return plain data in the wire's format."""
        return {
            "id": self.id, "state": self.status, "createdAt": self.created_at, "endedAt": self.ended_at,
            "apiKey": self.api_key, **{key: value for key, value in self.document.items() if key != PRIVATE},
        }  # fmt: skip


def begin(
    session: Session, *, id: str, project: str, name: str, worker: str, api_key: str | None,  # noqa: A002
    document: Mapping[str, Any], key: RequestKey | None = None,
) -> None:  # fmt: skip
    """Add a row with status `starting`. Raises IntegrityError if this caller has already used the key."""
    once = {} if key is None else {"idempotency_key": key.text, "request_sha256": key.sha256}
    session.execute(
        insert(StoredSandbox).values(
            id=id, project=project, created_at=now(), name=name, status=STARTING, api_key=api_key, worker=worker,
            document=dict(document), **once,
        )
    )  # fmt: skip


def find_repeated(
    session: Session, *, project: str, api_key: str | None, key: str
) -> tuple[SandboxFacts, bytes | None] | None:
    """Return the sandbox of an earlier request with the same idempotency key, and that request's hash."""
    query = select(StoredSandbox).where(
        StoredSandbox.project == project, StoredSandbox.api_key == api_key, StoredSandbox.idempotency_key == key
    )
    row = session.scalars(query).first()
    return None if row is None else (facts(row), row.request_sha256)


def give_key_back(session: Session, sandbox_id: str) -> None:
    """Release the idempotency key of a sandbox that never ran."""
    session.execute(update(StoredSandbox).where(StoredSandbox.id == sandbox_id).values(idempotency_key=None))


def note(session: Session, sandbox_id: str, status: str, document: Mapping[str, Any] | None = None) -> None:
    """Store the status of a sandbox that has not ended."""
    values: dict[str, Any] = {"status": status}
    if document is not None:
        values["document"] = dict(document)
    living = (StoredSandbox.id == sandbox_id, StoredSandbox.status != ENDED)
    session.execute(update(StoredSandbox).where(*living).values(**values))


def amend(session: Session, sandbox_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the document of a sandbox that has not ended, as it is now."""
    living = (StoredSandbox.id == sandbox_id, StoredSandbox.status != ENDED)
    document = session.scalar(select(StoredSandbox.document).where(*living))
    if document is not None:
        session.execute(update(StoredSandbox).where(*living).values(document=change(dict(document))))


def change(session: Session, sandbox_id: str, status: str, changes: Mapping[str, Any]) -> None:
    """Store the status and changes of the document of a sandbox that runs or is paused.

    One that is paused by this has `pausedAt`: now, or when its time was over.
    """
    row = session.get(StoredSandbox, sandbox_id)
    if row is None or row.status not in (RUNNING, PAUSED):
        return
    values = dict(changes)
    if status == PAUSED:
        ends_at = row.document.get("endsAt")
        paused_at = min(now(), ends_at) if ends_at else now()
        values["pausedAt"] = row.document.get("pausedAt") or paused_at
    row.status, row.document = status, {**row.document, **values}


def seconds_of(text: str) -> float:
    """Return a moment of records as seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def end(session: Session, sandbox_id: str) -> bool:
    """Store that a sandbox has ended; return whether that is new."""
    living = (StoredSandbox.id == sandbox_id, StoredSandbox.status != ENDED)
    changed = session.execute(update(StoredSandbox).where(*living).values(status=ENDED, ended_at=now()))
    return bool(cast("Any", changed).rowcount)


def forget(session: Session, sandbox_id: str) -> None:
    """Delete the row of a sandbox that was not created."""
    session.execute(delete(StoredSandbox).where(StoredSandbox.id == sandbox_id))


def forget_ended(session: Session) -> None:
    """Delete the rows of sandboxes that ended long ago."""
    before = (datetime.now(UTC) - timedelta(seconds=KEPT_S)).isoformat(timespec="milliseconds")
    session.execute(delete(StoredSandbox).where(StoredSandbox.ended_at < before.replace("+00:00", "Z")))


def find(session: Session, sandbox_id: str, *, project: str) -> SandboxFacts:
    """Return one sandbox. Raises NotFound, also for another project's."""
    row = session.get(StoredSandbox, check_id(sandbox_id, "sb"))
    if row is None or row.project != project:
        raise NotFound(f"there is no sandbox {escape_name(sandbox_id)}; GET /api/sandboxes lists them")
    return facts(row)


def find_any(session: Session, sandbox_id: str) -> SandboxFacts:
    """Return one sandbox of any project. Raises NotFound."""
    row = session.get(StoredSandbox, sandbox_id)
    if row is None:
        raise NotFound(f"there is no sandbox {escape_name(sandbox_id)}")
    return facts(row)


def living(session: Session) -> list[SandboxFacts]:
    """Return all sandboxes that are not recorded as ended."""
    return [facts(row) for row in session.scalars(select(StoredSandbox).where(StoredSandbox.status != ENDED))]


def living_of(session: Session, project: str) -> list[SandboxFacts]:
    """Return the sandboxes of a project that run or are paused."""
    here = StoredSandbox.status.in_((RUNNING, PAUSED))
    return [facts(row) for row in session.scalars(select(StoredSandbox).where(StoredSandbox.project == project, here))]


def worker_of(session: Session, sandbox_id: str) -> tuple[str, str] | None:
    """Return the worker of a sandbox and its status, None for an unknown one."""
    row = session.execute(
        select(StoredSandbox.worker, StoredSandbox.status).where(StoredSandbox.id == sandbox_id)
    ).first()
    return None if row is None else (row[0], row[1])


def take_over(session: Session, sandbox_id: str, *, of: str, by: str) -> None:
    """Move a sandbox from worker `of` to worker `by`, unless another worker has already taken it over."""
    session.execute(
        update(StoredSandbox).where(StoredSandbox.id == sandbox_id, StoredSandbox.worker == of).values(worker=by)
    )


def count_living(session: Session, api_key: str | None = None) -> int:
    """Return the number of sandboxes that have not ended, in total or of one key."""
    query = select(func.count()).select_from(StoredSandbox).where(StoredSandbox.status != ENDED)
    return session.scalar(query if api_key is None else query.where(StoredSandbox.api_key == api_key)) or 0


def conditions(labels: Mapping[str, str], states: Collection[str], name: str | None) -> Sequence[ColumnElement[bool]]:
    """Return the conditions for a list: each label's value, any of the states, and the name."""
    clauses: list[ColumnElement[bool]] = [
        StoredSandbox.document[("labels", label)].as_string() == value for label, value in labels.items()
    ]
    if states:
        clauses.append(StoredSandbox.status.in_(list(states)))
    if name is not None:
        clauses.append(StoredSandbox.document["name"].as_string() == name)
    return clauses


def facts(row: StoredSandbox) -> SandboxFacts:
    """Return a row as plain values."""
    return SandboxFacts(
        id=row.id, project=row.project, name=row.name, status=row.status, created_at=row.created_at,
        ended_at=row.ended_at, api_key=row.api_key, worker=row.worker, document=row.document,
    )  # fmt: skip
