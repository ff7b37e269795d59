"""Several workers on one database: what one of them has is reached by way of any other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.harness.postgres import postgres
from tests.harness.service import Service, end_sandboxes, start
from tests.harness.tls import Authority

pytestmark = pytest.mark.timeout(600)
LONG = "import time; print('begun', flush=True); time.sleep(300)"
ASYNC = {"Prefer": "respond-async"}
Starter = Callable[..., Service]


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    """Start services, each with a folder of its own below the test's unless one is given; all of them end."""
    with ExitStack() as at_end:

        def begin(name: str = "home", *words: str, **more: Any) -> Service:
            home = tmp_path / name
            home.mkdir(exist_ok=True)
            service = start(home, "--drain", "1s", *words, **more)
            at_end.callback(end_sandboxes, home)
            at_end.callback(lambda: service.process.poll() is None and service.end())
            return service

        yield begin


def free_port() -> int:
    """Return a port of loopback that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def begun(client: httpx.Client, address: str) -> None:
    """Follow a run's events until its code has begun."""
    with client.stream("GET", address, timeout=httpx.Timeout(60)) as stream:
        assert stream.status_code == 200
        assert any("begun" in line for line in stream.iter_lines())


def session_in(client: httpx.Client, sandbox: str) -> str:
    """Open a session; return its address."""
    made = client.post(f"{sandbox}/sessions", json={})
    assert made.status_code == 201, made.text
    return f"{sandbox}/sessions/{made.json()['id']}"


def test_what_one_worker_has_is_reached_by_the_other(starter: Starter) -> None:
    """Events and cancel of a run, cells of one session, a large file, and the result for an idempotency key."""
    first = starter()
    second = starter(key=first.key)
    with first.client() as one, second.client() as other, ThreadPoolExecutor(1) as beside:
        run = one.post("/api/code/exec", json={"code": LONG}, headers=ASYNC).json()["id"]
        begun(other, f"/api/runs/{run}/events")
        cancelled = other.post(f"/api/runs/{run}/cancel").json()
        assert (cancelled["id"], cancelled["status"]) == (run, "cancelled")

        sandbox = f"/api/sandboxes/{one.post('/api/sandboxes', json={}).json()['id']}"
        session = session_in(other, sandbox)
        assert one.post(f"{session}/run", json={"code": "x = 41"}).json()["status"] == "ok"
        assert other.post(f"{session}/run", json={"code": "print(x + 1)"}).json()["stdout"] == "42\n"
        data = os.urandom(3 << 20)
        put = other.put(f"{sandbox}/files/content", params={"path": "big file"}, content=data)
        assert put.json()["size"] == len(data)
        assert other.get(f"{sandbox}/files/content", params={"path": "big file"}).content == data
        # A client that goes away ends its cell there, too, so that the next one has its turn.
        with pytest.raises(httpx.ReadTimeout):
            other.post(f"{session}/run", json={"code": LONG}, timeout=1)
        assert other.post(f"{session}/run", json={"code": "print(x)"}).json()["stdout"] == "41\n"

        once = {"code": "import time; time.sleep(2); print('once')"}
        slow: dict[str, Any] = {"json": once, "headers": {"Idempotency-Key": "k"}}
        answers = [beside.submit(one.post, "/api/code/exec", **slow), other.post("/api/code/exec", **slow)]
        found = [answers[0].result().json(), answers[1].json()]
        assert {(one["id"], one["status"], one["stdout"]) for one in found} == {(found[0]["id"], "ok", "once\n")}

        # Nobody but a worker may say that a request was passed on, and for whom.
        assert other.get(sandbox, headers={"X-Cloche-Worker": "0" * 64}).status_code == 403
        refused = httpx.get(f"{second.address}{sandbox}", trust_env=False)
        assert refused.status_code == 401


def test_of_a_worker_that_is_gone_the_other_says_so(starter: Starter) -> None:
    """Its run is an error with the reason, its session is gone with it, and its sandbox goes on by the other one."""
    first = starter()
    second = starter(key=first.key)
    with first.client() as one, second.client() as other:
        run = one.post("/api/code/exec", json={"code": LONG}, headers=ASYNC).json()["id"]
        begun(one, f"/api/runs/{run}/events")
        sandbox = f"/api/sandboxes/{one.post('/api/sandboxes', json={}).json()['id']}"
        session = session_in(one, sandbox)
        first.end(signal.SIGKILL)
        cancelled = other.post(f"/api/runs/{run}/cancel").json()
        assert cancelled["status"] == "error"
        assert "the service ended during this run" in cancelled["error"]
        cell = other.post(f"{session}/run", json={"code": "1"})
        assert cell.status_code == 404
        assert "is gone, and its sessions with it" in cell.json()["detail"]
        assert other.post(f"{sandbox}/exec", json={"shell": "echo on"}).json()["stdout"] == "on\n"
    assert len(list((first.log.parent / "state/cloche/workers").iterdir())) <= 2


def socket_to(service: Service, path: str, trusting: ssl.SSLContext) -> ClientConnection:
    """Open a web socket of a service."""
    headers = {"Authorization": f"Bearer {service.key}"}
    address = service.address.replace("https", "wss", 1) + path
    return connect(address, additional_headers=headers, ssl=trusting, proxy=None)


