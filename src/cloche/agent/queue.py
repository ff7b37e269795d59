"""Approval requests in a SQLite file: one process waits, another one lists and decides.

Requests and decisions outlive the process that asked. A request that nobody waits for is closed at its deadline, as a
no. Closed requests are kept for a month, at most a thousand of them, to look back at and to show what changed since
the last request.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from cloche.core.errors import InvalidRequest

from .approval import PATIENCE_S, ApprovalRequest, Decision, Risk, changes_between, check_patience

POLL_S, MAX_POLL_S = 0.05, 0.5
RETENTION_S, MOST_CLOSED = 30 * 86_400.0, 1_000  # of what has ended
log = logging.getLogger("cloche.agent")
_TABLE = """
CREATE TABLE IF NOT EXISTS approvals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    asked_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    request TEXT NOT NULL,
    decision TEXT
)"""
_LAST_OF_TOOL = """
WHERE id = (
    SELECT MAX(id) FROM approvals
    WHERE CASE WHEN json_valid(request) THEN json_extract(request, '$.tool') END = ?
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold one request of the queue: its number, when it was asked and when it ends (seconds since 1970), and what was
    decided; None where nothing was.
    """

    number: int
    asked_at: float
    expires_at: float
    request: ApprovalRequest
    decision: Decision | None = None

    @property
    def state(self) -> str:
        """Return `waiting`, `approved`, `denied`, or `expired`, which is a no."""
        if self.decision is not None:
            return "approved" if self.decision.is_approved is True else "denied"
        return "waiting" if time.time() < self.expires_at else "expired"


def default_path() -> str:
    """Return the file that is meant where none is named: CLOCHE_APPROVALS, else one in the user's state folder.

    Raises InvalidRequest where there is neither.
    """
    if named := os.environ.get("CLOCHE_APPROVALS"):
        return os.path.abspath(named)
    from platformdirs import user_state_path

    with suppress(RuntimeError):  # what it says for a user without a home, or one whose HOME is empty
        path = os.fspath(user_state_path("cloche") / "approvals.db")
        if os.path.isabs(path):
            return path
    raise InvalidRequest(
        "the queue of approvals has no place, since this user has no home folder; name a file (CLOCHE_APPROVALS=/FILE)"
    )


class ApprovalQueue:
    """Keep approvals in a file, by default the user's own; pass it as `approve=`. `patience_s` is how long each waits.

    Who may write to the file may decide: it is made for its owner alone, and one that everybody may write to, replace,
    or put a journal beside is refused, so that /tmp is no place for it; in one of another user's nothing is asked.
    Raises InvalidRequest for that, and for a file that is no such queue.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, patience_s: float = PATIENCE_S):
        self._path, self._patience_s = os.path.realpath(path or default_path()), check_patience(patience_s)
        if path is None:
            _make_folder(os.path.dirname(self._path))
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
            pause_s = POLL_S
            while (decision := await asyncio.to_thread(self._decision, number)) is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        except asyncio.CancelledError:
            with suppress(sqlite3.Error):  # it closes at its deadline, then
                await asyncio.to_thread(self._close, await asking)
            raise
        return decision

    def waiting(self) -> list[Entry]:
        """Return what waits for a decision, the oldest first."""
        return self._entries("WHERE decision IS NULL AND expires_at > ?", time.time())

    def entries(self) -> list[Entry]:
        """Return what waits and what has ended, the oldest first."""
        return self._entries("")

    def entry(self, number: int) -> Entry:
        """Return one by its number. Raises InvalidRequest when there is none (any more)."""
        found = self._entries("WHERE id = ?", number) if number < 1 << 63 else []
        if not found:
            raise InvalidRequest(f"there is no approval {number} in {self._path}; `cloche approvals list` shows them")
        return found[0]

    def _entries(self, which: str, *values: object) -> list[Entry]:
        query = f"SELECT id, asked_at, expires_at, request, decision FROM approvals {which} ORDER BY id"  # noqa: S608
        with self._database() as database:
            rows = database.execute(query, values).fetchall()
        found = []
        for number, asked, expires, text, decided in rows:
            try:
                entry = Entry(
                    number=number, asked_at=float(asked), expires_at=float(expires), request=_read_request(text),
                    decision=_read_decision(decided),
                )  # fmt: skip
            except (ValueError, TypeError, KeyError) as error:  # one that cannot be read shall hide no other
                log.warning("approval %s in %s cannot be read: %s", number, self._path, error)
                continue
            found.append(entry)
        return found

    def decide(self, number: int, decision: Decision) -> None:
        """Decide about a request that waits. Raises InvalidRequest when there is none of that number (any more)."""
        with self._database() as database:
            done = database.execute(
                "UPDATE approvals SET decision = ? WHERE id = ? AND decision IS NULL AND expires_at > ?",
                (json.dumps(as_dict(decision)), number, time.time()),
            )
            if done.rowcount != 1:
                raise InvalidRequest(f"no approval {number} waits; it was decided about, or its time is over")

    def _ask(self, request: ApprovalRequest) -> int:
        now = time.time()
        for path in (self._path, os.path.dirname(self._path)):
            if (owner := os.stat(path).st_uid) not in (0, os.geteuid()):
                raise InvalidRequest(f"{path} belongs to user {owner}, who could approve; name a queue of your own")
        request = replace(request, changes=request.changes or self._changes(request))
        with self._database() as database:
            database.execute(
                "DELETE FROM approvals WHERE expires_at < ? AND (asked_at < ? OR id <= ("
                "SELECT id FROM approvals ORDER BY id DESC LIMIT 1 OFFSET ?))",
                (now, now - RETENTION_S, MOST_CLOSED),
            )
            done = database.execute(
                "INSERT INTO approvals (asked_at, expires_at, request) VALUES (?, ?, ?)",
                (now, now + self._patience_s, _as_text(request)),
            )
            return int(done.lastrowid or 0)

    def _changes(self, request: ApprovalRequest) -> str:
        """Compare with what this tool was asked to do last, by whichever process."""
        if request.is_confirmation:
            return ""
        last = self._entries(_LAST_OF_TOOL, request.tool)
        return changes_between(last[0].request, _read_request(_as_text(request))) if last else ""

    def _decision(self, number: int) -> Decision | None:
        with self._database() as database:
            text, expires_at = database.execute(
                "SELECT decision, expires_at FROM approvals WHERE id = ?", (number,)
            ).fetchone()
        if text is not None:
            return _read_decision(text)
        if time.time() >= expires_at:
            return Decision(is_approved=False, by="time-out", reason=f"no answer within {self._patience_s:g} s")
        return None

    def _close(self, number: int) -> None:
        """Expire a request that nobody waits for."""
        with self._database() as database:
            database.execute(
                "UPDATE approvals SET expires_at = MIN(expires_at, ?) WHERE id = ? AND decision IS NULL",
                (time.time(), number),
            )

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Hold a connection for one transaction: threads share none."""
        with closing(sqlite3.connect(self._path, timeout=10)) as database, database:
            yield database


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"the folder {folder} cannot be made: {error.strerror}; name a file elsewhere") from error


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
    # Sticky or not: SQLite rolls back to whatever a journal says that lies beside the file, whoever put it there.
    if os.stat(os.path.dirname(path)).st_mode & stat.S_IWOTH:
        raise InvalidRequest(
            f"{path}: everybody may put files beside it or in its place, and approve; name one in a folder of your own"
        )
    if facts.st_mode & stat.S_IWOTH:
        raise InvalidRequest(f"{path} may be written to by everybody, who could approve then; chmod o-w it")


def _as_text(request: ApprovalRequest) -> str:
    return json.dumps(_with_enum_names(_request_as_dict(request)), default=str)


def _with_enum_names(value: Any) -> Any:  # noqa: ANN401 - plain data
    """Return plain data with names instead of numbers for enumerations."""
    if isinstance(value, Mapping):
        return {str(name): _with_enum_names(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_enum_names(one) for one in value]
    return str(value) if isinstance(value, enum.Enum) else value


def _request_as_dict(request: ApprovalRequest) -> dict[str, Any]:
    return {
        "tool": request.tool, "risk": int(request.risk), "arguments": dict(request.arguments),
        "rules": dict(request.rules), "changes": request.changes, "is_confirmation": request.is_confirmation,
    }  # fmt: skip


def _read_request(text: str) -> ApprovalRequest:
    data = json.loads(text)
    request = ApprovalRequest(**{**data, "risk": Risk(data["risk"])})
    kinds = {"tool": str, "arguments": dict, "rules": dict, "changes": str, "is_confirmation": bool}
    for name, kind in kinds.items():
        if not isinstance(getattr(request, name), kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    return request


def _read_decision(text: str | None) -> Decision | None:
    if text is None:
        return None
    data: Any = json.loads(text)
    if not isinstance(data, dict) or any(not isinstance(data.get(name, ""), str) for name in ("by", "reason")):
        raise TypeError("by and reason are text")
    return Decision(**data)


def as_dict(decision: Decision) -> dict[str, Any]:
    """Return a decision as plain data, as the queue holds it and the command line prints it."""
    return {name: getattr(decision, name) for name in ("is_approved", "by", "reason", "is_remembered")}
