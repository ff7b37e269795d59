"""Records of runs are kept for a time, and a number of them."""

import time
from pathlib import Path

from sqlalchemy import text

from cloche.records import runs
from cloche.records.database import Database
from cloche.records.ids import moment, new_id
from cloche.records.tables import Run


def test_old_runs_are_forgotten_and_unfinished_ones_are_not(location: str) -> None:
    """By age, then by number, the oldest first."""
    database = Database(location)
    now = time.time()
    with database.writing() as session:
        for days, status in ((40, "ok"), (40, "queued"), (3, "ok"), (2, "error"), (1, "ok")):
            ended = None if status == "queued" else moment(now - days * 86_400)
            row = {"project": "default", "created_at": moment(now), "session_id": None, "worker": "w", "document": {}}
            session.add(Run(id=new_id("run"), status=status, ended_at=ended, **row))
            session.flush()
            time.sleep(0.002)  # ids sort by milliseconds
    with database.writing() as session:
        assert runs.forget_old(session, retention_s=30 * 86_400, most=2) == 2
    with database.reading() as session:
        assert [row.status for row in session.query(Run).order_by(Run.id)] == ["queued", "error", "ok"]
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
