"""The wire of the service: many calls over one web socket, each checked, none in another's way; by one server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sqlite3
import tarfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cloche.backends.archive import archive_pieces
from cloche.core.request import InputFile
from cloche.init import wire as frames
from tests.harness.service import Service, serving
from tests.harness.wire_client import ERR, IN, JSON, OUT, CallFailed, WireClient, wired

PATIENCE_S = 60
MIB = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve for all tests of this module."""
    with serving(tmp_path_factory.mktemp("service"), "--drain", "2s") as one:
        yield one


@pytest.fixture(scope="module")
def key(service: Service) -> str:
    """Be a key that may run and read."""
    return service.new_key("run", "read")


@pytest.fixture(scope="module")
def sandbox(service: Service, key: str) -> Iterator[str]:
    """Hold a sandbox that the tests share; return its id."""
    with service.client(key) as client:
        made = client.post("/api/sandboxes", json={"lifetime": "10m"}).json()["id"]
        yield made
        client.delete(f"/api/sandboxes/{made}")


def wire_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Service, str, str], None]:
    """Run a test with a connection of its own, for a minute at most."""

    async def run(service: Service, key: str, sandbox: str) -> None:
        async with asyncio.timeout(PATIENCE_S), wired(service.address, key) as wire:
            await test(wire, sandbox)

    def run_test(service: Service, key: str, sandbox: str) -> None:
        asyncio.run(run(service, key, sandbox))

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return run_test


async def failure(wire: WireClient, verb: str, **fields: Any) -> tuple[int, str]:
    """Return how a call fails."""
    with pytest.raises(CallFailed) as failed:
        await wire.do(verb, **fields)
    return failed.value.kind


async def shell(wire: WireClient, sandbox: str, line: str) -> str:
    """Run a line of shell and return what it prints."""
    return str((await wire.do("run", sandbox=sandbox, shell=line))["stdout"])


