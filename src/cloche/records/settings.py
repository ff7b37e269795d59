"""Settings stored by `PUT /api/sandbox/config`: rows, and a version that rises with each change.

They rank above files, and below the environment and arguments (`config.sources.use_stored_settings`). The owner's
ceilings always apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cloche.config import readers
from cloche.config.keys import ARGUMENT_READERS, BY_NAME
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.limits import REQUESTED_LIMITS
from cloche.core.record import dataclass

from .database import Database
from .ids import now
from .results import snake
from .tables import Setting

# The wire's name -> keyword of `SandboxOptions`.
NAMES: Mapping[str, str] = {
    "runtime": "backend", **{row.wire: row.keyword for row in REQUESTED_LIMITS},
    "network": "network", "networkAllow": "network_allow", "networkDeny": "network_deny", "languages": "languages",
    "packages": "packages", "require": "require", "screen": "screen", "users": "users",
}  # fmt: skip

# Every spelling of configuration files (C1), and the wire's, also in snake case -> keyword.
SPELLINGS: Mapping[str, str] = {
    **{spelling: keyword for keyword in NAMES.values() for spelling in BY_NAME[keyword].readers()},
    **{snake(name): keyword for name, keyword in NAMES.items()},
    **NAMES,
}

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


def read_names(spelled: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by keyword, from any of their names.

    Raises InvalidRequest for an unknown name, for two names of the same setting, and for an invalid value.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in spelled.items():
        keyword = SPELLINGS.get(name)
        if keyword is None:
            raise InvalidRequest(f"{escape_name(name[:80])}: there is no such setting; use some of {', '.join(NAMES)}")
        if keyword in values:
            raise InvalidRequest(f"{name}: {names[keyword]} sets the same value; give one of them")
        names[keyword], values[keyword] = name, read_spelling(name, value)
        if value is not None:  # errors use the given name
            ARGUMENT_READERS[keyword](readers.check_length(values[keyword], name=name), name=name)
    return values


def read_spelling(name: str, value: Any) -> Any:  # noqa: ANN401 - as many types as settings
    """Return a setting's value from one of its names, converted if needed, such as a percentage of processors."""
    keyword = SPELLINGS[name]
    reader = BY_NAME[keyword].other_spellings.get(name)
    return value if reader is None or value is None else reader(value, name=name)[keyword]
