"""E2B's `process.Process`, as its SDKs call it over the wire: starts, readers, input, signals, terminals, ends."""

from __future__ import annotations

import base64
import json
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import e2b, service

HEAD = struct.Struct(">BI")
TYPE = "application/connect+json"


@dataclass
class Processes:
    """Hold a sandbox of a service, and speak to its `process.Process`."""

    service: e2b.E2BService
    sandbox_id: str
    token: str

    def client(self, user: str = "", **headers: str) -> httpx.Client:
        """Return a client of envd's port."""
        own = {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}
        if user:
            own["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return self.service.http(**own, **headers)

    def call(self, method: str, /, **body: object) -> Any:
        """Return the answer of a unary method; an error's code."""
        with self.client() as client:
            answer = client.post(f"/process.Process/{method}", json=body)
            return answer.json() if answer.status_code == 200 else answer.json()["code"]

    @contextmanager
    def stream(self, method: str, body: object, *, user: str = "", **headers: str) -> Iterator[Iterator[Any]]:
        """Yield the messages of a stream; the last one is its end."""
        with (
            self.client(user, **headers) as client,
            client.stream(
                "POST", f"/process.Process/{method}", content=framed(body), headers={"Content-Type": TYPE}
            ) as answer,
        ):
            assert answer.status_code == 200
            yield unframed(answer)

    def start(self, line: str, *, user: str = "", timeout_ms: int = 0, **body: object) -> list[Any]:
        """Run a line of shell as the SDKs do; return all events, and the end of the stream."""
        headers = {"Connect-Timeout-Ms": str(timeout_ms)} if timeout_ms else {}
        with self.stream("Start", shell(line, **body), user=user, **headers) as events:
            return list(events)


def shell(line: str, **body: object) -> dict[str, object]:
    """Return the request of a line of shell."""
    config: dict[str, object] = {"cmd": "/bin/bash", "args": ["-l", "-c", line], **body.pop("config", {})}  # type: ignore[call-overload]
    return {"process": config, "stdin": False, **body}


def framed(*messages: object) -> bytes:
    """Return messages as a stream has them."""
    texts = [json.dumps(message).encode() for message in messages]
    return b"".join(HEAD.pack(0, len(text)) + text for text in texts)


def unframed(answer: httpx.Response) -> Iterator[Any]:
    """Yield the messages of a response."""
    data = b""
    for piece in answer.iter_bytes():
        data += piece
        while len(data) >= HEAD.size and len(data) >= HEAD.size + HEAD.unpack_from(data)[1]:
            _, length = HEAD.unpack_from(data)
            yield json.loads(data[HEAD.size : HEAD.size + length])
            data = data[HEAD.size + length :]


def output(events: list[Any], name: str = "stdout") -> bytes:
    """Return what came on a stream."""
    pieces = [event["event"]["data"].get(name, "") for event in events if "data" in event.get("event", {})]
    return b"".join(map(base64.b64decode, pieces))


def end(events: list[Any]) -> dict[str, Any]:
    """Return the event of a process's end."""
    assert events[-1] == {}, events[-1]
    found: dict[str, Any] = events[-2]["event"]["end"]
    return found


def code(events: list[Any]) -> str:
    """Return the code of the error with which a stream ended."""
    found: str = events[-1]["error"]["code"]
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Serve for all tests here, and have one sandbox."""
    with e2b.serving(tmp_path_factory.mktemp("e2b")) as running:
        yield create(running, envVars={"OF_SANDBOX": "1", "BOTH": "1"})


def create(running: e2b.E2BService, **fields: object) -> Processes:
    """Create a sandbox."""
    with running.http(**{"X-API-KEY": running.key}) as client:
        made = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 300, **fields}).json()
    return Processes(service=running, sandbox_id=made["sandboxID"], token=made["envdAccessToken"])


def test_a_process_from_its_start_to_its_end(processes: Processes) -> None:
    """Its pid first, bytes of any kind, then its end; variables of the sandbox below those of the request."""
    events = processes.start("printf '\\377\\000'; echo error >&2; echo $OF_SANDBOX$BOTH; pwd; exit 3",
                             config={"envs": {"BOTH": "2"}})  # fmt: skip
    assert events[0]["event"]["start"]["pid"] > 1
    assert output(events) == b"\xff\x0012\n/home/user\n"
    assert output(events, "stderr") == b"error\n"
    assert end(events) == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert end(processes.start("true")) == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    killed = {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}
    assert end(processes.start("kill -9 $$")) == killed


def test_folders_and_users_are_read_as_envd_reads_them(processes: Processes) -> None:
    """Relative folders and `~` begin in the user's home; what is not there is an error before any event."""
    processes.start("mkdir -p below")
    for cwd, folder in ((None, ""), ("below", "/below"), ("~/below", "/below"), ("~", "")):
        assert output(processes.start("pwd", config={"cwd": cwd})) == f"/home/user{folder}\n".encode()
    for line, user, cwd, wanted in (
        ("pwd", "", "/nowhere", "invalid_argument"), ("pwd", "", "~root", "invalid_argument"),
        ("pwd", "nobody-here", None, "unauthenticated"),
    ):  # fmt: skip
        events = processes.start(line, user=user, config={"cwd": cwd})
        assert (len(events), code(events)) == (1, wanted)


@pytest.mark.root
def test_root_has_its_own_home_and_the_sandboxs_variables(processes: Processes) -> None:
    """By the name in Basic authentication."""
    assert output(processes.start("id -u; pwd; echo $HOME $OF_SANDBOX", user="root")) == b"0\n/root\n/root 1\n"


def test_readers_see_the_same_and_the_process_outlives_them(processes: Processes) -> None:
    """From when they connect; each by pid or tag. A late one gets the end alone."""
    with processes.stream("Start", shell("read; seq 100000; read; exit 4", tag="many", stdin=True)) as first:
        pid = next(first)["event"]["start"]["pid"]
        with (
            processes.stream("Connect", {"process": {"pid": pid}}) as second,
            processes.stream("Connect", {"process": {"tag": "many"}}) as third,
        ):
            assert next(second) == next(third) == {"event": {"start": {"pid": pid}}}
            (row,) = processes.call("List")["processes"]
            assert (row["pid"], row["tag"], row["config"]["cmd"]) == (pid, "many", "/bin/bash")
            assert processes.call("SendInput", process={"pid": pid}, input={"stdin": "Cg=="}) == {}
            seen = [read_until(reader, b"100000\n") for reader in (first, second, third)]
            assert seen[0] == seen[1] == seen[2]
            assert len(seen[0]) == 588895
    assert [row["pid"] for row in processes.call("List")["processes"]] == [pid]
    with processes.stream("Connect", {"process": {"pid": pid}}) as again:
        next(again)
        processes.call("SendInput", process={"tag": "many"}, input={"stdin": "Cg=="})
        assert end(list(again))["exitCode"] == 4
    with processes.stream("Connect", {"process": {"pid": pid}}) as late:
        assert end(list(late))["exitCode"] == 4
    assert processes.call("List") == {"processes": []}


def read_until(events: Iterator[Any], last: bytes) -> bytes:
    """Return output up to its end."""
    found = b""
    while not found.endswith(last):
        found += base64.b64decode(next(events)["event"]["data"]["stdout"])
    return found


@pytest.mark.soak
def test_a_reader_that_reads_nothing_holds_nobody_up(processes: Processes) -> None:
    """It is dropped, and told so; another one has all of it."""
    with processes.stream("Start", shell("head -c 60000000 /dev/zero")) as idle:
        pid = next(idle)["event"]["start"]["pid"]
        began = time.monotonic()
        with processes.stream("Connect", {"process": {"pid": pid}}) as busy:
            events = list(busy)
        assert end(events)["exitCode"] == 0
        assert time.monotonic() - began < 40
        assert code(list(idle)) == "resource_exhausted"


def test_time_is_up(processes: Processes) -> None:
    """The process is killed alone; a reader's own time ends nothing but its stream."""
    assert code(processes.start("sleep 1000", timeout_ms=200)) == "deadline_exceeded"
    assert processes.call("List") == {"processes": []}
    with processes.stream("Start", shell("read", stdin=True)) as events:
        pid = next(events)["event"]["start"]["pid"]
        with processes.stream("Connect", {"process": {"pid": pid}}, **{"Connect-Timeout-Ms": "100"}) as reader:
            assert code(list(reader)) == "deadline_exceeded"
        assert processes.call("SendSignal", process={"pid": pid}, signal="SIGNAL_SIGKILL") == {}
        assert end(list(events))["status"] == "signal: killed"


def test_a_terminal(processes: Processes) -> None:
    """It has a size, which changes; its input is `pty`."""
    pty = {"pty": {"size": {"cols": 80, "rows": 24}}}
    body = {"process": {"cmd": "/bin/bash", "args": ["-c", "read; stty size; read; stty size; tty"]}, **pty}
    with processes.stream("Start", body) as events:
        pid = next(events)["event"]["start"]["pid"]
        process = {"pid": pid}
        assert processes.call("SendInput", process=process, input={"stdin": "Cg=="}) == "failed_precondition"
        assert processes.call("CloseStdin", process=process) == "failed_precondition"
        assert processes.call("SendInput", process=process, input={"pty": "Cg=="}) == {}
        wide = {"pty": {"size": {"cols": 120, "rows": 30}}}
        found = b""
        while b"24 80" not in found:
            found += base64.b64decode(next(events)["event"]["data"]["pty"])
        assert processes.call("Update", process=process, **wide) == {}
        assert processes.call("SendInput", process=process, input={"pty": "Cg=="}) == {}
        rest = list(events)
        assert b"30 120" in output(rest, "pty")
        assert b"/dev/pts/" in output(rest, "pty")
        assert end(rest)["exitCode"] == 0


def test_input_in_a_stream_and_its_end(processes: Processes) -> None:
    """Pieces come in their order; without input, after its end and for unknown processes there are errors."""
    with processes.stream("Start", shell("cat", stdin=True)) as events:
        pid = next(events)["event"]["start"]["pid"]
        pieces = [base64.b64encode(b"%07d\n" % number).decode() for number in range(2000)]
        start = {"start": {"process": {"pid": pid}}}
        data = [{"data": {"input": {"stdin": piece}}} for piece in pieces]
        with processes.client() as client:
            answer = client.post("/process.Process/StreamInput", headers={"Content-Type": TYPE},
                                 content=framed(start, {"keepalive": {}}, *data))  # fmt: skip
            assert list(unframed(answer)) == [{}, {}]
        assert processes.call("CloseStdin", process={"pid": pid}) == {}
        rest = list(events)
        assert output(rest) == b"".join(map(base64.b64decode, pieces))
        assert end(rest)["exitCode"] == 0
    with processes.stream("Start", shell("sleep 1000")) as events:
        pid = next(events)["event"]["start"]["pid"]
        assert processes.call("SendInput", process={"pid": pid}, input={"stdin": "Cg=="}) == "failed_precondition"
        processes.call("SendSignal", process={"pid": pid}, signal="SIGNAL_SIGTERM")
        assert end(list(events))["status"] == "signal: terminated"
    for method, body in (("SendSignal", {"signal": "SIGNAL_SIGKILL"}), ("SendInput", {"input": {"stdin": ""}}),
                         ("CloseStdin", {}), ("Update", {})):  # fmt: skip
        assert processes.call(method, process={"pid": pid}, **body) == "not_found"
    with processes.stream("Connect", {"process": {"tag": "none"}}) as events:
        assert code(list(events)) == "not_found"


def test_a_sandbox_that_is_killed_breaks_its_streams(processes: Processes) -> None:
    """Without the end of a stream: then its health says that it is gone."""
    other = create(processes.service)
    with other.stream("Start", shell("sleep 1000")) as events:
        next(events)
        with other.service.http(**{"X-API-KEY": other.service.key}) as client:
            assert client.delete(f"/sandboxes/{other.sandbox_id}").status_code == 204
        with pytest.raises(httpx.TransportError):
            list(events)
    with other.client() as client:
        assert client.get("/health").status_code == 502


def test_a_stream_is_kept_open_by_events(processes: Processes) -> None:
    """As often as the client asks."""
    with processes.stream("Start", shell("sleep 1000"), **{"Keepalive-Ping-Interval": "1"}) as events:
        pid = next(events)["event"]["start"]["pid"]
        assert next(events) == {"event": {"keepalive": {}}}
        processes.call("SendSignal", process={"pid": pid}, signal=9)


@pytest.mark.soak
def test_processes_go_on_when_the_service_is_killed(tmp_path: Path) -> None:
    """The next one finds them: their further output, what nobody has read of it, and ends that nobody has heard of."""
    first = e2b.start(tmp_path)
    before = create(first)
    started = []
    for line in ("read; echo unread; read; exit 5", "exit 6"):
        with before.stream("Start", shell(line, stdin=True)) as events:
            started.append(next(events)["event"]["start"]["pid"])
    before.call("SendInput", process={"pid": started[0]}, input={"stdin": "Cg=="})
    first.service.end(signal.SIGKILL)
    second = e2b.start(tmp_path, key=first.key)
    with service.ending(second.service, tmp_path):
        after = Processes(service=second, sandbox_id=before.sandbox_id, token=before.token)
        assert [row["pid"] for row in after.call("List")["processes"]] == started[:1]
        with after.stream("Connect", {"process": {"pid": started[0]}}) as events:
            next(events)
            after.call("SendInput", process={"pid": started[0]}, input={"stdin": "Cg=="})
            rest = list(events)
            assert output(rest) == b"unread\n"
            assert end(rest)["exitCode"] == 5
        with after.stream("Connect", {"process": {"pid": started[1]}}) as events:
            assert end(list(events))["exitCode"] == 6


@pytest.mark.soak
def test_a_stream_of_input_may_rest(processes: Processes) -> None:
    """Longer than the time in which a body must have a rate."""
    with processes.stream("Start", shell("read x; echo got $x", stdin=True)) as events:
        pid = next(events)["event"]["start"]["pid"]

        def slow() -> Iterator[bytes]:
            yield framed({"start": {"process": {"pid": pid}}})
            time.sleep(75)
            yield framed({"data": {"input": {"stdin": base64.b64encode(b"late\n").decode()}}})

        with processes.client() as client:
            answer = client.post("/process.Process/StreamInput", headers={"Content-Type": TYPE}, content=slow())
            assert list(unframed(answer)) == [{}, {}]
        assert output(list(events)) == b"got late\n"
