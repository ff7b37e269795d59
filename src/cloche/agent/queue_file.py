"""The file of the queue of approvals: where it is, that it is its owner's alone, its table, and what an older one held.

By default it is the database of records, which `cloche serve` has too. Whoever comes first makes the table: this
module, which needs the standard library alone, or the first migration of `cloche.records`. Before there were records
the queue was a file of its own; what that holds is moved over once.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cloche.config.state import records_file, state_file
from cloche.core.errors import InvalidRequest

OLDER = "approvals.db"  # in the user's state folder
BUSY_TIMEOUT_S = 10.0
_NO_PLACE = (
    "the queue of approvals has no place, since this user has no home folder; name a file (CLOCHE_APPROVALS=/FILE)"
)
# As `cloche.records.tables` has it; times are seconds since 1970, requests and decisions JSON.
_TABLE = (
    """
    CREATE TABLE IF NOT EXISTS approvals (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
        project VARCHAR(64) DEFAULT 'default' NOT NULL,
        asked_by VARCHAR(40),
        asked_at FLOAT NOT NULL,
        expires_at FLOAT NOT NULL,
        request TEXT NOT NULL,
        first_decision TEXT,
        decision TEXT,
        decided_at FLOAT,
        decided_from VARCHAR(64),
        version INTEGER DEFAULT '0' NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS ix_approvals_project ON approvals (project)",
    "CREATE INDEX IF NOT EXISTS ix_approvals_version ON approvals (version)",
)
_MOVE = """
INSERT INTO approvals (asked_at, expires_at, request, decision) SELECT ?1, ?2, ?3, ?4
WHERE NOT EXISTS (SELECT 1 FROM approvals WHERE asked_at = ?1 AND request = ?3)"""
_OLD_COLUMNS = ("id", "asked_at", "expires_at", "request", "decision")
_RENEW = (
    "ALTER TABLE approvals RENAME TO approvals_older",
    *_TABLE,
    f"INSERT INTO approvals ({', '.join(_OLD_COLUMNS)}) SELECT {', '.join(_OLD_COLUMNS)} FROM approvals_older",  # noqa: S608
    "DROP TABLE approvals_older",
)


def default_path() -> str:
    """Return the file that is meant where none is named: CLOCHE_APPROVALS, else that of the user's records.

    Raises InvalidRequest where there is neither.
    """
    if named := os.environ.get("CLOCHE_APPROVALS"):
        return os.path.abspath(named)
    if state_file(OLDER) is None and "CLOCHE_DATABASE" not in os.environ:
        raise InvalidRequest(_NO_PLACE)
    return records_file()


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """Hold a connection for one transaction: threads share none."""
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as database, database:
        yield database


def make_table(path: str) -> None:
    """Make the file, private, and its table; or renew that of an older Cloche.

    Raises InvalidRequest for a file that others may write to, and for one that is no database.
    """
    make_private(path)
    try:
        with opened(path) as database:
            if _missing(_columns(database)):
                database.execute("BEGIN IMMEDIATE")
                for statement in _missing(_columns(database)):  # again: another process may have been first
                    database.execute(statement)
    except sqlite3.Error as error:
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: {error}") from error


def _columns(database: sqlite3.Connection) -> set[str]:
    return {row[1] for row in database.execute("PRAGMA table_info(approvals)")}


def _missing(columns: set[str]) -> Sequence[str]:
    """Return what makes the table of these columns the one that is needed; nothing for one that is nobody's of ours."""
    if not columns:
        return _TABLE
    return _RENEW if columns == set(_OLD_COLUMNS) else ()


def take_over_older(path: str) -> int:
    """Move into `path`, the default file, what the queue's own file of an older Cloche holds; return how many.

    Raises InvalidRequest where that file is not its owner's alone.
    """
    older = state_file(OLDER)
    if older is None or not os.path.exists(older) or os.path.realpath(older) == os.path.realpath(path):
        return 0
    check_private(older)
    check_owner(older)
    try:
        return _copy(older, path)
    except sqlite3.Error as error:
        if not os.path.exists(older):  # another process was first
            return 0
        raise InvalidRequest(f"{older} cannot be moved into {path}: {error}; repair it, or remove it") from error


def _copy(older: str, path: str) -> int:
    """Copy the rows, then remove the older file; nobody writes to it meanwhile.

    After an interruption the next start does it again: a row that is there already is not added twice.
    """
    address = f"{Path(older).as_uri()}?mode=rw"  # never made here
    with closing(sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S)) as source:
        source.execute("BEGIN EXCLUSIVE")
        if not _columns(source):  # somebody else's, or not begun
            return 0
        rows = source.execute("SELECT asked_at, expires_at, request, decision FROM approvals ORDER BY id").fetchall()
        with opened(path) as target:
            target.execute("BEGIN IMMEDIATE")
            added = sum(target.execute(_MOVE, row).rowcount for row in rows)
        with suppress(FileNotFoundError):
            os.unlink(older)
        source.rollback()
    return added


def check_owner(path: str) -> None:
    """Raise InvalidRequest where another user owns the file or its folder, and so could put an approval into it."""
    for place in (path, os.path.dirname(path)):
        if (owner := os.stat(place).st_uid) not in (0, os.geteuid()):
            raise InvalidRequest(f"{place} belongs to user {owner}, who could approve; name a queue of your own")


def make_folder(folder: str) -> None:
    """Make the folder, for its owner alone. Raises InvalidRequest."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"the folder {folder} cannot be made: {error.strerror}; name a file elsewhere") from error


def make_private(path: str) -> None:
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
    except OSError as error:
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: {error.strerror}") from error
    check_private(path)


def check_private(path: str) -> None:
    """Raise InvalidRequest for what is no file, and for one that everybody may write to, or beside which they may."""
    try:
        facts, around = os.stat(path), os.stat(os.path.dirname(path))
    except OSError as error:
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidRequest(f"{path} is no queue of approvals, and cannot become one: it is no file")
    # Sticky or not: SQLite rolls back to whatever a journal says that lies beside the file, whoever put it there.
    if around.st_mode & stat.S_IWOTH:
        raise InvalidRequest(
            f"{path}: everybody may put files beside it or in its place, and approve; name one in a folder of your own"
        )
    if facts.st_mode & stat.S_IWOTH:
        raise InvalidRequest(f"{path} may be written to by everybody, who could approve then; chmod o-w it")
