"""Approvals that wait in a file, for a human somewhere else: another process lists them and decides.

One SQLite file. What is asked outlives the process that asks, and so does what was decided; a request that nobody
waits for any more is closed by its deadline, as a no.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from cloche.core.errors import InvalidRequest

from .approval import PATIENCE_S, ApprovalRequest, Decision, check_patience
from .risk import Risk

LOOK_S, MOST_LOOK_S = 0.05, 0.5
log = logging.getLogger("cloche.agent")
_TABLE = """
CREATE TABLE IF NOT EXISTS approvals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    asked_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    request TEXT NOT NULL,
    decision TEXT
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Hold one request that waits: its number, and when it was asked and when it ends (seconds since 1970)."""

    number: int
    asked_at: float
    expires_at: float
    request: ApprovalRequest


class ApprovalQueue:
    """Keep approvals in a file; pass it as `approve=`. `patience_s` is how long each one waits.

    Who may write to the file may decide: it is made for its owner alone, and one that everybody may write to is
    refused. Raises InvalidRequest for that, and for a file that is no such queue.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_s: float = PATIENCE_S):
        self._path, self._patience_s = os.path.abspath(path), check_patience(patience_s)
        _make_private(self._path)
        try:
            with self._database() as database:
                database.execute(_TABLE)
        except sqlite3.Error as error:
            raise InvalidRequest(f"{self._path} is no queue of approvals, and cannot become one: {error}") from error

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Ask, and wait for the decision."""
        asking = asyncio.ensure_future(asyncio.to_thread(self._ask, request))
        try:
            number = await asyncio.shield(asking)
            pause_s = LOOK_S
            while (decision := await asyncio.to_thread(self._decision, number)) is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_LOOK_S)
        except asyncio.CancelledError:
            with suppress(sqlite3.Error):  # it closes at its deadline, then
                await asyncio.to_thread(self._close, await asking)
            raise
        return decision

    def waiting(self) -> list[Waiting]:
        """Return what waits for a decision, the oldest first."""
        query = "SELECT id, asked_at, expires_at, request FROM approvals WHERE decision IS NULL AND expires_at > ?"
        with self._database() as database:
            rows = database.execute(f"{query} ORDER BY id", (time.time(),)).fetchall()
        found = []
        for number, asked, expires, text in rows:
            try:
                request = _read_request(text)
            except (ValueError, TypeError, KeyError) as error:  # one that cannot be read shall hide no other
                log.warning("approval %s in %s cannot be read: %s", number, self._path, error)
                continue
            found.append(Waiting(number=number, asked_at=asked, expires_at=expires, request=request))
        return found

    def decide(self, number: int, decision: Decision) -> None:
        """Decide about a request that waits. Raises InvalidRequest when there is none of that number (any more)."""
        with self._database() as database:
            done = database.execute(
                "UPDATE approvals SET decision = ? WHERE id = ? AND decision IS NULL AND expires_at > ?",
                (json.dumps(_as_dict(decision)), number, time.time()),
            )
            if done.rowcount != 1:
                raise InvalidRequest(f"no approval {number} waits; it was decided about, or its time is over")

    def _ask(self, request: ApprovalRequest) -> int:
        now = time.time()
        with self._database() as database:
            done = database.execute(
                "INSERT INTO approvals (asked_at, expires_at, request) VALUES (?, ?, ?)",
                (now, now + self._patience_s, json.dumps(_told(request), default=str)),
            )
            return int(done.lastrowid or 0)

    def _decision(self, number: int) -> Decision | None:
        with self._database() as database:
            text, expires_at = database.execute(
                "SELECT decision, expires_at FROM approvals WHERE id = ?", (number,)
            ).fetchone()
        if text is not None:
            return Decision(**json.loads(text))
        if time.time() >= expires_at:
            return Decision(is_approved=False, by="time-out", reason=f"no answer within {self._patience_s:g} s")
        return None

    def _close(self, number: int) -> None:
        """Let nobody decide about what nobody waits for."""
        with self._database() as database:
            database.execute("UPDATE approvals SET expires_at = 0 WHERE id = ? AND decision IS NULL", (number,))

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Hold a connection for one transaction: threads share none."""
        with closing(sqlite3.connect(self._path, timeout=10)) as database, database:
            yield database


def _make_private(path: str) -> None:
    """Make the file for its owner alone. It is never opened here: closing it would end this process's locks on it."""
    try:
        if not os.path.exists(path):
            fresh = f"{path}.{secrets.token_hex(6)}"
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                with suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                os.unlink(fresh)
        facts = os.stat(path)
    except OSError as error:
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: it is no file")
    if facts.st_mode & stat.S_IWOTH:
        raise InvalidRequest(f"{path} may be written to by everybody, who could approve then; chmod o-w it")


def _told(request: ApprovalRequest) -> dict[str, Any]:
    return {
        "tool": request.tool, "risk": int(request.risk), "arguments": dict(request.arguments),
        "rules": dict(request.rules), "changes": request.changes, "is_confirmation": request.is_confirmation,
    }  # fmt: skip


def _read_request(text: str) -> ApprovalRequest:
    told = json.loads(text)
    return ApprovalRequest(**{**told, "risk": Risk(told["risk"])})


def _as_dict(decision: Decision) -> dict[str, Any]:
    return {name: getattr(decision, name) for name in ("is_approved", "by", "reason", "is_remembered")}
