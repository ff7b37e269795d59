"""The file of the queue of approvals: its path, its permissions, and its table.

By default it is the database of records, which `cloche serve` has too. The first of two makes the table: this module,
which needs the standard library alone, or the first migration of `cloche.records`.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from cloche.config.state import records_file, state_file
from cloche.core.errors import InvalidRequest

BUSY_TIMEOUT_S = 10.0
_NO_PLACE = (
    "the queue of approvals has no place, since this user has no home folder; name a file (CLOCHE_APPROVALS=/FILE)"
)
# The one definition of the table, after `id`: name, type, whether there is always a value, default, whether there is an
# index. Times are seconds since 1970, requests and decisions JSON; `version` rises with each change of any row.
COLUMNS = (
    ("project", "VARCHAR(64)", True, "default", True),
    ("asked_by", "VARCHAR(40)", False, None, False),
    ("asked_at", "FLOAT", True, None, False),
    ("expires_at", "FLOAT", True, None, False),
    ("request", "TEXT", True, None, False),
    ("first_decision", "TEXT", False, None, False),
    ("decision", "TEXT", False, None, False),
    ("decided_at", "FLOAT", False, None, False),
    ("decided_from", "VARCHAR(64)", False, None, False),
    ("version", "INTEGER", True, "0", True),
)
FIELDS = ("id", *(column[0] for column in COLUMNS))


def default_path() -> str:
    """Return the default file: CLOCHE_APPROVALS, else that of the user's records.

    Raises InvalidRequest if neither is set.
    """
    if named := os.environ.get("CLOCHE_APPROVALS"):
        return os.path.abspath(named)
    if state_file("records.db") is None and "CLOCHE_DATABASE" not in os.environ:
        raise InvalidRequest(_NO_PLACE)
    return records_file()


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """Hold a connection for one transaction: threads share none."""
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as database, database:
        yield database


def make_table(path: str) -> None:
    """Make the file, private, and its table.

    Raises InvalidRequest for a file that others may write to, and for one that is no database.
    """
    make_private(path)
    try:
        with opened(path) as database:
            if not database.execute("PRAGMA table_info(approvals)").fetchall():
                for statement in _statements():  # another process may be first meanwhile
                    database.execute(statement)
    except sqlite3.Error as error:
        raise InvalidRequest(f"{path} is not a queue of approvals, and cannot become one: {error}") from error


def _statements() -> Iterator[str]:
    columns = ["id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT"]
    for name, kind, is_required, default, _ in COLUMNS:
        given = "" if default is None else f" DEFAULT '{default}'"
        columns.append(f"{name} {kind}{given}{' NOT NULL' if is_required else ''}")
    yield "BEGIN IMMEDIATE"
    yield f"CREATE TABLE IF NOT EXISTS approvals ({', '.join(columns)})"
    for name, *_, is_indexed in COLUMNS:
        if is_indexed:
            yield f"CREATE INDEX IF NOT EXISTS ix_approvals_{name} ON approvals ({name})"


def check_owner(path: str) -> None:
    """Raise InvalidRequest where another user owns the file or its folder, and so could put an approval into it."""
    for checked in (path, os.path.dirname(path)):
        if (owner := os.stat(checked).st_uid) not in (0, os.geteuid()):
            raise InvalidRequest(
                f"{checked} belongs to user {owner}, so that user could approve; name a queue of your own"
            )


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
        raise InvalidRequest(f"{path} is not a queue of approvals, and cannot become one: {error.strerror}") from error
    check_private(path)


def check_private(path: str) -> None:
    """Raise InvalidRequest for a path that is no regular file, and for one that others may write to, or beside."""
    try:
        facts, around = os.stat(path), os.stat(os.path.dirname(path))
    except OSError as error:
        raise InvalidRequest(f"{path} is not a queue of approvals, and cannot become one: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidRequest(f"{path} is not a queue of approvals, and cannot become one: it is not a file")
    # Sticky or not: SQLite rolls back to whatever a journal says that lies beside the file, whoever put it there.
    if around.st_mode & stat.S_IWOTH:
        raise InvalidRequest(
            f"{path}: everybody may put files beside it or in its place, and approve; name one in a folder of your own"
        )
    if facts.st_mode & stat.S_IWOTH:
        raise InvalidRequest(f"{path} is writable by every user, so any user could approve; chmod o-w it")
