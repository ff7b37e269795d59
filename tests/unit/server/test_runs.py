"""The queue of runs: no room, no time, no database; and events for readers who come late, or do not read."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.core.events import OutputChunk, Sink, Started
from cloche.core.result import Result
from cloche.execution.concurrency import default_count
from cloche.records import database as records_database
from cloche.records import runs as records
from cloche.records.database import Database
from cloche.records.statements import Encoded
from cloche.records.writer import Writer
from cloche.server import run_rows
from cloche.server.run_rows import StoredRuns
from cloche.wire.events import MOST_EVENT_BYTES, EventLog
from cloche.wire.places import Places
from cloche.wire.problems import Refused
from cloche.wire.queue import SERVICE_STOPPED, RunOrder, RunQueue

OK = Result("out", "", 0, 0.1)
Start = Callable[[Sink | None], Awaitable[Result]]


def _order(start: Start, **more: Any) -> RunOrder:
    return RunOrder(project="default", api_key="key", session_id=None, start=start, summary={}, size=10, **more)


def _try(
    tmp_path: Path, attempt: Callable[[RunQueue], Awaitable[None]], *, queue_limit: int = 100, deadline_s: float = 60
) -> Database:
    """Attempt something with a queue over a real database, and return that."""
    database = Database(tmp_path / "r.db")

    async def main() -> None:
        writer = Writer(database)
        await attempt(RunQueue(StoredRuns(writer, "worker"), queue_limit=queue_limit, deadline_s=deadline_s))
        await asyncio.to_thread(writer.close)

    asyncio.run(main())
    return database


def _rows(database: Database) -> list[records.RunFacts]:
    with database.reading() as session:
        return [records.facts(row) for row in session.query(records.StoredRun).order_by("id")]


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - turns of this loop, not time
        await asyncio.sleep(0)


def test_a_refused_run_is_told_of(tmp_path: Path) -> None:
    """Where there is no room for it, and where it was taken and no place came: then nobody may wait for the answer."""
    go, told = asyncio.Event(), list[tuple[str, str, bool]]()

    async def hold(_: Sink | None) -> Result:
        await go.wait()
        return OK

    async def note_refusal(error: BaseException, **fields: Any) -> None:
        told.append((str(error), fields["code"], "api_run" in fields))

    async def attempt(queue: RunQueue) -> None:
        queue._places, queue._note_refusal = Places(1), note_refusal
        holding = await queue.submit(_order(hold))
        await _until(lambda: queue.running == 1)
        waiting = await queue.submit(_order(hold, asked={"code": "late"}))
        with pytest.raises(Refused, match="1 runs are waiting already"):
            await queue.submit(_order(hold, asked={"code": "full"}))
        await asyncio.wait({waiting.task})
        go.set()
        await holding.wait()

    _try(tmp_path, attempt, queue_limit=1, deadline_s=0.1)
    assert [(code, has_id) for _, code, has_id in told] == [("full", False), ("late", True)]


def test_what_never_ran_gives_its_idempotency_key_back(tmp_path: Path) -> None:
    """Where no place came, or no sandbox started, the same key runs; where code began, it stays that run's."""
    go = asyncio.Event()

    async def hold(_: Sink | None) -> Result:
        await go.wait()
        return OK

    def failing(error: Exception, *, begins: bool = False) -> Start:
        async def start(sink: Sink | None) -> Result:
            assert sink is not None
            if begins:
                sink(Started())
            raise error

        return start

    async def attempt(queue: RunQueue) -> None:
        queue._places = Places(1)
        holding = await queue.submit(_order(hold))
        await _until(lambda: queue.running == 1)
        with pytest.raises(Refused, match="no place"):
            await (await queue.submit(_order(hold, idempotency_key="busy"))).wait()
        cancelled = await queue.submit(_order(hold, idempotency_key="cancelled"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled.wait(), return_exceptions=True)
        go.set()
        await holding.wait()
        with pytest.raises(StartFailed):
            await (await queue.submit(_order(failing(StartFailed("no")), idempotency_key="start"))).wait()
        for begun, unknown in (("begun", StartFailed("no")), ("lost", OutcomeUnknown("gone"))):
            live = await queue.submit(_order(failing(unknown, begins=begun == "begun"), idempotency_key=begun))
            with pytest.raises(type(unknown)):
                await live.wait()
            with pytest.raises(IntegrityError):
                await queue.submit(_order(hold, idempotency_key=begun))
        for free in ("busy", "cancelled", "start"):
            done = await (await queue.submit(_order(hold, idempotency_key=free))).wait()
            assert json.loads(done)["status"] == "ok"

    rows = _rows(_try(tmp_path, attempt, deadline_s=0.05))
    assert [row.status for row in rows].count("ok") == 4


def test_a_full_queue_refuses_before_anything_is_kept(tmp_path: Path) -> None:
    """With a time to come back; what has a place, or waits for one, is not touched."""
    go, places = asyncio.Event(), default_count() - 1

    async def start(_: Sink | None) -> Result:
        await go.wait()
        return OK

    async def attempt(queue: RunQueue) -> None:
        live = []
        for number in range(places):
            live.append(await queue.submit(_order(start)))
            await _until(lambda number=number: queue.running > number)
        live.append(await queue.submit(_order(start)))
        with pytest.raises(Refused) as refused:
            await queue.submit(_order(start))
        assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "2"})
        go.set()
        assert {json.loads(await one.wait())["status"] for one in live} == {"ok"}

    assert len(_rows(_try(tmp_path, attempt, queue_limit=1))) == places + 1


