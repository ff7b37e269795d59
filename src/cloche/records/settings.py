"""Settings that `PUT /api/sandbox/config` stored: rows, and a number that rises with each change.

They rank above files and below environment and arguments (`config.sources.use_stored_settings`). Tightening and
loosening are told apart by each key's own rule; the owner's ceilings bind in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cloche.config.keys import ARGUMENT_READERS, BY_NAME, Settings, read_layer
from cloche.config.origins import ARGUMENT
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

from .database import Database
from .ids import now
from .tables import Setting

# How the wire spells them -> the keyword of `SandboxOptions`.
NAMES: Mapping[str, str] = {
    "runtime": "backend", "timeout": "timeout", "memoryLimit": "memory", "cpuLimit": "cpus", "pidsLimit": "pids",
    "diskLimit": "disk", "maxOutputBytes": "output_limit", "network": "network", "networkAllow": "network_allow",
    "networkDeny": "network_deny", "languages": "languages", "packages": "packages", "require": "require",
    "screen": "screen", "users": "users",
}  # fmt: skip

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
    """Return values by keyword, from the wire's names. Raises InvalidRequest for a name that is none."""
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise InvalidRequest(f"{escape_name(unknown[0])} is no setting; use some of {', '.join(NAMES)}")
    return {NAMES[name]: value for name, value in given.items()}


def loosened_by(values: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return the keywords whose new value is looser than what holds; going back to files (None) counts as that.

    Raises InvalidRequest for a value that cannot be read.
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    layer = read_layer(given, ARGUMENT_READERS, origin=ARGUMENT, where="")
    looser = [name for name, value in values.items() if value is None]
    for name, configured in layer.items():
        key = BY_NAME[name]
        old = key.value_in(settings) if key.settings_field else None
        if key.is_looser is None or key.is_looser(configured.value, old):
            looser.append(configured.key)
    return looser
