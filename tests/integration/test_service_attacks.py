"""Attempts on the service: by who has no key, by a page in the operator's browser, by the owner of a key.

Each was seen to work, on the service as it was or on a naive twin here, before it was refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from starlette.testclient import TestClient

from bench.bodies import routes
from cloche.records.database import Database
from cloche.records.keys import create_key
from cloche.server.identities import csrf_token, use_link_code
from tests.harness.service import Service, serving

DENIED = "198.51.100.0/24"
PRINT = {"code": "print(1)"}
ASYNC = {"Prefer": "respond-async"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a workspace that may be written to, a read-only one in it, and links that lead out of it."""
    found = tmp_path_factory.mktemp("attacks")
    for name in ("ws", "ws/kept", "ws/free", "ws-beside", "secret"):
        (found / name).mkdir()
    (found / "ws" / "out").symlink_to(found / "secret")
    (found / "ws" / "free" / "up").symlink_to("..")
    return found


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    """Serve that workspace; a network is denied by an argument of the service."""
    roots = ["--workspace-root", f"{home}/ws:rw", "--workspace-root", f"{home}/ws/kept:ro"]
    with serving(home, *roots, "--network-deny", DENIED) as one:
        yield one


@pytest.fixture(scope="module")
def admin(service: Service) -> Iterator[httpx.Client]:
    """Be a client with the first key."""
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def runner(service: Service) -> Iterator[httpx.Client]:
    """Be the owner of a key as most have one."""
    with service.client(service.new_key("run", "read")) as client:
        yield client


@pytest.fixture(scope="module")
def browser(service: Service) -> Iterator[httpx.Client]:
    """Be the operator's browser, with the page's token."""
    database = Database(service.database)
    cookie = use_link_code(database, service.link.partition("code=")[2])
    database.close()
    assert cookie is not None
    token = csrf_token(hashlib.sha256(cookie.encode()).digest())
    with service.client("", cookies={"cloche_session": cookie}) as client:
        client.headers["X-CSRF-Token"] = token
        yield client


def said(service: Service, head: str, body: bytes = b"", *, is_whole: bool = True) -> str:
    """Send bytes as they are; return the answer, or its first part."""
    address = urlsplit(service.address)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(head.replace("\n", "\r\n").encode("latin-1") + body)
        found = client.recv(65_536)
        while is_whole and b"\r\n\r\n" not in found and (more := client.recv(65_536)):
            found += more
    return found.decode("latin-1")


# Whoever reaches the port.


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "localhost.", "user@127.0.0.1",
        "127.0.0.1@evil.example", "[::2]", "127.1", "2130706433", "127.0.0.1,evil.example", "0.0.0.0", "",
    ],
)  # fmt: skip
def test_a_name_that_is_rebound_is_refused_first(service: Service, host: str) -> None:
    """Before who asks, what for, and whether there is such a path; also where the request line names a host."""
    for target in ("/health", "/api/keys", "/nothing", f"http://{host or 'x'}/health"):
        assert said(service, f"GET {target} HTTP/1.1\nHost: {host}\n\n").split()[1] in ("421", "400"), target


