"""Every route of E2B's protocol with a wrong key, a wrong body, another's sandbox; and a service that restarts."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from cloche.records.database import Database
from cloche.records.keys import create_key
from cloche.server.e2b.app import CODE_PARTS, CONTROL, ENVD_PARTS, rows_of
from cloche.server.e2b.build_files import AT_ONCE
from cloche.server.e2b.calls import MOST_BODY, Row
from cloche.server.e2b.envd import environment
from cloche.server.e2b.target import CODE, ENVD
from tests.harness import e2b as harness
from tests.harness import service as services
from tests.harness.e2b import E2BService, serving, variables

pytest.importorskip("fastapi", reason="missing: the service's packages, which this environment lacks")
WRONG_KEY = "e2b_" + "0" * 64
# Routes of a port that need no token: whether the sandbox runs, and files, which a signature opens.
OPEN = {("GET", "/health"), ("GET", "/files"), ("POST", "/files")}
# The SDKs send no token to these, and go by the sandbox's id; a wrong one is refused.
WITHOUT_TOKEN = "/contexts"
BROKEN_BODIES = (b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"no such field": 1}', b'{"timeout": "x"}')


@pytest.fixture(scope="module")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service:
        yield service


@pytest.fixture(scope="module")
def sandbox(e2b: E2BService) -> Mapping[str, Any]:
    """Create a sandbox of the first key."""
    with e2b.http(**{"X-API-KEY": e2b.key}) as client:
        made = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
        assert made.status_code == 201, made.text
        return made.json()  # type: ignore[no-any-return]


def name_of(row: Row) -> str:
    """Return a route's name in the list of tests."""
    return f"{row.method} {row.path}"


def filled(row: Row, sandbox_id: str) -> str:
    """Return the path of a route, about a sandbox."""
    path = row.path.replace("{sandbox_id}", sandbox_id)
    return re.sub(r"\{\w+(:\w+)?\}", "nothing", path)


def has_body(row: Row) -> bool:
    """Tell whether a route takes a body."""
    return row.method in ("POST", "PUT", "PATCH")


def is_in_form(answer: httpx.Response) -> None:
    """Assert that an error is what E2B's clients can read, and that they know whether to try again."""
    content = answer.json()
    assert content["code"] == answer.status_code, content
    assert content["message"]
    if answer.status_code in (429, 502, 503, 504):
        assert answer.headers["Should-Retry"] in ("true", "false")


CONTROL_ROWS = [pytest.param(row, id=name_of(row)) for row in rows_of(CONTROL)]
ABOUT_A_SANDBOX = [
    pytest.param(row, id=name_of(row)) for row in rows_of(CONTROL) if "{sandbox_id}" in row.path
]  # fmt: skip
PORT_ROWS = [
    pytest.param(port, row, id=f"{port} {name_of(row)}")
    for port, parts in ((ENVD, ENVD_PARTS), (CODE, CODE_PARTS))
    for row in rows_of(parts)
    if (row.method, row.path) not in OPEN and row.path not in environment.INTERNAL
]


@pytest.mark.parametrize("row", CONTROL_ROWS)
def test_a_route_wants_a_key(e2b: E2BService, sandbox: Mapping[str, Any], row: Row) -> None:
    """Neither none, nor a wrong one, nor the sandbox's own token is one, and the answer is the same for each."""
    path, token = filled(row, sandbox["sandboxID"]), sandbox["envdAccessToken"]
    with e2b.http() as client:
        for headers in ({}, {"X-API-KEY": WRONG_KEY}, {"X-API-KEY": token}, {"Authorization": f"Bearer {token}"}):
            answer = client.request(row.method, path, headers=headers, json={} if has_body(row) else None)
            assert answer.status_code == 401, answer.text
            is_in_form(answer)


@pytest.mark.parametrize("project", ["default", "other"])
@pytest.mark.parametrize("row", ABOUT_A_SANDBOX)
def test_a_route_knows_no_sandbox_of_another_key(
    e2b: E2BService, sandbox: Mapping[str, Any], row: Row, project: str
) -> None:
    """The answer is that of a sandbox which there is not, letter by letter, and nothing happens to it."""
    with _of_other_key(e2b, project) as client:
        answers = []
        for sandbox_id in (sandbox["sandboxID"], "nosuchsandbox"):
            answer = client.request(row.method, filled(row, sandbox_id), json={} if has_body(row) else None)
            assert answer.status_code in (400, 404), answer.text
            is_in_form(answer)
            answers.append((answer.status_code, answer.text.replace(sandbox_id, "")))
        assert answers[0] == answers[1]
    with e2b.http(**{"X-API-KEY": e2b.key}) as client:
        assert client.get(f"/sandboxes/{sandbox['sandboxID']}").json()["state"] == "running"


