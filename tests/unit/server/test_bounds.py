"""What one caller, or one program, can make the service hold or wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche.backends.host import measure_host
from cloche.core.errors import InvalidRequest
from cloche.core.fleet import FleetSettings
from cloche.core.result import Result
from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.keys import create_key
from cloche.records.reproductions import Reproductions
from cloche.records.writer import Writer
from cloche.server import guard, sandbox_rows
from cloche.server.app import create_app
from cloche.server.capacity import ceilings_of, check_capacity
from cloche.server.pages import show_output
from cloche.server.routes import sandbox
from cloche.server.run_rows import StoredRuns
from cloche.server.service import ServiceOptions, opened
from cloche.wire import queue as queue_of_runs
from cloche.wire.events import MOST_AT_ONCE, MOST_EVENT_BYTES, EventLog
from cloche.wire.load import WireLoad
from cloche.wire.places import Places
from cloche.wire.problems import Refused
from cloche.wire.queue import RunOrder, RunQueue


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
    monkeypatch.setattr(queue_of_runs, "MOST_KEPT_BYTES", 3 << 20)
    writer = Writer(database)

    async def start(_: object) -> Result:
        return _result("x" * (900 << 10))

    async def work() -> list[bool]:
        queue = RunQueue(StoredRuns(writer, "worker"), queue_limit=8, deadline_s=5)
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
        queue = RunQueue(StoredRuns(writer, "worker"), queue_limit=8, deadline_s=5)
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
        with pytest.raises(Refused, match="are waiting already"):
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
        places.release("a")  # to c, which is cancelled before it runs again
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
        settings: Any = SimpleNamespace(images={}, remotes={}, fleet=FleetSettings())
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


def _order(start: Any, key: str | None = None, size: int = 1) -> RunOrder:
    return RunOrder(project="default", api_key=key, session_id=None, start=start, summary={}, size=size)


def test_one_key_never_has_all_places() -> None:
    """Runs that take long, however many one key has, keep no other key's run waiting for a place."""

    async def work() -> None:
        places = Places(4)
        taken = [asyncio.ensure_future(places.take("a")) for _ in range(9)]
        await asyncio.sleep(0)
        assert sum(one.done() for one in taken) == 3
        async with asyncio.timeout(5):
            await places.take("b")
        late = asyncio.ensure_future(places.take("b"))
        await asyncio.sleep(0)
        places.release("b")
        async with asyncio.timeout(5):
            await late  # which came after a's six, and a has its share
        places.release("a")
        await asyncio.sleep(0)
        assert sum(one.done() for one in taken) == 4
        for one in taken:
            one.cancel()
        await asyncio.gather(*taken, return_exceptions=True)
        only = Places(1)
        await only.take("a")

    asyncio.run(work())


def test_large_requests_of_one_key_leave_room_in_the_queue(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Bytes that wait are shared as places in the queue are: a few requests with large inputs are no full queue."""
    monkeypatch.setattr(queue_of_runs, "MOST_QUEUED_BYTES", 4_000)
    writer, may_end = Writer(database), asyncio.Event()

    async def start(_: object) -> Result:
        await may_end.wait()
        return _result()

    async def work() -> None:
        queue = RunQueue(StoredRuns(writer, "worker"), queue_limit=100, deadline_s=60)
        queue._places = Places(1)
        made = [await queue.submit(_order(start, key="a", size=1_000)) for _ in range(1)]
        await asyncio.sleep(0)  # it has its place
        made += [await queue.submit(_order(start, key="a", size=1_000)) for _ in range(3)]
        with pytest.raises(Refused, match="are waiting already"):
            await queue.submit(_order(start, key="a", size=1_000))
        made.append(await queue.submit(_order(start, key="b", size=1_000)))
        may_end.set()
        await asyncio.gather(*(one.wait() for one in made))

    asyncio.run(work())
    writer.close()


def test_bodies_of_one_key_leave_memory_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends large bodies slowly, and never to the end, keeps nobody else's body out."""
    monkeypatch.setattr(guard, "MOST_HELD", 100_000)
    names = iter("aab")

    async def identify(_: object) -> Any:
        return SimpleNamespace(key_id=next(names))

    async def app(_: object, receive: Any, __: object) -> None:
        while (await receive())["more_body"]:
            pass

    async def work() -> None:
        door = guard.Guard(app, names=["x"], identify=identify)  # type: ignore[arg-type]
        may_end = asyncio.Event()

        async def request(size: int, *, is_slow: bool = False) -> None:
            pieces = [{"type": "http.request", "body": bytes(size), "more_body": is_slow}]

            async def receive() -> Any:
                if not pieces:
                    await may_end.wait()
                    return {"type": "http.request", "body": b"", "more_body": False}
                return pieces.pop()

            headers = [(b"host", b"x"), (b"content-length", str(size).encode())]
            scope = {"type": "http", "method": "POST", "path": "/api/code/exec", "headers": headers}
            await door(scope, receive, lambda _: asyncio.sleep(0))

        slow = asyncio.ensure_future(request(70_000, is_slow=True))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="other requests use all the memory"):
            await request(10_000)
        await request(20_000)  # another key's
        may_end.set()
        await slow
        assert door._held.held == 0

    asyncio.run(work())