@pytest.mark.parametrize(
    "head",
    [
        "POST /health HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 4\nContent-Length: 40\n\n",
        "POST /health HTTP/1.1\nHost: 127.0.0.1\nContent-Length: +4\n\n",
        "POST /health HTTP/1.1\nHost: 127.0.0.1\nTransfer-Encoding: xchunked\n\n",
        "GET /health HTTP/1.1\nHost: 127.0.0.1\nHost: evil.example\n\n",
        "GET /health HTTP/1.1\nHost : 127.0.0.1\n\n",
        "GET /health HTTP/1.1\nHost: 127.0.0.1\nX: a\n b\0\n\n",
        f"GET /health HTTP/1.1\nHost: 127.0.0.1\nX: {'a' * 600_000}\n\n",
    ],
    ids=["two lengths", "signed length", "odd coding", "two hosts", "space", "nul", "flood"],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused(service: Service, head: str) -> None:
    """A proxy may read it the other way."""
    assert said(service, head).split()[1] in ("400", "501"), head[:80]


def test_who_has_no_key_has_no_body_read() -> None:
    """A framework reads and parses a body before it asks whose it is: the fault is told first."""

    async def nobody() -> None:
        raise HTTPException(401)

    app = FastAPI()

    @app.post("/")
    async def route(body: dict[str, str], _: Annotated[None, Depends(nobody)]) -> None:
        pass

    naive = TestClient(app)
    assert naive.post("/", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422


@pytest.mark.parametrize("length", ["Content-Length: 8000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["/api/keys", "/api/code/exec", "/api/sandboxes/x/files/content", "/run", "/login"])
def test_a_body_of_nobody_is_refused_before_it_comes(service: Service, path: str, length: str) -> None:
    """Eighteen megabytes of empty lists held up the service for four seconds, and took 700 MB: now none is read."""
    for who in ("", "Authorization: Bearer cloche_x\n", "Cookie: cloche_session=x\n"):
        head = f"POST {path} HTTP/1.1\nHost: 127.0.0.1\n{who}Content-Type: application/json\n{length}\n\n"
        assert said(service, head).split()[1] == ("413" if path == "/login" else "401")


def test_many_tiny_values_are_refused(service: Service, runner: httpx.Client) -> None:
    """On every route, also of one who has a key: two megabytes of keys held the service for seconds, and took 600."""
    keys = b"{" + b",".join(b'"k%d":0' % number for number in range(80_000)) + b"}"
    found = routes(service)
    assert len(found) > 20
    for method, path in found:
        answer = runner.request(method, path, content=keys, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (413, "body-too-large"), path
    lists = b"[" + b"[]," * 200_000 + b"[]]"
    answer = runner.post("/api/code/exec", content=lists, headers={"Content-Type": 'application/json; a="multipart/"'})
    assert answer.status_code == 413
    few = runner.post("/api/code/exec", json={**PRINT, **{f"k{number}": 0 for number in range(5_000)}})
    assert (few.status_code, few.json()["detail"].count("there is no such field")) == (422, 10)


def test_nobody_chooses_a_slow_encoding(service: Service, runner: httpx.Client) -> None:
    """A form's text is decoded as its head says: punycode takes the square of its length, on the event loop."""
    app = FastAPI()

    @app.post("/")
    async def route(request: Request) -> str:
        return str(next(iter((await request.form()).values())))

    body = b'--b\r\nContent-Disposition: form-data; name="code"\r\n\r\nbcher-kva\r\n--b--\r\n'
    kinds = ["charset=punycode", 'charset="punycode"', "charset=utf-8; charset=punycode", "CHARSET=Punycode"]
    for kind in kinds:
        head = {"Content-Type": f"multipart/form-data; boundary=b; {kind}"}
        with service.client("") as nobody:
            answers = [
                nobody.post("/login", content=body, headers=head),
                runner.post("/api/code/exec", content=body, headers=head),
            ]
        assert [answer.status_code for answer in answers] == [415, 415], kind
    naive = TestClient(app).post(
        "/", content=body, headers={"Content-Type": f"multipart/form-data; boundary=b; {kinds[0]}"}
    )
    assert naive.json() == "bücher"


def test_codes_that_are_wrong_keep_nobody_from_writing(service: Service, runner: httpx.Client) -> None:
    """While somebody writes for long, nobody's codes wait for nothing, and readers and the event loop neither."""
    with contextlib.closing(sqlite3.connect(service.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked = [threading.Thread(target=_log_in_wrongly, args=(service,)) for _ in range(24)]
        begun = time.monotonic()
        for one in asked:
            one.start()
        for one in asked:
            one.join()
        assert runner.get("/api/runs").status_code == 200
        assert runner.get("/api/sandbox/debug").status_code == 200
        assert time.monotonic() - begun < 5  # a writer waits for ten seconds
        other.execute("ROLLBACK")


def _log_in_wrongly(service: Service) -> None:
    with service.client("") as nobody:
        assert nobody.post("/login", data={"code": "wrong"}).status_code == 403


# A page in the operator's browser.


@pytest.mark.parametrize(
    "whose",
    [
        {"Origin": "http://127.0.0.1:9"}, {"Origin": "http://localhost"}, {"Origin": "null"},
        {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)  # fmt: skip
def test_a_page_at_another_port_changes_nothing(service: Service, browser: httpx.Client, whose: dict[str, str]) -> None:
    """It is sent the cookie, as cookies know no ports, and can make the token: a guest's server that is forwarded."""
    form = {"csrfToken": browser.headers["X-CSRF-Token"], "name": "mine", "scope": "admin"}
    own = {"Origin": service.address, "Sec-Fetch-Site": "same-origin"}
    assert browser.post("/settings/keys", data=form, headers=own).status_code == 200  # the token alone would do
    for path in ("/settings/keys", "/run", "/approvals/1", "/snapshots", "/logout"):
        assert browser.post(path, data=form, headers=whose).status_code == 403, path
    assert browser.put("/api/sandbox/config", json={}, headers=whose).status_code == 403
    assert browser.get("/run").status_code == 200


def test_forged_cookies_and_tokens_are_nobodys(service: Service, browser: httpx.Client) -> None:
    """A cookie that was never given, a token of another cookie, none, and one that is no text of ours."""
    for cookie in ("x", "", csrf_token(b"x"), "é", "a" * 8_000, service.key):
        with service.client("") as forged:
            headers = {b"Cookie": f"cloche_session={cookie}".encode("latin-1")}
            assert [forged.get(path, headers=headers).status_code for path in ("/api/runs", "/run")] == [401, 401]
    for token in ("", "x", csrf_token(b"x"), "é"):
        sent = {b"X-CSRF-Token": token.encode("latin-1")}
        assert browser.post("/api/code/exec", json=PRINT, headers=sent).status_code == 403


def test_answers_tell_browsers_to_keep_out(service: Service) -> None:
    """No frame, no sniffing, no reading across origins, on answers of every kind; and no CORS."""
    with service.client("") as nobody:
        nobody.headers["Origin"] = "https://evil.example"
        for path in ("/health", "/login", "/api/runs", "/nothing", "/static/page.js"):
            headers = nobody.get(path).headers
            assert "frame-ancestors 'none'" in headers["content-security-policy"], path
            assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "access-control-allow-origin" not in headers


def test_what_the_service_denies_stays_denied(runner: httpx.Client) -> None:
    """An argument of a run takes the place of the service's own: what is denied is joined before."""
    made = runner.post("/api/sandboxes", json={"networkDeny": ["x.example"], "network": False})
    try:
        assert made.status_code == 201, made.text
    finally:
        runner.delete(made.headers["Location"])


def test_a_manifest_brings_no_packages(runner: httpx.Client, admin: httpx.Client) -> None:
    """What a run may not install, setting up an environment does not either; the sandbox counts among all others."""
    assert runner.post("/api/code/exec", json={**PRINT, "packages": ["rich"]}).status_code == 403
    setup = [{"run": ["pip", "install", "rich"]}, {"run": ["true"]}]
    done = runner.post("/api/sandbox/dev-env/provision", json={"manifest": {"version": 1, "name": "x", "setup": setup}})
    assert done.status_code == 201, done.text
    first, second = done.json()["steps"]
    assert (first["status"], "above the service's limit" in first["error"], second["status"]) == (
        "error",
        True,
        "ok",
    )
    assert admin.delete(f"/api/sandboxes/{done.json()['sandbox']}").json()["state"] == "ended"


def test_a_run_that_was_cancelled_is_told_again(runner: httpx.Client) -> None:
    """The same idempotency key gives an answer, and no server's error."""
    headers, body = {"Idempotency-Key": "gone"}, {"code": "import time; time.sleep(60)"}
    made = runner.post("/api/code/exec", json=body, headers={**headers, **ASYNC}).json()
    assert runner.post(f"/api/runs/{made['id']}/cancel").json()["status"] == "cancelled"
    again = runner.post("/api/code/exec", json=body, headers=headers)
    assert (again.status_code, again.json()["type"].rpartition("/")[2]) == (409, "cancelled")


def test_a_revoked_key_is_sent_nothing_more(service: Service, admin: httpx.Client) -> None:
    """An answer that goes on ends within seconds, and with it what it was for."""
    made = admin.post("/api/keys", json={"name": "one", "scopes": ["run"]}).json()
    code = "import time\nfor i in range(60):\n print(i, flush=True)\n time.sleep(.5)"
    with (
        service.client(made["key"]) as client,
        client.stream("POST", "/api/code/exec?stream=1", json={"code": code, "sessionId": "revoked"}) as answer,
    ):
        lines = answer.iter_lines()
        next(line for line in lines if "output" in line)
        admin.delete(f"/api/keys/{made['id']}")
        begun = time.monotonic()
        with contextlib.suppress(httpx.HTTPError):
            assert not any("result" in line for line in lines)
        assert time.monotonic() - begun < 15
    while (run := admin.get("/api/runs", params={"sessionId": "revoked"}).json()["items"][0])["endedAt"] is None:
        assert time.monotonic() - begun < 20
        time.sleep(0.1)
    assert run["status"] == "cancelled"


def test_a_page_of_runs_is_bounded_by_bytes(runner: httpx.Client, admin: httpx.Client) -> None:
    """Results of many megabytes are listed one or a few at a time, and none is lost between pages."""
    code = "class A:\n def _repr_mimebundle_(self, **_):\n  return {'text/html': 'x' * 5_000_000}\nA()"
    made = [runner.post("/api/code/exec", json={"code": code, "sessionId": "large"}).json()["id"] for _ in range(3)]
    found, cursor, pages = [], None, 0
    while pages < 9:
        page = admin.get("/api/runs", params={"sessionId": "large", **({"cursor": cursor} if cursor else {})})
        assert len(page.content) < 9 << 20
        found += [run["id"] for run in page.json()["items"]]
        cursor, pages = page.json()["nextCursor"], pages + 1
        if cursor is None:
            break
    assert (found, pages > 1) == (made[::-1], True)


# Paths, and what is another's.


def test_no_workspace_path_leads_out(runner: httpx.Client, home: Path) -> None:
    """By links, dots, beginnings of names, other spellings, or into what may only be read."""
    wrong = [
        "/", "/etc", "/proc/self/root/etc", "/proc/self/cwd", str(home), f"{home}/ws-beside", f"{home}/ws/../secret",
        f"{home}/ws/out", f"{home}/ws/out/x", f"{home}/ws/free/up", f"{home}/ws/free/up/free", f"/{home}/ws", "ws", ".",
        f"{home}/ws\0", f"{home}/ws/\0/..", f"{home}/WS", f"{home}/ws/{'a/' * 2_000}", f"{home}/ws/{'a' * 300}", "",
    ]  # fmt: skip
    for path in wrong:
        for route in ("/api/workspace/snapshots", "/api/sandbox/snapshots", "/api/sandbox/dev-env/generate"):
            assert runner.post(route, json={"workspacePath": path}).status_code in (403, 422), (route, path)
    made = runner.post("/api/workspace/snapshots", json={"workspacePath": f"{home}/ws/free", "contents": True}).json()
    restore = f"/api/workspace/snapshots/{made['id']}/restore"
    for path in (*wrong, f"{home}/ws/kept", f"{home}/ws"):  # the last one holds the one before
        assert runner.post(restore, json={"workspacePath": path, "prune": True}).status_code in (403, 422), path
    assert runner.post(restore, json={"workspacePath": f"{home}/ws/free"}).status_code == 200


def test_no_name_of_a_file_leads_out(runner: httpx.Client) -> None:
    """Each name of a file for a run is refused, or stays in its workspace; none is a server's error."""
    for path in ("../x", "/etc/passwd", "a/../../x", "a\0b", ".", "..", "a//../../b", "x/" * 2_000, "a" * 300, "~/x"):
        done = runner.post("/api/code/exec", json={**PRINT, "files": [{"path": path, "text": "x"}]})
        assert done.status_code in (200, 403, 422), (path, done.text)
        if done.status_code == 200:
            assert path == "~/x"
        form = {"request": json.dumps(PRINT)}
        sent = runner.post("/api/code/exec", data=form, files={"file": (path, b"x")})
        assert sent.status_code in (200, 400, 403, 422), (path, sent.text)


def test_another_projects_objects_are_not_there(service: Service, admin: httpx.Client, home: Path) -> None:
    """With all scopes of its own project a key finds none of ours, by any verb, and its lists are empty."""
    folder = {"workspacePath": f"{home}/ws/free"}
    ids = {
        "runs": admin.post("/api/code/exec", json=PRINT).json()["id"],
        "sandbox/snapshots": admin.post("/api/sandbox/snapshots", json=folder).json()["id"],
        "workspace/snapshots": admin.post("/api/workspace/snapshots", json=folder).json()["id"],
        "sandbox/bug-repro": admin.post("/api/sandbox/bug-repro", json={"title": "t", "code": "1"}).json()["id"],
        "approvals": admin.post("/api/approvals", json={"tool": "t", "risk": "high"}).json()["id"],
        "keys": admin.get("/api/keys").json()["items"][0]["id"],
    }  # fmt: skip
    database = Database(service.database)
    _, text = create_key(database, name="other", scopes=["admin"], project="other")
    database.close()
    verbs = [("GET", "", None), ("DELETE", "", None)]
    verbs += [("POST", f"/{verb}", None) for verb in ("cancel", "approve", "deny", "confirm", "run", "rotate")]
    verbs += [("POST", f"/{verb}", folder) for verb in ("replicate", "restore")]
    with service.client(text) as other:
        for kind, one in ids.items():
            for verb, more, body in verbs:
                assert other.request(verb, f"/api/{kind}/{one}{more}", json=body).status_code in (404, 405), (
                    kind,
                    verb,
                    more,
                )
            if kind != "keys":
                assert other.get(f"/api/{kind}").json()["items"] == []
        assert other.get(f"/api/runs/{ids['runs']}/events").status_code == 404
        for route in ("sandbox/snapshots/compare", "workspace/snapshots/diff"):
            own = ids[route.rpartition("/")[0]]
            assert other.get(f"/api/{route}", params={"id1": own, "id2": own}).status_code == 404
    for kind, one in ids.items():
        if kind != "keys":
            assert admin.get(f"/api/{kind}/{one}").status_code == 200  # it was there all the time


def test_numbers_that_are_too_large_are_told(runner: httpx.Client, admin: httpx.Client) -> None:
    """Ids, cursors, ranges and event numbers of any size and kind are answered, and none is a server's error."""
    for text in ("9" * 5_000, "-1", "1e9", "\u0661", "x'; --", "%00", "NaN", "run_", "run_" + "z" * 20):
        paths = [
            f"/api/approvals/{text}",
            f"/api/runs/{text}",
            f"/api/sandboxes/{text}",
            f"/api/runs?cursor={text[:64]}",
        ]
        paths += [f"/api/approvals?cursor={text[:64]}", f"/api/audit?cursor={text}", f"/api/runs?limit={text}"]
        for path in paths:
            assert admin.get(path).status_code in (200, 404, 409, 422), path
    made = runner.post("/api/code/exec", json=PRINT, headers=ASYNC).json()["id"]
    for number in ("-1", "x", "1.5", "9" * 5_000):
        answer = runner.get(f"/api/runs/{made}/events", headers={"Last-Event-ID": number})
        assert answer.status_code == 422
