"""Sandboxes of a service that live: whose each is, what its keeper calls it, its labels, and whether it has ended.

A row is there before the sandbox is, so that none is nobody's. What has ended is kept for an hour, to be said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.orm import Session

from cloche.core.errors import NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .ids import check_id, now
from .tables import LiveSandbox

STARTING, RUNNING, PAUSED, ENDED = STATES = ("starting", "running", "paused", "ended")
KEPT_S = 3_600.0  # how long one that has ended is known


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFacts:
    """Hold what is known of one sandbox; `name` is its keeper's, and `worker` has it."""

    id: str
    project: str
    name: str
    status: str
    created_at: str
    ended_at: str | None
    api_key: str | None
    worker: str
    document: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as the wire has it."""
        return {
            "id": self.id, "state": self.status, "createdAt": self.created_at, "endedAt": self.ended_at,
            "apiKey": self.api_key, **self.document,
        }  # fmt: skip


def begin(
    session: Session, *, id: str, project: str, name: str, worker: str, api_key: str | None,  # noqa: A002
    document: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add a row, `starting`."""
    session.execute(
        insert(LiveSandbox).values(
            id=id, project=project, created_at=now(), name=name, status=STARTING, api_key=api_key, worker=worker,
            document=dict(document),
        )
    )  # fmt: skip


def note(session: Session, sandbox_id: str, status: str, document: Mapping[str, Any] | None = None) -> None:
    """Note how it is; one that has ended stays so."""
    values: dict[str, Any] = {"status": status}
    if document is not None:
        values["document"] = dict(document)
    living = (LiveSandbox.id == sandbox_id, LiveSandbox.status != ENDED)
    session.execute(update(LiveSandbox).where(*living).values(**values))


def end(session: Session, sandbox_id: str) -> bool:
    """Note that it has ended; tell whether nobody had noted that before."""
    living = (LiveSandbox.id == sandbox_id, LiveSandbox.status != ENDED)
    changed = session.execute(update(LiveSandbox).where(*living).values(status=ENDED, ended_at=now()))
    return bool(cast("Any", changed).rowcount)


def forget(session: Session, sandbox_id: str) -> None:
    """Remove the row of one that did not come to be."""
    session.execute(delete(LiveSandbox).where(LiveSandbox.id == sandbox_id))


def forget_ended(session: Session) -> None:
    """Remove the rows of those that ended long ago."""
    before = (datetime.now(UTC) - timedelta(seconds=KEPT_S)).isoformat(timespec="milliseconds")
    session.execute(delete(LiveSandbox).where(LiveSandbox.ended_at < before.replace("+00:00", "Z")))


def find(session: Session, sandbox_id: str, *, project: str) -> SandboxFacts:
    """Return one. Raises NotFound, also for another project's."""
    row = session.get(LiveSandbox, check_id(sandbox_id, "sb"))
    if row is None or row.project != project:
        raise NotFound(f"there is no sandbox {escape_name(sandbox_id)}; GET /api/sandboxes lists them")
    return facts(row)


def living(session: Session) -> list[SandboxFacts]:
    """Return all that have not ended, as far as that was noted."""
    return [facts(row) for row in session.scalars(select(LiveSandbox).where(LiveSandbox.status != ENDED))]


def worker_of(session: Session, sandbox_id: str) -> tuple[str, str] | None:
    """Return the worker that has one, and how that is; None where there is none."""
    row = session.execute(select(LiveSandbox.worker, LiveSandbox.status).where(LiveSandbox.id == sandbox_id)).first()
    return None if row is None else (row[0], row[1])


def take_over(session: Session, sandbox_id: str, *, of: str, by: str) -> None:
    """Let a worker have what another one had, if nobody else has taken that over."""
    session.execute(update(LiveSandbox).where(LiveSandbox.id == sandbox_id, LiveSandbox.worker == of).values(worker=by))


def count_living(session: Session, api_key: str | None = None) -> int:
    """Return how many these are, of one key if that is given."""
    query = select(func.count()).select_from(LiveSandbox).where(LiveSandbox.status != ENDED)
    return session.scalar(query if api_key is None else query.where(LiveSandbox.api_key == api_key)) or 0


def conditions(labels: Mapping[str, str], states: Collection[str], name: str | None) -> Sequence[ColumnElement[bool]]:
    """Return what a row must meet: each label's value, one of the states if any are given, and the name."""
    found: list[ColumnElement[bool]] = [
        LiveSandbox.document[("labels", label)].as_string() == value for label, value in labels.items()
    ]
    if states:
        found.append(LiveSandbox.status.in_(list(states)))
    if name is not None:
        found.append(LiveSandbox.document["name"].as_string() == name)
    return found


def facts(row: LiveSandbox) -> SandboxFacts:
    """Return a row as plain values."""
    return SandboxFacts(
        id=row.id, project=row.project, name=row.name, status=row.status, created_at=row.created_at,
        ended_at=row.ended_at, api_key=row.api_key, worker=row.worker, document=row.document,
    )  # fmt: skip
