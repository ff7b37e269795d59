"""The secrets that a service holds for its callers: encrypted rows, which only the operator's key opens.

AES-256-GCM authenticates project, name, hosts and the other terms with each value. So who can write to the database
cannot send a value to another host, or give it to another project.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from cloche.core.errors import BackendUnavailable, Conflict, InvalidRequest, NotFound
from cloche.core.record import dataclass
from cloche.core.secrets import Secret
from cloche.sealing import KEY_BYTES, SealingKey

from .ids import new_id, now
from .tables import StoredSecret

TERMS = ("hosts", "format", "foreign", "places", "files_inside")  # of a Secret, beside its value
NOTES = "notes"
MOST_STORED = 256  # of a project
MOST_KEY_FILE = 4_096
MAKE_ONE = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > secrets.key)"


def read_key(path: str) -> SealingKey:
    """Return the key of a file, 32 bytes in base64. Raises InvalidRequest, BackendUnavailable."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            key = base64.b64decode(file.read(MOST_KEY_FILE).strip(), validate=True)
    except OSError as error:
        raise InvalidRequest(f"secrets_key: the file cannot be read: {error}; {MAKE_ONE}") from None
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"secrets_key: the file does not have {KEY_BYTES} bytes in base64; {MAKE_ONE}")
    return SealingKey(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretFacts:
    """Describe a stored secret, without its value."""

    id: str
    name: str
    hosts: tuple[str, ...]
    notes: Mapping[str, Any]  # of who stored it, such as labels; authenticated with the value
    created_at: str
    changed_at: str
    changed_by: str
    last_used_at: str | None
    key_mark: str

    def as_dict(self, mark: str | None) -> dict[str, Any]:
        """Return plain data in the wire's format. `mark` is that of the service's key."""
        return {
            "name": self.name, "hosts": list(self.hosts), "heldBy": "service", "createdAt": self.created_at,
            "changedAt": self.changed_at, "changedBy": self.changed_by, "lastUsedAt": self.last_used_at,
            "usable": self.key_mark == mark,
        }  # fmt: skip


def list_secrets(session: Session, *, project: str) -> list[SecretFacts]:
    """Return the secrets of a project, by name."""
    return [_facts(row) for row in session.scalars(_rows(project).order_by(StoredSecret.name))]


def store_secret(
    session: Session,
    key: SealingKey,
    name: str,
    secret: Secret,
    *,
    project: str,
    by: str,
    notes: Mapping[str, Any] | None = None,
) -> tuple[SecretFacts, bool]:
    """Store a secret, or replace it; return its facts, and whether it is new. Raises Conflict for too many."""
    row = session.scalars(_rows(project, name)).first()
    is_new = row is None
    if row is None:
        count = session.scalar(select(func.count()).select_from(StoredSecret).where(StoredSecret.project == project))
        if count is not None and count >= MOST_STORED:
            raise Conflict(f"this project has {count} secrets, the most there may be; remove one")
        row = StoredSecret(id=new_id("secret"), project=project, name=name, created_at=now())
        session.add(row)
    row.terms = {**{name: _plain(getattr(secret, name)) for name in TERMS}, **({NOTES: notes} if notes else {})}
    row.sealed, row.key_mark = key.seal(secret.value or "", _about(row)), key.mark
    row.changed_at, row.changed_by = now(), by
    return _facts(row), is_new


def remove_secret(session: Session, name: str, *, project: str) -> SecretFacts:
    """Remove a secret. Raises NotFound, also for another project's."""
    row = session.scalars(_rows(project, name)).first()
    if row is None:
        raise NotFound(f"no secret {name} was stored here; GET /api/secrets lists them, and those of the operator")
    session.delete(row)
    return _facts(row)


def open_secrets(session: Session, key: SealingKey | None, names: Iterable[str], *, project: str) -> dict[str, Secret]:
    """Return the stored ones among these secrets. Raises BackendUnavailable for one that this key does not open."""
    rows = session.scalars(_rows(project).where(StoredSecret.name.in_(list(names)))).all()
    return {row.name: _opened(row, key) for row in rows}


def _opened(row: StoredSecret, key: SealingKey | None) -> Secret:
    if key is None or row.key_mark != key.mark:
        raise BackendUnavailable(
            f"secrets: {row.name} was stored with another key than this service has.",
            remedy="Start the service with that key (secrets_key), or store the secret again.",
        )
    from cryptography.exceptions import InvalidTag

    try:
        value = key.open(row.sealed, _about(row))
    except (InvalidTag, ValueError):
        raise BackendUnavailable(
            f"secrets: the row of {row.name} in the database was changed by something else.",
            remedy="Store the secret again.",
        ) from None
    return Secret(value=value, **{name: row.terms[name] for name in TERMS})


def _plain(value: Any) -> Any:  # noqa: ANN401 - a field of a Secret
    return list(value) if isinstance(value, tuple) else value


def note_use(session: Session, used: Iterable[tuple[str, str]]) -> None:
    """Store that secrets, by project and name, were used now."""
    for project, name in used:
        found = (StoredSecret.project == project, StoredSecret.name == name)
        session.execute(update(StoredSecret).where(*found).values(last_used_at=now()))


def _about(row: StoredSecret) -> bytes:
    """Return what a value is bound to."""
    return json.dumps([row.project, row.name, row.terms], sort_keys=True).encode()


def _rows(project: str, name: str | None = None) -> Any:  # noqa: ANN401 - a Select
    query = select(StoredSecret).where(StoredSecret.project == project)
    return query if name is None else query.where(StoredSecret.name == name)


def _facts(row: StoredSecret) -> SecretFacts:
    return SecretFacts(
        id=row.id, name=row.name, hosts=tuple(row.terms["hosts"]), notes=row.terms.get(NOTES, {}),
        created_at=row.created_at, changed_at=row.changed_at, changed_by=row.changed_by,
        last_used_at=row.last_used_at, key_mark=row.key_mark,
    )  # fmt: skip
