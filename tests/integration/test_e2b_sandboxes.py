"""E2B's control plane: the life of a sandbox, its pauses, and what a client may ask for twice."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloche.keeper import registry
from tests.harness.e2b import E2BService, serving, start
from tests.harness.service import end_sandboxes

pytest.importorskip("fastapi", reason="missing: the service's packages, which this environment lacks")
COUNT = "while :; do echo x >> /tmp/counted; sleep 0.02; done"


@pytest.fixture(scope="module")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service:
        yield service


@pytest.fixture(scope="module")
def client(e2b: E2BService) -> Iterator[httpx.Client]:
    """Return a client of the control plane."""
    with e2b.http(**{"X-API-KEY": e2b.key}) as client:
        yield client


def create(client: httpx.Client, version: str = "/v2", **fields: Any) -> str:
    """Create a sandbox and return its id."""
    made = client.post(f"{version}/sandboxes", json={"templateID": "base", **fields})
    assert made.status_code == 201, made.text
    return str(made.json()["sandboxID"])


def look(client: httpx.Client, sandbox: str) -> dict[str, Any]:
    """Return the description of a sandbox."""
    answer = client.get(f"/sandboxes/{sandbox}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def left_s(client: httpx.Client, sandbox: str) -> float:
    """Return the seconds until the end that is told."""
    return datetime.fromisoformat(look(client, sandbox)["endAt"]).timestamp() - time.time()


def change(client: httpx.Client, sandbox: str, what: str, **body: Any) -> int:
    """Ask for a change of a life, and return the status."""
    version = "/v2" if what == "connect" else ""
    return client.post(f"{version}/sandboxes/{sandbox}/{what}", json=body).status_code


def health(client: httpx.Client, sandbox: str) -> int:
    """Return the status of envd's health."""
    return client.get("/health", headers={"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "49983"}).status_code


def run(e2b: E2BService, sandbox: str, shell: str) -> str:
    """Run a command by the service's own API."""
    with e2b.service.client() as own:
        answer = own.post(f"/api/sandboxes/sb_{sandbox}/exec", json={"shell": shell})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["stdout"])


def begin(e2b: E2BService, sandbox: str, shell: str) -> None:
    """Start a process that goes on, by the service's own API."""
    with e2b.service.client() as own:
        answer = own.post(f"/api/sandboxes/sb_{sandbox}/processes", json={"shell": shell})
        assert answer.status_code == 201, answer.text


def until(is_so: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait until something is so."""
    ends = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


def counted(e2b: E2BService, sandbox: str) -> int:
    """Return how far a process has counted."""
    return int(run(e2b, sandbox, "wc -l < /tmp/counted").strip() or 0)


def test_what_renews_a_life_and_what_does_not(e2b: E2BService, client: httpx.Client) -> None:
    """A time-out is set to less, too; connect and a refresh never shorten; a query changes nothing."""
    assert left_s(client, create(client, version="")) == pytest.approx(15, abs=5)
    sandbox = create(client)
    before = look(client, sandbox)
    assert left_s(client, sandbox) == pytest.approx(300, abs=5)
    assert health(client, sandbox) == 204
    assert client.get("/v2/sandboxes").status_code == 200
    assert look(client, sandbox) == before
    for what, body, status, seconds in (
        ("timeout", {"timeout": 60}, 204, 60),
        ("connect", {"timeout": 10}, 200, 60),
        ("refreshes", {"duration": 20}, 204, 60),
        ("connect", {}, 200, 300),
        ("refreshes", {"duration": 900}, 204, 900),
        ("timeout", {"timeout": 30}, 204, 30),
    ):
        assert change(client, sandbox, what, **body) == status
        assert left_s(client, sandbox) == pytest.approx(seconds, abs=5)
    assert change(client, sandbox, "resume", timeout=60) == 409
    with e2b.service.client() as own:
        facts = own.get(f"/api/sandboxes/sb_{sandbox}").json()
    assert facts["secondsLeft"] == pytest.approx(30, abs=5)
    assert facts["labels"] == {"template": "base"}
    assert "e2b" not in facts
    assert change(client, sandbox, "timeout", timeout=0) == 204
    assert client.get(f"/sandboxes/{sandbox}").status_code == 404
    assert (health(client, sandbox), change(client, sandbox, "connect")) == (502, 404)
    assert client.delete(f"/sandboxes/{sandbox}").status_code == 404


def test_a_pause_stops_processes_and_the_clock(e2b: E2BService, client: httpx.Client) -> None:
    """What ran goes on after it; twice is refused; what a paused sandbox cannot do is refused in E2B's form."""
    sandbox = create(client, timeout=60, metadata={"test": "pause"})
    begin(e2b, sandbox, COUNT)
    until(lambda: counted(e2b, sandbox) > 3)
    assert (change(client, sandbox, "pause"), change(client, sandbox, "pause")) == (204, 409)
    facts = look(client, sandbox)
    assert (facts["state"], facts["pauseMode"], health(client, sandbox)) == ("paused", "full", 502)
    listed = client.get("/v2/sandboxes?state=paused&metadata=test%3Dpause").json()
    assert [row["sandboxID"] for row in listed] == [sandbox]
    assert client.get("/sandboxes?metadata=test%3Dpause").json() == []
    assert change(client, sandbox, "timeout", timeout=30) == 404
    assert change(client, sandbox, "connect", timeout=90) == 201
    assert left_s(client, sandbox) == pytest.approx(90, abs=5)
    count = counted(e2b, sandbox)
    until(lambda: counted(e2b, sandbox) > count)
    assert change(client, sandbox, "pause", memory=False) == 204
    assert look(client, sandbox)["pauseMode"] == "filesystem"
    assert change(client, sandbox, "connect") == 201
    count = counted(e2b, sandbox)
    assert count > 3
    assert run(e2b, sandbox, "pgrep -fc counted; true") != ""
    assert counted(e2b, sandbox) == count
    assert client.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_a_stream_is_cut_at_a_pause(client: httpx.Client) -> None:
    """A client whose stream breaks looks at once whether the sandbox runs: then it does not."""
    sandbox = create(client)
    token = client.post(f"/v2/sandboxes/{sandbox}/connect", json={}).json()["envdAccessToken"]
    order = json.dumps({"process": {"cmd": "/bin/sleep", "args": ["100"]}}).encode()
    headers = {
        "E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "49983", "X-Access-Token": token,
        "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
    }  # fmt: skip
    frame = struct.pack(">BI", 0, len(order)) + order
    starting = client.stream("POST", "/process.Process/Start", headers=headers, content=frame)
    with ThreadPoolExecutor(1) as threads, starting as answer:
        pieces = answer.iter_raw()
        assert b"start" in next(pieces)
        pausing = threads.submit(change, client, sandbox, "pause")
        with pytest.raises(httpx.TransportError):  # without the end of its last piece, or reset
            list(pieces)
        assert health(client, sandbox) == 502
        assert pausing.result() == 204
    assert client.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_a_sandbox_with_auto_pause_is_paused_at_each_end(e2b: E2BService, client: httpx.Client) -> None:
    """Its row says so at once; traffic wakes the one that shall be woken, and no other."""
    kept = create(client, timeout=1, autoPause=True)
    woken = create(client, timeout=1, autoPause=True, autoResume={"enabled": True})
    lifecycle = {"autoResume": True, "onTimeout": "pause"}
    assert look(client, woken)["lifecycle"] == lifecycle
    begin(e2b, kept, COUNT)
    until(lambda: look(client, kept)["state"] == "paused" and look(client, woken)["state"] == "paused")
    assert (health(client, kept), health(client, woken)) == (502, 204)
    assert (look(client, kept)["state"], look(client, woken)["state"]) == ("paused", "running")
    assert left_s(client, woken) > 30
    assert change(client, kept, "connect", timeout=1) == 201
    count = counted(e2b, kept)
    until(lambda: look(client, kept)["state"] == "paused")
    assert change(client, kept, "connect", timeout=60) == 201
    until(lambda: counted(e2b, kept) > count)
    for sandbox in (kept, woken):
        assert client.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_the_same_request_creates_one_sandbox(client: httpx.Client) -> None:
    """At the same time, and later; another request with its key is refused, and so is a field that is not known."""
    body = {"templateID": "base", "timeout": 60}

    def ask(**more: Any) -> httpx.Response:
        return client.post("/v2/sandboxes", json={**body, **more}, headers={"Idempotency-Key": "once-1"})

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: ask(), range(4)))
    assert {answer.status_code for answer in answers} == {201}
    [sandbox] = {answer.json()["sandboxID"] for answer in answers}
    refused = ask(timeout=61)
    assert (refused.status_code, refused.json()["error_code"]) == (409, "idempotency_request_mismatch")
    assert client.delete(f"/sandboxes/{sandbox}").status_code == 204
    for fields, status in (({"mcp": {"x": {}}}, 501), ({"iam": {"tokens": {"a": {}}}}, 501), ({"speed": 1}, 400)):
        assert client.post("/v2/sandboxes", json={**body, **fields}).status_code == status
    assert create(client, mcp=None, iam=None, network={}, volumeMounts=[], autoPause=False, secure=True)


