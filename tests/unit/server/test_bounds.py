"""What one caller, or one program, can make the service hold or wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche.core.result import Result
from cloche.records.database import Database, Writer
from cloche.records.reproductions import Reproductions
from cloche.server import runs
from cloche.server.events import MOST_AT_ONCE, MOST_EVENT_BYTES, EventLog
from cloche.server.pages import show_output
from cloche.server.places import Places
from cloche.server.problems import Refused
from cloche.server.routes import sandbox
from cloche.server.runs import RunOrder, RunQueue


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Open a new one."""
    found = Database(tmp_path / "r.db")
    yield found
    found.close()


def _read(log: EventLog, after: int) -> list[tuple[int, str]]:
    async def work() -> list[tuple[int, str]]:
        return [(one.number, one.name) async for one in log.read(after, heartbeat_s=1) if one is not None]

    return asyncio.run(work())


def test_a_reader_of_events_holds_few_and_costs_little() -> None:
    """Each gets what follows its number, whatever that is; tiny events count with what they take beside their data."""
    log = EventLog()
    for _ in range(10_000):
        log.add("output", "{}")
    assert log.size <= MOST_EVENT_BYTES
    assert len(log._following(0)) == len(log._following(9_000)) == MOST_AT_ONCE
    log.end()
    found = _read(log, 0)
    assert (found[0][1], found[-1], len(found) < 5_000) == ("missed", (10_000, "output"), True)
    assert [number for number, _ in found] == list(range(found[0][0], 10_001))
    assert _read(log, 9_998) == [(9_999, "output"), (10_000, "output")]
    assert _read(log, 10_000) == _read(log, 1 << 70) == []


def test_results_that_were_given_are_kept_up_to_a_bound(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight runs with files of 15 MB held 300 MB for a minute: the oldest are given up."""
    monkeypatch.setattr(runs, "MOST_KEPT_BYTES", 3 << 20)
    writer = Writer(database)

    async def start(_: object) -> Result:
        return _result("x" * (900 << 10))

    async def work() -> list[bool]:
        queue = RunQueue(writer, "worker", queue_limit=8, deadline_s=5)
        made = []
        for _ in range(5):
            made.append(await queue.submit(_order(start)))
            await made[-1].wait()
            await asyncio.sleep(0)
        return [queue.find(one.id, "default") is not None for one in made]

    kept = asyncio.run(work())
    writer.close()
    assert (kept[0], kept[-1]) == (False, True)


def test_keys_take_turns(database: Database) -> None:
    """A key that fills the queue leaves room in it, and another one's run passes those that wait."""
    writer, begun, has_begun, may_end = Writer(database), [], asyncio.Event(), asyncio.Event()

    async def work() -> None:
        queue = RunQueue(writer, "worker", queue_limit=8, deadline_s=5)
        queue._places = Places(1)

        def order(key: str) -> RunOrder:
            async def start(_: object) -> Result:
                begun.append(key)
                has_begun.set()
                await may_end.wait()
                return _result()

            return _order(start, key=key)

        made = [await queue.submit(order("a"))]
        await has_begun.wait()
        made += [await queue.submit(order("a")) for _ in range(6)]
        with pytest.raises(Refused, match="wait already"):
            await queue.submit(order("a"))
        made.append(await queue.submit(order("b")))
        may_end.set()
        await asyncio.gather(*(one.wait() for one in made))

    asyncio.run(work())
    writer.close()
    assert begun.index("b") < 5  # it would have been the last


def test_a_place_that_nobody_waits_for_any_more_goes_on() -> None:
    """Whoever is cancelled while it waits, or just when it gets its place, takes none with it."""

    async def work() -> None:
        places = Places(1)
        await places.take("a")
        gone, given = (asyncio.ensure_future(places.take(key)) for key in ("b", "c"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        places.release()  # to c, which is cancelled before it runs again
        given.cancel()
        await asyncio.gather(gone, given, return_exceptions=True)
        async with asyncio.timeout(5):
            await places.take("d")

    asyncio.run(work())


def test_a_picture_that_is_none_costs_no_time() -> None:
    """Eight million spaces are looked at once: each way to divide them would be tried for days."""
    begun = time.monotonic()
    for text in (" " * 7_000_000 + "!", "=" + " " * 7_000_000 + "!"):
        assert show_output({"data": {"image/png": text}}, 0).kind == "text"
    assert time.monotonic() - begun < 10
    assert show_output({"data": {"image/png": "YQ==\n"}}, 0).kind == "picture"


def test_who_asks_at_once_is_answered_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred who ask for backends take one thread, and not all that there are."""
    looks: list[str] = []

    def describe(name: str, _: object) -> Any:
        looks.append(name)
        time.sleep(0.05)
        return SimpleNamespace(available=False, level=None, level_source="measured", reason="", remedy="")

    monkeypatch.setattr(sandbox, "describe", describe)
    monkeypatch.setattr(sandbox, "_detected", {})

    async def work() -> None:
        settings: Any = SimpleNamespace(images={}, remotes={})
        await asyncio.gather(*(sandbox._backend("docker", settings) for _ in range(100)))

    asyncio.run(work())
    assert looks == ["docker"]


def test_a_reproduction_without_room_does_not_stay_running(database: Database) -> None:
    """It is an error with the reason, and can be run again."""
    records = Reproductions(database)
    made = records.create({"title": "t", "code": "1"})
    records.start(made["id"])
    assert records.give_up(made["id"], "no room")["error"] == "no room"
    assert records.start(made["id"])["status"] == "running"


def _result(stdout: str = "") -> Result:
    return Result(status="ok", exit_code=0, stdout=stdout, stderr="", duration=0.0)


def _order(start: Any, key: str | None = None) -> RunOrder:
    return RunOrder(project="default", api_key=key, session_id=None, start=start, summary={}, size=1)
