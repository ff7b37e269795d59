"""The other workers of a database: which of them is taken for gone, and what becomes of its runs."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from cloche.records import runs as records
from cloche.records import workers
from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.runs import LOST
from cloche.records.writer import Writer
from cloche.server.peers import SILENT_S, Peers

ELSEWHERE = "0badcafe-0badcafe-1-1"  # a worker of another machine, of which nothing is seen but its row


def test_a_worker_of_another_machine_that_is_silent_for_a_minute_is_gone(tmp_path: Path) -> None:
    """Each rise of its number counts a minute from anew; then its run is an error that says why."""
    database = Database(tmp_path / "r.db")
    moment, run_id = 1000.0, new_id("run")

    async def main() -> None:
        nonlocal moment
        writer = Writer(database)
        peers = Peers(database, writer, workers.own_worker(), clock=lambda: moment)
        begin = records.begin(
            id=run_id, project="default", worker=ELSEWHERE, session_id=None, api_key=None,
            idempotency_key=None, request_sha256=None, summary={},
        )  # fmt: skip
        await writer.write(begin)
        await writer.write(partial(workers.join, name=ELSEWHERE, address="https://elsewhere:1", certificate=None))
        try:
            assert await peers.has_run(run_id) == ELSEWHERE
            moment += SILENT_S
            assert await peers.has_run(run_id) == ELSEWHERE
            assert await writer.write(partial(workers.note_alive, name=ELSEWHERE))
            moment += 1
            assert await peers.has_run(run_id) == ELSEWHERE
            moment += SILENT_S
            found = await peers.find(ELSEWHERE)
            assert found is not None
            assert found.name == ELSEWHERE
            moment += 0.1
            assert await peers.find(ELSEWHERE) is None
            assert await peers.has_run(run_id) is None
        finally:
            await asyncio.to_thread(writer.close)

    asyncio.run(main())
    with database.reading() as session:
        run = records.find(session, run_id, project="default")
        assert (run.status, run.document["error"]) == ("error", LOST)
        assert workers.serving(session) == []
    database.close()