def test_a_sandbox_that_ended_by_itself_is_found_by_nobody(e2b: E2BService, client: httpx.Client) -> None:
    """The next look finds it gone, not the one after a while."""
    sandbox = create(client, timeout=600)
    run_folder = e2b.service.environ["XDG_RUNTIME_DIR"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run_folder)
        for pid in registry.holders(f"sb-{sandbox}"):
            os.kill(pid, signal.SIGKILL)
    until(lambda: health(client, sandbox) == 502)
    assert client.get(f"/sandboxes/{sandbox}").status_code == 404
    assert (change(client, sandbox, "connect"), change(client, sandbox, "pause")) == (404, 404)
    assert sandbox not in client.get("/v2/sandboxes").text


def test_metrics_and_logs(e2b: E2BService, client: httpx.Client) -> None:
    """Values are measured when they are asked for, of one and of many."""
    sandbox = create(client)
    run(e2b, sandbox, "head -c 9000000 /dev/zero > /tmp/zero")
    [value] = client.get(f"/sandboxes/{sandbox}/metrics").json()
    assert value["cpuCount"] == 2
    assert (value["memTotal"], value["diskTotal"]) == (512 << 20, 512 << 20)
    assert value["memUsed"] > 1 << 20
    assert value["diskUsed"] > 9_000_000
    assert client.get(f"/sandboxes/{sandbox}/metrics?end=1").json() == []
    assert list(client.get(f"/sandboxes/metrics?sandbox_ids={sandbox},nothing").json()["sandboxes"]) == [sandbox]
    assert client.get(f"/v2/sandboxes/{sandbox}/logs").json()["logs"][0]["message"] == "the sandbox was created"


