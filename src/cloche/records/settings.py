"""Settings stored by `PUT /api/sandbox/config`: rows, and a version that rises with each change.

They rank above files, and below the environment and arguments (`config.sources.use_stored_settings`). The owner's
ceilings always apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cloche.core.record import dataclass

from .database import Database
from .ids import now
from .tables import Setting

_NEWEST = "SELECT MAX(version) FROM settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSettings:
    """Hold the stored settings by the keywords of `SandboxOptions`, and their version."""

    version: int = 0
    values: Mapping[str, Any]


def read_stored(session: Session) -> StoredSettings:
    """Return the stored settings."""
    rows = session.scalars(select(Setting)).all()
    values = {row.name: row.value for row in rows if row.value is not None}
    return StoredSettings(version=max((row.version for row in rows), default=0), values=values)


def stored_version(database: Database) -> int:
    """Return only the version: a cheap read, which never waits in SQLite. Raises RecordsFailed."""
    return database.look(_NEWEST) or 0


def store(session: Session, values: Mapping[str, Any], *, by: str) -> None:
    """Store values by the keywords of `SandboxOptions`; None resets one to the files."""
    version = (session.scalar(select(func.max(Setting.version))) or 0) + 1
    for name, value in values.items():
        session.merge(Setting(name=name, value=value, version=version, changed_at=now(), changed_by=by))
