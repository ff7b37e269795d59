"""Each test of records runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.postgres import Server, postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """Serve PostgreSQL for all tests of records."""
    with postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where a database is that nobody has used; files beside it are in `tmp_path / "cloche"`."""
    if request.param == "sqlite":
        return os.fspath(tmp_path / "cloche" / "records.db")
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(tmp_path))
    server: Server = request.getfixturevalue("postgres_server")
    return server.new_database()