def test_a_sandbox_is_a_spare_one_that_got_its_name(e2b: E2BService, client: httpx.Client) -> None:
    """It is open before it is created."""
    names = Path(e2b.service.environ["XDG_RUNTIME_DIR"]) / "cloche"

    def locks() -> dict[int, str]:
        return {entry.inode(): entry.name for entry in os.scandir(names) if entry.name.endswith(".lock")}

    def is_spare() -> bool:
        """Create a sandbox, and tell whether it was there before."""
        before = locks()
        sandbox = create(client)
        (inode,) = (inode for inode, name in locks().items() if sandbox in name)
        assert client.delete(f"/sandboxes/{sandbox}").status_code == 204
        return before.get(inode, "").startswith(registry.SPARE)

    until(is_spare)  # not the first ones, if sandboxes of other kinds were used before


def test_a_paused_sandbox_outlives_its_service(tmp_path: Path) -> None:
    """Killed with SIGKILL: one that was paused, and one that its keeper paused meanwhile, go on after `connect`."""
    first = start(tmp_path)
    try:
        with first.http(**{"X-API-KEY": first.key}) as client:
            paused, expiring = create(client, timeout=60), create(client, timeout=2, autoPause=True)
            for sandbox in (paused, expiring):
                begin(first, sandbox, COUNT)
                until(lambda sandbox=sandbox: counted(first, sandbox) > 0)
            assert change(client, paused, "pause") == 204
        first.service.end(signal.SIGKILL)
        time.sleep(2)
        with serving(tmp_path, key=first.key) as second, second.http(**{"X-API-KEY": first.key}) as client:
            states = {row["sandboxID"]: row["state"] for row in client.get("/v2/sandboxes").json()}
            assert states == {paused: "paused", expiring: "paused"}
            for sandbox in (paused, expiring):
                assert change(client, sandbox, "connect") == 201
                count = counted(second, sandbox)
                until(lambda sandbox=sandbox, count=count: counted(second, sandbox) > count)
    finally:
        end_sandboxes(tmp_path)
