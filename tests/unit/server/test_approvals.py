"""Waiting for approvals: one poller for all, bounded buffers, and no decision without its event."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloche.agent.approval import ApprovalRequest, Risk
from cloche.records.approvals import NewRequest, ask, request_text
from cloche.records.keys import create_key
from cloche.server import guard
from cloche.server.app import create_app
from cloche.server.approvals import MOST_BUFFERED, ApprovalChange, Follower
from cloche.server.service import Service, ServiceOptions, opened

REQUEST = request_text(ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print(1)"}))


@asynccontextmanager
async def service_in(folder: Path) -> AsyncIterator[Service]:
    """Hold a service with an empty database."""
    async with opened(str(folder / "records" / "records.db"), ServiceOptions(drain_s=1)) as service:
        yield service


async def add(service: Service, count: int = 1, *, project: str = "default") -> list[int]:
    """Ask for so many calls, in one transaction."""
    new = NewRequest(project=project, asked_by="key_agent", text=REQUEST, patience_s=60)
    return await service.write(lambda session: [ask(session, new).number for _ in range(count)])


@asynccontextmanager
async def client_of(service: Service, *scopes: str) -> AsyncIterator[httpx.AsyncClient]:
    """Hold a client of the application, without a socket between."""
    _, key = await asyncio.to_thread(create_key, service.database, name="k", scopes=scopes)
    transport = httpx.ASGITransport(create_app(service))
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        yield client


async def until(is_so: Any) -> None:
    """Wait until something is so."""
    ends = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


def test_all_who_wait_share_one_poller(tmp_path: Path) -> None:
    """Fifty get a change, for fewer looks into the database; who follows another project gets none; none is left."""

    async def main() -> None:
        async with service_in(tmp_path) as service:
            watch = service.approvals

            async def wait(project: str) -> ApprovalChange | None:
                async with watch.follow(project) as follower:
                    begun.append(project)
                    return await follower.next(30 if project == "default" else 1)

            begun: list[str] = []
            waiting = [asyncio.ensure_future(wait("default")) for _ in range(50)]
            foreign = asyncio.ensure_future(wait("other"))
            await until(lambda: len(begun) == 51)
            (number,) = await add(service)
            changes = await asyncio.gather(*waiting)
            assert {change and (change.name, change.number) for change in changes} == {("asked", number)}
            assert await foreign is None
            assert watch.looks < 25
            await until(lambda: watch._polling is None or watch._polling.done())

    asyncio.run(main())


def test_a_follower_that_does_not_read_is_bounded() -> None:
    """It is told that it fell behind, and then nothing."""

    async def main() -> None:
        follower = Follower("default", None)
        for number in range(MOST_BUFFERED + 10):
            follower.tell(ApprovalChange(version=number, number=number, project="default", name="asked", data="{}"))
        assert (follower.is_behind, len(follower._changes)) == (True, MOST_BUFFERED)
        assert await follower.next(1) is None

    asyncio.run(main())


def test_a_reader_of_events_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends, and nothing of it is left; the service stops at once for the others."""
    monkeypatch.setattr(guard, "SEND_S", 0.3)

    async def main() -> None:
        async with service_in(tmp_path) as service:
            _, key = await asyncio.to_thread(create_key, service.database, name="k", scopes=["read"])
            await add(service, 3)
            app = create_app(service)
            headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
            scope = {
                "type": "http", "method": "GET", "path": "/api/approvals/events", "query_string": b"", "root_path": "",
                "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
                "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"},
            }  # fmt: skip
            reading, stuck = asyncio.Event(), asyncio.Event()

            async def receive() -> dict[str, Any]:
                await asyncio.Event().wait()
                raise AssertionError

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    reading.set()
                    await stuck.wait()

            request = asyncio.ensure_future(app(scope, receive, send))  # type: ignore[arg-type]
            await asyncio.wait_for(reading.wait(), 30)
            assert len(service.approvals._followers) == 1
            await add(service, MOST_BUFFERED + 50)
            await asyncio.wait({request}, timeout=30)
            assert request.done()
            assert service.approvals._followers == set()
            request.exception()

            async with client_of(service, "read") as client:
                watching = asyncio.ensure_future(client.get("/api/approvals/1", params={"wait": 60}))
                await until(lambda: service.approvals._followers)
                service.begin_draining()
                assert (await asyncio.wait_for(watching, 30)).json()["status"] == "waiting"

    asyncio.run(main())


def test_nothing_is_decided_that_the_log_cannot_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the event cannot be written the request waits on; where the audit is off, the log's paths say so."""
    audit = tmp_path / "audit"
    audit.write_text("a file, where the log's folder should be")

    async def main() -> None:
        async with service_in(tmp_path) as service, client_of(service, "admin") as client:
            (number,) = await add(service)
            monkeypatch.setenv("CLOCHE_AUDIT", str(audit))
            answer = await client.post(f"/api/approvals/{number}/approve")
            assert (answer.status_code, answer.json()["type"][-12:]) == (503, "audit-failed")
            assert (await client.get("/api/audit/export")).status_code == 503
            assert (await client.get(f"/api/approvals/{number}")).json()["status"] == "waiting"
            monkeypatch.setenv("CLOCHE_AUDIT", "off")
            assert (await client.post(f"/api/approvals/{number}/approve")).json()["status"] == "approved"
            for verb, path in (("GET", ""), ("GET", "/export"), ("POST", "/verify")):
                off = await client.request(verb, f"/api/audit{path}")
                assert (off.status_code, off.json()["type"].rpartition("/")[2]) == (409, "audit-off")
                assert "CLOCHE_AUDIT=on" in off.json()["remedy"]

    asyncio.run(main())