def use_sockets(service: Service, sandbox: str, trusting: ssl.SSLContext) -> None:
    """Work in a terminal of a sandbox that another machine has; a refusal there is one here."""
    with socket_to(service, f"{sandbox}/terminal?rows=33&columns=77", trusting) as terminal:
        terminal.send(b"stty size; read -r word; echo got-$word; exit 3\n")
        terminal.send(json.dumps({"resize": [44, 88]}))
        terminal.send(b"this\n")
        *pieces, end = list(terminal)
        output = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        assert b"33 77" in output or b"44 88" in output
        assert b"got-this" in output
        assert json.loads(end) == {"exitCode": 3, "status": "error"}
    assert (terminal.close_code, terminal.close_reason) == (1000, "")
    with pytest.raises(InvalidStatus) as refused:
        socket_to(service, f"{sandbox}/ports/9", trusting)
    assert refused.value.response.status_code == 409
    assert json.loads(refused.value.response.body)["type"].endswith("connection-refused")
    with socket_to(service, f"{sandbox}/terminal", trusting) as terminal:
        terminal.send("[]")
        with pytest.raises(ConnectionClosedError):
            list(terminal)
    assert (terminal.close_code, terminal.close_reason) == (1007, "text must be a JSON object")


def use_page(service: Service, address: str, trusting: ssl.SSLContext) -> None:
    """See a sandbox that another machine has on the page, and kill a process of it there by a form."""
    with service.client(verify=trusting) as client:
        started = client.post(f"/api{address}/processes", json={"shell": "exec sleep 1000"}).json()["id"]
    with httpx.Client(base_url=service.address, verify=trusting, trust_env=False, timeout=60) as browser:
        browser.post("/login", data={"code": parse_qs(urlsplit(service.link).query)["code"][0]})
        shown = browser.get(address)
        assert shown.status_code == 200
        assert "exec sleep 1000" in shown.text
        token = re.search(r'name="csrfToken" value="([^"]+)"', shown.text)
        assert token is not None
        kill, form = f"{address}/processes/{started}/kill", {"csrfToken": token[1]}
        foreign = browser.post(kill, data=form, headers={"Origin": "https://elsewhere.example"})
        assert foreign.status_code == 403
        assert browser.post(kill, data={"csrfToken": "wrong"}).status_code == 403
        assert browser.post(kill, data=form).headers["location"] == address
        cookie = {"Cookie": f"cloche_session={browser.cookies['cloche_session']}"}
    where: dict[str, Any] = {"uri": f"{service.address.replace('https', 'wss', 1)}/api{address}/terminal"}
    where |= {"additional_headers": cookie, "ssl": trusting, "proxy": None}
    with connect(**where, origin=Origin(service.address)) as terminal:
        terminal.send(b"exit\n")
        assert json.loads(list(terminal)[-1])["exitCode"] == 0
    with pytest.raises(InvalidStatus) as refused:
        connect(**where, origin=Origin("https://elsewhere.example"))
    assert refused.value.response.status_code == 403
    with service.client(verify=trusting) as client:
        assert client.get(f"/api{address}/processes/{started}").json()["status"] == "signaled"
    assert httpx.get(service.address + address, verify=trusting, trust_env=False).status_code == 401


def test_workers_of_two_machines_pass_on_by_tls(starter: Starter, tmp_path: Path) -> None:
    """With PostgreSQL, and certificates that the database vouches for; of a machine that is gone this is said."""
    authority = Authority(tmp_path)
    pem = os.fspath(authority.server_file())
    tls = ("--tls-certificate", pem, "--tls-key", pem)
    trusting = ssl.create_default_context(cafile=os.fspath(authority.file))
    with postgres() as server:
        url = server.new_database()

        def machine(name: str, **more: Any) -> Service:
            port = free_port()
            words = (*tls, "--worker-address", f"https://127.0.0.1:{port}", "--port", str(port))
            return starter(name, "--database", url, *words, **more)

        first = machine("one")
        # Another name of the host is another machine, as is another folder of sandboxes.
        second = machine(
            "two", key=first.key, program=["tests.harness.other_host"], PYTHONPATH=os.pathsep.join(sys.path)
        )
        with first.client(verify=trusting) as one, second.client(verify=trusting) as other:
            sandbox = f"/api/sandboxes/{one.post('/api/sandboxes', json={}).json()['id']}"
            session = session_in(other, sandbox)
            assert one.post(f"{session}/run", json={"code": "x = 41"}).json()["status"] == "ok"
            assert other.post(f"{session}/run", json={"code": "print(x + 1)"}).json()["stdout"] == "42\n"
            listed = other.get("/api/sandboxes").json()["items"]  # which compares with the registry of its own machine
            assert [row["state"] for row in listed] == ["running"]
            run = one.post("/api/code/exec", json={"code": LONG}, headers=ASYNC).json()["id"]
            begun(other, f"/api/runs/{run}/events")
            assert other.post(f"/api/runs/{run}/cancel").json()["status"] == "cancelled"
            use_sockets(second, sandbox, trusting)
            use_page(second, sandbox.removeprefix("/api"), trusting)
            first.end(signal.SIGKILL)
            with pytest.raises(InvalidStatus) as gone:
                socket_to(second, f"{sandbox}/terminal", trusting)
            assert gone.value.response.status_code == 503
            lost = other.post(f"{session}/run", json={"code": "1"})
            assert (lost.status_code, lost.json()["title"]) == (503, "Worker gone")
        second.end()
