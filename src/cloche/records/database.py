"""The database of records: opening, migration, and transactions, one at a time in each thread.

Calls block: in a coroutine use a `Writer`, or `asyncio.to_thread`. Several processes share a SQLite file: writers wait
for each other (WAL, `BEGIN IMMEDIATE`, ten seconds), readers wait for no one. PostgreSQL writers are serialised by an
advisory lock, so that data read in a write transaction stays valid until its commit. A failure of the database (locked,
disk full, damaged, unreachable) raises RecordsFailed and rolls the transaction back.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import URL, Engine, PoolProxiedConnection, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from cloche.config.state import records_location, state_file
from cloche.core.errors import InvalidRequest, RecordsFailed
from cloche.core.escape import escape_name

from .statements import Statements, encode, run_by

log = logging.getLogger("cloche.records")
NEWEST = "0005"  # of migrations/versions
BUSY_TIMEOUT_S = 10.0
_WRITING = 0xC10C4E  # key of PostgreSQL's advisory lock
T = TypeVar("T")
_MIGRATIONS = Path(__file__).parent / "migrations"
# Meaning and remedy of SQLite's messages. Nothing is lost: the transaction is rolled back.
_REASONS = (
    ("locked", "another process has been writing for ten seconds; try again"),
    ("lock timeout", "another process has been writing for ten seconds; try again"),
    ("full", "the disk is full; make room and try again"),
    ("malformed", "the file is damaged; put a backup in its place"),
    ("not a database", "the file is not a database; put a backup in its place, or name another"),
    ("readonly", "it is not writable; change its owner or mode"),
    ("unable to open", "it cannot be opened; check the folder and its owner"),
)


class Database:
    """Open the database at a file or URL, and migrate it to the newest version. `close` it at the end.

    `folder` is the place for files beside it: JSON files and blobs. Raises InvalidRequest, RecordsFailed.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None):
        where = os.fspath(location) if location is not None else records_location()
        self.on_failure: Callable[[], None] = _ignore  # called for each RecordsFailed
        self.url = _url(where)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            path = os.path.realpath(str(self.url.database))
            _make_private(path)
            self.folder = os.path.dirname(path)
        else:
            self.folder = os.path.dirname(state_file("records.db") or os.path.abspath("records.db"))
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self.engine = _engine(self.url.render_as_string(hide_password=False), is_sqlite=self.is_sqlite)
        reading = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(is_reading=True, **reading)
        self._looker: PoolProxiedConnection | None = None
        try:
            with failures_named(self.name):
                if self.version() != NEWEST:
                    self.migrate()
        except BaseException:
            self.engine.dispose()
            raise

    @property
    def name(self) -> str:
        """Return the name for messages, without a password."""
        return self.url.render_as_string() if not self.is_sqlite else escape_name(str(self.url.database))

    def version(self) -> str | None:
        """Return the migration of the database, None for an empty one."""
        with self.engine.connect() as connection:
            if not self.engine.dialect.has_table(connection, "alembic_version"):
                return None
            version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            return None if version is None else str(version)

    def migrate(self, target: str = "head") -> None:
        """Migrate to the newest version, or down to `target` (`base`: empty). Raises InvalidRequest if it is newer."""
        from alembic import command
        from alembic.config import Config
        from alembic.util.exc import CommandError

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        before = self.version()
        with self.engine.begin() as connection:
            config.attributes["connection"] = connection
            try:
                if target == "head":
                    command.upgrade(config, target)
                else:
                    command.downgrade(config, target)
            except CommandError as error:
                raise InvalidRequest(
                    f"{self.name} was written by a newer Cloche ({before}); install that, or name another file"
                ) from error

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Yield a session for one write transaction, which an exception rolls back. Raises RecordsFailed."""
        with self._reporting_failures(), Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    def write_by(self, connection: sqlite3.Connection, work: Sequence[Statements]) -> None:
        """Run statements in one transaction of SQLite's driver. Raises RecordsFailed, IntegrityError."""
        with self._reporting_failures(), self._of_driver("a transaction"):
            run_by(connection, work)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a session that sees one consistent state. Raises RecordsFailed."""
        with self._reporting_failures(), Session(self._reader, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """Turn a failure of the database into RecordsFailed, and report it to `on_failure`."""
        try:
            with failures_named(self.name):
                yield
        except RecordsFailed as error:
            log.debug("%s", error)
            self.on_failure()
            raise

    def look(self, query: str) -> Any:  # noqa: ANN401 - one value of the database
        """Return the first value of a constant query, with little overhead. Raises RecordsFailed.

        An event loop may call it for SQLite, since readers of its WAL never wait for writers.
        """
        if not self.is_sqlite:
            with self._reporting_failures(), self._reader.connect() as connection:
                return connection.exec_driver_sql(query).scalar()
        if self._looker is None:
            with self._reporting_failures(), self._of_driver(query):
                self._looker = self.engine.raw_connection()
        driver = cast("sqlite3.Connection", self._looker.driver_connection)
        try:
            rows = driver.execute(query).fetchall()
        except sqlite3.Error as error:
            with self._reporting_failures(), self._of_driver(query):
                raise error
        return rows[0][0] if rows else None

    @contextmanager
    def _of_driver(self, query: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise IntegrityError(query, None, error) from error
        except sqlite3.Error as error:
            raise DBAPIError(query, None, error) from error

    def close(self) -> None:
        """Close all connections."""
        if self._looker is not None:
            self._looker.close()
            self._looker = None
        self.engine.dispose()


def _ignore() -> None:
    pass


@contextmanager
def failures_named(name: str) -> Iterator[None]:
    """Turn a failure of the database into RecordsFailed with a remedy; errors of constraints pass."""
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeout as error:
        raise RecordsFailed(f"the records in {name} cannot be used: all connections are in use; try again") from error
    except (DatabaseError, DBAPIError) as error:
        text_ = str(error.orig).lower()
        reason = next((why for fragment, why in _REASONS if fragment in text_), str(error.orig))
        raise RecordsFailed(f"the records in {name} cannot be used: {reason}") from error


def _engine(url: str, *, is_sqlite: bool) -> Engine:
    if not is_sqlite:
        return _postgresql_engine(url)
    arguments = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
    # One connection for each thread: a waiting writer must not block readers.
    engine = create_engine(
        url, connect_args=arguments, json_serializer=encode, hide_parameters=True, max_overflow=-1
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's
        connection.isolation_level = (
            None  # the driver must not begin transactions (docs of sqlite3): `begin` below does
        )
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        # A transaction that reads before it writes cannot wait: it fails with SQLITE_BUSY
        # (sqlite.org/lang_transaction.html).
        is_reading = connection.get_execution_options().get("is_reading", False)
        connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")

    return engine


def _url(where: str) -> URL:
    """Return a database's URL. Raises InvalidRequest for an unsupported kind."""
    if "://" not in where:
        return make_url(f"sqlite:///{os.path.abspath(where)}")
    try:
        url = make_url(where)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() in ("sqlite", "postgresql"):
            url.get_dialect().import_dbapi()
            return url
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidRequest("the database's URL cannot be read; write postgresql://USER@HOST/NAME") from error
    except ImportError as error:
        raise InvalidRequest(
            f"the database needs the package {error.name}; pip install 'cloche[postgresql]'"
        ) from error
    raise InvalidRequest("records are kept by SQLite or PostgreSQL; name a file, or postgresql://USER@HOST/NAME")


def _postgresql_engine(url: str) -> Engine:
    engine = create_engine(
        url, pool_pre_ping=True, pool_size=8, max_overflow=8, pool_timeout=BUSY_TIMEOUT_S, json_serializer=encode,
        hide_parameters=True,
        connect_args={"connect_timeout": round(BUSY_TIMEOUT_S), "options": f"-c lock_timeout={BUSY_TIMEOUT_S:g}s"},
    )  # fmt: skip

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        if not connection.get_execution_options().get("is_reading", False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITING})")

    return engine


def _make_private(path: str) -> None:
    """Create the file and its folder as private. Raises InvalidRequest if other users can write to them."""
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        facts, around = os.stat(path), os.stat(folder)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot hold records: {error.strerror}; name a file elsewhere") from error
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidRequest(f"{path} cannot hold records: it is not a file")
    # SQLite rolls back by any hot journal beside the file, whoever wrote it (sqlite.org/atomiccommit.html).
    if (facts.st_mode | around.st_mode) & stat.S_IWOTH:
        raise InvalidRequest(f"{path}: every user may write to it or to its folder; name a file in a private folder")
