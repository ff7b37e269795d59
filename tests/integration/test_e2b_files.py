"""E2B's envd and its files: requests as its SDKs send them, and as somebody sends them who wants to break it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.harness import e2b

DISK = 16 << 20
OCTETS = {"Content-Type": "application/octet-stream"}
FRAME = struct.Struct(">BI")


@dataclass
class Envd:
    """Hold a sandbox of a service, and speak to its envd."""

    service: e2b.E2BService
    sandbox_id: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that name the sandbox, and open it."""
        return {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}

    def send(self, method: str, path: str, headers: Any = (), **more: Any) -> httpx.Response:
        """Send a request."""
        with self.service.http(**self.headers) as client:
            return client.request(method, path, headers=dict(headers), **more)

    def write(self, path: str, content: Any, user: str = "", **headers: str) -> httpx.Response:
        """Write a file from a body of octets."""
        query = {"path": path} | ({"username": user} if user else {})
        return self.send("POST", "/files", {**OCTETS, **headers}, params=query, content=content)

    def read(self, path: str, **headers: str) -> httpx.Response:
        """Read a file."""
        return self.send("GET", "/files", headers, params={"path": path})

    def ask(self, method: str, user: str = "", **fields: Any) -> httpx.Response:
        """Call a unary method."""
        basic = {"Authorization": f"Basic {base64.b64encode(f'{user}:'.encode()).decode()}"} if user else {}
        return self.send("POST", f"/filesystem.Filesystem/{method}", basic, json=fields)

    def entry(self, path: str, user: str = "") -> dict[str, Any]:
        """Describe a file."""
        answer = self.ask("Stat", user, path=path)
        assert answer.status_code == 200, answer.text
        entry: dict[str, Any] = answer.json()["entry"]
        return entry

    def run(self, line: str, program: str = "/bin/sh") -> str:
        """Run a line of shell, or of Python; return what it prints."""
        body = json.dumps({"process": {"cmd": program, "args": ["-c", line]}}).encode()
        headers = {"Content-Type": "application/connect+json"}
        answer = self.send("POST", "/process.Process/Start", headers, content=FRAME.pack(0, len(body)) + body)
        events = [message["event"] for message in messages(answer.content) if "event" in message]
        assert events[-1]["end"].get("exitCode", 0) == 0, (line, events)
        pieces = [event["data"]["stdout"] for event in events if "stdout" in event.get("data", {})]
        return b"".join(map(base64.b64decode, pieces)).decode()

    def signed(self, path: str, operation: str, user: str = "", expiration: int | None = None) -> dict[str, str]:
        """Return the query of a signed URL."""
        words = [path, operation, user, self.token, *([] if expiration is None else [str(expiration)])]
        digest = base64.b64encode(hashlib.sha256(":".join(words).encode()).digest()).decode().rstrip("=")
        more = {} if expiration is None else {"signature_expiration": str(expiration)}
        return {"path": path, "signature": f"v1_{digest}", **more, **({"username": user} if user else {})}


def messages(data: bytes) -> list[dict[str, Any]]:
    """Return the messages of a stream."""
    found = []
    while len(data) >= FRAME.size:
        _, length = FRAME.unpack_from(data)
        found.append(json.loads(data[FRAME.size : FRAME.size + length]))
        data = data[FRAME.size + length :]
    return found


def create(running: e2b.E2BService, **fields: object) -> Envd:
    """Create a sandbox."""
    with running.http(**{"X-API-KEY": running.key}) as client:
        answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 300, **fields})
        assert answer.status_code == 201, answer.text
        made = answer.json()
    return Envd(service=running, sandbox_id=made["sandboxID"], token=made["envdAccessToken"])


def kill(envd: Envd) -> None:
    """End a sandbox."""
    with envd.service.http(**{"X-API-KEY": envd.service.key}) as client:
        assert client.delete(f"/sandboxes/{envd.sandbox_id}").status_code == 204


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[e2b.E2BService]:
    """Serve for this module's tests."""
    with e2b.serving(tmp_path_factory.mktemp("e2b-files"), "--disk", str(DISK)) as running:
        yield running


