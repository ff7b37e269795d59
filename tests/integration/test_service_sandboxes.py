"""Live sandboxes over HTTP: what is done in one, who may, and that none is lost; by one server for most of it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from cloche.init import wire
from cloche.keeper import registry
from cloche.keeper.attach import visit
from cloche.records.database import Database
from cloche.server.identities import use_link_code
from tests.harness.service import Service, end_sandboxes, serving, start

PATIENCE_S = 60


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve for all tests of this module."""
    with serving(tmp_path_factory.mktemp("service"), "--drain", "2s") as one:
        yield one


@pytest.fixture(scope="module")
def runner(service: Service) -> Iterator[httpx.Client]:
    """Be a client that may run and read."""
    with service.client(service.new_key("run", "read")) as client:
        yield client


@contextmanager
def opened(client: httpx.Client, **asked: Any) -> Iterator[str]:
    """Hold a sandbox for the body; return the address of what is in it."""
    made = client.post("/api/sandboxes", json={"lifetime": "10m", **asked})
    assert made.status_code == 201, made.text
    address = f"/api/sandboxes/{made.json()['id']}"
    try:
        yield address
    finally:
        assert client.delete(address).json()["state"] == "ended"


@pytest.fixture(scope="module")
def sandbox(runner: httpx.Client) -> Iterator[str]:
    """Hold one that many tests share, which leave nothing in each other's way."""
    with opened(runner, labels={"for": "all"}) as address:
        yield address


