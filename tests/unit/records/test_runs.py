"""Records of runs are kept for a time, and a number of them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from cloche.records import runs
from cloche.records.database import Database
from cloche.records.ids import moment, new_id
from cloche.records.statements import Encoded
from cloche.records.tables import StoredRun
from cloche.records.writer import Writer


def test_old_runs_are_forgotten_and_unfinished_ones_are_not(location: str) -> None:
    """By age, then by number, the oldest first."""
    database = Database(location)
    now = time.time()
    with database.writing() as session:
        for days, status in ((40, "ok"), (40, "queued"), (3, "ok"), (2, "error"), (1, "ok")):
            ended = None if status == "queued" else moment(now - days * 86_400)
            row = {"project": "default", "created_at": moment(now), "session_id": None, "worker": "w", "document": {}}
            session.add(StoredRun(id=new_id("run"), status=status, ended_at=ended, **row))
            session.flush()
            time.sleep(0.002)  # ids sort by milliseconds
    with database.writing() as session:
        assert runs.forget_old(session, retention_s=30 * 86_400, max_runs=2) == 2
    with database.reading() as session:
        assert [row.status for row in session.query(StoredRun).order_by(StoredRun.id)] == ["queued", "error", "ok"]
    database.close()


def test_a_list_has_the_index_that_it_sorts_by(tmp_path: Path) -> None:
    """The newest runs of a project, and of a label in it, are found without sorting all."""
    database = Database(tmp_path / "r.db")
    with database.reading() as session:
        for where in ("project = 'p'", "project = 'p' AND session_id = 's'"):
            query = f"EXPLAIN QUERY PLAN SELECT document FROM runs WHERE {where} ORDER BY id DESC LIMIT 50"
            plan = " ".join(row[3] for row in session.execute(text(query)))
            assert "USING INDEX" in plan, plan
            assert "TEMP B-TREE" not in plan, plan
    database.close()


def test_rows_of_runs_need_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver writes what a session writes, column by column, and refuses the same."""
    opened: list[object] = []
    event.listen(Session, "after_begin", lambda *_: opened.append(1))
    database, sha256, ids = Database(tmp_path / "r.db"), b"\0" * 32, [new_id("run") for _ in range(2)]
    monkeypatch.setattr(runs, "now", lambda: moment(0))

    def work(number: int) -> Any:
        key = f"key {number}"
        begun = runs.begin(
            id=ids[number], project="default", worker="w", session_id=None, api_key="k", idempotency_key=key,
            request_sha256=sha256, summary={"language": "\ud83d\ude00"}, asked=None if number else {"code": "1"},
        )  # fmt: skip
        return begun + runs.finish(id=ids[number], status="ok", document=Encoded('{"stdout": "1"}'))

    async def write(*works: Any) -> list[Any]:
        writer = Writer(database)
        found = await asyncio.gather(*map(writer.write, works), return_exceptions=True)
        await asyncio.to_thread(writer.close)
        return found

    def rows() -> list[tuple[Any, ...]]:
        with database.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT * FROM runs ORDER BY id"))]

    assert asyncio.run(write(work(0), work(1))) == [None, None]
    by_driver = rows()
    (repeated,) = asyncio.run(write(work(0)))
    assert (type(repeated).__name__, opened, len(by_driver)) == ("IntegrityError", [], 2)
    with database.writing() as session:
        session.query(StoredRun).delete()
        for number in range(2):
            work(number)(session)
    assert rows() == by_driver
    database.close()