@pytest.fixture(scope="module")
def envd(running: e2b.E2BService) -> Envd:
    """Create the sandbox that most tests use."""
    return create(running, envVars={"GIVEN": "at create"})


def code(answer: httpx.Response) -> tuple[int, object]:
    """Return the status of an answer and its `code`: a number for HTTP, a word for Connect."""
    return answer.status_code, answer.json()["code"]


def test_a_written_file_is_its_users_with_all_folders_above_it_and_replaces_what_was_there(envd: Envd) -> None:
    """Paths are of the user's home; mode 0644; a second write keeps the mode, and its metadata replace the first."""
    answer = envd.write("new/deep/a.txt", b"one", **{"X-Metadata-Author": "me", "x-metadata-b": "2"})
    written = {"path": "/home/user/new/deep/a.txt", "name": "a.txt", "type": "file"}
    assert answer.json() == [{**written, "metadata": {"author": "me", "b": "2"}}]
    entry = envd.entry("~/new/deep/a.txt")
    assert (entry["size"], entry["mode"], entry["permissions"]) == ("3", 0o644, "-rw-r--r--")
    assert (entry["owner"], entry["group"], entry["metadata"]) == ("user", "user", {"author": "me", "b": "2"})
    assert envd.entry("new/deep")["permissions"] == "drwxr-xr-x"
    envd.run("chmod 755 /home/user/new/deep/a.txt")
    assert envd.write("/home/user/new/deep/a.txt", b"second").json() == [written]
    entry = envd.entry("new/deep/a.txt")
    assert (entry["mode"], entry["size"], entry.get("metadata")) == (0o755, "6", None)
    assert envd.read("new/deep/a.txt").content == b"second"


def test_what_a_users_rights_do_not_reach_is_done_as_root_and_becomes_the_users(envd: Envd) -> None:
    """As envd is root at E2B's, a file in root's folder is written and read for any user, and `root` keeps its own."""
    assert envd.write("/root/in/x", b"1").status_code == 200
    assert envd.run("stat -c '%U %a' /root/in /root/in/x") == "user 755\nuser 644\n"
    assert envd.write("y", bytes(3 << 20), user="root").json()[0]["path"] == "/root/y"
    assert envd.entry("/root/y")["owner"] == "root"
    assert envd.read("/etc/shadow").content.startswith(b"root:")
    assert envd.write("/root/y", bytes(3 << 20)).status_code == 200, "more than can be sent again"
    assert envd.entry("/root/y")["owner"] == "user"
    for path in ("/root/y", "/root/in"):
        assert envd.ask("Remove", path=path).status_code == 200


def test_files_of_a_form_are_written_to_the_paths_that_are_their_names(envd: Envd) -> None:
    """Parts of another name are passed over; a path in the query counts for one file, and not for a second."""
    files = [("file", ('m/é "1".txt', b"1")), ("other", ("m/0", b"0")), ("file", ("/tmp/2", bytes(300_000)))]
    answer = envd.send("POST", "/files", files=files)
    assert [row["path"] for row in answer.json()] == ["/home/user/m/é %221%22.txt", "/tmp/2"]
    assert envd.entry("/tmp/2")["size"] == "300000"
    assert [row["name"] for row in envd.ask("ListDir", path="m").json()["entries"]] == ["é %221%22.txt"]
    one = envd.send("POST", "/files", params={"path": "m/3"}, files=[("file", ("elsewhere", b"3"))])
    assert one.json()[0]["path"] == "/home/user/m/3"
    twice = envd.send("POST", "/files", files=[("file", ("m/4", b"4"))] * 2)
    assert code(twice) == (400, 400)
    assert "only the first specified file was uploaded" in twice.json()["message"]
    assert envd.read("m/4").content == b"4"