def until(what: Callable[[], Any]) -> Any:
    """Wait until something is so, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)
    return found


def shell(client: httpx.Client, address: str, line: str, **more: Any) -> dict[str, Any]:
    """Run a line of shell to its end."""
    done = client.post(f"{address}/exec", json={"shell": line, **more})
    assert done.status_code == 200, done.text
    result: dict[str, Any] = done.json()
    return result


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and data of server-sent events."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def socket_to(service: Service, client: httpx.Client, path: str) -> ClientConnection:
    """Open a web socket with the key of a client."""
    headers = {"Authorization": client.headers["authorization"]}
    return connect(service.address.replace("http", "ws", 1) + path, additional_headers=headers, proxy=None)


def kind_of(answer: httpx.Response) -> tuple[int, str]:
    """Return what is wrong."""
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


def test_the_life_of_a_sandbox(runner: httpx.Client) -> None:
    """It is opened with files and labels, listed by these and by its state, paused, ended; then that is said."""
    files = [{"path": "in.txt", "text": "given"}]
    with opened(runner, name="mine", labels={"task": "7"}, files=files, memoryLimit="100m") as address:
        facts = runner.get(address).json()
        assert (facts["state"], facts["name"], facts["limits"]["memoryBytes"]) == ("running", "mine", 100 << 20)
        assert 0 < facts["secondsLeft"] <= 600
        assert shell(runner, address, "cat in.txt; echo left > /tmp/left")["stdout"] == "given"
        code = {"code": "open('a.csv', 'w').write('1'); print(6 * 7)", "collect": ["*.csv"]}
        ran = runner.post(f"{address}/exec", json=code).json()
        assert (ran["stdout"], [file["path"] for file in ran["files"]]) == ("42\n", ["a.csv"])

        def listed(**query: str) -> list[str]:
            return [one["id"] for one in runner.get("/api/sandboxes", params=query).json()["items"]]

        assert listed(label="task=7") == listed(name="mine", state="running") == [facts["id"]]
        assert listed(label="task=8") == listed(label="task=7", state="ended") == []
        assert runner.post(f"{address}/pause").json()["state"] == "paused"
        assert runner.get(address).json()["state"] == "paused"
        runner.post(f"{address}/resume")
        assert shell(runner, address, "cat /tmp/left")["stdout"] == "left\n"
    assert kind_of(runner.post(f"{address}/exec", json={"shell": "true"})) == (409, "sandbox-ended")
    assert listed(label="task=7", state="ended") == [facts["id"]]


def test_what_is_too_much_is_refused(runner: httpx.Client, sandbox: str) -> None:
    """Limits, users, network and time are bounded as those of runs are, also where a sandbox is there already."""
    for asked in ({"memoryLimit": "64g"}, {"users": True}, {"network": "open"}, {"lifetime": "48h"}, {"level": "none"}):
        assert kind_of(runner.post("/api/sandboxes", json=asked)) == (403, "policy-denied"), asked
    assert kind_of(runner.post(f"{sandbox}/exec", json={"shell": "true", "timeout": "1h"})) == (403, "policy-denied")
    rule = {"rules": ["files.example.org"]}
    assert kind_of(runner.post(f"{sandbox}/network/allow", json=rule)) == (403, "policy-denied")
    assert runner.get(f"{sandbox}/network").json()["mode"] == "off"
    assert runner.post("/api/sandboxes", json={"labels": {"a b": "c"}}).status_code == 422


def test_rules_of_the_network_are_changed_and_told(service: Service) -> None:
    """What is allowed and denied holds at once; what was refused is told."""
    with service.client() as admin, opened(admin, networkAllow=["example.org"]) as address:
        for verb, rule in (("allow", "files.example.org"), ("deny", "example.org")):
            answer = admin.post(f"{address}/network/{verb}", json={"rules": [rule]})
            assert answer.status_code == 200, answer.text
        told = {
            "mode": "allowlist", "allow": ["example.org", "files.example.org"], "deny": ["example.org"], "traffic": [],
        }  # fmt: skip
        assert admin.get(f"{address}/network").json() == told


CONNECT = "python3 -c 'import socket; socket.create_connection((\"{}\", 443), timeout=30)'"  # sends nothing


@pytest.mark.parametrize("lease", [{}, {"lease": "10m"}], ids=["kept", "held"])
def test_hosts_without_a_rule_are_asked_about(service: Service, lease: dict[str, str]) -> None:
    """By events to one client, whose answers are in the audit log; without a client or an answer, they are refused."""
    with service.client() as admin, service.client() as other, service.client(service.new_key("run")) as runner:
        asking = {"network": "allowlist", "networkAllow": [], "onNetwork": "ask", "lifetime": "10m", **lease}
        address = f"/api/sandboxes/{admin.post('/api/sandboxes', json=asking).json()['id']}"
        questions = f"{address}/network/questions"
        assert kind_of(admin.post(f"{questions}/1", json={"allow": True})) == (404, "not-found")

        def attempt(host: str) -> str:
            return str(admin.post(f"{address}/processes", json={"shell": CONNECT.format(host)}).json()["id"])

        def refusal(host: str) -> str:
            rows = {row["host"]: row["why"] for row in admin.get(f"{address}/network").json()["traffic"]}
            return rows.get(host, "")

        attempt("no.example")
        until(lambda: refusal("no.example"))
        question = {"question": 1, "host": "no.example", "port": 443}
        with other.stream("GET", questions) as answer:
            found = events(answer.iter_lines())
            assert next(found) == ("asking", {})
            assert kind_of(admin.get(questions)) == (409, "followed")
            going = attempt("no.example")
            assert next(found) == ("question", question)
        assert admin.post(f"{address}/processes/{going}/wait").status_code == 200  # the client has left
        with other.stream("GET", questions) as answer:
            found = events(answer.iter_lines())
            attempt("no.example")
            assert list(itertools.islice(found, 2)) == [("asking", {}), ("question", question)]
            assert kind_of(runner.post(f"{questions}/1", json={"allow": True})) == (404, "not-found")
            admin.post(f"{questions}/1", json={"allow": False}).raise_for_status()
            attempt("yes.example")
            assert next(found)[1]["host"] == "yes.example"
            assert admin.post(f"{questions}/2", json={"allow": True}).json() == {"question": 2, "allow": True}
            assert kind_of(admin.post(f"{questions}/2", json={"allow": False})) == (404, "not-found")
            until(lambda: refusal("yes.example"))
            assert admin.delete(address).json()["state"] == "ended"
            assert list(found) == [("ended", {})]
        told = admin.get("/api/audit", params={"limit": 20}).json()["items"]
        answered = [(one["kind"], one["host"], one["sandbox"]) for one in told if one.get("tool") == "network"][:2]
        number = address.rpartition("/")[2]
        assert answered == [("approval", "yes.example", number), ("denial", "no.example", number)]


def test_a_key_that_reads_does_not_run(service: Service, sandbox: str) -> None:
    """It looks, lists and reads; whatever changes anything, web sockets too, takes scope run."""
    with service.client(service.new_key("read")) as reader:
        assert reader.get(f"{sandbox}/files", params={"path": "/"}).status_code == 200
        assert reader.get(f"{sandbox}/processes").status_code == 200
        attempts = [
            reader.post("/api/sandboxes", json={}), reader.post(f"{sandbox}/exec", json={"shell": "true"}),
            reader.post(f"{sandbox}/processes", json={"shell": "true"}), reader.post(f"{sandbox}/sessions", json={}),
            reader.put(f"{sandbox}/files/content", params={"path": "x"}, content=b""), reader.delete(sandbox),
            reader.post(f"{sandbox}/network/deny", json={"rules": ["a.example"]}), reader.post(f"{sandbox}/pause"),
        ]  # fmt: skip
        assert [kind_of(one) for one in attempts] == [(403, "scope-missing")] * len(attempts)
        with pytest.raises(InvalidStatus) as refused, socket_to(service, reader, f"{sandbox}/terminal"):
            pass
        assert refused.value.response.status_code == 403
    with service.client("cloche_none") as client, pytest.raises(InvalidStatus) as nobody:
        socket_to(service, client, f"{sandbox}/terminal")
    assert nobody.value.response.status_code == 401


def test_of_another_project_nothing_is_found(service: Service, runner: httpx.Client) -> None:
    """Its id, which worked before, is 404 for every request; and it is in no list."""
    with opened(runner, labels={"whose": "ours"}) as address:
        number = address.rpartition("/")[2]
        with sqlite3.connect(service.database, timeout=10) as rows:
            rows.execute("UPDATE sandboxes SET project = 'theirs' WHERE id = ?", (number,))
        attempts = [
            runner.get(address), runner.delete(address), runner.post(f"{address}/exec", json={"shell": "true"}),
            runner.get(f"{address}/files", params={"path": "/"}), runner.get(f"{address}/processes"),
        ]  # fmt: skip
        assert [kind_of(one) for one in attempts] == [(404, "not-found")] * len(attempts)
        with pytest.raises(InvalidStatus) as refused, socket_to(service, runner, f"{address}/terminal"):
            pass
        assert refused.value.response.status_code == 404
        assert runner.get("/api/sandboxes", params={"label": "whose=ours"}).json()["items"] == []
        with sqlite3.connect(service.database, timeout=10) as rows:
            rows.execute("UPDATE sandboxes SET project = 'default' WHERE id = ?", (number,))


def test_output_comes_while_it_runs_and_who_goes_away_ends_it(runner: httpx.Client, sandbox: str) -> None:
    """The first output is there before the command goes on; then nobody reads, and it is killed with what it left."""
    line = "sleep 1000 & echo $! > /tmp/pid; echo first; wait"
    with runner.stream("POST", f"{sandbox}/exec", params={"stream": "1"}, json={"shell": line}) as answer:
        found = events(answer.iter_lines())
        assert next(found)[0] == "call"
        assert next(data["text"] for name, data in found if name == "output") == "first\n"
    until(lambda: shell(runner, sandbox, "kill -0 $(cat /tmp/pid) || echo gone")["stdout"] == "gone\n")
    with runner.stream("POST", f"{sandbox}/exec", params={"stream": "1"}, json={"shell": "sleep 1000"}) as answer:
        found = events(answer.iter_lines())
        runner.delete(f"{sandbox}/exec/{next(found)[1]['id']}")
        assert [data["status"] for name, data in found if name == "error"] == ["cancelled"]


def test_files_pass_in_both_directions(runner: httpx.Client, sandbox: str) -> None:
    """Streamed in, appended to, read in parts, described, moved, listed and removed; errors have statuses."""
    content = f"{sandbox}/files/content"
    pieces = (bytes([number]) * 65_536 for number in range(64))
    assert runner.put(content, params={"path": "d/big", "mode": "600"}, content=pieces).json()["mode"] == "0600"
    assert runner.put(content, params={"path": "d/big", "append": "1"}, content=b"end").json()["size"] == (4 << 20) + 3
    for asked, data, shown in (
        ("65534-65537", b"\0\0\1\1", "65534-65537/4194307"), ("-3", b"end", "4194304-4194306/4194307"),
        ("4194305-", b"nd", "4194305-4194306/4194307"),
    ):  # fmt: skip
        part = runner.get(content, params={"path": "d/big"}, headers={"Range": f"bytes={asked}"})
        assert (part.status_code, part.content, part.headers["content-range"]) == (206, data, f"bytes {shown}")
    past = runner.get(content, params={"path": "d/big"}, headers={"Range": "bytes=4194307-"})
    assert kind_of(past) == (416, "range-not-satisfiable")
    whole = runner.get(content, params={"path": "d/big"})
    assert (len(whole.content), whole.headers["content-length"]) == ((4 << 20) + 3, "4194307")
    assert b"Pid:" in runner.get(content, params={"path": "/proc/self/status"}).content  # which says that it is empty
    moved = runner.post(f"{sandbox}/files/move", json={"path": "d/big", "target": "/tmp/moved"})
    assert moved.json()["name"] == "moved"
    assert runner.get(f"{sandbox}/files", params={"path": "d"}).json()["items"] == []
    assert runner.post(f"{sandbox}/files/folder", json={"path": "d/e"}).json()["type"] == "directory"
    assert kind_of(runner.delete(f"{sandbox}/files", params={"path": "d"})) == (409, "file-exists")
    assert runner.delete(f"{sandbox}/files", params={"path": "d", "recursive": "1"}).json() == {"removed": True}
    assert kind_of(runner.get(content, params={"path": "d"})) == (404, "file-not-found")
    assert kind_of(runner.put(content, params={"path": "/etc/passwd"}, content=b"")) == (403, "file-refused")
    shell(runner, sandbox, r"mkdir odd; echo odd > odd/$(printf '\377')")
    named = runner.get(f"{sandbox}/files", params={"path": "odd"}).json()["items"][0]["nameBase64"]
    assert named == "/w=="
    assert runner.get(content, params={"pathBase64": "b2RkL/8="}).content == b"odd\n"
    assert kind_of(runner.get(content, params={"pathBase64": "b2RkL/4="})) == (404, "file-not-found")


def test_half_an_upload_replaces_nothing(service: Service, runner: httpx.Client, sandbox: str) -> None:
    """A client that goes away in the middle leaves the file as it was, and frees what it held."""
    params = {"path": "/tmp/kept"}
    runner.put(f"{sandbox}/files/content", params=params, content=b"before")

    def half() -> Iterator[bytes]:
        yield b"x" * 300_000
        raise InterruptedError

    for _ in range(20):  # more than there may be at once
        with service.client() as other, pytest.raises(InterruptedError):
            other.put(f"{sandbox}/files/content", params=params, content=half())
    assert runner.get(f"{sandbox}/files/content", params=params).content == b"before"
    assert runner.put(f"{sandbox}/files/content", params=params, content=b"after").status_code == 200


def test_a_folder_travels_as_an_archive(runner: httpx.Client, sandbox: str) -> None:
    """Out of one folder and into another; what leads out of it by its name, or through a link, is refused inside."""
    shell(runner, sandbox, "mkdir -p tree/sub; echo one > tree/sub/a; ln -s a tree/sub/link")
    packed = runner.get(f"{sandbox}/files/archive", params={"path": "tree"})
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert {name.rstrip("/") for name in archive.getnames()} == {"sub", "sub/a", "sub/link"}
    runner.put(f"{sandbox}/files/archive", params={"path": "/tmp/copy"}, content=packed.content).raise_for_status()
    assert shell(runner, sandbox, "cat /tmp/copy/sub/link")["stdout"] == "one\n"
    hostile = io.BytesIO()
    with tarfile.open(fileobj=hostile, mode="w") as archive:
        member = tarfile.TarInfo("../../escaped")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    refused = runner.put(f"{sandbox}/files/archive", params={"path": "/tmp/copy"}, content=hostile.getvalue())
    assert refused.status_code == 409
    assert shell(runner, sandbox, "ls /tmp/escaped /escaped; true")["stdout"] == ""


def test_changes_since_a_mark(runner: httpx.Client, sandbox: str) -> None:
    """Each kind by its path, also what a moved folder holds; the content as an archive; what is no mark is 422."""
    at, mark_path = "/workspace/marked", {"path": "/workspace/marked"}
    shell(
        runner,
        sandbox,
        "mkdir -p marked/d marked/gone; cd marked; for f in a b c d/x d/y gone/z; do echo $f > $f; done",
    )
    shell(runner, sandbox, r"cd marked; ln -s a link; echo odd > $(printf '\377')")
    mark = runner.get(f"{sandbox}/files/mark", params=mark_path).json()
    assert set(mark["entries"]) == {"a", "b", "c", "d", "d/x", "d/y", "gone", "gone/z", "link"}
    nothing = {"items": [], "leftOut": [], "nextCursor": None, "isPartial": False}
    assert runner.post(f"{sandbox}/files/changes", json=mark).json() == nothing
    shell(
        runner, sandbox, "cd marked; echo new > a; touch b; chmod 600 c; rm -r gone; mv d e; ln -sfn b link; "
        r"mkfifo pipe; rm $(printf '\377'); echo made > $(printf '\376')",
    )  # fmt: skip
    answer = runner.post(f"{sandbox}/files/changes", json=mark).json()
    told = {one.get("path", one.get("pathBase64")): one for one in answer["items"]}
    assert {path: one["what"] for path, one in told.items()} == {
        "a": "modified", "c": "mode", "d": "removed", "d/x": "removed", "d/y": "removed", "e": "created",
        "e/x": "created", "e/y": "created", "gone": "removed", "gone/z": "removed", "link": "modified",
        "pipe": "created", "/w==": "removed", "/g==": "created",
    }  # fmt: skip
    digest = hashlib.sha256(b"new\n").hexdigest()
    assert told["a"] == {
        "path": "a", "what": "modified", "type": "file", "mode": "0644", "size": 4, "sha256": digest,
        "oldType": "file", "oldMode": "0644",
    }  # fmt: skip
    assert (told["c"]["mode"], told["c"]["oldMode"], told["link"]["target"]) == ("0600", "0644", "b")
    packed = runner.post(f"{sandbox}/files/changes/archive", json=mark)
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert archive.getnames() == ["a", "c", "e", "e/x", "e/y", "link", "\udcfe"]
        assert archive.extractfile("e/x").read() == b"d/x\n"  # type: ignore[union-attr]
    for wrong in ({"since": "0"}, {"entries": {"a": "file"}}, {"path": None}, {"since": "9" * 19}, {"path": "a\0"}):
        assert runner.post(f"{sandbox}/files/changes", json={**mark, **wrong}).status_code == 422, wrong
    assert kind_of(runner.get(f"{sandbox}/files/mark", params={"path": f"{at}/none"})) == (404, "file-not-found")
    shell(runner, sandbox, "rm -r marked")


def test_a_path_never_leads_to_this_machine(runner: httpx.Client, sandbox: str, tmp_path: Path) -> None:
    """Whatever a path, or an id, looks like, it is one inside, or an error; nothing here is read or written."""
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    assert Path(f"{tmp_path}/x/../secret").parent.parent == tmp_path / "x"  # a naive join would have found it
    tricks = (str(secret), f"../../..{secret}", f"//{secret}", f"/proc/1/root{secret}", f"/proc/self/cwd/../..{secret}")
    for path in tricks:
        read = runner.get(f"{sandbox}/files/content", params={"path": path})
        assert read.status_code in (403, 404, 409), (path, read.text)
        runner.put(f"{sandbox}/files/content", params={"path": path}, content=b"overwritten")
        runner.delete(f"{sandbox}/files", params={"path": path})
    shell(runner, sandbox, f"mkdir -p /tmp/l; ln -sf {secret} /tmp/l/link; ln -sf {tmp_path} /tmp/l/folder")
    for path in ("/tmp/l/link", "/tmp/l/folder/secret"):
        assert b"of this machine" not in runner.get(f"{sandbox}/files/content", params={"path": path}).content
    assert secret.read_text() == "of this machine"
    for odd in ("..", "%2e%2e", "sb_..%2f..", "x" * 200, "sb_%00"):
        assert runner.get(f"/api/sandboxes/{odd}/files", params={"path": "/"}).status_code in (404, 405, 422)
    assert runner.get(f"{sandbox}/files/content", params={"path": "a\0b"}).status_code == 422


def test_each_call_on_a_file_takes_a_timeout(runner: httpx.Client, sandbox: str) -> None:
    """No process inside starts in a microsecond: each call is given up, and says why, as is the start of a session."""
    short, at = "0.001ms", "/tmp/in-time"
    calls = [
        ("GET", "files", {}), ("DELETE", "files", {}), ("GET", "files/stat", {}), ("GET", "files/content", {}),
        ("PUT", "files/content", {"content": b"1"}), ("GET", "files/archive", {}),
        ("PUT", "files/archive", {"content": b""}), ("GET", "changes", {}),
    ]  # fmt: skip
    answers = [
        runner.request(method, f"{sandbox}/{name}", params={"path": at, "timeout": short}, **more)
        for method, name, more in calls
    ]
    bodies = [("files/folder", {"path": at}), ("files/move", {"path": at, "target": "/tmp/x"})]
    answers += [runner.post(f"{sandbox}/{name}", json={**body, "timeout": short}) for name, body in bodies]
    for answer in answers:
        assert (answer.status_code, answer.json().get("kind")) == (409, "timeout"), answer.text
    late = runner.post(f"{sandbox}/sessions", json={"timeout": short})
    assert (late.status_code, late.json()["title"]) == (503, "Start failed"), late.text
    wrong = runner.get(f"{sandbox}/files", params={"path": at, "timeout": "soon"})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "timeout"), wrong.text
    assert runner.get(f"{sandbox}/files", params={"path": "/tmp", "timeout": "60s"}).status_code == 200


def test_changes_are_told(runner: httpx.Client, sandbox: str) -> None:
    """What is made in a folder that is watched comes as an event."""
    runner.post(f"{sandbox}/files/folder", json={"path": "/tmp/watched"})
    with runner.stream("GET", f"{sandbox}/changes", params={"path": "/tmp/watched"}) as answer:
        found = events(answer.iter_lines())
        assert next(found)[0] == "watching"
        shell(runner, sandbox, "echo 1 > /tmp/watched/new")
        assert next(found) == ("change", {"kind": "created", "path": "new", "isDirectory": False})


def test_a_process_goes_on_by_itself(runner: httpx.Client, sandbox: str) -> None:
    """It is started, looked at, followed by one reader while another writes to it, waited for, signalled and killed."""
    made = runner.post(f"{sandbox}/processes", json={"shell": "echo begun; read word; echo $word >&2; sleep 1000"})
    process = f"{sandbox}/processes/{made.json()['id']}"
    until(lambda: runner.get(process).json()["stdout"] == "begun\n")
    with runner.stream("GET", f"{process}/output") as answer:
        found = events(answer.iter_lines())
        assert next(found) == ("output", {"stream": "stdout", "text": "begun\n"})
        assert kind_of(runner.get(f"{process}/output")) == (409, "followed")
        assert runner.post(f"{process}/stdin", json={"text": "word\n"}).json()["isRead"]
        assert next(found) == ("output", {"stream": "stderr", "text": "word\n"})
    assert runner.post(f"{process}/wait", params={"seconds": 0.1}).status_code == 202
    runner.post(f"{process}/signal", json={"signal": "TERM"})
    ended = runner.post(f"{process}/wait").json()
    assert (ended["status"], ended["exitCode"], ended["stdout"]) == ("signaled", 143, "")
    other = runner.post(f"{sandbox}/processes", json={"argv": ["sleep", "1000"]}).json()["id"]
    assert runner.delete(f"{sandbox}/processes/{other}").json()["exitCode"] is not None
    assert kind_of(runner.get(f"{sandbox}/processes/12345678")) == (404, "not-found")


def test_a_session_keeps_its_state_and_goes_back(runner: httpx.Client, sandbox: str) -> None:
    """Cells find what others left; a checkpoint brings memory back; a fork goes its own way; a cell is interrupted."""
    made = runner.post(f"{sandbox}/sessions", json={"checkpoints": True})
    session = f"{sandbox}/sessions/{made.json()['id']}"

    def value(code: str, address: str = session) -> Any:
        return runner.post(f"{address}/run", json={"code": code}).json()["value"]

    value("x = 1")
    runner.post(f"{session}/checkpoint", json={"name": "one"}).raise_for_status()
    assert value("x = 2; x") == 2
    runner.post(f"{session}/rollback", json={"name": "one"}).raise_for_status()
    fork = f"{sandbox}/sessions/{runner.post(f'{session}/fork', json={}).json()['items'][0]['id']}"
    assert (value("x += 10; x"), value("x", fork)) == (11, 1)
    sleeping = "import time; print('begun', flush=True); time.sleep(1000)"
    with runner.stream("POST", f"{fork}/run", params={"stream": "1"}, json={"code": sleeping}) as answer:
        found = events(answer.iter_lines())
        next(data for name, data in found if name == "output")
        runner.post(f"{fork}/interrupt")
        assert [data["status"] for name, data in found if name == "result"] == ["signaled"]
    plain = runner.post(f"{sandbox}/sessions", json={}).json()["id"]
    refused = runner.post(f"{sandbox}/sessions/{plain}/checkpoint", json={"name": "a"})
    assert kind_of(refused) == (503, "backend-unavailable")
    for one in (session, fork, f"{sandbox}/sessions/{plain}"):
        runner.delete(one)
    assert runner.get(f"{sandbox}/sessions").json()["items"] == []
    assert kind_of(runner.post(f"{session}/run", json={"code": "x"})) == (404, "not-found")


def test_a_terminal_by_web_socket(service: Service, runner: httpx.Client, sandbox: str) -> None:
    """Bytes pass both ways, its size follows, and its end is told; with its client goes its process."""
    command = "/terminal?rows=30&columns=100&command=sh&command=-c&command="
    with socket_to(service, runner, f"{sandbox}{command}stty%20size;read%20x;stty%20size;exit%203") as terminal:
        assert b"30 100" in received(terminal, b"30 100")
        terminal.send(json.dumps({"resize": [40, 120]}))
        terminal.send(b"\n")
        assert b"40 120" in received(terminal, b"40 120")
        assert json.loads(last_text(terminal)) == {"exitCode": 3, "status": "error"}
    with socket_to(service, runner, f"{sandbox}{command}echo%20$$%3E/tmp/tty;cat") as terminal:
        until(lambda: shell(runner, sandbox, "test -s /tmp/tty")["exitCode"] == 0)
    until(lambda: shell(runner, sandbox, "kill -0 $(cat /tmp/tty) || echo gone")["stdout"] == "gone\n")
    with socket_to(service, runner, f"{sandbox}/terminal") as terminal:
        terminal.send("no JSON")
        assert closed_by(terminal) == 1007


def closed_by(terminal: ClientConnection) -> int:
    """Wait until the service closes a web socket, and return the code."""
    try:
        while True:
            terminal.recv(PATIENCE_S)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 0


def received(terminal: ClientConnection, wanted: bytes) -> bytes:
    """Return what comes until something wanted is in it."""
    found = b""
    while wanted not in found:
        piece = terminal.recv(PATIENCE_S)
        assert isinstance(piece, bytes)
        found += piece
    return found


def last_text(terminal: ClientConnection) -> str:
    """Return the text that comes after all bytes."""
    while isinstance(found := terminal.recv(PATIENCE_S), bytes):
        pass
    return found


def test_who_does_not_read_a_terminal_makes_it_wait(service: Service, runner: httpx.Client, sandbox: str) -> None:
    """The program stands still after what the pipes hold, the service holds no more, and reading sets it going."""
    line = "i=0; while :; do echo $i > /tmp/progress; head -c 65536 /dev/zero; i=$((i+1)); done"
    query = httpx.QueryParams([("command", "sh"), ("command", "-c"), ("command", line)])
    headers = {"Authorization": runner.headers["authorization"]}
    address = urlsplit(service.address)
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    link.connect((address.hostname, address.port))
    where = f"ws://{address.netloc}{sandbox}/terminal?{query}"
    with connect(where, sock=link, additional_headers=headers, proxy=None, max_queue=1) as terminal:
        terminal.recv(PATIENCE_S)

        def progress() -> int:
            return int(shell(runner, sandbox, "cat /tmp/progress")["stdout"] or 0)

        def stands() -> bool:
            before = progress()
            shell(runner, sandbox, "sleep 0.3")
            return progress() == before

        until(stands)
        at = progress()
        assert at < 100  # of 64 KiB, in all pipes and windows on the way
        assert resident_kib(service.process.pid) < 400_000
        for _ in range(2_000):
            terminal.recv(PATIENCE_S)
        assert progress() > at
        link.shutdown(socket.SHUT_RDWR)  # a client that does not read cannot say good-bye


def resident_kib(pid: int) -> int:
    """Return how much memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_a_port_by_web_socket(service: Service, runner: httpx.Client, sandbox: str) -> None:
    """A server on loopback inside is reached, half by half; one that is not there is refused."""
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 7000)); c, _ = s.accept(); "
        "d = b''.join(iter(lambda: c.recv(9999), b'')); c.sendall(d[::-1]); c.close()"
    )
    with pytest.raises(InvalidStatus) as refused, socket_to(service, runner, f"{sandbox}/ports/7001"):
        pass
    assert refused.value.response.status_code == 409
    runner.post(f"{sandbox}/processes", json={"argv": ["python3", "-c", code]})
    until(lambda: 7000 in [one["port"] for one in runner.get(f"{sandbox}/ports").json()["items"]])
    with socket_to(service, runner, f"{sandbox}/ports/7000") as connection:
        connection.send(b"ab")
        connection.send(b"c")
        connection.send(json.dumps({"end": True}))
        assert connection.recv(PATIENCE_S) == b"cba"


def test_a_key_that_is_revoked_ends_its_web_socket(service: Service, sandbox: str) -> None:
    """An open terminal is closed within seconds of its key's end."""
    with service.client() as admin:
        made = admin.post("/api/keys", json={"name": "short", "scopes": ["run"]}).json()
        with service.client(made["key"]) as client, socket_to(service, client, f"{sandbox}/terminal") as terminal:
            terminal.send(b"echo st'il'l here\n")
            assert received(terminal, b"still here")
            admin.delete(f"/api/keys/{made['id']}")
            assert closed_by(terminal) == 1008


def test_a_page_of_another_site_opens_no_terminal(service: Service, sandbox: str) -> None:
    """A browser sends its cookie along with any page's web socket: one that works for our own page, and no other's."""
    database = Database(service.database)
    cookie = use_link_code(database, parse_qs(urlsplit(service.link).query)["code"][0])
    database.close()
    where = f"{service.address.replace('http', 'ws', 1)}{sandbox}/terminal"
    headers = {"Cookie": f"cloche_session={cookie}"}
    with connect(where, additional_headers=headers, origin=Origin(service.address), proxy=None):
        pass
    with pytest.raises(InvalidStatus) as refused:
        connect(where, additional_headers=headers, origin=Origin("http://elsewhere.example"), proxy=None)
    assert refused.value.response.status_code == 403


def test_a_sandbox_outlives_its_service(tmp_path: Path) -> None:
    """After kill -9 a service that starts again finds it with its files and processes; another's end is said."""
    first = start(tmp_path)
    with first.client() as client:
        kept, lost = (
            f"/api/sandboxes/{client.post('/api/sandboxes', json={'labels': {'n': n}}).json()['id']}" for n in "12"
        )
        shell(client, kept, "echo text > /home/sandbox/note")
        process = client.post(f"{kept}/processes", json={"shell": "echo begun; exec sleep 1000"}).json()["id"]
        session = client.post(f"{kept}/sessions", json={}).json()["id"]
    first.end(signal.SIGKILL)
    second = start(tmp_path, key=first.key)
    try:
        with second.client() as client:
            assert shell(client, kept, "cat /home/sandbox/note")["stdout"] == "text\n"
            assert client.get(f"{kept}/processes/{process}").json()["stdout"] == "begun\n"
            assert kind_of(client.get(f"{kept}/sessions/{session}")) == (404, "not-found")
            shell(client, lost, "true")
            os.kill(keeper_of(tmp_path / "run", lost), signal.SIGKILL)
            until(lambda: client.get(lost).json()["state"] == "ended")
            assert kind_of(client.post(f"{lost}/exec", json={"shell": "true"})) == (409, "sandbox-ended")
            states = {one["labels"]["n"]: one["state"] for one in client.get("/api/sandboxes").json()["items"]}
            assert states == {"1": "running", "2": "ended"}
            assert client.delete(kept).json()["state"] == "ended"
    finally:
        second.end()
        end_sandboxes(tmp_path)


