"""The backend `cloche` and a service in a process of its own: the same results as here, and what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection

import cloche
from cloche.backends.cloche import ClocheBackend, live, sandbox
from cloche.backends.cloche import wire as client
from cloche.backends.cloche.fields import option_fields
from cloche.backends.remote.quota import Counter
from cloche.core.enforcement import Control, State
from cloche.core.errors import BackendUnavailable, InvalidRequest, OutcomeUnknown, PolicyDenied, SandboxFileError
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.processes import ProcessRequest
from cloche.core.remote import HiddenText, Quota, RemoteAccount
from cloche.core.request import InputFile, Request
from cloche.core.result import Result
from cloche.init import wire
from tests.harness.containers import make_certificates
from tests.harness.remote import Relay, account_at, posing, relayed, serving_tls, tls_words
from tests.harness.service import Service, start
from tests.integration import test_docker_live as docker

PATIENCE_S = 60.0
SLEEPS = "print('up', flush=True)\nimport time; time.sleep(1000)"
PROGRAM = """
import os, sys
sys.stdout.buffer.write(b"out \\xff\\n")
print("err", file=sys.stderr)
os.makedirs("d")
open("d/a", "wb").write(bytes(range(256)))
{"sum": 1 + 1, "of": [1, None, 1.5]}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, RemoteAccount]]:
    """Serve over TLS for all tests of this module."""
    with serving_tls(tmp_path_factory.mktemp("service"), "--drain", "2s") as found:
        yield found


