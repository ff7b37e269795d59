"""The database of records: what it does when it cannot go on, its migrations, and writes that share a transaction."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cloche.core.errors import InvalidRequest, RecordsFailed
from cloche.records import database as records_database
from cloche.records.database import Database
from cloche.records.ids import check_id, new_id, now
from cloche.records.lists import list_page
from cloche.records.tables import EnvironmentSnapshot, Table
from cloche.records.writer import Writer


def _add(session: Session, size: int = 1) -> None:
    session.add(
        EnvironmentSnapshot(
            id=new_id("snap"), project="default", created_at=now(), session_id=None, document={"x": "x" * size}
        )
    )  # fmt: skip


def _count(database: Database) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(EnvironmentSnapshot)) or 0


def test_migrations_make_the_tables_and_take_them_away(location: str) -> None:
    """Up, the tables are those of the code; down and up again with rows in them, nothing is in the way."""
    database = Database(location)
    with database.writing() as session:
        _add(session)
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    database.migrate("base")
    assert database.version() is None
    database.migrate()
    assert (database.version(), _count(database)) == (records_database.NEWEST, 0)
    database.close()


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    """What another version wrote is not touched."""
    Database(tmp_path / "r.db").close()
    with sqlite3.connect(tmp_path / "r.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(InvalidRequest, match="newer Cloche"):
        Database(tmp_path / "r.db")


def test_two_processes_may_make_it_at_once(tmp_path: Path) -> None:
    """Whoever comes second waits, and finds it made."""
    code = f"from cloche.records.database import Database; print(Database({os.fspath(tmp_path / 'r.db')!r}).version())"
    made = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert {one.communicate(timeout=60)[0].decode().strip() for one in made} == {records_database.NEWEST}


def test_a_locked_database_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that goes on writing makes an error that says so, and no row is lost."""
    monkeypatch.setattr(records_database, "BUSY_TIMEOUT_S", 0.1)
    database = Database(tmp_path / "r.db")
    holder = sqlite3.connect(tmp_path / "r.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(RecordsFailed, match="another process"), database.writing() as session:
        _add(session)
    holder.execute("ROLLBACK")
    holder.close()
    with database.writing() as session:
        _add(session)
    assert _count(database) == 1
    database.close()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """A write that finds no room undoes its transaction; those before it stay."""
    code = f"""
import resource, signal, sys
from cloche.core.errors import RecordsFailed
from tests.unit.records.test_database import Database, _add, _count
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database = Database({os.fspath(tmp_path / "r.db")!r})
with database.writing() as session:
    _add(session)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    with database.writing() as session:
        _add(session, size=8 << 20)
except RecordsFailed as error:
    print(error)
print(_count(database))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    said, count = done.stdout.strip().splitlines()
    assert "cannot be used" in said, done
    assert count == "1"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(4096) * 20), "damaged|not a database"),
        (lambda path: path.chmod(0o666), "every user may write"),
    ],
    ids=["another file", "damaged", "writable by all"],
)
def test_a_spoilt_file_is_told(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    """Each says what is wrong with which file, before anything is written."""
    path = tmp_path / "r.db"
    made = Database(path)
    with made.writing() as session:
        _add(session, size=100_000)
    made.close()
    spoil(path)
    with pytest.raises((RecordsFailed, InvalidRequest), match=words), closing(Database(path)) as database:
        _count(database)


def test_writes_share_a_transaction_and_fail_alone(location: str) -> None:
    """Of a hundred at once, one that fails takes no other with it, and few commits are made."""
    database, commits = Database(location), []
    from sqlalchemy import event

    event.listen(database.engine, "commit", lambda _: commits.append(1))

    def fail(session: Session) -> None:
        _add(session)
        session.flush()
        raise KeyError("of this one")

    async def main() -> list[object]:
        writer = Writer(database)
        work = [fail if number == 50 else _add for number in range(100)]
        found = await asyncio.gather(*(writer.write(one) for one in work), return_exceptions=True)
        await asyncio.to_thread(writer.close)
        return list(found)

    found = asyncio.run(main())
    assert [type(one) for one in found if one is not None] == [KeyError]
    assert _count(database) == 99
    assert len(commits) < 99
    database.close()


def test_ids_sort_by_time_and_pages_follow_them(location: str) -> None:
    """Each page goes on where the one before ended, the newest first; another project sees none."""
    database = Database(location)
    for _ in range(5):
        with database.writing() as session:
            _add(session)
    seen: list[str] = []
    cursor = None
    with database.reading() as session:
        while True:
            page = list_page(
                session, EnvironmentSnapshot, project="default", show=lambda row: {"id": row.id}, limit=2, cursor=cursor
            )
            seen += [item["id"] for item in page["items"]]
            if (cursor := page["nextCursor"]) is None:
                break
        assert not list_page(session, EnvironmentSnapshot, project="other", show=lambda _: {})["items"]
        with pytest.raises(InvalidRequest, match="limit"):
            list_page(session, EnvironmentSnapshot, project="default", show=lambda _: {}, limit=201)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 5
    database.close()


@pytest.mark.parametrize("text", ["", "snap_", "run_01k9z" + "0" * 15, "snap_" + "0" * 19 + "u", "../../etc/passwd"])
def test_what_is_no_id_names_no_file(text: str) -> None:
    """Only what could be an id of the kind passes."""
    with pytest.raises(InvalidRequest, match="not an id"):
        check_id(text, "snap")
    assert check_id(new_id("snap"), "snap").startswith("snap_")
