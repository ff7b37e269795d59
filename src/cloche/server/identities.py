"""The owner of a key or cookie, and its scopes.

Answers of the database are cached for a second, so a revoked key stops working within that time. A browser's cookie
stands for a human at the operator's own terminal, and has all scopes. A wrong key costs as much as a right one: one
hash and one index lookup.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import delete, select

from cloche.records.database import Database
from cloche.records.ids import new_id, now
from cloche.records.keys import KeyFacts, find_key
from cloche.records.tables import DEFAULT_PROJECT, BrowserSession

HOLDS_S = 1.0  # how long an answer of the database is cached
MOST_CACHED = 1_024
COOKIE_S, LINK_S = 12 * 3_600, 600


class Identities:
    """Authenticate keys and cookies, with answers cached for `HOLDS_S`."""

    def __init__(self, database: Database):
        self._database = database
        self._known: dict[bytes, tuple[float, KeyFacts | str | None]] = {}
        self.used: set[str] = set()  # keys whose use is not stored yet

    async def of_key(self, text: str) -> KeyFacts | None:
        """Return the key with this text, None unless it is valid."""
        key = await self._look(b"key" + hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._key, text)
        if not isinstance(key, KeyFacts) or not key.is_valid:
            return None
        self.used.add(key.id)
        return key

    async def of_cookie(self, text: str) -> bytes | None:
        """Return the hash of a valid cookie, None for an invalid one."""
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        ends = await self._look(b"cookie" + digest, self._cookie_end, digest)
        return digest if isinstance(ends, str) and now() < ends else None

    def forget(self) -> None:
        """Drop all cached answers."""
        self._known.clear()

    async def _look(self, index: bytes, ask: Callable[..., KeyFacts | str | None], argument: object) -> object:
        read_at, answer = self._known.get(index, (0.0, None))
        if time.monotonic() - read_at < HOLDS_S:
            return answer
        answer = await asyncio.to_thread(ask, argument)
        if len(self._known) >= MOST_CACHED:
            self._known.clear()
        if answer is not None:  # unknown keys are not cached: there is no end of them
            self._known[index] = (time.monotonic(), answer)
        return answer

    def _key(self, text: str) -> KeyFacts | None:
        with self._database.reading() as session:
            return find_key(session, text)

    def _cookie_end(self, digest: bytes) -> str | None:
        with self._database.reading() as session:
            query = select(BrowserSession).where(BrowserSession.sha256 == digest, BrowserSession.kind == "cookie")
            row = session.scalars(query).first()
            return None if row is None or not hmac.compare_digest(row.sha256, digest) else row.expires_at


def make_link_code(database: Database) -> str:
    """Create a one-time link, valid for ten minutes, and return its code."""
    return _store_secret(database, "link", LINK_S)


def use_link_code(database: Database, code: str) -> str | None:
    """Return a new cookie for a link's code, which is used up; None for a wrong code."""
    digest = hashlib.sha256(code.encode("utf-8", "replace")).digest()
    with database.reading() as session:  # a wrong code must not take the lock of a writer
        if session.scalar(select(BrowserSession.id).where(BrowserSession.sha256 == digest)) is None:
            return None
    with database.writing() as session:
        session.execute(delete(BrowserSession).where(BrowserSession.expires_at <= now()))
        query = delete(BrowserSession).where(BrowserSession.sha256 == digest, BrowserSession.kind == "link")
        if cast("Any", session.execute(query)).rowcount != 1:
            return None
    return _store_secret(database, "cookie", COOKIE_S)


def end_cookie(database: Database, digest: bytes) -> None:
    """Invalidate a browser's cookie."""
    with database.writing() as session:
        session.execute(delete(BrowserSession).where(BrowserSession.sha256 == digest))


def csrf_token(session_hash: bytes) -> str:
    """Return the CSRF token of the page's forms. It can be computed only from the cookie."""
    return hmac.new(session_hash, b"csrf", "sha256").hexdigest()


def _store_secret(database: Database, kind: str, lifetime_s: float) -> str:
    text = secrets.token_urlsafe(32)
    ends = (datetime.now(UTC) + timedelta(seconds=lifetime_s)).isoformat(timespec="milliseconds")
    with database.writing() as session:
        session.add(
            BrowserSession(
                id=new_id("browser"), project=DEFAULT_PROJECT, created_at=now(), kind=kind,
                sha256=hashlib.sha256(text.encode()).digest(), expires_at=ends.replace("+00:00", "Z"),
            )
        )  # fmt: skip
    return text