@wire_test
async def test_a_command_reads_and_writes_megabytes_at_once(wire: WireClient, sandbox: str) -> None:
    """Its input and both outputs pass at the same time and are whole; its result says how it ended."""
    data = bytes(range(256)) * (3 * MIB // 256)
    code = (
        "import sys\nwhile data := sys.stdin.buffer.read(65536):\n"
        "    sys.stdout.buffer.write(data), sys.stderr.buffer.write(data)\nsys.exit(3)"
    )
    call = await wire.begin("exec", sandbox=sandbox, argv=["python3", "-c", code])
    sending = asyncio.ensure_future(call.send(data))
    out, err = await asyncio.gather(call.read(OUT), call.read(ERR))
    await sending
    result = await call.result
    assert (out == data, err == data, result["exitCode"]) == (True, True, 3)


@wire_test
async def test_a_call_that_is_not_read_holds_only_itself_up(wire: WireClient, sandbox: str) -> None:
    """It stops within its window, and so does its program, while another call carries megabytes; read, it goes on."""
    line = "head -c 2000000 /dev/zero; echo over > /tmp/over"
    unread = await wire.begin("exec", sandbox=sandbox, shell=line)
    other = await wire.begin("exec", sandbox=sandbox, shell="head -c 2000000 /dev/zero")
    assert len(await other.read()) == 2_000_000
    await other.result
    assert await shell(wire, sandbox, "cat /tmp/over 2>/dev/null || echo waits") == "waits\n"
    assert 0 < unread.came[OUT] <= frames.WINDOW_BYTES
    deaf = await wire.begin("exec", sandbox=sandbox, shell="sleep 1000")  # and one that does not read what it is sent
    stuck = asyncio.ensure_future(deaf.send(b"x" * (2 * MIB)))
    assert len(await unread.read()) == 2_000_000
    assert (await unread.result)["status"] == "ok"
    assert not stuck.done()
    stuck.cancel()
    await deaf.cancel()
    with pytest.raises(CallFailed, match="cancelled"):
        await deaf.result


FLOODS = """
import os, time, cloche_host
calls = cloche_host._functions.__closure__[0].cell_contents.calls  # which writes without blocking
ends, count = time.monotonic() + 1, 0
while time.monotonic() < ends:
    try:
        count += os.write(calls, bytes(65536))
    except BlockingIOError:
        time.sleep(0.01)
count
"""


@wire_test
async def test_calls_of_a_clients_functions_wait_where_nobody_takes_them(wire: WireClient, sandbox: str) -> None:
    """A client without reading gets a window of a program's flood, and the program waits; so it is the other way."""
    flooding = await wire.begin("run", sandbox=sandbox, code=FLOODS, tools=["f"])
    value = (await flooding.result)["value"]
    assert flooding.came[frames.HOST_CALLS] <= frames.WINDOW_BYTES
    assert value < 4 * MIB
    deaf = await wire.begin("run", sandbox=sandbox, code="import time; time.sleep(60)", tools=["f"], timeout=2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await deaf.send(bytes(16 * MIB), channel=frames.HOST_ANSWERS)
    assert (await deaf.result)["status"] == "timeout"
    assert await shell(wire, sandbox, "echo goes on") == "goes on\n"


@wire_test
async def test_calls_of_a_session_are_carried_once_and_to_its_own_key_alone(wire: WireClient, sandbox: str) -> None:
    """Neither a session without functions, nor one of another sandbox, nor a second call has any."""
    plain = (await wire.do("session.open", sandbox=sandbox))["id"]
    session = (await wire.do("session.open", sandbox=sandbox, tools=["f"]))["id"]
    assert await failure(wire, "session.calls", sandbox=sandbox, session=plain) == (409, "followed")
    assert await failure(wire, "session.calls", sandbox=f"sb_{sandbox[:2:-1]}", session=session) == (404, "not-found")
    carrying = await wire.begin("session.calls", sandbox=sandbox, session=session)
    await asyncio.sleep(0.1)
    assert await failure(wire, "session.calls", sandbox=sandbox, session=session) == (409, "followed")
    await carrying.cancel()
    with pytest.raises(CallFailed):
        await carrying.result
    assert await failure(wire, "session.calls", sandbox=sandbox, session=session) == (409, "followed")
    cell = await wire.do("session.run", sandbox=sandbox, session=session, code="import cloche_host; cloche_host.f")
    assert "takes no more calls" in cell["stderr"]
    for opened in (plain, session):
        await wire.do("session.close", sandbox=sandbox, session=opened)


@wire_test
async def test_cancelling_a_call_ends_what_it_started(wire: WireClient, sandbox: str) -> None:
    """A command with all that it started, code, and a cell, whose session lives on; another cancel changes nothing."""
    call = await wire.begin("exec", sandbox=sandbox, shell="sleep 1000 & echo $!; wait")
    pid = (await anext(call.pieces())).decode().strip()
    assert await shell(wire, sandbox, f"kill -0 {pid} && echo there") == "there\n"
    await call.cancel()
    with pytest.raises(CallFailed) as ended:
        await call.result
    assert ended.value.kind == (409, "cancelled")
    assert await shell(wire, sandbox, f"kill -0 {pid} 2>/dev/null || echo gone") == "gone\n"
    await call.cancel()

    session = (await wire.do("session.open", sandbox=sandbox))["id"]
    where = {"sandbox": sandbox, "session": session}
    assert (await wire.do("session.run", **where, code="x = 41"))["status"] == "ok"
    cell = await wire.begin("session.run", **where, code="print('on', flush=True)\nimport time; time.sleep(1000)")
    while (await cell.event())[0] != "output":
        pass
    await cell.cancel()
    with pytest.raises(CallFailed, match="cancelled"):
        await cell.result
    assert (await wire.do("session.run", **where, code="x + 1"))["value"] == 42
    assert (await wire.do("session.close", **where))["isAlive"] is False


@wire_test
async def test_processes_outlive_their_calls_where_they_shall(wire: WireClient, sandbox: str) -> None:
    """A signal reaches one that another call carries; one that was let go, or is kept, goes on and is found again."""
    call = await wire.begin("process.start", sandbox=sandbox, shell="trap 'echo hup' HUP; echo up; cat; exit 5")
    name, started = await call.event()
    where = {"sandbox": sandbox, "process": started["id"]}
    assert (name, await anext(call.pieces())) == ("started", b"up\n")
    await call.send(b"word\n", end=False)
    assert await anext(call.pieces()) == b"word\n"  # and so the shell waits for cat, and does what it traps after that
    await wire.do("process.signal", **where, signal="HUP")
    assert await failure(wire, "process.follow", **where) == (409, "followed")
    await wire.do("process.detach", **where)
    assert (await call.result)["isDetached"] is True
    again = await wire.begin("process.follow", **where)
    await again.send(b"more\n")
    assert await again.read() == b"more\nhup\n"
    assert (await again.result)["exitCode"] == 5
    kept = await wire.begin("process.start", sandbox=sandbox, shell="echo kept; read word; echo $word", keep=True)
    where["process"] = (await kept.event())[1]["id"]
    await kept.cancel()
    with pytest.raises(CallFailed, match="cancelled"):
        await kept.result
    assert (await wire.do("process.write", **where, text="written\n"))["isRead"] is True
    assert (await wire.do("process.wait", **where, seconds=30))["exitCode"] == 0


@wire_test
async def test_files_pass_both_ways(wire: WireClient, sandbox: str) -> None:
    """A file up and a part of it down, an archive up and down, changes told; half an upload leaves nothing."""
    data = hashlib.sha256(b"seed").digest() * (2 * MIB // 32)
    up = await wire.begin("file.write", sandbox=sandbox, path="d/big", mode="640")
    await up.send(data)
    facts = await up.result
    assert (facts["size"], facts["mode"]) == (len(data), "0640")
    down = await wire.begin("file.read", sandbox=sandbox, path="d/big", offset=5, count=MIB)
    assert await down.read() == data[5 : MIB + 5]
    assert await down.result == {"size": MIB}
    packed = await wire.begin("file.pack", sandbox=sandbox, path="d")
    archive = await packed.read()
    assert await packed.result == {"size": len(archive), "leftOut": 0}
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        assert members.getnames() == ["big"]
    watch = await wire.begin("file.watch", sandbox=sandbox, path="/workspace", recursive=True)
    assert (await watch.event())[0] == "watching"
    unpacked = await wire.begin("file.unpack", sandbox=sandbox, path="copy")
    await unpacked.send(archive)
    await unpacked.result
    assert (await watch.event())[1]["path"] == "copy"
    await watch.cancel()
    half = await wire.begin("file.write", sandbox=sandbox, path="d/big")
    await half.send(b"half", end=False)
    await half.cancel()
    with pytest.raises(CallFailed, match="cancelled"):
        await half.result
    assert (await wire.do("file.stat", sandbox=sandbox, path="d/big"))["size"] == len(data)
    assert [one["name"] for one in (await wire.do("file.list", sandbox=sandbox, path="copy"))["items"]] == ["big"]
    for verb in ("file.stat", "file.list", "file.write", "file.unpack", "file.remove", "file.watch", "file.makeFolder"):
        assert await failure(wire, verb, sandbox=sandbox, path="copy", timeout=1e-6) == (409, "file-error")
    await wire.do("file.remove", sandbox=sandbox, path="copy", recursive=True)
    new = await wire.begin("file.write", sandbox=sandbox, path="d/big", how="new")
    with pytest.raises(CallFailed) as there:
        await new.result
    assert there.value.kind == (409, "file-exists")


@wire_test
async def test_long_fields_and_long_results_come_in_pieces(wire: WireClient, sandbox: str) -> None:
    """A program of megabytes is run, and a listing of hundreds of kilobytes comes back whole."""
    lines = "import os\n" + "# a comment\n" * (2 * MIB // 12)
    code = f"{lines}os.mkdir('m')\nfor number in range(3000): open(f'm/{{number:060}}', 'w')\n"
    call = await wire.begin("run", fieldsOn=JSON)
    await call.send(json_bytes({"sandbox": sandbox, "code": code}), channel=JSON)
    assert (await call.result)["status"] == "ok"
    assert len((await wire.do("file.list", sandbox=sandbox, path="m"))["items"]) == 3000


def json_bytes(value: Any) -> bytes:
    """Return JSON."""
    return httpx.Request("POST", "http://x", json=value).content


@wire_test
async def test_a_terminal_and_a_port(wire: WireClient, sandbox: str) -> None:
    """A terminal has its size and takes keys; bytes pass to a server inside, and both halves end by themselves."""
    call = await wire.begin("process.start", sandbox=sandbox, argv=["sh"], terminal=[30, 100])
    where = {"sandbox": sandbox, "process": (await call.event())[1]["id"]}
    await wire.do("process.resize", **where, rows=31, columns=101)
    await call.send(b"stty size; exit 4\n", end=False)
    assert b"31 101" in await call.read()
    assert (await call.result)["exitCode"] == 4

    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 8123)); print('on', flush=True); c, _ = s.accept()\n"
        "while data := c.recv(65536): c.sendall(data)\n"
    )
    server = await wire.begin("exec", sandbox=sandbox, argv=["python3", "-c", code])
    assert await anext(server.pieces()) == b"on\n"
    assert 8123 in [one["port"] for one in (await wire.do("port.list", sandbox=sandbox))["items"]]
    port = await wire.begin("port.connect", sandbox=sandbox, port=8123)
    assert await port.event() == ("connected", {})
    sending = asyncio.ensure_future(port.send(b"z" * MIB))
    assert len(await port.read()) == MIB
    await sending
    assert await port.result == {}
    assert (await server.result)["exitCode"] == 0
    assert await failure(wire, "port.connect", sandbox=sandbox, port=8124) == (409, "connection-refused")


@wire_test
async def test_what_is_wrong_is_named_and_ends_its_call_alone(wire: WireClient, sandbox: str) -> None:
    """A verb, a field, an id, what is above the ceilings; the connection goes on."""
    for verb, fields, kind, named in (
        ("tunnel", {}, (422, "unknown-verb"), "verb"),
        ("exec", {"sandbox": sandbox, "shell": "true", "hostPath": "/"}, (422, "invalid-request"), "hostPath"),
        ("sandbox.look", {"sandbox": sandbox, "more": 1}, (422, "invalid-request"), "more"),
        ("file.read", {"path": "x"}, (422, "invalid-request"), "sandbox"),
        ("port.connect", {"sandbox": sandbox, "port": 70_000}, (422, "invalid-request"), "port"),
        ("exec", {"sandbox": sandbox, "shell": "true", "timeout": "1h"}, (403, "policy-denied"), "timeout"),
        ("sandbox.open", {"memoryLimit": "64g"}, (403, "policy-denied"), "memoryLimit"),
        ("sandbox.open", {"level": "none"}, (403, "policy-denied"), "level"),
        ("network.allow", {"sandbox": sandbox, "rules": ["a.example"]}, (403, "policy-denied"), "rules"),
        ("sandbox.look", {"sandbox": "sb_" + 20 * "0"}, (404, "not-found"), None),
        ("process.signal", {"sandbox": sandbox, "process": "99"}, (404, "not-found"), None),
    ):
        with pytest.raises(CallFailed) as failed:
            await wire.do(verb, **fields)
        assert (failed.value.kind, failed.value.problem["field"]) == (kind, named), verb
    many = [await wire.begin("sandbox.open", fieldsOn=JSON) for _ in range(wire.hello["bounds"]["calls"])]
    assert await failure(wire, "sandbox.list") == (429, "too-many-calls")
    for one in many:
        await one.send(b"[]", channel=JSON)
    await asyncio.wait([one.result for one in many])
    assert {type(one.result.exception()) for one in many} == {CallFailed}
    await wire.socket.send(frames.frame(frames.PING, 0, b"7"))
    assert await wire.pongs.get() == b"7"
    opened = await wire.do("sandbox.open", lifetime="5m", labels={"for": "wire"})
    listed = await wire.do("sandbox.list", label=["for=wire"])
    facts = await wire.do("sandbox.attach", sandbox=opened["id"])
    assert ([one["id"] for one in listed["items"]], facts["level"]) == ([opened["id"]], "jail")
    assert facts["enforcement"]["network"]["state"] == "enforced"
    assert (await wire.do("sandbox.end", sandbox=opened["id"]))["state"] == "ended"
    assert await failure(wire, "run", sandbox=opened["id"], shell="true") == (409, "sandbox-ended")


def test_each_call_needs_its_scope_and_its_project(service: Service, key: str, sandbox: str) -> None:
    """A key that reads does not run; of another project nothing is found, from one call to the next."""

    async def attempt() -> None:
        async with asyncio.timeout(PATIENCE_S), wired(service.address, service.new_key("read")) as reader:
            assert (await reader.do("file.stat", sandbox=sandbox, path="/"))["type"] == "directory"
            for verb, fields in (("run", {"shell": "true"}), ("file.write", {"path": "x"}), ("sandbox.end", {})):
                assert await failure(reader, verb, sandbox=sandbox, **fields) == (403, "scope-missing")
        ends = time.monotonic() + PATIENCE_S
        while ("sandbox.end", 403) not in (calls := logged_calls(service)):  # a thread writes the log
            assert time.monotonic() < ends
            await asyncio.sleep(0.05)
        assert calls[-2:] == [("file.write", 403), ("sandbox.end", 403)]
        async with asyncio.timeout(PATIENCE_S), wired(service.address, key) as wire:
            assert await shell(wire, sandbox, "echo ours") == "ours\n"
            with sqlite3.connect(service.database, timeout=10) as rows:
                rows.execute("UPDATE sandboxes SET project = 'theirs' WHERE id = ?", (sandbox,))
            try:
                for verb, fields in (("run", {"shell": "true"}), ("sandbox.look", {}), ("sandbox.end", {})):
                    assert await failure(wire, verb, sandbox=sandbox, **fields) == (404, "not-found")
            finally:
                with sqlite3.connect(service.database, timeout=10) as rows:
                    rows.execute("UPDATE sandboxes SET project = 'default' WHERE id = ?", (sandbox,))
        with pytest.raises(InvalidStatus) as nobody:
            async with wired(service.address, "cloche_none"):
                pass
        assert nobody.value.response.status_code == 401

    asyncio.run(attempt())


def logged_calls(service: Service) -> list[tuple[str, int]]:
    """Return the calls of the log, each with its verb and its status."""
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    return [(line["verb"], line["status"]) for line in lines if line["event"] == "call"]


async def broken(service: Service, key: str, message: str | bytes) -> tuple[int | None, str]:
    """Send one message while two calls go on, and return how the connection is closed: code and reason."""
    headers = {"Authorization": f"Bearer {key}"}
    url = service.address.replace("http", "ws", 1) + "/api/wire"
    async with connect(url, additional_headers=headers, proxy=None) as socket:
        await socket.recv()
        await socket.send(frames.json_frame(frames.OPEN, 1, verb="file.write", sandbox="sb_none", path="x"))
        await socket.send(frames.json_frame(frames.OPEN, 2, verb="sandbox.open", fieldsOn=3))
        await socket.send(message)
        with suppress(ConnectionClosed):
            while True:
                await socket.recv()
        return socket.close_code, socket.close_reason or ""


def test_who_breaks_the_protocol_loses_the_connection(service: Service, key: str) -> None:
    """Frames that are too long, of no kind or no JSON, data exceeds the window, a grant of nothing, a number in use.

    So does a client of another version, and it is told so.
    """

    async def attempt() -> None:
        for message, code, said in (
            (b"x" * (MIB + 1), 1009, ""), ('{"call": 1, "verb": "run"}', 1007, "version 2 of the wire"),
            (frames.data_frame(2, IN, bytes(MIB // 2)), 1007, "524289 bytes"),
            (frames.HEADER.pack(MIB + 1, 2, frames.DATA), 1007, f"{MIB + 1} bytes"),
            (frames.data_frame(2, IN, bytes(1 << 16)) * 5, 1007, "call 2: stream 0: data exceeds its window"),
            (frames.data_frame(2, OUT, b"x"), 1007, "stream 1"), (frames.data_frame(2, 9, b"x"), 1007, "stream 9"),
            (frames.data_frame(2, IN, b""), 1007, "no empty piece"), (frames.frame(99, 2), 1007, "kind 99"),
            (frames.frame(frames.EVENT, 2, b"{}"), 1007, "no frame of kind 2"),
            (frames.grant_frame(2, OUT, 1), 1007, "a window for data that was not sent"),
            (frames.frame(frames.OPEN, 3, b"[]"), 1007, "object"), (frames.frame(frames.OPEN, 3, b"{"), 1007, "JSON"),
            (frames.json_frame(frames.OPEN, 3, tunnel=1), 1007, "has a verb"),
            (frames.json_frame(frames.OPEN, 2, verb="run"), 1007, "goes on already"),
            (frames.json_frame(frames.OPEN, 0, verb="run"), 1007, "number"),
            (frames.frame(frames.PING, 0, bytes(200)), 1007, "ping"),
        ):  # fmt: skip
            async with asyncio.timeout(PATIENCE_S):
                closed, reason = await broken(service, key, message)
            assert closed == code, (message[:40], reason)
            assert said in reason

    asyncio.run(attempt())


def test_the_end_of_a_connection_ends_its_calls(service: Service, key: str, sandbox: str) -> None:
    """What an exec started is killed, and a kept process and the sandbox live on, when the client is just gone."""

    async def attempt() -> None:
        async with wired(service.address, key) as wire:
            call = await wire.begin("exec", sandbox=sandbox, shell="sleep 1000 & echo $!; wait")
            killed = (await anext(call.pieces())).decode().strip()
            kept = await wire.begin("process.start", sandbox=sandbox, shell="echo $$; sleep 1000", keep=True)
            lives = (await anext(kept.pieces())).decode().strip()
            identity = (await kept.event())[1]["id"]
            wire.socket.transport.abort()
        async with asyncio.timeout(PATIENCE_S), wired(service.address, key) as other:
            ends = time.monotonic() + PATIENCE_S
            while await shell(other, sandbox, f"kill -0 {killed} 2>/dev/null || echo gone") != "gone\n":
                assert time.monotonic() < ends
            assert await shell(other, sandbox, f"kill -0 {lives} && echo there") == "there\n"
            assert (await other.do("process.kill", sandbox=sandbox, process=identity))["exitCode"] == 137

    asyncio.run(attempt())


def test_a_revoked_key_ends_its_connection(service: Service, sandbox: str) -> None:
    """Within seconds, with the code for what is not allowed; its next call is refused at once, or was cut off."""
    with service.client() as admin:
        made = admin.post("/api/keys", json={"name": "gone", "scopes": ["run"]}).json()

        async def attempt() -> None:
            async with asyncio.timeout(PATIENCE_S), wired(service.address, made["key"]) as wire:
                call = await wire.begin("exec", sandbox=sandbox, shell="echo $$; sleep 1000")
                assert await anext(call.pieces())
                assert (await asyncio.to_thread(admin.delete, f"/api/keys/{made['id']}")).status_code < 300
                await wire.socket.wait_closed()
                assert wire.socket.close_code == 1008

        asyncio.run(attempt())


@wire_test
async def test_a_run_of_its_own_is_one_call(wire: WireClient, sandbox: str) -> None:
    """Its id comes first, then the contents of its files, then the whole result; it is in the list of runs."""
    code = "import sys; open('a', 'w').write('12'); open('b', 'w').write('3'); sys.stdout.buffer.write(b'\\xff')"
    call = await wire.begin("code.exec", code=code, returnFiles=True, files=[{"path": "x", "text": "", "mode": "755"}])
    name, data = await call.event()
    content, result = await call.read(OUT), await call.result
    assert (name, data) == ("run", {"id": result["id"]})
    assert ([(one["path"], one["size"]) for one in result["files"]], content) == ([("a", 2), ("b", 1)], b"123")
    assert (result["status"], result["stdout"], result["stdoutBase64"]) == ("ok", "\ufffd", "/w==")
    call = await wire.begin("code.exec", code="print(1)", stream=True)
    await call.result
    names = [call.events.get_nowait()[0] for _ in range(call.events.qsize())]
    assert names == ["run", "started", "output"]


@wire_test
async def test_a_workspace_lives_as_long_as_its_call(wire: WireClient, sandbox: str) -> None:
    """Runs in it are fresh processes in one workspace, whose files can be read and written; then it is not found."""
    keeping = await wire.begin("workspace.open")
    workspace = (await keeping.event())[1]["id"]
    writing = await wire.begin("workspace.write", workspace=workspace, path="in")
    await writing.send(b"given")
    assert await writing.result == {"size": 5}
    forks = "if os.fork() == 0: os.execvp('sleep', ['sleep', '900'])"
    code = f"import os; open('out', 'w').write(open('in').read() * 2)\n{forks}"
    result = await wire.do("workspace.run", workspace=workspace, code=code)
    assert (result["status"], [one["path"] for one in result["files"]]) == ("ok", ["out"])
    listed = await wire.do("workspace.run", workspace=workspace, argv=["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
    assert int(listed["stdout"]) < 6  # nothing of the run before
    reading = await wire.begin("workspace.read", workspace=workspace, path="out")
    assert await reading.read() == b"givengiven"
    assert await failure(wire, "workspace.read", workspace=workspace, path="out", most=3) == (413, "file-too-large")
    await keeping.cancel()
    with pytest.raises(CallFailed):
        await keeping.result
    assert await failure(wire, "workspace.run", workspace=workspace, code="1") == (404, "not-found")


@wire_test
async def test_the_workspace_of_a_session_has_files(wire: WireClient, sandbox: str) -> None:
    """One with checkpoints has its own."""
    session = (await wire.do("session.open", sandbox=sandbox, checkpoints=True))["id"]
    writing = await wire.begin("session.writeFile", sandbox=sandbox, session=session, path="mine")
    await writing.send(b"1")
    await writing.result
    assert (await wire.do("session.run", sandbox=sandbox, session=session, code="open('mine').read()"))["value"] == "1"
    reading = await wire.begin("session.readFile", sandbox=sandbox, session=session, path="mine")
    assert await reading.read() == b"1"
    assert await failure(wire, "file.stat", sandbox=sandbox, path="/workspace/mine") == (404, "file-not-found")
    await wire.do("session.close", sandbox=sandbox, session=session)


@wire_test
async def test_files_of_a_run_on_a_stream_are_checked_before_it_runs(wire: WireClient, sandbox: str) -> None:
    """An archive with its input runs; one that is longer, cut, too large, or leads elsewhere is refused, and so are
    sizes beside the same fields, and files of a workspace.
    """

    def archive(name: str, content: bytes = b"here") -> bytes:
        return b"".join(map(bytes, archive_pieces([_named(name, content)])))

    async def refusal(data: bytes, *, archiveSize: int = 0, **fields: Any) -> tuple[int, str]:  # noqa: N803 - a field
        call = await wire.begin("code.exec", code="1", archiveSize=archiveSize, **fields)
        sending = asyncio.ensure_future(call.send(data))
        with pytest.raises(CallFailed) as failed:
            await call.result
        sending.cancel()
        return failed.value.kind

    whole = archive("d/a")
    code = "import sys; print(open('d/a').read(), sys.stdin.read()); open('b', 'w').write('new')"
    call = await wire.begin("code.exec", code=code, archiveSize=len(whole), stdinSize=3, returnFiles=True)
    await call.send(whole + b"abc")
    content, result = await call.read(OUT), await call.result
    assert (result["status"], result["stdout"], content) == ("ok", "here abc\n", b"new")
    assert [file["path"] for file in result["files"]] == ["b"]
    assert await refusal(whole + b"more", archiveSize=len(whole)) == (413, "body-too-large")
    assert await refusal(whole[:-1], archiveSize=len(whole)) == (422, "invalid-request")
    assert await refusal(b"", archiveSize=1 << 40) == (413, "body-too-large")
    assert await refusal(b"", stdinSize=51 * MIB) == (413, "body-too-large")
    assert await refusal(archive("../a"), archiveSize=len(whole)) == (422, "invalid-request")
    same = {"files": [{"path": "x", "text": ""}]}
    assert await refusal(b"", archiveSize=1, **same) == (422, "invalid-request")
    keeping = await wire.begin("workspace.open")
    workspace = (await keeping.event())[1]["id"]
    refused = await failure(wire, "workspace.run", workspace=workspace, code="1", archiveSize=1024)
    assert refused == (422, "invalid-request")
    await keeping.cancel()


def _named(name: str, content: bytes) -> InputFile:
    """Return a file with any name."""
    file = InputFile(path="a", data=content)
    object.__setattr__(file, "path", name)
    return file