@pytest.fixture
def account(served: tuple[Service, RemoteAccount]) -> RemoteAccount:
    """Return the account of an admin's key."""
    return served[1]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return certificates for who poses as a service."""
    return make_certificates(tmp_path_factory.mktemp("posed") / "certificates")


def run(account: RemoteAccount, code: str = "print(1)", **options: Any) -> Result:
    """Run code at a service."""
    return cloche.run(code, backend=ClocheBackend(account), **options)


def look(served: tuple[Service, RemoteAccount], path: str) -> Any:
    """Return what a route of the service says."""
    service, account = served
    context = ssl.create_default_context(cafile=account.ca_file)
    with service.client(verify=context) as client:
        return client.get(path).json()


def runner_key(served: tuple[Service, RemoteAccount]) -> HiddenText:
    """Return a new key that may run and read."""
    service, account = served
    with service.client(verify=ssl.create_default_context(cafile=account.ca_file)) as client:
        return HiddenText(client.post("/api/keys", json={"name": "r", "scopes": ["run", "read"]}).json()["key"])


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends, "it did not come to hold"
        time.sleep(0.02)


# What comes back.


def test_a_run_elsewhere_is_the_same_as_here(account: RemoteAccount, tmp_path: Path) -> None:
    """Status, exact output, value and files are equal; what held is claimed, by whom, and where it ran is said."""
    here, there = cloche.run(PROGRAM), run(account, PROGRAM)
    for name in ("status", "exit_code", "stdout", "stdout_bytes", "stderr_bytes", "value", "files", "truncated"):
        assert getattr(there, name) == getattr(here, name), name
    assert there.save(tmp_path) == ("d/a",)
    assert (tmp_path / "d" / "a").read_bytes() == bytes(range(256))
    measure = there.enforcement[Control.FILESYSTEM]
    assert (measure.state, there.enforcement.level_source) == (State.CLAIMED, "claimed")
    assert measure.mechanism.startswith(f"claimed by {account.host}")
    assert there.enforcement.level is here.enforcement.level
    assert there.meta["remote"] == {**account.as_dict(), "sandbox": there.meta["remote"]["sandbox"], "backend": "local"}
    assert (there.meta["backend"], there.meta["level_source"]) == ("cloche", "claimed")


def test_a_connection_is_kept_between_calls_and_opened_anew(account: RemoteAccount) -> None:
    """Blocking runs share a connection, and so do those of one loop; one that was cut is replaced."""
    with relayed(account) as (relay, through):
        for _ in range(3):
            assert run(through).stdout == "1\n"
        assert relay.connections == 1
        relay.cut()
        assert run(through).stdout == "1\n"
        assert relay.connections == 2

        async def several() -> None:
            backend = ClocheBackend(through)
            await cloche.arun("1", backend=backend)
            results = await asyncio.gather(*(cloche.arun(f"print({n})", backend=backend) for n in range(8)))
            assert [one.stdout for one in results] == [f"{n}\n" for n in range(8)]

        asyncio.run(several())
        assert relay.connections == 3


def test_a_sandbox_that_lives_does_what_ours_do(account: RemoteAccount) -> None:
    """Runs, processes, a session with rich results, files, and a pause, over one connection."""

    async def attempt() -> None:
        async with cloche.AsyncSandbox(backend=ClocheBackend(account)) as one:
            assert one.is_live
            result = await one.run("open('x', 'w').write('1'); print(2)", collect=["x"])
            assert (result.stdout, [file.path for file in result.files]) == ("2\n", ["x"])
            process = await one.start(["cat"])
            await process.write("in")
            await process.close_stdin()
            assert (await process.wait()).stdout == "in"
            session = await one.session()
            cell = await session.run("class C:\n def _repr_html_(self): return '<b>'\nC()")
            assert cell.outputs[0].data["text/html"] == "<b>"
            await one.write_file("y", b"z" * 1_000_000)
            assert len(await one.read_file("/workspace/y")) == 1_000_000
            for late in (one.write_file("z", bytes(100 << 20), timeout=0.1), one.stat("y", timeout="0.001ms")):
                with pytest.raises(SandboxFileError, match="not done in") as given_up:
                    await late
                assert given_up.value.kind == "timeout"
            assert not await one.exists("z", timeout=60)
            await one.pause()
            assert (await one._require_live("info").ask("info"))["is_paused"] is True
            await one.resume()
            assert (await one.exec(shell="exit 5")).exit_code == 5

    asyncio.run(attempt())


def test_what_nobody_reads_is_not_held_here(account: RemoteAccount) -> None:
    """A process that writes for ever stops at a window here, and other calls go on over the same connection."""

    async def attempt() -> None:
        async with ClocheBackend(account).open_live(Policy(), Limits()) as live:
            process = await live.start_process(ProcessRequest(argv=("yes",)))
            held = lambda: sum(map(len, process.stdout._pieces))  # type: ignore[attr-defined]  # noqa: E731
            async with asyncio.timeout(PATIENCE_S):
                while held() < wire.WINDOW_BYTES:  # noqa: ASYNC110 - nobody is told of what is not read
                    await asyncio.sleep(0.02)
            assert (await live.run(Request(code="print(1)"))).stdout == "1\n"
            assert held() == wire.WINDOW_BYTES
            await process.close()

    asyncio.run(attempt())


def test_a_sandbox_is_held_by_its_connection(served: tuple[Service, RemoteAccount], account: RemoteAccount) -> None:
    """Without a keeper; after a cut another connection holds it; it ends a lease after its client is lost."""

    async def attempt(relay: Relay, through: RemoteAccount) -> str:
        async with ClocheBackend(through).open_live(Policy(), Limits()) as one:
            facts = await one.ask_inside("sandbox.attach")
            assert (facts["heldBy"], facts["level"], facts["lease"]) == ("worker", "jail", through.lease_s)
            relay.cut()
            await asyncio.sleep(2 * through.lease_s)
            assert (await one.run(Request(code="print(1)"))).stdout == "1\n"
            return one.id

    async def leave(relay: Relay, through: RemoteAccount) -> str:
        opened = live.opened(through, option_fields(Policy(), Limits()), Policy(), Limits())
        one = await opened.__aenter__()
        relay.close()
        with pytest.raises(OutcomeUnknown):
            await one.run(Request(code="print(1)"))
        with contextlib.suppress(BackendUnavailable):  # nobody can be told
            await opened.__aexit__(None, None, None)
        return one.id

    with relayed(replace(account, lease_s=3.0)) as (relay, through):
        ended = asyncio.run(attempt(relay, through))
        assert look(served, f"/api/sandboxes/{ended}")["state"] == "ended"
        abandoned = asyncio.run(leave(relay, through))
    until(lambda: bool(look(served, f"/api/sandboxes/{abandoned}")["state"] == "ended"))


def test_a_service_keeps_a_sandbox_without_a_lease(account: RemoteAccount) -> None:
    """A keeper does, with `lease` 0: for services with several workers behind one address."""

    async def attempt() -> None:
        async with ClocheBackend(replace(account, lease_s=0.0)).open_live(Policy(), Limits()) as one:
            assert (await one.ask_inside("sandbox.attach"))["heldBy"] == "keeper"

    asyncio.run(attempt())


def test_a_folder_of_this_host_is_copied_and_committed(
    served: tuple[Service, RemoteAccount], account: RemoteAccount, tmp_path: Path
) -> None:
    """As in a container: what was shown is what is written, with conflicts; a key that may only run suffices."""
    docker.check_folder_of_the_host(tmp_path, backend=ClocheBackend(replace(account, api_key=runner_key(served))))


def test_a_copy_has_to_fit_into_the_granted_disk(account: RemoteAccount, tmp_path: Path) -> None:
    """More is refused before anything is sent; what a sandbox changes beyond its disk is not taken."""
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    with (
        pytest.raises(InvalidRequest, match="at a service: disk"),
        cloche.Sandbox(backend=ClocheBackend(account), workspace=tmp_path, disk="2m"),
    ):
        pass
    with cloche.Sandbox(backend=ClocheBackend(account), workspace=tmp_path, disk="16m") as one:
        one.exec(shell="printf new > made")
        assert [change.path for change in one.diff().changes] == ["made"]


def test_hosts_without_a_rule_are_asked_about_here(account: RemoteAccount) -> None:
    """The caller's function gets host and port; a no, an error and silence refuse; single runs have nobody to ask."""
    asked = list[tuple[str, int]]()
    fetch = "import urllib.request; urllib.request.urlopen('https://{}', timeout=10)"

    async def decide(host: str, port: int) -> bool:
        asked.append((host, port))
        if host == "broken.example.org":
            raise ValueError(host)
        return False

    async def attempt() -> None:
        options: Any = {"network": "allowlist", "network_allow": [], "on_network": "ask"}
        async with cloche.AsyncSandbox(backend=ClocheBackend(account), live=True, **options) as one:
            one.network.ask(decide)
            for host in ("files.example.org", "broken.example.org"):
                async with asyncio.timeout(PATIENCE_S):
                    while host not in [name for name, _ in asked]:  # until the service has somebody to ask
                        assert not (await one.run(fetch.format(host), timeout=30)).ok
        with pytest.raises(InvalidRequest, match="live sandbox"):
            await cloche.arun("1", backend=ClocheBackend(account), **options)

    asyncio.run(attempt())
    assert set(asked) == {("files.example.org", 443), ("broken.example.org", 443)}