def test_sandboxes_and_wires_of_one_key_leave_room_for_others(database: Database) -> None:
    """One key has most of what there is, and never all."""
    room = sandbox_rows.Room()

    def open_one(key: str) -> None:
        row = {"id": new_id("sb"), "project": "default", "name": new_id("sb"), "worker": "w", "api_key": key}
        with database.writing() as session:
            sandbox_rows._begin(session, room=room, row=row, document={}, key=None)

    for _ in range(room.most_of_key):
        open_one("a")
    with pytest.raises(Refused, match="56 sandboxes of this key"):
        open_one("a")
    open_one("b")
    assert (room.most_of_key, room.most_attached, room.most) == (56, 60, 64)
    load = WireLoad()
    with ExitStack() as stack:
        for _ in range(24):
            stack.enter_context(load.connection("a"))
        with pytest.raises(Refused, match="24 wires are open"):
            stack.enter_context(load.connection("a"))
        stack.enter_context(load.connection("b"))
        load.hold("a", 96 << 20)
        with pytest.raises(Refused, match="all memory"):
            load.hold("a", 1)
        load.hold("b", 16 << 20)


def test_more_sandboxes_than_a_machine_carries_are_refused() -> None:
    """The least of memory, processes and files bounds them, and the error says which."""
    ceilings = ceilings_of(memory_bytes=1 << 30, processes=4_000, files=1_024)
    assert ceilings == {"memory": 64, "processes": 1_000, "open files (ulimit -Hn)": 128}
    with pytest.raises(InvalidRequest, match=r"--sandboxes 1000000000: this machine carries \d+, by its \w+"):
        check_capacity(10**9)


def test_the_host_is_measured_before_anybody_asks(tmp_path: Path) -> None:
    """What takes seconds the first time is done when the service takes requests, so that no first run keeps others."""
    measure_host.cache_clear()

    async def work() -> None:
        async with opened(str(tmp_path / "records" / "r.db"), ServiceOptions(drain_s=1)):
            assert measure_host.cache_info().currsize == 1

    asyncio.run(work())


def test_a_client_that_goes_away_is_no_error_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half a body is what somebody did, so it fills no log with errors and counts as no fault of the service."""
    log = logging.getLogger("cloche.service")
    log.addHandler(caplog.handler)
    statuses = list[int]()

    async def work() -> None:
        async with opened(str(tmp_path / "records" / "r.db"), ServiceOptions(drain_s=1)) as service:
            _, text = create_key(service.database, name="key", scopes=("run",))
            headers = [
                (b"host", b"localhost"), (b"authorization", f"Bearer {text}".encode()), (b"content-length", b"9000"),
                (b"content-type", b"application/json"),
            ]  # fmt: skip
            pieces = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
            scope = {
                "type": "http", "method": "POST", "path": "/api/code/exec", "headers": headers, "query_string": b"",
                "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http", "http_version": "1.1",
                "root_path": "",
            }  # fmt: skip

            async def receive() -> Any:
                return pieces.pop()

            async def send(message: Any) -> None:
                statuses.append(message.get("status", 0))

            await create_app(service)(scope, receive, send)

    asyncio.run(work())
    assert statuses[0] == 400
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []
