"""Each test of records runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness.postgres import Server, postgres


def _databases() -> list[str]:
    """Return which there are; PostgreSQL's programs refuse a user without a name, as that of `test_as_user.sh` is."""
    with suppress(KeyError):
        pwd.getpwuid(os.geteuid())
        return ["sqlite", "postgresql"]
    return ["sqlite"]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """Serve PostgreSQL for all tests of records."""
    with postgres() as server:
        yield server


@pytest.fixture(params=_databases())
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where a database is that nobody has used; files beside it are in `tmp_path / "cloche"`."""
    if request.param == "sqlite":
        return os.fspath(tmp_path / "cloche" / "records.db")
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(tmp_path))
    server: Server = request.getfixturevalue("postgres_server")
    return server.new_database()