# Who may what.


def test_what_a_service_refuses_is_said_with_its_words(
    served: tuple[Service, RemoteAccount], account: RemoteAccount
) -> None:
    """Limits above the service's own are PolicyDenied; what cannot be sent is refused before anything is."""
    runner = replace(account, api_key=runner_key(served))
    assert run(runner).stdout == "1\n"
    with pytest.raises(PolicyDenied, match="timeout: 100s is above the service's limit"):
        run(runner, timeout=100)
    with pytest.raises(PolicyDenied, match="network"):
        run(runner, network="open")
    with relayed(account) as (relay, through):
        with pytest.raises(InvalidRequest, match="tmp_bytes"):
            asyncio.run(_enter(ClocheBackend(through), Limits(tmp_bytes=1 << 20)))
        with pytest.raises(BackendUnavailable, match="claimed"):
            run(through, require="jail")
        assert relay.connections == 0
    assert run(account, require="jail", accept_claimed=True).ok


async def _enter(backend: ClocheBackend, limits: Limits) -> None:
    async with backend.open(Policy(), limits):
        pass


def test_quotas_are_counted_before_anything_is_sent(account: RemoteAccount, tmp_path: Path) -> None:
    """A run that is refused by the quota is not sent; one that could not be sent is not counted."""
    limited = replace(account, quota=Quota(runs_per_day=1), quota_file=str(tmp_path / "quota.db"))
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        run(replace(limited, url="https://127.0.0.1:1"))
    assert run(limited).ok
    with relayed(limited) as (relay, through):
        with pytest.raises(BackendUnavailable, match="1 of 1 runs"):
            run(through)
        assert relay.connections == 0


def test_whatever_runs_in_a_sandbox_that_lives_is_counted(account: RemoteAccount, tmp_path: Path) -> None:
    """Runs, commands, processes and cells."""
    limited = replace(account, quota=Quota(runs_per_day=4), quota_file=str(tmp_path / "quota.db"))
    with cloche.Sandbox(backend=ClocheBackend(limited)) as sandbox:
        sandbox.run("1")
        sandbox.exec(["true"])
        with sandbox.start(["true"]) as process:
            process.wait()
        with sandbox.session() as session:
            session.run("1")
            with pytest.raises(BackendUnavailable, match="4 of 4 runs"):
                session.run("2")


def test_the_key_is_nowhere_but_in_its_header(
    account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No proxy, key log or certificates of the environment are used; results, errors and logs do not have the key."""
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.settimeout(0)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "WSS_PROXY", "SOCKS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
    for name in ("SSLKEYLOGFILE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    said = [repr(account), repr(ClocheBackend(account))]
    with caplog.at_level(logging.DEBUG):
        result = run(account)
        said += [repr(result), json.dumps(result.as_dict())]
        for wrong in (replace(account, url=account.url + "/nowhere"), replace(account, url="https://127.0.0.1:1")):
            with pytest.raises(BackendUnavailable) as refused:
                run(wrong)
            said.append(f"{refused.value!r}")
    said.append(caplog.text)
    key = account.api_key.reveal()
    assert not any(key in text for text in said)
    assert not any((tmp_path / name).exists() for name in ("SSLKEYLOGFILE",))
    with pytest.raises(BlockingIOError):
        proxy.accept()
    proxy.close()


# What may go wrong before anything is sent.

ANSWERS = {
    "401": ((401, {}, b'{"detail": "this key is not valid"}'), "does not accept the key.*this key is not valid"),
    "403": ((403, {}, b"{}"), "may not do this"),
    "429": ((429, {"Retry-After": "77"}, b"{}"), "wait for 77 s"),
    "503": ((503, {"Retry-After": "60"}, b'{"detail": "32 wires are open already"}'), "it failed.*32 wires"),
    "proxy": ((502, {"Content-Type": "text/html"}, b"<html>cloche_posed</html>"), r"it failed \(502\) at [0-9.:]+\. "),
    "page": ((200, {"Content-Type": "text/html"}, b"<html>hello</html>"), "does not follow the protocol"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_that_is_no_wire_has_its_sentence(certificates: Path, name: str) -> None:
    """Each is BackendUnavailable, with what to do, and nothing was sent."""
    answer, sentence = ANSWERS[name]
    with posing(certificates, lambda _: None, answer) as (account, seen):
        with pytest.raises(BackendUnavailable, match=sentence) as refused:
            run(account)
        assert refused.value.remedy
        assert set(seen) == {"/api/wire"}


def test_certificates_are_checked(account: RemoteAccount, certificates: Path) -> None:
    """One of another authority, and one for another name, are refused; http is for loopback alone."""
    for wrong in (
        replace(account, ca_file=str(certificates / "ca.pem")),
        replace(account, ca_file=""),
        replace(account, url=account.url.replace("127.0.0.1", "localhost")),
    ):
        with pytest.raises(BackendUnavailable, match=r"its certificate cannot be verified"):
            run(wrong)
    with pytest.raises(BackendUnavailable, match="not https"):
        run(replace(account, url="http://192.0.2.1:1"))


def test_a_certificate_is_pinned_by_its_hash(account: RemoteAccount) -> None:
    """The one of this hash is taken, whoever signed it and for whatever name; another one is refused before the key."""
    text = (Path(account.ca_file).parent / "server" / "cert.pem").read_text()
    pinned = replace(account, ca_file="", certificate=hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest())
    for url in (account.url, account.url.replace("127.0.0.1", "localhost")):
        assert run(replace(pinned, url=url)).stdout == "1\n"
    with pytest.raises(BackendUnavailable, match=r"its SHA-256 is another one"):
        run(replace(pinned, certificate="0" * 64))


def test_a_service_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and never answers holds nobody up for long."""
    monkeypatch.setattr(RemoteAccount, "open_s", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(BackendUnavailable, match="did not answer in time"),
    ):
        run(account_at(f"https://127.0.0.1:{silent.getsockname()[1]}", "key"))


# What may go wrong afterwards.


def call_of(connection: ServerConnection, verb: str = "") -> int:
    """Wait for a call, of this verb if one is named, and return its number."""
    while True:
        message = connection.recv()
        assert isinstance(message, bytes)
        for kind, number, body in wire.FrameBuffer(last_kind=wire.PONG).feed(message):
            if kind == wire.OPEN and (not verb or wire.read_object(body)["verb"] == verb):
                return number


def frames(*messages: Callable[[int], str | bytes]) -> Callable[[ServerConnection], None]:
    """Return what sends these messages to the first call, and waits for the end of the connection."""

    def talk(connection: ServerConnection) -> None:
        number = call_of(connection)
        for message in messages:
            connection.send(message(number))
        while True:
            connection.recv()

    return talk


def event(name: str, **data: Any) -> Callable[[int], bytes]:
    """Return an event of a call."""
    return lambda n: wire.json_frame(wire.EVENT, n, event=name, data=data)


def result(value: Any) -> Callable[[int], bytes]:
    """Return the end of a call."""
    return lambda n: wire.frame(wire.CLOSE, n, json.dumps({"result": value}).encode())


def done(**facts: Any) -> Callable[[int], bytes]:
    """Return the end of a run that succeeded."""
    return result({"status": "ok", "exitCode": 0, "stdout": "", "stderr": "", "files": [], **facts})


def half_frame(connection: ServerConnection) -> None:
    """Send the head of a frame and a part of its content."""
    call_of(connection)
    connection.socket.sendall(b"\x82\x7e\x10\x00abc")
    connection.socket.close()


def fragments(connection: ServerConnection) -> None:
    """Begin a message that has no end, and no content."""
    call_of(connection)
    connection.socket.sendall(b"\x01\x00" + b"\x00\x00" * 5000)
    connection.recv()


FAULTS: dict[str, Callable[[ServerConnection], None]] = {
    "no JSON": frames(lambda n: wire.frame(wire.CLOSE, n, b"{")),
    "no object": frames(lambda n: wire.frame(wire.CLOSE, n, b"[]")),
    "deep": frames(lambda n: wire.frame(wire.CLOSE, n, b"[" * 100_000)),
    "text": frames(lambda _: '{"what": 1}'), "another greeting": frames(lambda _: '{"hello": {"wire": 1}}'),
    "another call": frames(lambda n: result({})(n + 1)),
    "no end": frames(lambda n: wire.frame(wire.CLOSE, n, b"{}")),
    "event without data": frames(lambda n: wire.json_frame(wire.EVENT, n, event="run")),
    "a frame that only clients send": frames(lambda n: wire.json_frame(wire.OPEN, n, verb="run")),
    "unknown kind": frames(lambda n: wire.frame(99, n)),
    "client's stream": frames(lambda n: wire.data_frame(n, 0, b"x")),
    "no such stream": frames(lambda n: wire.data_frame(n, 5, b"x")),
    "credit for nothing": frames(lambda n: wire.grant_frame(n, 0, 1)),
    "too large": frames(lambda n: wire.data_frame(n, 1, bytes((1 << 16) + 1))),
    "a body without bounds": frames(lambda n: wire.HEADER.pack((1 << 32) - 1, n, wire.DATA)),
    "after its end": frames(lambda n: wire.frame(wire.END, n, b"\1"), lambda n: wire.data_frame(n, 1, b"x")),
    "giant": frames(lambda _: b"x" * (1 << 21)),
    "no result": frames(result([1])),
    "result of nothing": frames(result({"status": "fine"})),
    "files that did not come": frames(done(files=[{"path": "a", "size": 1, "sha256": "0" * 64}])),
    "path of ours": frames(done(files=[{"path": "../a", "size": 0, "sha256": "0" * 64}])),
    "pieces that are no JSON": frames(
        lambda n: wire.data_frame(n, 3, b"nonsense"), lambda n: wire.frame(wire.END, n, b"\3"),
        lambda n: wire.json_frame(wire.CLOSE, n, resultOn=3),
    ),
    "an empty frame": frames(lambda n: wire.data_frame(n, 1, b"")),
    "a number that is none": frames(result({"value": float("nan")})),
    "millions of values": frames(
        *[lambda n: wire.data_frame(n, 3, b"[" + b"[]," * 20_000) for _ in range(32)],
        lambda n: wire.data_frame(n, 3, b"[]" + b"]" * 32), lambda n: wire.frame(wire.END, n, b"\3"),
        lambda n: wire.json_frame(wire.CLOSE, n, resultOn=3),
    ),
    "fragments without an end": fragments,
    "half a frame": half_frame,
    "closed": lambda connection: (call_of(connection), connection.close())[0],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_frames_end_the_connection_with_a_clear_error(certificates: Path, name: str) -> None:
    """After the code was sent, each is OutcomeUnknown, or says that the answer is no result; nothing crashes."""
    with (
        posing(certificates, FAULTS[name]) as (account, _),
        pytest.raises((OutcomeUnknown, BackendUnavailable), match=r"may or may not|does not follow the protocol"),
    ):
        run(account)


def test_a_service_of_another_version_is_named(certificates: Path) -> None:
    """Before anything is sent, the error says which version is spoken here, and what to do."""
    for version in (1, 3):
        with (
            posing(certificates, lambda _: None, version=version) as (account, _),
            pytest.raises(BackendUnavailable, match="not version 2: use the same version of Cloche on both"),
        ):
            run(account)


def test_small_frames_of_a_service_do_not_hold_the_loop(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ten thousand, alone in a message or many, they are handled by turns; the result behind them is read."""
    handled = most = 0
    take = client.Wire._take

    def counted(self: client.Wire, *arguments: Any) -> None:
        nonlocal handled
        handled += 1
        take(self, *arguments)

    def talk(connection: ServerConnection) -> None:
        number = call_of(connection)
        connection.send(wire.frame(wire.END, number + 1, b"\1") * 50_000)
        connection.socket.sendall(b"\x82\x00" * 20_000)  # messages without content
        connection.send(done()(number))

    async def attempt(account: RemoteAccount) -> None:
        nonlocal most
        running = asyncio.ensure_future(cloche.arun("1", backend=ClocheBackend(account)))
        while not running.done():
            before = handled
            await asyncio.sleep(0)
            most = max(most, handled - before)
        assert (await running).ok

    monkeypatch.setattr(client.Wire, "_take", counted)
    with posing(certificates, talk) as (account, _):
        asyncio.run(asyncio.wait_for(attempt(account), PATIENCE_S))
    assert handled > 50_000
    assert most <= 2 * wire.MOST_AT_ONCE  # the end of what came before, and the beginning of what came now


def test_what_a_service_does_not_take_keeps_nobody(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields for which it gives no credit are given up, whatever else it says; so is a file that it does not take."""
    monkeypatch.setattr(RemoteAccount, "stall_s", 0.3)
    monkeypatch.setattr(sandbox, "FILE_S", 0.3)

    def talk(connection: ServerConnection) -> None:
        connection.send(event("opened", id="ws_1")(call_of(connection)))
        while True:
            connection.send(wire.frame(wire.PING, 0))
            time.sleep(0.05)

    async def attempt(account: RemoteAccount) -> None:
        async with ClocheBackend(account).open(Policy(), Limits()) as opened:
            with pytest.raises(SandboxFileError, match="not finished within"):
                await opened.write_file("a", bytes(1 << 20))
            with pytest.raises(SandboxFileError, match="not finished within"):
                await opened.read_file("a", max_bytes=9)

    with posing(certificates, talk) as (account, _):
        asyncio.run(asyncio.wait_for(attempt(account), 30))
        with pytest.raises(OutcomeUnknown, match="does not read the fields of a call"):
            asyncio.run(asyncio.wait_for(cloche.arun("#" * (1 << 20), backend=ClocheBackend(account)), 30))


def test_a_file_larger_than_the_disk_is_not_asked_for(certificates: Path) -> None:
    """Whatever size a service says: such a file would fill the memory here."""
    record = {"path": "a", "size": 1 << 40, "sha256": "0" * 64}
    asked: list[int] = []

    def talk(connection: ServerConnection) -> None:
        connection.send(done(files=[record])(call_of(connection, "run")))
        asked.append(call_of(connection, "file.read"))

    async def attempt(account: RemoteAccount) -> Result:
        opened = live.RemoteSandbox(account, "sb_1", Policy(), Limits())
        return await asyncio.wait_for(opened.run(Request(code="1")), PATIENCE_S)

    with posing(certificates, talk) as (account, _):
        ran = asyncio.run(attempt(account))
    assert (ran.files, ran.meta["files_partial"], asked) == ((), "access", [])


def test_a_large_file_of_a_result_is_not_held_in_memory(account: RemoteAccount, tmp_path: Path) -> None:
    """It goes from the service to the disk, between small ones."""
    code = (
        "import os\nfor name, size in (('a', 3), ('b', 40 << 20), ('c', 5)): open(name, 'wb').write(os.urandom(size))"
    )

    async def attempt() -> Result:
        async with cloche.AsyncSandbox(live=True, backend=ClocheBackend(account)) as box:
            await box.run("1")
            tracemalloc.start()
            return await box.run(code, collect=["*"])

    try:
        ran = asyncio.run(attempt())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ran.save(tmp_path)
    sizes = {file.path: file.size for file in ran.files}
    assert sizes == {"a": 3, "b": 40 << 20, "c": 5}
    assert {hashlib.sha256((tmp_path / file.path).read_bytes()).hexdigest() for file in ran.files} == {
        file.sha256 for file in ran.files
    }
    assert peak < 24 << 20


def test_a_pause_without_end_ends_with_the_lifetime(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that says for ever that a sandbox is paused keeps nobody longer than the sandbox may live."""
    monkeypatch.setattr(live, "GRACE_S", 0.1)
    monkeypatch.setattr(RemoteAccount, "cancel_s", 0.1)

    def talk(connection: ServerConnection) -> None:
        while True:
            connection.send(result({"state": "paused"})(call_of(connection, "sandbox.look")))

    async def attempt(account: RemoteAccount) -> None:
        opened = live.RemoteSandbox(replace(account, lifetime_s=0.5), "sb_1", Policy(), Limits())
        with pytest.raises(OutcomeUnknown, match="did not report in time"):
            await opened.run(Request(code="1", timeout_s=0.1))

    with posing(certificates, talk) as (account, _):
        asyncio.run(asyncio.wait_for(attempt(account), 20))


def test_time_is_counted_by_the_clock_here(certificates: Path, tmp_path: Path) -> None:
    """What a service says that a run took neither uses up an account nor spares it."""
    quota = Quota(seconds_per_day=100)
    with posing(certificates, frames(done(duration=1e12))) as (account, _):
        limited = replace(account, quota=quota, quota_file=str(tmp_path / "quota.db"))
        asyncio.run(cloche.arun("1", backend=ClocheBackend(limited), timeout=20))
    assert 0 < Counter(limited).used_today()["seconds"] < 20


def test_what_is_no_result_counts_as_a_run(certificates: Path, tmp_path: Path) -> None:
    """Code was sent, so nothing of it is given back."""
    with posing(certificates, FAULTS["result of nothing"]) as (account, _):
        limited = replace(account, quota=Quota(runs_per_day=5), quota_file=str(tmp_path / "quota.db"))
        with pytest.raises(OutcomeUnknown):
            run(limited)
    assert Counter(limited).used_today()["runs"] == 1


def test_more_than_a_window_ends_the_connection(certificates: Path) -> None:
    """Content that nobody gave credit for is never held."""

    def flood(connection: ServerConnection) -> None:
        number = call_of(connection)
        connection.send(event("started", id="1", pid=2)(number))
        for _ in range(5):
            connection.send(wire.data_frame(number, 1, bytes(1 << 16)))
        while True:
            connection.recv()

    async def attempt(account: RemoteAccount) -> None:
        from cloche.backends.cloche.live import RemoteSandbox

        live = RemoteSandbox(account, "sb_1", Policy(), Limits())
        process = await live.start_process(ProcessRequest(argv=("yes",)))
        with pytest.raises(OutcomeUnknown, match="stream 1: data exceeds its window"):
            await process.result(takes_output=False)

    with posing(certificates, flood) as (account, _):
        asyncio.run(attempt(account))


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "internal-error"), (502, "internal-error"), (599, "odd")], ids=["500", "502", "unknown"]
)
def test_a_service_that_fails_when_it_has_the_code(certificates: Path, status: int, kind: str) -> None:
    """The code may have run; what was only too much at once (429, 503) is no such failure."""

    def failing(status: int, kind: str) -> Callable[[ServerConnection], None]:
        problem = {"type": f"https://cloche.example/{kind}", "title": kind, "status": status, "detail": "it fell"}
        return frames(lambda n: wire.json_frame(wire.CLOSE, n, error=problem))

    for one, error, said in (
        (failing(status, kind), OutcomeUnknown, "may have run all the same"),
        (failing(429, "too-many-calls"), BackendUnavailable, "too many requests"),
    ):
        with posing(certificates, one) as (account, _), pytest.raises(error, match=said):
            run(account)


def test_a_full_account_gives_no_sandbox_of_another_kind(account: RemoteAccount, tmp_path: Path) -> None:
    """One that lives is refused, and does not become one whose runs take turns without a word."""
    limited = ClocheBackend(replace(account, quota=Quota(sandboxes_at_once=1), quota_file=str(tmp_path / "quota.db")))
    with cloche.Sandbox(backend=limited) as sandbox:
        assert sandbox.is_live
        with pytest.raises(BackendUnavailable, match="1 of 1 sandboxes at once"), cloche.Sandbox(backend=limited):
            pass


def test_a_service_that_never_ends_a_run_is_given_up(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs are counted here as well."""
    monkeypatch.setattr(sandbox, "GRACE_S", 0.1)
    monkeypatch.setattr(RemoteAccount, "cancel_s", 0.1)
    begun = frames(event("run", id="run_7"))
    with (
        posing(certificates, begun) as (account, _),
        pytest.raises(OutcomeUnknown, match=r"did not report in time.*run_7"),
    ):
        run(account, timeout=0.2)


def test_a_connection_that_is_cut_while_code_runs(
    served: tuple[Service, RemoteAccount], account: RemoteAccount
) -> None:
    """It is OutcomeUnknown, with the run's id; the service has killed the run, and the next one goes on."""
    with relayed(account) as (relay, through):
        up = threading.Event()

        def cut() -> None:
            up.wait(PATIENCE_S)
            relay.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(OutcomeUnknown, match=r"It is run run_") as lost:
            run(through, SLEEPS, on_output=lambda *_: up.set())
        cutting.join()
        number = str(lost.value).partition("It is run ")[2].partition(":")[0]
        until(lambda: bool(look(served, f"/api/runs/{number}")["status"] == "cancelled"))
        assert run(through).ok


def test_a_run_that_is_cancelled_is_ended_there(served: tuple[Service, RemoteAccount], account: RemoteAccount) -> None:
    """Cancelling the call returns once the service says that it has ended."""
    up = asyncio.Event()

    async def attempt() -> None:
        running = asyncio.ensure_future(
            cloche.arun(SLEEPS, backend=ClocheBackend(account), on_output=lambda *_: up.set())
        )
        await asyncio.wait_for(up.wait(), PATIENCE_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(attempt())
    rows = look(served, "/api/runs?limit=1")["items"]
    assert [row["status"] for row in rows] == ["cancelled"]


def test_a_service_that_is_killed(tmp_path: Path) -> None:
    """What ran is OutcomeUnknown; then it cannot be reached; nothing hangs."""
    certificates = make_certificates(tmp_path / "certificates")
    service = start(tmp_path, *tls_words(certificates))
    account = account_at(service.address, service.key, certificates / "ca.pem")
    try:
        with pytest.raises(OutcomeUnknown, match="It is run run_"):
            run(account, SLEEPS, on_output=lambda *_: service.process.send_signal(signal.SIGKILL))
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            run(account)
    finally:
        assert service.end(signal.SIGKILL) == -signal.SIGKILL


# What is left behind.

CALLER = """
import asyncio, sys, json
import cloche
from cloche.backends.cloche import ClocheBackend
from tests.harness.remote import account_at
async def main():
    async with cloche.AsyncSandbox(backend=ClocheBackend(account_at(*json.load(sys.stdin)))) as one:
        process = await one.start(["sleep", "1000"])
        print("up", flush=True)
        await process.wait()
asyncio.run(main())
"""


AT_ONCE = 50  # a service has no more than 64 live sandboxes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [pytest.param(3, id="some"), pytest.param(100, id="all", marks=pytest.mark.soak)])
def test_what_callers_that_were_killed_left_is_ended(
    served: tuple[Service, RemoteAccount], account: RemoteAccount, times: int
) -> None:
    """Sandboxes of dead processes are found by their label and ended; those of the living stay."""
    backend = ClocheBackend(account)
    told = json.dumps([account.url, account.api_key.reveal(), account.ca_file])

    async def own() -> None:
        async with cloche.AsyncSandbox(backend=backend) as one:
            for many in [AT_ONCE] * (times // AT_ONCE) + [times % AT_ONCE]:
                left = await asyncio.to_thread(lambda many=many: [kill_caller() for _ in range(many)])
                assert left == [-signal.SIGKILL] * many
                assert len(await asyncio.to_thread(backend.collect_garbage)) == many
            assert (await one.run("print(1)")).ok

    def kill_caller() -> int:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(told)
        caller.stdin.close()
        assert caller.stdout.readline() == "up\n"
        caller.kill()
        caller.stdout.close()
        return caller.wait()

    asyncio.run(own())
    assert backend.collect_garbage() == []
    assert look(served, "/api/sandboxes?state=running")["items"] == []


# Files and input beyond what the fields of a run carry.

MIB = 1 << 20
COPIES = """
import os, shutil, sys
shutil.copyfile("large", "out")
print(len(os.listdir("many")), len(sys.stdin.buffer.read()), oct(os.stat("tool").st_mode)[-3:])
os.remove("many/1")
open("many/2", "a").write("changed")
"""


def large_files(folder: Path) -> dict[str, Any]:
    """Return files that are too large and too many for fields."""
    many = folder / "many"
    many.mkdir()
    for number in range(3_000):
        (many / str(number)).write_text(str(number))
    (folder / "large").write_bytes(os.urandom(MIB) * 38)
    return {"large": folder / "large", "many": many, "tool": InputFile(path="tool", data=b"#!", mode=0o755)}


def held_open(service: Service) -> list[str]:
    """Return what unnamed files of runs the service has open."""
    folder = Path(f"/proc/{service.process.pid}/fd")
    names = []
    for fd in folder.iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(fd))
    return [name for name in names if "/#" in name or ("/cloche-" in name and name.endswith("(deleted)"))]


def test_files_and_input_of_any_size_pass_both_ways(
    served: tuple[Service, RemoteAccount], account: RemoteAccount, tmp_path: Path
) -> None:
    """40 MiB, 3,000 files and 21 MiB of input go in, 38 MiB come out: the result is as here, nothing is left."""
    files, stdin = large_files(tmp_path), b"i" * (21 * MIB)
    here = cloche.run(COPIES, files=files, stdin=stdin)
    there = run(account, COPIES, files=files, stdin=stdin, out=tmp_path / "out")
    assert (there.status, there.stdout, there.stderr) == (here.status, "3000 22020096 755\n", here.stderr)
    assert there.files == here.files
    assert sorted(file.path for file in there.files) == ["many/2", "out"]
    assert (tmp_path / "out" / "out").read_bytes() == (tmp_path / "large").read_bytes()
    number = there.meta["remote"]["sandbox"]
    assert look(served, f"/api/runs/{number}")["status"] == "ok"
    assert held_open(served[0]) == []


def test_input_of_any_size_goes_into_a_workspace_and_files_do_not(account: RemoteAccount) -> None:
    """Several runs share what the service holds open; large files are refused before anything is sent."""
    with cloche.Sandbox(backend=ClocheBackend(account), live=False) as several:
        size = "import sys; print(len(sys.stdin.buffer.read()))"
        assert several.run(size, stdin=bytes(21 * MIB)).stdout == f"{21 * MIB}\n"
        with pytest.raises(InvalidRequest, match="only with a single run; write them into a live sandbox"):
            several.run(size, files={"a": bytes(21 * MIB)})


def test_a_connection_that_is_cut_while_files_are_sent(
    served: tuple[Service, RemoteAccount], account: RemoteAccount
) -> None:
    """Nothing has run, and that is said; the service lets go of what came, and the next run goes on."""
    with relayed(account) as (relay, through):
        assert run(through).ok
        relay.passed.clear()

        def cut() -> None:
            relay.passed.wait(PATIENCE_S)
            relay.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(BackendUnavailable, match="while files were sent; nothing has run"):
            run(through, files={"a": bytes(200 * MIB)})
        cutting.join()
    until(lambda: not held_open(served[0]))
    assert run(account).ok


def test_a_caller_that_is_cancelled_while_files_are_sent(
    served: tuple[Service, RemoteAccount], account: RemoteAccount
) -> None:
    """The call is ended there, and what came is let go."""

    async def attempt() -> None:
        running = asyncio.ensure_future(cloche.arun("1", files={"a": bytes(200 * MIB)}, backend=ClocheBackend(account)))
        await asyncio.to_thread(until, lambda: bool(held_open(served[0])))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(attempt())
    until(lambda: not held_open(served[0]))


@pytest.mark.parametrize(
    ("streamed", "error", "said"),
    [
        (None, InvalidRequest, "the older Cloche at .* does not take with a run"),
        (MIB, InvalidRequest, "takes 1048576 with a run"),
        (1 << 40, BackendUnavailable, "has taken no more of a run's files"),
    ],
    ids=["older", "less", "stalls"],
)
def test_a_service_that_does_not_take_files(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, streamed: int | None, error: type[Exception], said: str
) -> None:
    """One that knows no stream, or takes less, gets none of it; one that stops taking is given up, and nothing ran."""
    monkeypatch.setattr(RemoteAccount, "stall_s", 0.3)
    monkeypatch.setattr(RemoteAccount, "cancel_s", 0.1)
    with posing(certificates, frames(), streamed=streamed) as (account, _), pytest.raises(error, match=said):
        run(account, files={"a": bytes(21 * MIB)})


def test_a_service_that_sends_more_than_the_disk_fills_none_here(certificates: Path) -> None:
    """The rest is dropped as it comes, and the result says that its files are not whole."""

    def flood(connection: ServerConnection) -> None:
        number, window = call_of(connection), wire.WINDOW_BYTES
        for _ in range(3 * MIB // wire.MOST_DATA):
            while window < wire.MOST_DATA:
                for kind, _, body in wire.FrameBuffer(last_kind=wire.PONG).feed(bytes(connection.recv())):  # type: ignore[arg-type]
                    window += wire.read_grant(body)[1] if kind == wire.WINDOW else 0
            connection.send(wire.data_frame(number, 1, bytes(wire.MOST_DATA)))
            window -= wire.MOST_DATA
        connection.send(done(files=[{"path": "a", "size": 3 * MIB, "sha256": "0" * 64}])(number))
        connection.recv()

    with posing(certificates, flood) as (account, _):
        there = run(account, disk="2m")
    assert (there.files, there.meta["files_partial"]) == ((), "bytes")


def test_files_that_do_not_fit_into_the_disk_there_are_the_callers_error(account: RemoteAccount) -> None:
    """Small files take more of the disk than their bytes: the run is refused when it is full, and nothing has run."""
    with pytest.raises(InvalidRequest, match=r"disk is full.*nothing has run"):
        run(account, files={f"d/{number}": b"x" for number in range(3_000)}, disk="1m")
