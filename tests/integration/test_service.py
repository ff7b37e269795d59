"""The service: runs over HTTP, who may do what, and that no record is lost. One real server for most of it."""

from __future__ import annotations

import base64
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.harness.service import Service, serving, start

PRINT = {"code": "print(1)"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve for all tests of this module."""
    with serving(tmp_path_factory.mktemp("service")) as one:
        yield one


@pytest.fixture(scope="module")
def admin(service: Service) -> Iterator[httpx.Client]:
    """Be a client with the first key."""
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def runner(service: Service) -> Iterator[httpx.Client]:
    """Be a client with scope run alone."""
    with service.client(service.new_key("run")) as client:
        yield client


def test_a_run_is_answered_whole_and_kept(admin: httpx.Client) -> None:
    """Output, value, files in and out, and what was enforced; the record is the same but for the files' contents."""
    asked = {
        "code": "import sys; open('out.txt', 'w').write(open('in.txt').read()); print(sys.argv[1], input()); 6 * 7",
        "argv": ["word"], "stdin": "line", "files": [{"path": "in.txt", "base64": base64.b64encode(b"in").decode()}],
        "returnFiles": True, "sessionId": "agent-7", "memoryLimit": "128m",
    }  # fmt: skip
    done = admin.post("/api/code/exec", json=asked)
    assert done.status_code == 200, done.text
    result = done.json()
    assert (result["status"], result["stdout"], result["value"]) == ("ok", "word line\n", 42)
    assert {"path": "out.txt", "base64": base64.b64encode(b"in").decode()}.items() <= result["files"][0].items()
    assert result["enforcement"]["network"]["state"] == "enforced"
    kept = admin.get(f"/api/runs/{result['id']}").json()
    assert "base64" not in kept["files"][0]
    assert kept["stdout"] == result["stdout"]
    listed = admin.get("/api/runs", params={"sessionId": "agent-7"}).json()
    assert [run["id"] for run in listed["items"]] == [result["id"]]


WRONG = {"code": 1, "nonsense": 2}
REQUESTS: tuple[tuple[dict[str, str], Any], ...] = (
    ({}, PRINT), ({}, WRONG), ({}, []), ({}, {**PRINT, "level": "process"}),
    ({"Accept": "text/html"}, WRONG), ({"Authorization": "Bearer cloche_no"}, PRINT), ({"Idempotency-Key": ""}, PRINT),
    ({"Content-Type": "text/plain"}, PRINT), ({"Prefer": "respond-async"}, PRINT), ({"Host": "elsewhere"}, PRINT),
)  # fmt: skip


def test_the_route_of_runs_answers_as_the_frameworks_own(service: Service, runner: httpx.Client) -> None:
    """With a query the framework takes the request, without one nothing of it: the answers are the same."""

    def ask(client: httpx.Client, query: str, headers: dict[str, str], body: Any) -> tuple[Any, ...]:
        done = client.post(f"/api/code/exec{query}", json=body, headers=headers)
        names = {name: value for name, value in done.headers.items() if name not in ("date", "content-length")}
        names["x-request-id"], names["location"] = "", names.get("location", "").rpartition("_")[0]
        fields = done.json()
        shown = fields if done.status_code >= 400 else (sorted(fields), fields["status"], fields.get("stdout"))
        return done.status_code, names, shown

    with service.client(service.new_key("read")) as reader:
        for headers, body in REQUESTS:
            assert ask(runner, "", headers, body) == ask(runner, "?stream=0", headers, body)
        assert ask(reader, "", {}, PRINT) == ask(reader, "?stream=0", {}, PRINT)


def test_a_form_brings_files(runner: httpx.Client) -> None:
    """A file of a multipart request is there under its name."""
    form = {"request": json.dumps({"code": "print(open('data.csv').read())"})}
    done = runner.post("/api/code/exec", data=form, files={"file": ("data.csv", b"1,2")})
    assert done.json()["stdout"] == "1,2\n", done.text


def test_events_come_while_it_runs(runner: httpx.Client, service: Service) -> None:
    """The first output is there before the program goes on, which waits for nothing else than being cancelled."""
    code = "import time; print('first', flush=True); time.sleep(60)"
    with runner.stream("POST", "/api/code/exec", params={"stream": "1"}, json={"code": code}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:") and "first" in line:
                break
    with service.client() as admin:  # nobody reads any more: it is killed, and that is noted
        run = _until(lambda: admin.get("/api/runs").json()["items"][0], lambda one: one["endedAt"] is not None)
    assert run["status"] == "cancelled"


def test_a_run_goes_on_without_its_client(admin: httpx.Client) -> None:
    """With `respond-async` there is an id, events from any number on, and a way to kill it."""
    code = "import time; print('first', flush=True); time.sleep(60)"
    made = admin.post("/api/code/exec", json={"code": code}, headers={"Prefer": "respond-async"})
    assert made.status_code == 202
    where = made.headers["Location"]
    with admin.stream("GET", f"{where}/events", headers={"Last-Event-ID": "1"}) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("id:"))
    assert first == "id: 2"
    assert admin.post(f"{where}/cancel").json()["status"] == "cancelled"
    assert "cancelled" in admin.get(where).json()["error"]


def test_a_client_that_goes_away_kills_its_run(runner: httpx.Client, admin: httpx.Client) -> None:
    """A connection that is closed in the middle ends the program."""
    address = urlsplit(str(runner.base_url))
    body = json.dumps({"code": "import time; time.sleep(60)", "sessionId": "gone"})
    with socket.create_connection((address.hostname, address.port)) as client:
        head = (
            f"POST /api/code/exec HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {runner.headers['Authorization']}\r\n"
        )
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        _until(lambda: _of_session(admin, "gone"), bool)
    run = _until(lambda: _of_session(admin, "gone")[0], lambda one: one["endedAt"] is not None)
    assert run["status"] == "cancelled"


def test_an_idempotency_key_runs_once(runner: httpx.Client) -> None:
    """The same request gives the same run; another one is a conflict."""
    headers = {"Idempotency-Key": "once"}
    code = {"code": "import os; print(os.urandom(8).hex())"}
    first, again = (runner.post("/api/code/exec", json=code, headers=headers).json() for _ in range(2))
    assert first["stdout"] == again["stdout"]
    assert runner.post("/api/code/exec", json=PRINT, headers=headers).status_code == 409


@pytest.mark.parametrize(
    "more",
    [
        {"level": "process"}, {"bestEffort": ["network"]}, {"tier": 4}, {"trusted": True}, {"fallback": "process"},
        {"image": "evil"}, {"network": True}, {"networkAllow": ["example.org"]}, {"packages": ["rich"]},
        {"packages": "auto"}, {"users": True}, {"timeout": "1h"}, {"memoryLimit": "8g"}, {"backend": "subprocess"},
        {"backend": "none"}, {"preset": "network-open"}, {"require": "process", "backend": "subprocess"},
        {"cpuLimit": 8}, {"maxOutputBytes": "1g"},
    ],
    ids=str,
)  # fmt: skip
def test_nobody_below_admin_gets_more_than_configured(runner: httpx.Client, more: dict[str, object]) -> None:
    """Each is refused before anything runs, with the field in the message."""
    done = runner.post("/api/code/exec", json={**PRINT, **more})
    assert done.status_code in (403, 422, 503), done.text
    assert done.json()["type"].rpartition("/")[2] in ("policy-denied", "invalid-request", "backend-unavailable")


@pytest.mark.parametrize("name", ["e2b", "daytona", "cloche"])
def test_nobody_below_admin_sends_code_to_other_machines(runner: httpx.Client, name: str) -> None:
    """Neither by a run nor by the run of a reproduction: it would be at the expense of the service's account."""
    made = runner.post("/api/sandbox/bug-repro", json={"title": "t", "code": "1"}).json()
    for path, body in (("/api/code/exec", PRINT), (f"/api/sandbox/bug-repro/{made['id']}/run", {})):
        done = runner.post(path, json={**body, "backend": name})
        assert (done.status_code, "other machines" in done.json()["detail"]) == (403, True), done.text


def test_an_admin_gets_what_the_rules_allow(admin: httpx.Client) -> None:
    """What is refused to others runs for an admin: so it was the key that decided."""
    done = admin.post("/api/code/exec", json={**PRINT, "level": "process", "timeout": "1h", "memoryLimit": "1g"})
    assert (done.status_code, done.json()["meta"]["level"]) == (200, "process")


def test_unknown_fields_and_odd_bodies_are_told(runner: httpx.Client) -> None:
    """A problem names the field and repeats no value; nothing is a server's error."""
    secret = "sk-do-not-repeat"
    for body in ({"code": 1}, {"code": "1", "token": secret}, {"files": [{"path": secret}]}, [], "text", None, {}):
        answer = runner.post("/api/code/exec", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
        assert secret not in answer.text
    odd = runner.post("/api/code/exec", content=b"\xff{", headers={"Content-Type": "application/json"})
    assert odd.status_code == 422


def test_settings_are_changed_by_admins_for_all(runner: httpx.Client, admin: httpx.Client) -> None:
    """A change counts from the next request on; null goes back. Who may run changes nobody else's runs."""
    assert runner.put("/api/sandbox/config", json={"timeout": 0.001}).status_code == 403
    assert admin.put("/api/sandbox/config", json={"timeout": "20s"}).json()["timeout"] == 20.0
    try:
        assert runner.put("/api/sandbox/config", json={"timeout": None}).status_code == 403
        assert runner.post("/api/code/exec", json={**PRINT, "timeout": "25s"}).status_code == 403
        assert admin.put("/api/sandbox/config", json={"timeout": "a while"}).status_code == 422
        shown = admin.get("/api/sandbox/config").json()
        assert (shown["memoryLimit"], shown["diskLimit"], shown["maxOutputBytes"]) == ("256m", "256m", 65536)
        assert (shown["timeout"], shown["origins"]["timeout"]) == (20.0, "stored by PUT /api/sandbox/config")
    finally:
        assert admin.put("/api/sandbox/config", json={"timeout": None}).json()["timeout"] == 30.0


def test_keys_are_shown_once_and_end_when_revoked(service: Service, admin: httpx.Client) -> None:
    """A text is in one answer and in no list; another scope is another's; a revoked key is nobody."""
    made = admin.post("/api/keys", json={"name": "one", "scopes": ["read"]}).json()
    assert made["key"] not in admin.get("/api/keys").text
    with service.client(made["key"]) as reader:
        assert reader.get("/api/runs").status_code == 200
        assert reader.post("/api/code/exec", json=PRINT).status_code == 403
        assert reader.get("/api/keys").status_code == 403
        assert admin.delete(f"/api/keys/{made['id']}").json()["revokedAt"] is not None
        assert reader.get("/api/runs").status_code == 401
    assert made["key"].encode() not in service.database.read_bytes()


def test_whoever_is_nobody_gets_nothing(service: Service) -> None:
    """No key, a wrong one, and a made-up cookie are all 401; a name that is not ours is refused before."""
    with service.client("") as nobody:
        for headers in ({}, {"Authorization": "Bearer cloche_x"}, {"Cookie": "cloche_session=x"}):
            assert nobody.get("/api/runs", headers=headers).status_code == 401
        assert nobody.get("/health").status_code == 200
        assert nobody.get("/health", headers={"Host": "evil.example"}).status_code == 421


def test_bodies_are_bounded(service: Service) -> None:
    """One that says that it is too large, and one that only becomes so, are 413."""
    address = urlsplit(service.address)
    for length in ("Content-Length: 99999999999", "Transfer-Encoding: chunked"):
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"POST /api/code/exec HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {service.key}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode())
            if "chunked" in length:
                sending = threading.Thread(target=_send_without_end, args=(client,), daemon=True)
                sending.start()
            assert client.recv(64).startswith(b"HTTP/1.1 413")


def test_a_killed_service_loses_no_record(tmp_path: Path) -> None:
    """What ran when it was killed is an error with the reason, after the next start; SIGTERM lets a run end."""
    first = start(tmp_path)
    with first.client() as client:
        sleep = {"code": "import time; time.sleep(60)"}
        made = client.post("/api/code/exec", json=sleep, headers={"Prefer": "respond-async"}).json()
        _until(lambda: client.get(f"/api/runs/{made['id']}").json(), lambda run: run["status"] in ("queued", "running"))
    first.end(signal.SIGKILL)
    again = start(tmp_path, key=first.key)
    assert "cloche keys create NAME makes another one" in again.log.read_text()
    with again.client() as client:
        run = client.get(f"/api/runs/{made['id']}").json()
        assert (run["status"], "the service ended" in run["error"]) == ("error", True)
        short = {"code": "import time; time.sleep(1); print('done')"}
        draining = client.post("/api/code/exec", json=short, headers={"Prefer": "respond-async"}).json()
    assert again.end() == 128 + signal.SIGTERM
    third = start(tmp_path, key=first.key)
    with third.client() as client:
        assert client.get(f"/api/runs/{draining['id']}").json()["stdout"] == "done\n"
    third.end()


def _send_without_end(client: socket.socket) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    try:
        while True:
            client.sendall(piece)
    except OSError:
        pass  # refused, as it should be


def _of_session(client: httpx.Client, name: str) -> list[dict[str, object]]:
    return list(client.get("/api/runs", params={"sessionId": name}).json()["items"])


def _until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    ends = time.monotonic() + 60
    while not holds(found := look()):
        assert time.monotonic() < ends, found
        time.sleep(0.05)
    return found