@pytest.mark.usefixtures("gvisor_alone")
def test_sandboxes_of_other_backends_live_too(service: Service) -> None:
    """The worker holds one on gVisor: commands, processes, sessions, files and a pause are those of any sandbox."""
    with service.client() as admin, opened(admin, backend="gvisor", lifetime="10m") as address:
        about = admin.get(address).json()
        assert (about["backend"], about["heldBy"], about["state"]) == ("gvisor", "worker", "running")
        assert shell(admin, address, "uname -r; echo text > note")["stdout"] == "4.4.0\n"
        assert admin.get(f"{address}/files/content", params={"path": "/workspace/note"}).text == "text\n"
        process = admin.post(f"{address}/processes", json={"shell": "echo begun; sleep 1000"}).json()["id"]
        until(lambda: admin.get(f"{address}/processes/{process}").json()["stdout"] == "begun\n")
        session = admin.post(f"{address}/sessions", json={}).json()["id"]
        assert admin.post(f"{address}/sessions/{session}/run", json={"code": "6 * 7"}).json()["value"] == 42
        assert admin.post(f"{address}/pause").json()["state"] == "paused"
        assert admin.get(address).json()["state"] == "paused"
        assert admin.post(f"{address}/resume").json()["state"] == "running"
        assert shell(admin, address, "cat note")["stdout"] == "text\n"