@pytest.mark.parametrize("path", ["", "/exec", "/snapshots"])
def test_the_api_is_not_for_keys_of_sdks(e2b: E2BService, sandbox: Mapping[str, Any], path: str) -> None:
    """The API shows all sandboxes of the project, so another key of an SDK reaches none there."""
    url = f"{e2b.service.address}/api/sandboxes/sb_{sandbox['sandboxID']}{path}"
    with _of_other_key(e2b, "default") as client:
        key = {"Authorization": f"Bearer {client.headers['X-API-KEY']}"}
        answer = client.request("POST" if path else "GET", url, headers=key, json={"shell": "id"} if path else None)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (403, "scope-missing")


def test_slow_uploads_of_one_key_do_not_hold_up_another(e2b: E2BService) -> None:
    """Neither do more than all may have at once."""
    with _of_other_key(e2b, "default") as slow, ExitStack() as stack:
        for number in range(AT_ONCE + 1):
            url = urlsplit(_upload_to(slow, "slow", number))
            link = stack.enter_context(socket.create_connection((str(url.hostname), url.port or 0), timeout=60))
            link.sendall(f"PUT {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 9\r\n\r\nx".encode())
        with e2b.http(**{"X-API-KEY": e2b.key}) as client:
            assert client.put(_upload_to(client, "quick", 0), content=b"x", timeout=10).status_code == 200


def _upload_to(client: httpx.Client, name: str, number: int) -> str:
    template = client.post("/v3/templates", json={"name": name}).json()["templateID"]
    url: str = client.get(f"/templates/{template}/files/{number:064x}").json()["url"]
    return url


def _of_other_key(e2b: E2BService, project: str) -> httpx.Client:
    database = Database(e2b.service.database)
    _, key = create_key(database, name="other", scopes=("run", "read"), project=project, is_e2b=True)
    database.close()
    return e2b.http(**{"X-API-KEY": key})


@pytest.mark.parametrize("row", [param for param in CONTROL_ROWS if has_body(param.values[0])])  # type: ignore[arg-type]
def test_a_broken_body_is_told(e2b: E2BService, sandbox: Mapping[str, Any], row: Row) -> None:
    """What is no JSON, no object, has a field that there is not or is too large, with words; the service goes on."""
    path = filled(row, "nosuchsandbox")
    with e2b.http(**{"X-API-KEY": e2b.key, "Content-Type": "application/json"}) as client:
        for body in BROKEN_BODIES:
            answer = client.request(row.method, path, content=body)
            assert 400 <= answer.status_code < 500 or answer.status_code == 501, (
                body[:40],
                answer.status_code,
                answer.text,
            )
            is_in_form(answer)
        answer = client.request(row.method, path, content=b" " * (MOST_BODY + 1))
        assert answer.status_code in (400, 401, 404, 413, 501), answer.text
        assert client.get(f"/sandboxes/{sandbox['sandboxID']}").status_code == 200


@pytest.mark.parametrize(("port", "row"), PORT_ROWS)
def test_a_port_wants_the_token_of_its_sandbox(
    e2b: E2BService, sandbox: Mapping[str, Any], port: int, row: Row
) -> None:
    """Neither none, nor a key, nor the token of another sandbox opens envd or the code interpreter."""
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(port)}
    with e2b.http(**headers) as client:
        wrong = (e2b.key, "0" * 64, sandbox["envdAccessToken"][:-1] + "x")
        for token in wrong if row.path.startswith(WITHOUT_TOKEN) else (None, *wrong):
            own = {} if token is None else {"X-Access-Token": token}
            content = b"{}" if has_body(row) else None
            answer = client.request(row.method, filled(row, "x"), headers=own, content=content)
            assert answer.status_code in (401, 415), answer.text
            assert answer.text if port == CODE else answer.json()["message"]


@pytest.mark.parametrize(("port", "row"), PORT_ROWS)
def test_no_port_of_a_sandbox_that_is_not_there_answers(e2b: E2BService, port: int, row: Row) -> None:
    """As E2B's proxy does, which SDKs compare letter by letter."""
    headers = {"E2b-Sandbox-Id": "nosuchsandbox", "E2b-Sandbox-Port": str(port), "X-Access-Token": "0" * 64}
    with e2b.http(**headers) as client:
        answer = client.request(row.method, filled(row, "x"), content=b"{}" if has_body(row) else None)
    assert answer.status_code == 502 or answer.status_code == 401, answer.text
    if answer.status_code == 502:
        assert answer.json()["message"] == "The sandbox was not found"


