"""Databases that older builds made: they are migrated as they are opened, and every row stays."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import JSON, MetaData, create_engine, select, text

from cloche.records.database import NEWEST, Database, _url
from cloche.records.tables import Table

pytestmark = pytest.mark.user_soak
SCHEMA = Path(__file__).with_name("schema_0001.sql")
WHEN = "2026-11-27T03:00:00.000Z"
OWNED = {"project": "default", "created_at": WHEN}
LABELLED = {**OWNED, "session_id": "task", "document": {"text": "é", "n": [1, None]}}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "api_keys": {**OWNED, "id": "key_1", "name": "first", "scopes": "run read", "sha256": b"\x00" * 32},
    "browser_sessions": {**OWNED, "id": "browser_1", "kind": "cookie", "sha256": b"\xff" * 32, "expires_at": WHEN},
    "settings": {"name": "timeout", "value": 7, "version": 3, "changed_at": WHEN, "changed_by": "key_1"},
    "debug_namespaces": {"name": "jail", "is_on": True, "changed_at": WHEN, "changed_by": "key_1"},
    "runs": {
        **LABELLED, "id": "run_1", "status": "ok", "api_key": "key_1", "idempotency_key": "once",
        "request_sha256": b"\x01" * 32, "worker": "w", "ended_at": WHEN,
    },
    "environment_snapshots": {**LABELLED, "id": "snap_1"},
    "workspace_snapshots": {**LABELLED, "id": "snap_2", "tree": {"files": []}},
    "kept_contents": {"sha256": "a" * 64, "snapshot_id": "snap_2"},
    "manifests": {**OWNED, "id": "man_1", "name": "shop", "workspace_path": "/shop", "document": {"name": "shop"}},
    "reproductions": {**LABELLED, "id": "repro_1", "status": "passed", "worker": "w"},
    "sandboxes": {
        **OWNED, "id": "sb_1", "name": "sb-1", "status": "running", "api_key": "key_1", "worker": "w",
        "document": {"labels": {}},
    },
    "approvals": {"id": 5, "project": "default", "asked_at": 1.5, "expires_at": 2.5, "request": "{}", "version": 4},
}  # fmt: skip
# What later builds put into the same migration, one after the other.
ASKED = "ALTER TABLE runs ADD COLUMN asked JSON"
WORKERS = (
    (
        "CREATE TABLE workers (name VARCHAR(64) NOT NULL PRIMARY KEY, address TEXT NOT NULL, certificate TEXT, "
        "beat INTEGER NOT NULL)"
    ),
    "CREATE TABLE shared_secrets (name VARCHAR(64) NOT NULL PRIMARY KEY, value VARCHAR(64) NOT NULL)",
)
INDEXED = (
    "DROP INDEX ix_runs_project",
    "CREATE INDEX ix_runs_project ON runs (project, id)",
    "DROP INDEX ix_runs_session_id",
    "CREATE INDEX ix_runs_session_id ON runs (project, session_id, id)",
)


def make_older(location: str) -> None:
    """Make a database as it was at 0001: SQLite's as an older build did, PostgreSQL's by that migration."""
    if "://" in location:
        made = Database(location)
        made.migrate("0001")
        made.close()
        return
    Path(location).parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(location)) as connection:
        connection.executescript(SCHEMA.read_text())


def rows_of(location: str) -> dict[str, list[dict[str, Any]]]:
    """Return all rows, by the columns that `ROWS` has of each table."""
    engine, found = create_engine(_url(location)), {}
    metadata = MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        for name, row in ROWS.items():
            columns = [metadata.tables[name].c[column] for column in row]
            found[name] = [dict(one._mapping) for one in connection.execute(select(*columns))]
    engine.dispose()
    return found


@pytest.mark.parametrize(
    "later",
    [(), (ASKED,), (ASKED, *WORKERS), (ASKED, *WORKERS, *INDEXED)],
    ids=["first", "asked", "workers", "indexes"],
)
def test_an_older_database_is_migrated_with_its_rows(location: str, later: Sequence[str]) -> None:
    """Whichever build wrote it, its tables are those of the code afterwards, and it goes back with its rows, too."""
    make_older(location)
    engine, metadata = create_engine(_url(location)), MetaData()
    with engine.begin() as connection:
        for statement in later:
            connection.execute(text(statement))
        metadata.reflect(connection)
        for name in sorted(ROWS, key=lambda name: name == "kept_contents"):
            connection.execute(metadata.tables[name].insert().values(dict(ROWS[name])))
        if later:
            runs = metadata.tables["runs"]
            connection.execute(runs.update().values(asked={"code": "1"}))
    engine.dispose()
    before = {name: [dict(row)] for name, row in ROWS.items()}
    assert rows_of(location) == before
    database = Database(location)
    assert database.version() == NEWEST
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        asked = connection.execute(text("SELECT asked FROM runs").columns(asked=JSON)).scalar()
    assert asked == ({"code": "1"} if later else None)
    assert rows_of(location) == before
    database.migrate("0001")
    assert rows_of(location) == before
    database.close()