def test_content_is_compressed_in_both_directions_only_where_it_is_asked_for(envd: Envd) -> None:
    """Gzip in one or several streams is unpacked; an answer is packed for a client that wants nothing else."""
    packed = gzip.compress(b"a" * 70_000) + gzip.compress(b"b") + bytes(8)
    assert envd.write("gz", packed, **{"Content-Encoding": "gzip"}).status_code == 200
    plain = envd.read("gz", **{"Accept-Encoding": "gzip, deflate, br"})
    assert (plain.headers.get("content-encoding"), plain.headers["content-length"]) == (None, "70001")
    small = envd.read("gz", **{"Accept-Encoding": "gzip"})
    assert (small.headers["content-encoding"], small.content) == ("gzip", b"a" * 70_000 + b"b")
    assert code(envd.read("gz", **{"Accept-Encoding": "identity;q=0, br"})) == (406, 406)
    for wrong, encoding in ((b"no gzip", "gzip"), (packed[:40], "gzip"), (b"", "gzip"), (b"x", "br")):
        assert code(envd.write("gz", wrong, **{"Content-Encoding": encoding})) == (400, 400)
    assert len(envd.read("gz").content) == 70_001, "what is refused replaces nothing"


def test_a_range_of_a_file_can_be_read_and_one_behind_its_end_not(envd: Envd) -> None:
    """Ranges have the status and the headers of RFC 9110; an empty file has a length of 0."""
    envd.write("range.bin", b"0123456789")
    for wanted, status, content in (
        ("bytes=2-4", 206, b"234"), ("bytes=-3", 206, b"789"), ("bytes=8-99", 206, b"89"), ("bytes=5-", 206, b"56789"),
        ("bytes=0-1,3-4", 200, b"0123456789"), ("lines=1-2", 200, b"0123456789"), ("bytes=4-2", 200, b"0123456789"),
    ):  # fmt: skip
        answer = envd.read("range.bin", Range=wanted)
        assert (answer.status_code, answer.content) == (status, content), wanted
    assert envd.read("range.bin", Range="bytes=2-4").headers["content-range"] == "bytes 2-4/10"
    beyond = envd.read("range.bin", Range="bytes=10-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    changed = envd.read("range.bin").headers["last-modified"]
    assert envd.read("range.bin", **{"If-Modified-Since": changed}).status_code == 304
    envd.write("empty", b"")
    assert envd.read("empty").headers["content-length"] == "0"


def test_files_are_listed_to_a_depth_moved_and_removed_with_e2bs_errors(envd: Envd) -> None:
    """Each folder comes before what is in it, by name; errors have Connect's words."""
    for path in ("l/b/c/d", "l/a", "l/b.txt"):
        envd.write(path, b"1")

    def names(**more: Any) -> list[str]:
        return [row["path"][13:] for row in envd.ask("ListDir", path="l", **more).json()["entries"]]

    assert names() == names(depth=1) == ["a", "b", "b.txt"]
    assert names(depth=3) == ["a", "b", "b/c", "b/c/d", "b.txt"]
    assert envd.ask("MakeDir", path="l/new/x").json()["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    moved = envd.ask("Move", source="l/a", destination="l/n2/a").json()["entry"]
    assert (moved["path"], moved["size"]) == ("/home/user/l/n2/a", "1")
    assert envd.ask("Remove", path="l/b").json() == envd.ask("Remove", path="l/b").json() == {}
    bad, gone = (400, "invalid_argument"), (404, "not_found")
    for method, fields, expected in (
        ("Stat", {"path": "l/b"}, gone), ("ListDir", {"path": "l/none"}, gone), ("ListDir", {"path": "l/b.txt"}, bad),
        ("MakeDir", {"path": "l/new"}, (409, "already_exists")), ("MakeDir", {"path": "l/b.txt"}, bad),
        ("MakeDir", {"path": "l/b.txt/x"}, bad), ("Move", {"source": "l/none", "destination": "x"}, gone),
        ("Stat", {"path": "~root/x"}, bad), ("ListDir", {"path": "l", "depth": -1}, bad), ("Stat", {"path": 7}, bad),
        ("Stat", {"path": "a\0b"}, bad), ("Stat", {"path": "n" * 5000}, bad),
    ):  # fmt: skip
        answer = envd.ask(method, **fields)
        assert code(answer) == expected, (method, fields, answer.text)
    unknown = envd.ask("Stat", "nobody-here", path="l")
    assert (code(unknown), unknown.json()["message"]) == ((401, "unauthenticated"), "invalid username: 'nobody-here'")
    for answer, status in (
        (envd.read("l"), 400), (envd.read("l/none"), 404), (envd.write("l", b""), 400),
        (envd.write("l/b.txt/x", b""), 400), (envd.send("POST", "/files", OCTETS, content=b"x"), 400),
        (envd.send("POST", "/files", content=b"x"), 400), (envd.write("x", b"", user="nobody-here"), 401),
        (envd.write("x", b"", **{"X-Metadata-K": "a\tb"}), 400),
        (envd.write("x", b"", **{"X-Metadata-K": "v" * 5000}), 400),
    ):  # fmt: skip
        assert code(answer) == (status, status), answer.text


def test_a_link_is_described_by_what_it_leads_to(envd: Envd) -> None:
    """Type and mode are the target's, the permissions the link's own; a link to nothing has no type."""
    envd.write("target", b"123")
    envd.run("cd /home/user; ln -s target link; ln -s nowhere dangling; ln -s loop loop")
    for name in ("dangling", "loop"):
        broken = envd.entry(name)
        assert (broken["type"], broken["symlinkTarget"]) == ("FILE_TYPE_UNSPECIFIED", f"/home/user/{name}")
    assert code(envd.ask("ListDir", path="loop")) == (400, "failed_precondition")
    entry = envd.entry("link")
    assert (entry["type"], entry["symlinkTarget"]) == ("FILE_TYPE_FILE", "/home/user/target")
    assert (entry["permissions"], entry["mode"]) == ("Lrwxrwxrwx", 0o644)


def test_files_are_put_together_as_one(envd: Envd) -> None:
    """The sources go, in their order, into one file of the user's; what cannot be done leaves them as they were."""
    for number in range(3):
        envd.write(f"part{number}", str(number).encode() * 10)
    sources = ["part0", "part1", "/home/user/part2"]
    refused = envd.send("POST", "/files/compose", json={"source_paths": [*sources, "none"], "destination": "whole"})
    assert code(refused) == (404, 404)
    answer = envd.send("POST", "/files/compose", json={"source_paths": sources, "destination": "c/whole"})
    assert answer.json() == {"path": "/home/user/c/whole", "name": "whole", "type": "file"}
    assert envd.read("c/whole").content == b"0" * 10 + b"1" * 10 + b"2" * 10
    assert envd.read("part1").status_code == 404
    for body in ({"source_paths": [], "destination": "x"}, {"source_paths": ["c/whole"], "destination": "c/whole"}):
        assert code(envd.send("POST", "/files/compose", json=body)) == (400, 400)


def watch(envd: Envd, path: str, **fields: Any) -> str:
    """Make a watcher; return its name."""
    answer = envd.ask("CreateWatcher", path=path, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["watcherId"])


def events(envd: Envd, watcher: str) -> list[tuple[str, str]]:
    """Return kinds and names of a watcher's new events."""
    answer = envd.ask("GetWatcherEvents", watcherId=watcher)
    assert answer.status_code == 200, answer.text
    return [(row["type"].removeprefix("EVENT_TYPE_"), row["name"]) for row in answer.json().get("events", [])]


def test_a_write_is_three_events_which_are_there_when_it_has_returned(envd: Envd) -> None:
    """Create, chmod, write, for each of many writes one after the other; nothing else is told of our own files."""
    envd.ask("MakeDir", path="w")
    watcher = watch(envd, "w")
    for number in range(10):
        envd.write(f"w/{number}", b"x")
        assert events(envd, watcher) == [("CREATE", f"{number}"), ("CHMOD", f"{number}"), ("WRITE", f"{number}")]
    envd.write("w/1", b"y")
    assert events(envd, watcher) == [("CHMOD", "1"), ("WRITE", "1")]
    envd.run("cd /home/user/w; echo hi > by_hand; mv by_hand moved; rm moved; mv 2 ../2")
    told = events(envd, watcher)
    assert told[:2] == [("CREATE", "by_hand"), ("WRITE", "by_hand")]
    assert told[2:] == [("RENAME", "by_hand"), ("CREATE", "moved"), ("REMOVE", "moved"), ("RENAME", "2")]
    assert envd.ask("RemoveWatcher", watcherId=watcher).json() == {}
    assert code(envd.ask("GetWatcherEvents", watcherId=watcher)) == (404, "not_found")


def test_a_recursive_watch_follows_new_folders_and_describes_entries(envd: Envd) -> None:
    """A folder that is made later is watched; an event has the entry as it was, of the new name after a move."""
    envd.ask("MakeDir", path="r")
    watcher = watch(envd, "r", recursive=True, includeEntry=True)
    envd.ask("MakeDir", path="r/n/m")
    assert ("CREATE", "n/m") in events(envd, watcher)
    envd.write("r/n/m/f", b"123")
    rows = envd.ask("GetWatcherEvents", watcherId=watcher).json()["events"]
    assert [(row["name"], row["entry"]["size"]) for row in rows] == [("n/m/f", "3")] * 3
    envd.ask("Move", source="r/n/m/f", destination="r/g")
    rows = envd.ask("GetWatcherEvents", watcherId=watcher).json()["events"]
    assert [(row["type"], row["name"], "entry" in row) for row in rows] == [
        ("EVENT_TYPE_RENAME", "n/m/f", False), ("EVENT_TYPE_CREATE", "g", True),
    ]  # fmt: skip
    envd.ask("RemoveWatcher", watcherId=watcher)


@pytest.mark.soak
def test_watches_are_bounded_in_number_and_in_events(running: e2b.E2BService) -> None:
    """10,000 files are told; more than the kernel queues are an error; one watcher too many is refused."""
    envd = create(running)
    watcher = watch(envd, "/tmp")
    churn = "import os\nfor _ in range({}): os.mknod('/tmp/a'); os.unlink('/tmp/a')"
    envd.run(churn.format(5000), "python3")
    assert events(envd, watcher) == [("CREATE", "a"), ("REMOVE", "a")] * 5000
    envd.run(churn.format(30_000), "python3")
    many, lost = (envd.ask("GetWatcherEvents", watcherId=watcher) for _ in range(2))
    assert len(many.json()["events"]) > 10_000
    assert code(lost) == (500, "internal")
    for path, status in (("/none", 404), ("/etc/passwd", 400)):
        assert envd.ask("CreateWatcher", path=path).status_code == status
    answers = [envd.ask("CreateWatcher", path="/tmp") for _ in range(13)]
    assert [answer.status_code for answer in answers].count(200) < 13
    assert code(answers[-1]) == (429, "resource_exhausted")
    kill(envd)


def test_a_stream_of_a_watch_tells_starts_keeps_alive_and_breaks_off_with_its_sandbox(running: e2b.E2BService) -> None:
    """The first message is `start`; an idle stream has keep-alives; at the end of the sandbox it has no proper end."""
    envd = create(running)
    seen: list[dict[str, Any]] = []
    is_started = threading.Event()
    outcome: list[type] = []

    def follow() -> None:
        body = json.dumps({"path": "/home/user"}).encode()
        headers = {"Content-Type": "application/connect+json", "Keepalive-Ping-Interval": "1"}
        try:
            with running.http(**envd.headers) as client, client.stream(
                "POST", "/filesystem.Filesystem/WatchDir", headers=headers, content=FRAME.pack(0, len(body)) + body
            ) as answer:  # fmt: skip
                data = b""
                for piece in answer.iter_raw():
                    data += piece
                    seen[:] = messages(data)
                    is_started.set()
            outcome.append(type(None))
        except httpx.HTTPError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=follow)
    thread.start()
    assert is_started.wait(30)
    assert seen[0] == {"start": {}}
    envd.write("f", b"1")
    ends = time.monotonic() + 30
    while not (len(seen) > 4 and {"keepalive": {}} in seen) and time.monotonic() < ends:
        time.sleep(0.05)
    kinds = [message["filesystem"]["type"] for message in seen if "filesystem" in message]
    assert kinds == ["EVENT_TYPE_CREATE", "EVENT_TYPE_CHMOD", "EVENT_TYPE_WRITE"]
    assert {"keepalive": {}} in seen
    kill(envd)
    thread.join(30)
    assert outcome[0] in (httpx.ReadError, httpx.RemoteProtocolError), "broken off, not ended"


def test_a_stream_of_a_watch_ends_at_its_time(envd: Envd) -> None:
    """`Connect-Timeout-Ms` ends it with Connect's word, and an error before the start is the only message."""
    headers = {"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "300"}
    for path, word in (("/tmp", "deadline_exceeded"), ("/none", "not_found"), ("/etc/passwd", "invalid_argument")):
        body = json.dumps({"path": path}).encode()
        content = FRAME.pack(0, len(body)) + body
        answer = envd.send("POST", "/filesystem.Filesystem/WatchDir", headers, content=content)
        assert (answer.status_code, messages(answer.content)[-1]["error"]["code"]) == (200, word)


def test_a_signature_opens_one_path_for_one_operation_one_user_and_one_time(envd: Envd) -> None:
    """It needs no token; anything else about it is refused with E2B's words."""
    envd.write("signed", b"1")
    anyone = {name: value for name, value in envd.headers.items() if name != "X-Access-Token"}
    good, later = envd.signed("signed", "read"), int(time.time()) + 100
    with envd.service.http(**anyone) as client:

        def get(query: dict[str, str]) -> httpx.Response:
            return client.get("/files", params=query)

        assert get(good).content == get(envd.signed("signed", "read", expiration=later)).content == b"1"
        written = client.post("/files", params=envd.signed("w2", "write", "root"), headers=OCTETS, content=b"2")
        assert written.json()[0]["path"] == "/root/w2"
        wrong = [
            {**good, "path": "target"}, {**good, "username": "root"}, {**good, "signature": good["signature"][:-1]},
            {**good, "signature": ""}, {**good, "signature_expiration": str(later)}, envd.signed("signed", "write"),
        ]  # fmt: skip
        for query, message in (
            ({"path": "signed"}, "missing signature query parameter"),
            *((query, "invalid signature") for query in wrong),
            (envd.signed("signed", "read", expiration=1), "signature is already expired"),
        ):
            assert (get(query).status_code, get(query).json()["message"]) == (401, message)
        for wrong in ("soon", "--5"):
            assert get({**good, "signature_expiration": wrong}).status_code == 400
        assert client.post("/files", params=good, headers=OCTETS, content=b"").status_code == 401
        refused = client.get("/files", params=good, headers={"X-Access-Token": "no"})
        assert "does not match" in refused.json()["message"]


def test_a_signed_url_that_names_no_sandbox_finds_it_as_long_as_it_lives(running: e2b.E2BService, envd: Envd) -> None:
    """It is found among others, also one that is made later, and not after its end; nothing is told without one."""
    other = create(running)
    other.write("mine", b"other's")
    envd.write("mine", b"1")
    query, others = envd.signed("mine", "read"), other.signed("mine", "read")
    with running.http() as client:
        assert client.get("/files", params=query).content == b"1"
        assert client.get("/files", params=others).content == b"other's"
        by_name = {"signature": envd.signed("", "write")["signature"]}
        uploaded = client.post("/files", params=by_name, files={"file": ("by_url", b"u")})
        assert uploaded.json()[0]["path"] == "/home/user/by_url"
        assert client.get("/files", params={"path": "mine"}, headers={"X-Access-Token": envd.token}).content == b"1"
        kill(other)
        forged = [{**query, "signature": text} for text in ("v1_" + "A" * 43, "v" * 9999, "")]
        for wrong in (others, *forged, {"path": "mine"}):
            assert code(client.get("/files", params=wrong)) == (401, 401)


def test_a_page_of_any_origin_may_use_a_signed_url(running: e2b.E2BService, envd: Envd) -> None:
    """A browser asks first, and reads the answer; at the control plane this holds for files alone."""
    envd.write("page", b"1")
    page = {"Origin": "https://example.org"}
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with running.http(**page) as client:
        assert client.options("/files", headers=asks).headers["access-control-allow-origin"] == "*"
        answer = client.get("/files", params=envd.signed("page", "read"))
        assert (answer.content, answer.headers["access-control-allow-origin"]) == (b"1", "*")
        assert "access-control-allow-origin" not in client.get("/v2/sandboxes").headers
    assert envd.send("OPTIONS", "/files", asks).status_code == 200


def test_nobody_reaches_a_sandbox_with_another_ones_token_or_none(running: e2b.E2BService, envd: Envd) -> None:
    """Each route but `/health` asks for the sandbox's own token; routes of E2B's own machines are there for nobody."""
    other = create(running)
    unary = ("Stat", "ListDir", "MakeDir", "Move", "Remove", "CreateWatcher", "GetWatcherEvents", "RemoveWatcher")
    http = ("GET /files?path=/etc/passwd", "POST /files?path=x", "GET /envs", "GET /metrics", "POST /files/compose")
    for token in (other.token, ""):
        with running.http(**{**envd.headers, "X-Access-Token": token}) as client:
            for name in (*unary, "WatchDir"):
                answer = client.post(f"/filesystem.Filesystem/{name}", json={"path": "/"})
                assert code(answer) == (401, "unauthenticated"), name
            for line in http:
                assert client.request(*line.split(" ")).status_code == 401, line
    for path in ("/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"):
        assert envd.send("POST", path, json={}).status_code == 404
    watcher = watch(other, "/tmp")
    assert code(envd.ask("GetWatcherEvents", watcherId=watcher)) == (404, "not_found")
    assert envd.send("GET", "/envs").json()["GIVEN"] == "at create"
    used = envd.send("GET", "/metrics").json()
    assert used["disk_total"] == DISK
    assert 0 < used["disk_used"] < 10 * DISK
    kill(other)


def test_paths_are_resolved_inside_and_nothing_waits_for_another_end(envd: Envd) -> None:
    """Files of the host, links, `..`, pipes, devices, /proc and names that are no text: an answer soon, from inside."""
    assert os.path.exists(__file__)
    assert envd.ask("Stat", path=__file__).status_code == 404
    envd.run("cd /home/user; ln -s /proc/1/root/etc/shadow s; mkfifo fifo; mkdir t; ln -s / t/up")
    envd.run("cd /home/user; printf x > \"$(printf 'b\\377d')\"")
    began = time.monotonic()
    for path in ("fifo", "/dev/zero", "/dev/tty", "/dev/random"):
        assert code(envd.read(path))[0] in (400, 403), path
        assert code(envd.write(path, b"x"))[0] in (400, 403), path
    assert envd.read("t/up/../../../../etc/hostname").status_code in (200, 404)
    assert envd.read("../../../../../etc/hostname").content == envd.read("/etc/hostname").content
    assert b"Linux" in envd.read("/proc/version").content
    assert envd.read("s").status_code in (200, 403, 404)
    names = [row["name"] for row in envd.ask("ListDir", path="").json()["entries"]]
    assert "b\ufffdd" in names
    for path in ("/proc", "/proc/self/fd", "/dev"):
        assert envd.ask("ListDir", path=path, depth=2).status_code == 200, path
    assert time.monotonic() - began < 60
    assert envd.ask("Remove", path="t").status_code == 200
    assert envd.entry("/etc/hostname")["name"] == "hostname"


def test_a_full_disk_is_507_and_replaces_nothing(running: e2b.E2BService) -> None:
    """Neither a long body is written, nor one that is much shorter on the wire; nothing is left of it."""
    envd = create(running)
    envd.write("/tmp/kept", b"kept")
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(256)) + bomb.flush()
    free = envd.run("df --output=avail /tmp")
    for content, headers in ((bytes(DISK + (1 << 20)), {}), (packed, {"Content-Encoding": "gzip"})):
        answer = envd.write("/tmp/kept", content, **headers)
        assert (answer.status_code, answer.json()["message"]) == (507, "not enough disk space available")
    form = envd.send("POST", "/files", files=[("file", ("/tmp/kept", bytes(DISK + (1 << 20))))])
    assert form.status_code == 507
    assert envd.read("/tmp/kept").content == b"kept"
    assert envd.run("df --output=avail /tmp") == free
    kill(envd)


def test_an_upload_that_breaks_off_replaces_nothing(envd: Envd) -> None:
    """The connection goes in the middle of a body with a length, and of a form: the file stays as it was."""
    envd.write("/tmp/whole", b"whole")
    address = httpx.URL(envd.service.url)
    head_of_part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    for kind, begin in ((OCTETS["Content-Type"], b""), ("multipart/form-data; boundary=b", head_of_part)):
        headers = {**envd.headers, "Host": "localhost", "Content-Type": kind, "Content-Length": "2000000000"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection((address.host, address.port)) as connection:
            head = f"POST /files?path=/tmp/whole HTTP/1.1\r\n{lines}\r\n"
            connection.sendall(head.encode() + begin + bytes(4 << 20))
    ends = time.monotonic() + 30
    while envd.run("ls -A /tmp | grep cloche || true") and time.monotonic() < ends:
        time.sleep(0.1)
    assert envd.read("/tmp/whole").content == b"whole"
    assert envd.run("ls -A /tmp | grep -c cloche || true") == "0\n"


def test_forms_are_bounded_in_parts_heads_and_boundaries(envd: Envd) -> None:
    """Too many parts, an endless head, no boundary, no end: 400 or 413, soon, and the service answers on."""
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'

    def send(content: bytes, headers: dict[str, str] = kind) -> httpx.Response:
        return envd.send("POST", "/files", headers, content=content)

    assert code(send(part * 10_001 + b"--b--\r\n")) == (413, 413)
    assert code(send(b"--b\r\nX-Y: " + b"z" * (64 << 10))) == (400, 400)
    nameless = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n1\r\n--b--'
    for content in (part, b"--b\r\n", b"", b"no form", nameless):
        assert code(send(content)) == (400, 400), content
    form = "multipart/form-data"
    for wrong in (form, f"{form}; boundary=", "text/plain", f"{form}; boundary={'b' * 999}"):
        assert code(send(part, {"Content-Type": wrong})) == (400, 400), wrong
    assert send(b"--b--\r\n").json() == []


@pytest.mark.soak
def test_a_folder_that_is_swapped_during_a_walk_leads_nowhere_else(envd: Envd) -> None:
    """A folder becomes a link and a folder again while it is listed and removed: what the link leads to is spared."""
    envd.run("mkdir -p /tmp/walk/d /tmp/keep; touch /tmp/keep/file; cd /tmp/walk/d; touch $(seq 300)")
    swap = """import os, time
os.chdir("/tmp/walk")
ends = time.monotonic() + 1.5
while time.monotonic() < ends:
    try: os.rename("d", "e"); os.symlink("/tmp/keep", "d"); os.unlink("d"); os.rename("e", "d")
    except OSError: break
"""
    thread = threading.Thread(target=lambda: envd.run(swap, "python3"))
    thread.start()
    for _ in range(15):
        listed = envd.ask("ListDir", path="/tmp/walk", depth=4)
        assert listed.status_code == 200, listed.text
        assert not [row for row in listed.json()["entries"] if row["path"].startswith("/tmp/walk/d/file")]
    envd.ask("Remove", path="/tmp/walk")
    thread.join()
    assert envd.entry("/tmp/keep/file")["size"] == "0"