def test_a_route_that_is_not_there_and_a_wrong_method_are_in_form(e2b: E2BService) -> None:
    """Also what no route could be."""
    with e2b.http(**{"X-API-KEY": e2b.key}) as client:
        for method, path in (
            ("GET", "/nothing"),
            ("PATCH", "/sandboxes"),
            ("GET", "/sandboxes/%2e%2e%2f"),
            ("GET", "//"),
        ):
            answer = client.request(method, path)
            assert answer.status_code in (404, 405), answer.text
            is_in_form(answer)


def test_a_key_that_may_only_read_creates_and_ends_nothing(e2b: E2BService, sandbox: Mapping[str, Any]) -> None:
    """It sees what it made, which is nothing."""
    with e2b.http(**{"X-API-KEY": e2b.new_key("read")}) as client:
        refused = [
            client.post("/v2/sandboxes", json={"templateID": "base"}),
            client.delete(f"/sandboxes/{sandbox['sandboxID']}"),
        ]
        for answer in refused:
            assert answer.status_code == 403, answer.text
            is_in_form(answer)
        assert client.get("/v2/sandboxes").json() == []


def test_one_sandbox_too_many_is_refused_at_once(tmp_path: Path) -> None:
    """With 429, which the SDK is told not to repeat; a key has but one of two places, and room after an end."""
    from e2b import RateLimitException, Sandbox

    with serving(tmp_path, "--sandboxes", "2") as few, variables(few):
        first = Sandbox.create(timeout=60)
        with pytest.raises(RateLimitException):
            Sandbox.create(timeout=60)
        with few.http(**{"X-API-KEY": few.key}) as client:
            answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 60})
            assert (answer.status_code, answer.headers["Should-Retry"]) == (429, "false")
        first.kill()
        Sandbox.create(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_restarts_keeps_its_sandboxes(tmp_path: Path, number: signal.Signals) -> None:
    """The same objects of the SDK go on: files, a command in the background, its output and its end."""
    from e2b import CommandExitException, Sandbox

    first = harness.start(tmp_path, "--drain", "1s")
    port = str(urlsplit(first.url).port)
    try:
        with variables(first):
            sandbox = Sandbox.create(timeout=600, metadata={"kept": "yes"})
            sandbox.files.write("kept", "1")
            handle = sandbox.commands.run("read line; echo got $line; exit 5", background=True, stdin=True, timeout=0)
            paused = Sandbox.create(timeout=600)
            paused.pause()
            first.service.end(number)
            second = harness.start(tmp_path, "--e2b-port", port, key=first.key)
            with services.ending(second.service, tmp_path):
                assert sandbox.is_running()
                assert sandbox.get_info().metadata == {"kept": "yes"}
                assert sandbox.files.read("kept") == "1"
                again = sandbox.commands.connect(handle.pid)
                sandbox.commands.send_stdin(handle.pid, "it\n")
                with pytest.raises(CommandExitException) as ended:
                    again.wait()
                assert (ended.value.exit_code, ended.value.stdout) == (5, "got it\n")
                assert paused.connect().commands.run("echo 1").stdout == "1\n"
    finally:
        first.service.end(signal.SIGKILL)
        services.end_sandboxes(tmp_path)


def test_a_client_that_never_reads_holds_nothing_up(e2b: E2BService, sandbox: Mapping[str, Any]) -> None:
    """A command that writes without end waits for it, and the service keeps little of what was not read."""
    where = urlsplit(e2b.url)
    before = _resident_mib(e2b)
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-c", "yes"]}}).encode()
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: {where.netloc}\r\nE2b-Sandbox-Id: {sandbox['sandboxID']}\r\n"
        f"E2b-Sandbox-Port: 49983\r\nX-Access-Token: {sandbox['envdAccessToken']}\r\n"
        f"Content-Type: application/connect+json\r\nContent-Length: {len(message) + 5}\r\n\r\n"
    )
    with socket.create_connection((str(where.hostname), where.port or 0)) as client:
        client.sendall(head.encode() + b"\0" + len(message).to_bytes(4, "big") + message)
        assert client.recv(12) == b"HTTP/1.1 200"
        with e2b.http(**{"X-API-KEY": e2b.key}) as other:
            for _ in range(100):
                assert other.get(f"/sandboxes/{sandbox['sandboxID']}").status_code == 200
        assert _resident_mib(e2b) - before < 64


def _resident_mib(e2b: E2BService) -> float:
    status = Path(f"/proc/{e2b.service.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
