"""Keys of the service: 256 random bits, shown once. Only the SHA-256 is stored, and compared in constant time.

A key has scopes. `run`: run code. `read`: read records. `approve`: decide about approvals. `admin`: all of these, keys,
and settings up to the operator's ceilings. A change is made only together with its audit event.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from cloche.audit.log import Audit
from cloche.core.errors import Conflict, InvalidRequest, NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .database import Database
from .ids import check_id, new_id, now
from .tables import APPROVALS, DEFAULT_PROJECT, ApiKey

SCOPES = ("run", "read", "approve", "admin")
PREFIX = "cloche_"
E2B_PREFIX = "e2b_"  # before hexadecimal digits: some of E2B's SDKs accept no other key
_RANDOM_BYTES, _MOST_NAME = 32, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """Describe a key, without its text."""

    id: str
    name: str
    scopes: tuple[str, ...]
    project: str
    created_at: str
    expires_at: str | None = None
    revoked_at: str | None = None
    last_used_at: str | None = None

    @property
    def is_valid(self) -> bool:
        """Tell whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now() < self.expires_at)

    def has(self, scope: str) -> bool:
        """Tell whether it has a scope. `admin` includes all of them."""
        return scope in self.scopes or "admin" in self.scopes

    def as_dict(self) -> dict[str, Any]:
        """Return plain data in the wire's format."""
        return {
            "id": self.id, "name": self.name, "scopes": list(self.scopes), "project": self.project,
            "createdAt": self.created_at, "expiresAt": self.expires_at, "revokedAt": self.revoked_at,
            "lastUsedAt": self.last_used_at,
        }  # fmt: skip


def create_key(
    database: Database, *, name: str, scopes: Iterable[str], lifetime_s: float | None = None,
    project: str = DEFAULT_PROJECT, audit: Audit | None = None, is_e2b: bool = False,
) -> tuple[KeyFacts, str]:  # fmt: skip
    """Store a new key; return its description and its text, which cannot be retrieved again.

    With `is_e2b` the text has the form that E2B's SDKs require. Raises InvalidRequest, AuditFailed.
    """
    text = _new_text(is_e2b=is_e2b)
    facts = store_key(
        database, _hash(text), name=name, scopes=scopes, lifetime_s=lifetime_s, project=project, audit=audit
    )
    return facts, text


def store_key(
    database: Database, sha256: bytes, *, name: str, scopes: Iterable[str], lifetime_s: float | None = None,
    project: str = DEFAULT_PROJECT, audit: Audit | None = None,
) -> KeyFacts:  # fmt: skip
    """Store a key that its owner has made, by its SHA-256. Raises InvalidRequest, Conflict, AuditFailed."""
    checked_scopes = _checked_scopes(scopes)
    if not name.strip() or len(name) > _MOST_NAME or "\0" in name:
        raise InvalidRequest(f"name: give 1 to {_MOST_NAME} characters that name its owner")
    ends = None if lifetime_s is None else datetime.now(UTC) + timedelta(seconds=lifetime_s)
    expires_at = None if ends is None else ends.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    with database.writing() as session:
        if session.scalar(select(ApiKey.id).where(ApiKey.sha256 == sha256)) is not None:
            raise Conflict("there is a key with this SHA-256; make another one")
        key = _add(session, sha256, name=name, scopes=" ".join(checked_scopes), expires_at=expires_at, project=project)
        if audit is not None:
            audit.record("key", what="made", id=key.id, name=key.name, scopes=list(key.scopes))
        return key


def _new_text(*, is_e2b: bool = False) -> str:
    if is_e2b:
        return E2B_PREFIX + secrets.token_hex(_RANDOM_BYTES)
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def _add(
    session: Session, sha256: bytes, *, name: str, scopes: str, expires_at: str | None, project: str
) -> KeyFacts:  # fmt: skip
    row = ApiKey(
        id=new_id("key"), project=project, created_at=now(), name=name, scopes=scopes, sha256=sha256,
        expires_at=expires_at,
    )  # fmt: skip
    session.add(row)
    return _facts(row)


def find_key(session: Session, text: str) -> KeyFacts | None:
    """Return the key with this text, valid or not; None if unknown."""
    digest = _hash(text)
    row = session.scalars(select(ApiKey).where(ApiKey.sha256 == digest)).first()
    return _facts(row) if row is not None and hmac.compare_digest(row.sha256, digest) else None


def list_keys(database: Database, *, project: str = DEFAULT_PROJECT) -> list[KeyFacts]:
    """Return all keys, the oldest first."""
    with database.reading() as session:
        return [_facts(row) for row in session.scalars(select(ApiKey).where(ApiKey.project == project).order_by("id"))]


def revoke_key(
    database: Database, key_id: str, *, project: str = DEFAULT_PROJECT, audit: Audit | None = None
) -> KeyFacts:
    """Revoke a key, effective within a second. Raises NotFound, AuditFailed."""
    with database.writing() as session:
        row = _row(session, key_id, project)
        if audit is not None and row.revoked_at is None:
            audit.record("key", what="revoked", id=row.id, name=row.name)
        row.revoked_at = row.revoked_at or now()
    return _facts(row)


def rotate_key(
    database: Database, key_id: str, *, project: str = DEFAULT_PROJECT, audit: Audit | None = None,
    is_e2b: bool = False,
) -> tuple[KeyFacts, str]:  # fmt: skip
    """Replace a key by a new one with the same name, scopes and expiry. Its approval requests move to the new key.

    `is_e2b` is as for `create_key`. Raises NotFound, AuditFailed, and Conflict for an invalid key, which rotation must
    not revive.
    """
    with database.writing() as session:
        old = _row(session, key_id, project)
        if not _facts(old).is_valid:
            raise Conflict(f"key {escape_name(key_id)} is no longer valid; make a new one")
        old.revoked_at = now()
        text = _new_text(is_e2b=is_e2b)
        added = _add(session, _hash(text), name=old.name, scopes=old.scopes, expires_at=old.expires_at, project=project)
        session.execute(update(APPROVALS).where(APPROVALS.c.asked_by == old.id).values(asked_by=added.id))
        if audit is not None:
            audit.record("key", what="rotated", id=old.id, name=old.name, by_id=added.id)
        return added, text


def _row(session: Session, key_id: str, project: str) -> ApiKey:
    row = session.get(ApiKey, check_id(key_id, "key"))
    if row is None or row.project != project:
        raise NotFound(f"there is no key {escape_name(key_id)}; `cloche keys list` shows them")
    return row


def note_use(session: Session, key_ids: Iterable[str]) -> None:
    """Store that keys were used now."""
    session.execute(update(ApiKey).where(ApiKey.id.in_(list(key_ids))).values(last_used_at=now()))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _checked_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    requested = set(scopes)
    unknown = sorted(requested - set(SCOPES))
    if unknown or not requested:
        named = escape_name(unknown[0]) if unknown else "nothing"
        raise InvalidRequest(f"scopes: {named} is not a scope; use some of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in requested)


def _facts(row: ApiKey) -> KeyFacts:
    return KeyFacts(
        id=row.id, name=row.name, scopes=tuple(row.scopes.split()), project=row.project, created_at=row.created_at,
        expires_at=row.expires_at, revoked_at=row.revoked_at, last_used_at=row.last_used_at,
    )  # fmt: skip
