"""Settings that `PUT /api/sandbox/config` stored: rows, and a number that rises with each change.

They rank above files and below environment and arguments (`config.sources.use_stored_settings`). The owner's ceilings
bind in any case.
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

# How the wire spells them -> the keyword of `SandboxOptions`.
NAMES: Mapping[str, str] = {
    "runtime": "backend", **{row.wire: row.keyword for row in REQUESTED_LIMITS},
    "network": "network", "networkAllow": "network_allow", "networkDeny": "network_deny", "languages": "languages",
    "packages": "packages", "require": "require", "screen": "screen", "users": "users",
}  # fmt: skip

# Each spelling that files know of these (C1), and the wire's own, also in snake case -> the keyword.
SPELLINGS: Mapping[str, str] = {
    **{spelling: keyword for keyword in NAMES.values() for spelling in BY_NAME[keyword].readers()},
    **{snake(name): keyword for name, keyword in NAMES.items()},
    **NAMES,
}

_NEWEST = "SELECT MAX(version) FROM settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSettings:
    """Hold what is stored, by the keywords of `SandboxOptions`, and its version."""

    version: int = 0
    values: Mapping[str, Any]


def read_stored(session: Session) -> StoredSettings:
    """Return what is stored."""
    rows = session.scalars(select(Setting)).all()
    values = {row.name: row.value for row in rows if row.value is not None}
    return StoredSettings(version=max((row.version for row in rows), default=0), values=values)


def stored_version(database: Database) -> int:
    """Return the version alone; little work, which waits for nobody in SQLite. Raises RecordsFailed."""
    return database.look(_NEWEST) or 0


def store(session: Session, values: Mapping[str, Any], *, by: str) -> None:
    """Store values by the keywords of `SandboxOptions`; None goes back to what files say."""
    version = (session.scalar(select(func.max(Setting.version))) or 0) + 1
    for name, value in values.items():
        session.merge(Setting(name=name, value=value, version=version, changed_at=now(), changed_by=by))


def read_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by keyword, from any of their names.

    Raises InvalidRequest for a name that is none, for two of the same setting, and for a value that cannot be read.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in given.items():
        keyword = SPELLINGS.get(name)
        if keyword is None:
            raise InvalidRequest(f"{escape_name(name[:80])}: there is no such setting; use some of {', '.join(NAMES)}")
        if keyword in values:
            raise InvalidRequest(f"{name}: {names[keyword]} says the same; give one of them")
        names[keyword], values[keyword] = name, read_spelling(name, value)
        if value is not None:  # what is wrong with it is said by the name that it was given
            ARGUMENT_READERS[keyword](readers.check_length(values[keyword], name=name), name=name)
    return values


def read_spelling(name: str, value: Any) -> Any:  # noqa: ANN401 - as many types as settings
    """Return the value that a setting has by one of its names: a percentage of processors is an amount of them."""
    keyword = SPELLINGS[name]
    reader = BY_NAME[keyword].other_spellings.get(name)
    return value if reader is None or value is None else reader(value, name=name)[keyword]