def test_who_waits_too_long_is_refused_and_noted(tmp_path: Path) -> None:
    """The deadline is that of the queue, not of the run."""

    async def forever(_: Sink | None) -> Result:
        await asyncio.Event().wait()
        raise AssertionError

    async def attempt(queue: RunQueue) -> None:
        live = [await queue.submit(_order(forever)) for _ in range(default_count())]
        with pytest.raises(Refused, match="no place became free"):
            await live[-1].wait()
        await queue.drain(0)

    errors = [row.document["error"] for row in _rows(_try(tmp_path, attempt, deadline_s=0.05))]
    waited = "no place became free within 0.05 s; nothing was run"
    assert sorted(errors) == sorted([*[SERVICE_STOPPED] * (default_count() - 1), waited])


def test_a_run_without_a_row_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the end of one that runs is written once the database can be used again; its client has the result."""
    monkeypatch.setattr(records_database, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(run_rows, "RETRY_S", 0.05)
    started: list[str] = []

    async def attempt(queue: RunQueue) -> None:
        holder = sqlite3.connect(tmp_path / "r.db", isolation_level=None, check_same_thread=False)

        async def first(_: Sink | None) -> Result:
            holder.execute("BEGIN IMMEDIATE")
            return OK

        async def second(_: Sink | None) -> Result:
            started.append("second")
            return OK

        live = await queue.submit(_order(first))
        assert json.loads(await live.wait())["stdout"] == "out"
        with pytest.raises(records_database.RecordsFailed, match="another process"):
            await queue.submit(_order(second))
        holder.execute("ROLLBACK")
        holder.close()
        await queue.drain(60)

    database = _try(tmp_path, attempt)
    assert started == []
    assert [(row.status, row.document["stdout"]) for row in _rows(database)] == [("ok", "out")]


def test_events_are_bounded_and_go_on_after_any(tmp_path: Path) -> None:
    """A reader who comes late is told how many are missing; one beyond the end waits, and takes no processor."""

    async def start(sink: Sink | None) -> Result:
        assert sink is not None
        for _ in range(30):
            sink(OutputChunk(stream="stdout", data=b"x" * (MOST_EVENT_BYTES // 10)))
        return OK

    async def attempt(queue: RunQueue) -> None:
        live = await queue.submit(_order(start))
        await live.wait()
        await _until(lambda: live.events.is_over)
        seen = [event async for event in live.events.read(0, heartbeat_s=60)]
        assert [event.name for event in seen if event][:2] == ["missed", "output"]
        assert sum(len(event.data) for event in seen if event) <= 2 * MOST_EVENT_BYTES
        assert [event.name async for event in live.events.read(30, heartbeat_s=60) if event] == ["result"]
        log, ticks = EventLog(), 0
        async for _ in log.read(10**9, heartbeat_s=0.01):
            if (ticks := ticks + 1) == 3:
                log.end()

    _try(tmp_path, attempt)


def test_an_order_may_wait_for_its_own_time(tmp_path: Path) -> None:
    """Instead of the queue's; then nothing of it ran, and the next one gets the place."""
    go, ran = asyncio.Event(), []

    async def attempt(queue: RunQueue) -> None:
        queue._places = Places(1)

        async def hold(_: Sink | None) -> Result:
            await go.wait()
            return OK

        async def work(_: Sink | None) -> Result:
            ran.append(1)
            return OK

        holding = await queue.submit(_order(hold))
        await _until(lambda: queue.running == 1)
        late = await queue.submit(_order(work, ends_waiting=asyncio.get_running_loop().time() + 0.05))
        with pytest.raises(Refused, match="nothing was run") as raised:
            await late.wait()
        assert (raised.value.status_code, ran) == (503, [])
        go.set()
        await holding.wait()
        await (await queue.submit(_order(work))).wait()
        assert ran == [1]

    _try(tmp_path, attempt)


def test_an_order_may_write_its_own_document(tmp_path: Path) -> None:
    """One for the caller, and one for the row."""

    async def work(_: Sink | None) -> Result:
        return OK

    async def encode(run_id: str, result: Result) -> tuple[str, Encoded]:
        return result.stdout * 2, Encoded(json.dumps({"id": run_id, "short": True}))

    async def attempt(queue: RunQueue) -> None:
        assert await (await queue.submit(_order(work, encode=encode, has_events=False))).wait() == "outout"

    (row,) = _rows(_try(tmp_path, attempt))
    assert (row.status, row.document["short"]) == ("ok", True)


@pytest.mark.parametrize("turns", range(4))
def test_a_reader_is_cancelled_though_an_event_comes_at_once(turns: int) -> None:
    """In whatever turn of the loop after an event the reader is cancelled, it ends."""

    async def main() -> None:
        log = EventLog()

        async def read() -> None:
            async for _ in log.read(0, heartbeat_s=60):
                pass

        reader = asyncio.ensure_future(read())
        for _ in range(4):
            await asyncio.sleep(0)
        log.add("output", {})
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader], timeout=5)
        assert reader.cancelled()

    asyncio.run(main())
