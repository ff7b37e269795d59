"""Small rows are written by the event loop: it waits for nobody, keeps the order, and the log stays short."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from cloche.records import runs, writer
from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.statements import Statements
from cloche.records.writer import Writer


def _begin(number: str, **more: Any) -> Statements:
    return runs.begin(
        id=number, project="default", worker="w", session_id=None, api_key="k",
        **{"idempotency_key": None, "request_sha256": None, "summary": {}, **more},
    )  # fmt: skip


def _statuses(database: Database) -> list[str]:
    with database.engine.connect() as connection:
        return [row[0] for row in connection.execute(text("SELECT status FROM runs ORDER BY status"))]


async def _turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_the_loop_waits_for_no_other_writer(tmp_path: Path) -> None:
    """While another process writes the loop goes on, and what was asked for is written afterwards in that order."""
    database, number = Database(tmp_path / "r.db"), new_id("run")

    async def main() -> None:
        rows = Writer(database)
        await rows.write(_begin(new_id("run"), idempotency_key="first"))
        with closing(sqlite3.connect(tmp_path / "r.db", isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            begun = asyncio.ensure_future(rows.write(_begin(number)))
            await _turns()
            ended = asyncio.ensure_future(rows.write(runs.finish(id=number, status="ok", document={})))
            repeated = asyncio.ensure_future(rows.write(_begin(new_id("run"), idempotency_key="first")))
            await _turns()
            assert not any(one.done() for one in (begun, ended, repeated))
            holder.execute("ROLLBACK")
        found = await asyncio.gather(begun, ended, repeated, return_exceptions=True)
        assert [type(one).__name__ for one in found] == ["NoneType", "NoneType", "IntegrityError"]
        await asyncio.to_thread(rows.close)

    asyncio.run(main())
    assert _statuses(database) == ["ok", "queued"]
    database.close()


def test_what_fails_in_the_loop_fails_nobody_else(tmp_path: Path) -> None:
    """Of rows that are asked for in one turn, the one that is refused is told so, and all others are written."""
    database = Database(tmp_path / "r.db")

    async def main() -> None:
        rows = Writer(database)
        asked = (rows.write(_begin(new_id("run"), idempotency_key=key)) for key in ("a", "b", "a", "c"))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one).__name__ for one in found] == ["NoneType", "NoneType", "IntegrityError", "NoneType"]
        await asyncio.to_thread(rows.close)

    asyncio.run(main())
    assert _statuses(database) == ["queued"] * 3
    database.close()


def test_small_rows_are_written_in_the_loops_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one, and what needs a session, are not; and the log is copied into the database as it grows."""
    monkeypatch.setattr(writer, "SLOW_S", 60.0)
    database, begun = Database(tmp_path / "r.db"), list[int]()
    event.listen(
        database.engine, "connect",
        lambda made, _: made.set_trace_callback(
            lambda query: begun.append(threading.get_ident()) if query == "BEGIN IMMEDIATE" else None
        ),
    )  # fmt: skip
    database.engine.dispose()
    document = {"stdout": "x" * 20_000}

    async def main() -> None:
        rows = Writer(database)
        await rows.write(_begin(new_id("run"), summary=document))
        await rows.write(_begin(new_id("run"), summary={"stdout": "x" * writer.MOST_SMALL}))
        await rows.write(lambda session: session.execute(text("SELECT 1")))
        mine = threading.get_ident()
        assert [one == mine for one in begun] == [True, False, False]
        for _ in range(3 * writer.MOST_OF_LOOP):
            await rows.write(_begin(new_id("run"), summary=document))
        assert sum(one == mine for one in begun) > 2 * writer.MOST_OF_LOOP
        await asyncio.to_thread(rows.close)

    most = 2 * writer.MOST_OF_LOOP * 2 * len(str(document))
    asyncio.run(main())
    assert (tmp_path / "r.db-wal").stat().st_size < most
    database.close()
