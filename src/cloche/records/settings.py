"""Settings that `PUT /api/sandbox/config` stored: rows, and a number that rises with each change.

They rank above files and below environment and arguments (`config.sources.use_stored_settings`). Tightening and
loosening are told apart by each key's own rule; the owner's ceilings bind in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cloche.config import readers
from cloche.config.keys import ARGUMENT_READERS, BY_NAME, Settings, read_layer
from cloche.config.origins import ARGUMENT, DEFAULT
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

# Each spelling that files know of these (C1), and the wire's own, also in snake case -> the keyword.
SPELLINGS: Mapping[str, str] = {
    **{spelling: keyword for keyword in NAMES.values() for spelling in BY_NAME[keyword].readers()},
    **{re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): keyword for name, keyword in NAMES.items()},
    **NAMES,
}

_NEWEST = "SELECT MAX(version) FROM settings"


# Keys that join what several files say, where a value given here does not: is less than what holds in the new one?
TAKES_AWAY: Mapping[str, Callable[[Any, Any], bool]] = {
    "network_deny": lambda new, old: not set(old) <= set(new),
    "require_controls": lambda new, old: not set(old) <= set(new),
    "require_level": lambda new, old: old is not None and new < old,
}


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


def loosened_by(values: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return the keywords whose new value is looser than what holds; going back to files (None) counts as that.

    A value takes the place of what was stored and of what files say, so what is only ever added to elsewhere must have
    all that holds. Raises InvalidRequest for a value that cannot be read.
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    layer = read_layer(given, ARGUMENT_READERS, origin=ARGUMENT, where="")
    looser = [name for name, value in values.items() if value is None]
    for name, configured in layer.items():
        key = BY_NAME[name]
        old = key.value_in(settings) if key.settings_field else None
        if name in TAKES_AWAY:
            is_looser = TAKES_AWAY[name](configured.value, old)
        elif name == "screen":  # once it is said, the strict one for level process no longer comes by itself
            is_looser = configured.value != "block" and configured.value != _said_screen(settings)
        else:
            is_looser = key.is_looser is None or key.is_looser(configured.value, old)
        if is_looser:
            looser.append(configured.key)
    if values.get("require") is not None:  # what it does not name of both was perhaps stored, and then is no more
        unnamed = [name for name in ("require_level", "require_controls") if name not in layer]
        looser += ["require" for name in unnamed if BY_NAME[name].value_in(settings)]
    return looser


def _said_screen(settings: Settings) -> str | None:
    return None if settings.origins.get("screen") == DEFAULT else settings.policy.screen
