"""The queue of approvals in the database of records, whoever makes the table."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from cloche import InvalidRequest
from cloche.agent.approval import ApprovalRequest, Decision, Risk
from cloche.agent.queue import ApprovalQueue
from cloche.records.database import Database
from cloche.records.tables import Table

HIGH = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print(1)"}, rules={"runs_on": "local"})
YES = Decision(is_approved=True, by="test")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return this user's state folder, which is empty, and nothing names another place."""
    for name in ("CLOCHE_APPROVALS", "CLOCHE_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "cloche").mkdir(mode=0o700)
    return tmp_path / "cloche"


def schema_faults(database: Database) -> list[object]:
    """Return how the tables differ from what `tables.py` says."""
    with database.engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), Table.metadata))


@pytest.mark.parametrize("first", ["queue", "records"])
def test_whoever_comes_first_makes_the_same_table(state: Path, first: str) -> None:
    """An agent or the service; both can use it then."""
    queue = None if first == "records" else ApprovalQueue()
    database = Database()
    try:
        assert schema_faults(database) == []
        queue = queue or ApprovalQueue()
        number = queue._ask(HIGH)
        queue.decide(number, YES)
        assert (queue.entry(number).decision, queue.entry(number).state) == (YES, "approved")
        with database.reading() as session:
            row = session.connection().exec_driver_sql(f"SELECT project, version FROM approvals WHERE id = {number}")
            assert tuple(row.one()) == ("default", 2)
    finally:
        database.close()
    assert (state / "records.db").stat().st_mode & 0o777 == 0o600


def test_migrations_go_down_and_up_with_the_queue(state: Path) -> None:
    """Down leaves no table; up makes it anew."""
    database = Database()
    try:
        database.migrate("base")
        with closing(sqlite3.connect(state / "records.db")) as plain:
            names = plain.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'").fetchall()
        assert names == [("alembic_version",)]
        database.migrate()
        assert schema_faults(database) == []
    finally:
        database.close()


def test_several_processes_begin_with_both_at_once(state: Path) -> None:
    """Agents and services: all of them work."""
    agent = "from cloche.agent.queue import ApprovalQueue; ApprovalQueue().entries()"
    service = "from cloche.records.database import Database; Database().close()"
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in (agent, service, agent, service)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert (state / "records.db").exists()


def test_the_database_of_a_server_is_no_queue(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to name."""
    monkeypatch.setenv("CLOCHE_DATABASE", "postgresql://host/records")
    with pytest.raises(InvalidRequest, match="CLOCHE_DATABASE is not a file; name one for approvals"):
        ApprovalQueue()
    monkeypatch.setenv("CLOCHE_DATABASE", f"sqlite:///{state}/other.db")
    ApprovalQueue()
    assert (state / "other.db").exists()


def test_a_critical_row_of_the_service_takes_two_decisions(state: Path) -> None:
    """On the command line, too: a second yes that confirms nothing is refused, and one no is enough."""
    queue = ApprovalQueue()
    numbers = [queue._ask(replace(HIGH, risk=Risk.CRITICAL)) for _ in range(2)]
    with closing(sqlite3.connect(state / "records.db")) as database, database:
        database.execute("UPDATE approvals SET asked_by = 'key_1'")
    with pytest.raises(InvalidRequest, match="nothing to confirm"):
        queue.decide(numbers[0], YES, is_confirming=True)
    queue.decide(numbers[0], YES)
    entry = queue.entry(numbers[0])
    assert (entry.state, entry.request.is_confirmation) == ("waiting", True)
    with pytest.raises(InvalidRequest, match="was approved by test, and must be confirmed"):
        queue.decide(numbers[0], YES)
    queue.decide(numbers[0], YES, is_confirming=True)
    queue.decide(numbers[1], replace(YES, is_approved=False))
    assert [queue.entry(number).state for number in numbers] == ["approved", "denied"]