def test_a_sandbox_with_a_lease_ends_after_its_last_use(service: Service) -> None:
    """No keeper holds it, at level jail and confined; it lives while a request uses it, and for the lease after."""
    with service.client() as client:
        for level in ("jail", "confined"):
            made = client.post("/api/sandboxes", json={"lease": "1s", "level": level}).json()
            address = f"/api/sandboxes/{made['id']}"
            assert (made["heldBy"], made["lease"]) == ("worker", 1.0)
            assert shell(client, address, "sleep 2; echo up")["stdout"] == "up\n"
            until(lambda address=address: client.get(address).json()["state"] == "ended")
            assert kind_of(client.post(f"{address}/exec", json={"shell": "true"})) == (409, "sandbox-ended")
        short = client.post("/api/sandboxes", json={"lease": "10m", "lifetime": "1s"}).json()["id"]
        until(lambda: client.get(f"/api/sandboxes/{short}").json()["state"] == "ended")
        for lease in ("1us", 0.9):  # the service would look at it as often
            assert kind_of(client.post("/api/sandboxes", json={"lease": lease})) == (422, "invalid-request")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_held_sandbox_ends_with_its_service(tmp_path: Path, number: int) -> None:
    """Its processes end, by SIGTERM or SIGKILL, and the next service says so; no keeper was there."""
    service, word = start(tmp_path), b"%d" % (10**8 + int.from_bytes(os.urandom(3)))
    with service.client() as client:
        address = f"/api/sandboxes/{client.post('/api/sandboxes', json={'lease': '10m'}).json()['id']}"
        client.post(f"{address}/processes", json={"shell": f"exec sleep {word.decode()}"})
        until(lambda: runs_somewhere(word))
        assert not list((tmp_path / "run" / "cloche").glob("*.lock"))
    service.end(number)
    until(lambda: not runs_somewhere(word))
    with serving(tmp_path, key=service.key) as again, again.client() as client:
        until(lambda: client.get(address).json()["state"] == "ended")


def runs_somewhere(word: bytes) -> bool:
    """Tell whether a process has this word in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_bytes().split(b"\0"):
                return True
    return False


def test_sandboxes_end_when_no_service_comes_back(tmp_path: Path) -> None:
    """Also after kill -9; one that comes back says how long it may be away; the list says whose sandboxes are."""
    service, place = start(tmp_path), tmp_path / "run" / "cloche"
    try:
        with service.client() as client:
            made = client.post("/api/sandboxes", json={}).json()
        name = made["id"].replace("_", "-")
        listed = cloche(service, "sandbox", "list", "--json")
        (mine,) = [
            one for one in json.loads(listed) if one["name"] == name
        ]  # root's list has those of everybody's tests
        assert mine["owner"] == f"{made['apiKey']} of {service.database}"
        found = registry.Found(name=name, path=str(place))
        assert visit(found, "info")["owner_s"] == 600
        with found.connect() as link:  # whoever is in it keeps it
            link.sendall(wire.json_frame(wire.HELLO, 0, version=wire.VERSION))
            service.end(signal.SIGKILL)
            service = start(tmp_path, "--keep-sandboxes", "1s", key=service.key)
            until(lambda: visit(found, "info")["owner_s"] == 1)
            service.end(signal.SIGKILL)
        until(lambda: not list(place.iterdir()))
        until(lambda: not list(place.iterdir()))
    finally:
        if service.process.poll() is None:
            service.end()
        end_sandboxes(tmp_path)


def test_a_service_may_end_its_sandboxes_with_itself(tmp_path: Path) -> None:
    """With --end-sandboxes SIGTERM ends those that live, and the next service says so."""
    service = start(tmp_path, "--end-sandboxes")
    with service.client() as client:
        address = f"/api/sandboxes/{client.post('/api/sandboxes', json={}).json()['id']}"
        client.post(f"{address}/processes", json={"shell": "trap '' TERM; sleep 1000"})
    assert service.end() == 128 + signal.SIGTERM
    assert not list((tmp_path / "run" / "cloche").iterdir())
    with serving(tmp_path, key=service.key) as again, again.client() as client:
        assert client.get(address).json()["state"] == "ended"


def cloche(service: Service, *words: str) -> str:
    """Run a command of the command line as the service's user, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "cloche", *words], env=service.environ, cwd=service.log.parent, capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def keeper_of(place: Path, address: str) -> int:
    """Return the process that keeps a sandbox: it has the lock of its name open."""
    lock = os.stat(place / "cloche" / f"{address.rpartition('/')[2].replace('_', '-')}.lock")
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.path.samestat(os.stat(fd), lock) for fd in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:
            continue
    raise AssertionError("nobody keeps it")
