"""The daytona backend, over a server that speaks Daytona's wire and really runs programs: what comes of it, and faults.

Every fault has a sentence of its own, and the key is in none of them, nor in any log.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloche.backends.daytona import DaytonaBackend, client
from cloche.backends.daytona.relay import FOUND, OUT, PIECE, TAKEN
from cloche.backends.daytona.terminal import MOST_UNREAD, TerminalWire
from cloche.backends.remote.failures import Failure, RemoteUnavailable
from cloche.backends.remote.labels import LABEL
from cloche.core.enforcement import Level, State
from cloche.core.errors import BackendUnavailable, ClocheError, OutcomeUnknown, StartFailed
from cloche.core.events import OutputChunk, discard
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.processes import ProcessRequest
from cloche.core.remote import HiddenText, Quota, RemoteAccount
from cloche.core.request import InputFile, Request
from cloche.core.result import Status
from tests.harness.daytona_server import KEY, DaytonaServer, Fault
from tests.harness.tls import Authority

pytest.importorskip(client.API, reason="the clients of the SDK daytona are not installed")
pytestmark = pytest.mark.timeout(180)

ENDLESS = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Have one authority for all servers here."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def serving(authority: Authority) -> Iterator[DaytonaServer]:
    """Have one server for all tests that do not need their own."""
    with DaytonaServer(authority.server_context()) as server:
        yield server


@pytest.fixture
def server(serving: DaytonaServer, caplog: pytest.LogCaptureFixture) -> Iterator[DaytonaServer]:
    """Have the server without faults; afterwards it has no sandboxes, and no log has the key."""
    caplog.set_level(logging.DEBUG)
    serving.reset()
    yield serving
    serving.faults.clear()
    assert not serving.boxes, [box.name for box in serving.boxes.values()]
    assert KEY not in caplog.text


@pytest.fixture
def account(server: DaytonaServer, authority: Authority) -> RemoteAccount:
    """Have an account there."""
    return RemoteAccount(provider="daytona", api_key=HiddenText(KEY), url=server.url, ca_file=str(authority.file))


def run(account: RemoteAccount, code: str = "print(6 * 7)", **request: Any) -> Any:
    """Run code in a sandbox of its own."""

    async def main() -> Any:
        async with DaytonaBackend(account).open(Policy(), Limits()) as sandbox:
            return await sandbox.run(Request(code=code, **request))

    return asyncio.run(main())


def refused(account: RemoteAccount, kind: type[ClocheError] = RemoteUnavailable) -> Any:
    """Return the error of a run that cannot be had; nowhere in it is the key."""
    with pytest.raises(kind) as caught:
        run(account)
    everything = "".join(traceback.format_exception(caught.value))
    assert KEY not in everything
    assert KEY not in repr(caught.value)
    assert len(str(caught.value)) < 1200
    return caught.value


# What comes of it.


def test_a_run_goes_through(server: DaytonaServer, account: RemoteAccount) -> None:
    """Files, input, environment, output, value, exit code; what is asked of the provider; what is said of it."""
    code = "import os, sys; print(open('a.txt').read(), sys.stdin.read(), os.environ['B']); open('c', 'w').write('d')"

    async def main() -> None:
        async with DaytonaBackend(replace(account, region="eu", template="mine")).open(Policy(), Limits()) as sandbox:
            files = (InputFile(path="a.txt", data=b"one"),)
            result = await sandbox.run(Request(code=f"{code}\n1 + 1", files=files, stdin=b"two", env={"B": "three"}))
            assert (result.status, result.stdout, result.value) == (Status.OK, "one two three\n", 2), result.stderr
            assert [file.path for file in result.files] == ["c"]
            again = await sandbox.run(Request(code="print(open('c').read()); raise SystemExit(3)"))
            assert (again.stdout, again.exit_code) == ("d\n", 3)
            assert await sandbox.read_file("c", max_bytes=9) == b"d"
            (box,) = server.boxes.values()
            remote = {"provider": "daytona", "account": account.id, "host": account.host, "sandbox": box.id}
            assert result.meta["remote"] == {**remote, "class": "container"}
            assert (result.meta["backend"], result.meta["level_source"]) == ("daytona", "claimed")
            assert result.enforcement.level_source == "claimed"
            states = {str(row.state) for row in result.enforcement.controls.values()}
            assert states == {"claimed", "partial", "enforced"}
            wanted = box.wanted
            assert (wanted["target"], wanted["snapshot"], wanted["user"]) == ("eu", "mine", "root")
            assert (wanted["networkBlockAll"], wanted["public"], wanted["autoDeleteInterval"]) == (True, False, 0)
            assert wanted["ttlMinutes"] == wanted["autoStopInterval"] == 60
            assert LABEL in wanted["labels"]

    asyncio.run(main())
    keys = {headers.get("Authorization") for _, _, headers in server.requests}
    assert keys == {f"Bearer {KEY}"}


def test_output_streams_and_a_cancelled_run_ends(server: DaytonaServer, account: RemoteAccount) -> None:
    """Output comes while the program runs; who gives up is free at once, and the program is gone."""

    async def main() -> None:
        async with DaytonaBackend(account).open_live(Policy(), Limits()) as sandbox:
            seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            begin = "import os; open('pid', 'w').write(str(os.getpid()))\n"
            running = asyncio.create_task(
                sandbox.run_streaming(Request(code=begin + ENDLESS), functools.partial(note, seen))
            )
            assert await asyncio.wait_for(seen, 60) == "begun\n"
            running.cancel()
            begun = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert time.monotonic() - begun < 20
            look = "import os\npid = open('pid').read()\nprint(os.path.exists(f'/proc/{pid}'))"
            assert (await sandbox.run(Request(code=look))).stdout == "False\n"

    asyncio.run(main())


def note(seen: asyncio.Future[str], event: object) -> None:
    """Note the first output."""
    if isinstance(event, OutputChunk) and not seen.done():
        seen.set_result(event.text)


def test_time_and_memory_end_a_run(account: RemoteAccount) -> None:
    """Both are statuses, as everywhere, and the sandbox goes on."""

    async def main() -> None:
        async with DaytonaBackend(account).open(Policy(), Limits()) as sandbox:
            late = await sandbox.run(Request(code="while True: pass", timeout_s=1))
            assert (late.status, late.exit_code) == (Status.TIMEOUT, -1)
            code = "held = []\nwhile True: held.append(bytes(range(256)) * 65536)"
            assert (await sandbox.run(Request(code=code))).status is Status.OUT_OF_MEMORY
            assert (await sandbox.run(Request(code="print(1)"))).stdout == "1\n"

    asyncio.run(main())


def test_programs_reach_neither_our_first_process_nor_its_terminal(account: RemoteAccount) -> None:
    """The attempts work on a process of the program's own, and fail on those that watch it; the sandbox goes on."""
    attempt = textwrap.dedent("""
        import os, signal, subprocess, time
        own = subprocess.Popen(["sleep", "100"])
        os.kill(own.pid, signal.SIGKILL)
        assert own.wait() == -9
        failed, tried = 0, 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            if int(name) not in (os.getpid(), own.pid):
                for attempt in (lambda: os.kill(int(name), 9), lambda: open(f"/proc/{name}/mem", "rb+")):
                    tried += 1
                    try:
                        attempt()
                    except OSError:
                        failed += 1
        for name in filter(str.isdigit, os.listdir("/dev/pts")):
            tried += 1
            try:
                os.open(f"/dev/pts/{name}", os.O_RDWR)
            except OSError:
                failed += 1
        print(tried > 4, tried - failed, os.getresuid()[0] == os.getresuid()[2] != 0)
        os.kill(-1, signal.SIGKILL)
        print("still there")
    """)

    async def main() -> None:
        backend = DaytonaBackend(account)
        for opening in (backend.open(Policy(), Limits()), backend.open_live(Policy(), Limits())):
            async with opening as sandbox:
                result = await sandbox.run(Request(code=attempt))
                assert result.stdout == "True 0 True\nstill there\n", result.stderr
                assert (await sandbox.run(Request(code="print(1)"))).stdout == "1\n"

    asyncio.run(main())


def test_a_sandbox_lives_with_sessions_and_processes(account: RemoteAccount) -> None:
    """An interpreter keeps its state and shows rich results; a process in the background, and ports, are there."""

    async def main() -> None:
        async with DaytonaBackend(account).open_live(Policy(), Limits()) as sandbox:
            session = await sandbox.open_session("python", {})
            assert (await session.run("a = 20", timeout_s=30, sink=discard)).status is Status.OK
            shown = "class C:\n    def _repr_html_(self): return '<b>' + str(a + 1) + '</b>'\nC()"
            result = await session.run(shown, timeout_s=30, sink=discard)
            assert [output.data.get("text/html") for output in result.outputs] == ["<b>21</b>"]
            serve = "import socket; s = socket.create_server(('127.0.0.1', 8123)); print(1, flush=True); s.accept()"
            process = await sandbox.start_process(ProcessRequest(argv=("python3", "-c", serve), has_input=False))
            assert await process.stdout.read() == b"1\n"
            assert [port.port for port in await sandbox.list_ports()] == [8123]
            process.kill()
            assert (await process.wait()).status is Status.SIGNALED
            await session.close()

    asyncio.run(main())


def test_more_than_a_window_goes_both_ways(account: RemoteAccount) -> None:
    """Megabytes pass whole in both directions at once, though no more than a window is ever under way."""
    data = os.urandom(6 << 20)

    async def main() -> None:
        async with DaytonaBackend(account).open_live(Policy(), Limits(disk_bytes=64 << 20)) as sandbox:
            await asyncio.gather(*(sandbox.write_file(f"{number}.bin", data) for number in range(2)))
            names = [f"{number}.bin" for number in range(2)]
            found = await asyncio.gather(*(sandbox.read_file(name, max_bytes=8 << 20) for name in names))
            assert all(one == data for one in found)

    asyncio.run(main())


# What does not come of it, before anything ran.

REFUSALS = [
    pytest.param(Fault("^/api/sandbox$", status=401, body="{}"), Failure.UNAUTHORIZED, id="401"),
    pytest.param(
        Fault("^/api/sandbox$", status=403, body='{"message": "Forbidden resource"}'), Failure.FORBIDDEN, id="403"
    ),
    pytest.param(
        Fault("^/api/sandbox$", status=403, body='{"message": "Total CPU limit exceeded. Maximum allowed: 10."}'),
        Failure.QUOTA, id="quota",
    ),
    pytest.param(
        Fault("^/api/sandbox$", status=400, body='{"message": "Region \\"mars\\" is not available"}'),
        Failure.REGION, id="region",
    ),
    pytest.param(
        Fault("^/api/sandbox$", status=429, body="{}", headers={"Retry-After": "3600"}), Failure.RATE_LIMITED, id="429"
    ),
    pytest.param(
        Fault("^/api/sandbox$", status=500, body='{"message": "Internal server error"}'), Failure.SERVER, id="500"
    ),
    pytest.param(
        Fault(
            "^/api/sandbox$", status=502, body="<html><h1>502 Bad Gateway</h1>" + "x" * 9000,
            headers={"Content-Type": "text/html"},
        ),
        Failure.SERVER, id="502 of a proxy",
    ),
    pytest.param(Fault("^/api/sandbox$", status=200, body="<html>hello"), Failure.BAD_ANSWER, id="no JSON"),
    pytest.param(Fault("^/api/sandbox$", status=200, body='{"id": 5}'), Failure.BAD_ANSWER, id="no id"),
    pytest.param(Fault("^/api/sandbox$", status=200, body='{"id": "../x"}'), Failure.BAD_ANSWER, id="a path for an id"),
    pytest.param(
        Fault("^/api/sandbox$", status=200, body='{"id": "x", "toolboxProxyUrl": "http://192.0.2.1/"}'),
        Failure.BAD_ANSWER, id="a toolbox without TLS",
    ),
    pytest.param(Fault("^/api/sandbox$", status=200, body="[" * 5_000_000), Failure.BAD_ANSWER, id="endless"),
    pytest.param(Fault("^/api/sandbox$", kind="half"), Failure.BAD_ANSWER, id="half an answer"),
    pytest.param(Fault("^/api/sandbox$", kind="drop"), Failure.NO_NETWORK, id="dropped"),
    pytest.param(Fault("^/api/sandbox$", kind="late"), Failure.NO_NETWORK, id="made, then dropped"),
    pytest.param(Fault("process/pty$", status=403, body="{}"), Failure.FORBIDDEN, id="no terminal"),
    pytest.param(Fault("connect$", status=502, body="<html>"), Failure.SERVER, id="no web socket"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "failure"), REFUSALS)
def test_each_fault_has_its_sentence(
    server: DaytonaServer, account: RemoteAccount, fault: Fault, failure: Failure
) -> None:
    """It is named, with what to do; whatever may have been made is deleted, and the next run goes through."""
    server.faults.append(replace(fault))
    error = refused(account)
    assert error.failure is failure, error
    assert failure.sentence in str(error)
    assert "<html" not in str(error)
    if failure is Failure.RATE_LIMITED:
        assert error.retry_after_s == 3600
    assert not server.boxes
    assert run(account).stdout == "42\n"


@pytest.mark.parametrize("path", ["^/api/sandbox$", "process/pty$", "connect$"])
def test_nobody_is_sent_elsewhere(
    server: DaytonaServer, account: RemoteAccount, authority: Authority, path: str
) -> None:
    """A redirect is followed neither to another host nor to none: code, labels and key go where the account says."""
    with DaytonaServer(None) as other:
        server.faults.append(Fault(path, status=307, headers={"Location": f"{other.url}/sandbox"}))
        assert refused(account).failure is Failure.BAD_ANSWER
        assert not other.requests


def test_what_is_packed_is_not_unpacked(server: DaytonaServer, account: RemoteAccount) -> None:
    """A coding that nobody asked for, which may unpack to anything, is no answer."""
    server.faults.append(Fault("^/api/sandbox$", status=200, body="{}", headers={"Content-Encoding": "gzip"}))
    assert refused(account).failure is Failure.BAD_ANSWER
    assert {headers.get("Accept-Encoding") for _, _, headers in server.requests} == {"identity"}


def test_this_host_is_not_reached_through_the_provider(server: DaytonaServer, account: RemoteAccount) -> None:
    """A toolbox on loopback without TLS is this host's own service, not the provider's."""
    with DaytonaServer(None) as other:
        server.toolbox_url = other.toolbox_url
        try:
            assert refused(account).failure is Failure.BAD_ANSWER
        finally:
            server.toolbox_url = f"{server.origin}/toolbox"
        assert not other.requests


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((OUT, bytes(PIECE), 10_000), "exceeded its window"),
        ((OUT, b"", 1), "sends no output"),
        ((TAKEN, b"1", 1), "was not sent"),
        ((TAKEN, b"-9999999", 1), "was not sent"),
        ((TAKEN, b"9" * 5000, 1), "digits"),
        ((FOUND, b"[" * 900_000, 3), "exceeded its window"),
    ],
)
def test_a_terminal_that_keeps_to_no_window_is_given_up(frames: tuple[bytes, bytes, int], why: str) -> None:
    """However much comes, no more is held than a window has, and the reader learns why it ended."""
    kind, body, count = frames
    wire = TerminalWire(None)
    frame = kind + len(body).to_bytes(4, "big") + body
    with pytest.raises(ValueError, match=why):
        any(wire._take(frame) for _ in range(count))
    assert wire._queue.qsize() * (len(body) + 5) <= MOST_UNREAD


def test_a_relay_that_says_nonsense_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read of what is in a sandbox is no error of ours."""
    for body in (b"{", b"[" * 500_000, b"\xff"):
        wire = TerminalWire(None)
        monkeypatch.setattr(wire, "_boot", lambda _, wire=wire, body=body: say(wire, body))
        with pytest.raises(StartFailed):
            wire.boot({})


async def say(wire: TerminalWire, body: bytes) -> None:
    """Say what is there."""
    wire._take(FOUND + len(body).to_bytes(4, "big") + body)


def test_a_short_wait_is_kept(server: DaytonaServer, account: RemoteAccount) -> None:
    """Who is asked too often, and says how long to wait, is asked again: nothing has run."""
    server.faults.append(Fault("^/api/sandbox$", status=429, body="{}", headers={"Retry-After": "0.1"}, times=2))
    assert run(account).stdout == "42\n"
    assert [path for method, path, _ in server.requests if method == "POST"].count("/api/sandbox") == 3


def test_who_does_not_answer_is_not_waited_for(
    server: DaytonaServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first byte that does not come is a time-out of ours."""
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    server.faults.append(Fault("^/api/sandbox$", "POST", kind="slow", seconds=5))
    begun = time.monotonic()
    assert refused(account).failure is Failure.TIMEOUT
    assert time.monotonic() - begun < 4


def test_a_word_of_the_provider_does_not_repeat_the_key(server: DaytonaServer, account: RemoteAccount) -> None:
    """What it says is cut, on one line, and without the key that it was sent."""
    message = f'{{"message": "no \\u001b[31m {KEY} here\\nsecond line {"x" * 5000}"}}'
    server.faults.append(Fault("^/api/sandbox$", status=403, body=message))
    error = str(refused(account))
    assert "no  [31m (hidden) here" in error.replace("no [", "no  [")
    assert "\n" not in error
    assert "\x1b" not in error


@pytest.mark.parametrize(
    ("host", "since"),
    [
        pytest.param("example.org", -dt.timedelta(days=1), id="of another host"),
        pytest.param("127.0.0.1", dt.timedelta(hours=2), id="not valid yet: a clock is wrong"),
        pytest.param("127.0.0.1", -dt.timedelta(days=9), id="not valid any more"),
    ],
)
def test_a_certificate_that_does_not_fit_is_refused(authority: Authority, host: str, since: dt.timedelta) -> None:
    """Nothing is sent to whoever shows it."""
    with DaytonaServer(authority.server_context(host, since)) as server:
        account = RemoteAccount(
            provider="daytona", api_key=HiddenText(KEY), url=server.url, ca_file=str(authority.file)
        )
        assert refused(account).failure is Failure.TLS
        assert not server.requests


def test_an_authority_that_is_not_trusted_is_refused(server: DaytonaServer, account: RemoteAccount) -> None:
    """The system's authorities did not sign the certificate of this server."""
    assert refused(replace(account, ca_file="")).failure is Failure.TLS
    assert not server.requests


def test_nobody_there_is_said(account: RemoteAccount) -> None:
    """A port where nobody listens."""
    assert refused(replace(account, url="https://127.0.0.1:1/api")).failure is Failure.NO_NETWORK


def test_a_wrong_key_is_said(account: RemoteAccount) -> None:
    """It is not what was configured that is wrong, but what the provider makes of it."""
    assert refused(replace(account, api_key=HiddenText("dtn_other"))).failure is Failure.UNAUTHORIZED


def test_a_sandbox_that_does_not_start_is_deleted(server: DaytonaServer, account: RemoteAccount) -> None:
    """It is waited for, and its reason is repeated."""
    server.states = ["creating", "creating", "error"]
    assert "the runner has no room" in str(refused(account, StartFailed))
    server.states = ["creating", "pulling_snapshot"]
    assert run(account).stdout == "42\n"


@pytest.mark.parametrize(
    ("shell", "user", "words"),
    [
        pytest.param(("/bin/echo", "no shell for you"), "root", "no shell for you", id="no shell"),
        pytest.param(("/bin/sh", "-c", "stty -echo; sleep 600"), "root", "no Python listens", id="silent"),
        pytest.param(("/bin/bash", "-i", "-l"), None, "is not root", id="not root"),
    ],
)
def test_a_sandbox_that_cannot_be_used_is_deleted(
    server: DaytonaServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, shell: tuple[str, ...],
    user: str | None, words: str,
) -> None:  # fmt: skip
    """It says why: what the terminal said, that nothing came, or that programs could not be kept apart."""
    monkeypatch.setattr("cloche.backends.daytona.terminal.READY_S", 5.0)
    server.shell, server.user = shell, user
    assert words in str(refused(account, StartFailed))


# What is lost on the way.


@pytest.mark.parametrize("name", ["open", "open_live"])
def test_a_sandbox_that_nobody_waits_for_is_deleted(server: DaytonaServer, account: RemoteAccount, name: str) -> None:
    """Who gives up while it is made is free soon, and nothing of it is left."""
    server.states = ["creating"] * 10_000

    async def main() -> None:
        async with getattr(DaytonaBackend(account), name)(Policy(), Limits()) as sandbox:
            running = asyncio.create_task(sandbox.run(Request(code="print(1)")))
            while not server.boxes:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    begun = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - begun < 30


def test_a_link_that_is_lost_leaves_the_outcome_unknown(server: DaytonaServer, account: RemoteAccount) -> None:
    """The code was sent, so nobody may say that it did not run; the program does not go on there."""

    async def main() -> None:
        for name in ("open", "open_live"):
            async with getattr(DaytonaBackend(account), name)(Policy(), Limits()) as sandbox:
                seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                sink = functools.partial(note, seen)
                running = asyncio.create_task(sandbox.run_streaming(Request(code=ENDLESS), sink))
                await asyncio.wait_for(seen, 60)
                server.drop_terminals()
                with pytest.raises(OutcomeUnknown):
                    await asyncio.wait_for(running, 60)
            assert not server.boxes

    asyncio.run(main())


def test_a_sandbox_that_is_deleted_elsewhere_is_said(server: DaytonaServer, account: RemoteAccount) -> None:
    """Its end is no end of the program's."""

    async def main() -> None:
        async with DaytonaBackend(account).open(Policy(), Limits()) as sandbox:
            assert (await sandbox.run(Request(code="print(1)"))).stdout == "1\n"
            server.delete_all()
            with pytest.raises((StartFailed, BackendUnavailable)):
                await sandbox.run(Request(code="print(1)"))

    asyncio.run(main())


SCRIPT = """
import asyncio, sys
from cloche.backends.daytona import DaytonaBackend
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.remote import RemoteAccount, HiddenText
from cloche.core.request import Request

async def main(url, ca_file, code):
    account = RemoteAccount(provider="daytona", api_key=HiddenText(sys.stdin.read()), url=url, ca_file=ca_file)
    async with DaytonaBackend(account).open_live(Policy(), Limits()) as sandbox:
        result = await sandbox.run_streaming(Request(code=code), lambda event: print("event", flush=True))
        print(result.stdout)
    names = sorted({name.split(".")[0] for name in sys.modules} & {"daytona", "opentelemetry", "dotenv", "socketio"})
    print("imported:", names)

asyncio.run(main(*sys.argv[1:]))
"""


def start_caller(account: RemoteAccount, code: str, **more: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs code there; its key comes by standard input, as a command line is for all to read."""
    words = [sys.executable, "-c", SCRIPT, account.url, account.ca_file, code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    assert process.stdin is not None
    process.stdin.write(KEY.encode())
    process.stdin.close()
    process.stdin = None
    return process


def kill_callers(server: DaytonaServer, account: RemoteAccount, count: int) -> None:
    """Kill so many callers while their code runs; then collect."""
    for _ in range(count):
        caller = start_caller(account, ENDLESS)
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"event\n", caller.communicate()
        os.kill(caller.pid, signal.SIGKILL)
        caller.communicate()
    assert len(server.boxes) >= count
    gone = DaytonaBackend(account).collect_garbage()
    assert len(gone) == count


def test_what_a_killed_caller_left_is_found(server: DaytonaServer, account: RemoteAccount) -> None:
    """Its sandbox is deleted, and neither that of a living process nor one that is none of ours."""

    async def main() -> None:
        async with DaytonaBackend(account).open(Policy(), Limits()) as sandbox:
            await sandbox.run(Request(code="print(1)"))
            kill_callers(server, account, 1)
            (mine,) = server.boxes.values()
            labels, mine.wanted["labels"] = mine.wanted["labels"], {"other": "x"}
            assert not DaytonaBackend(account).collect_garbage()
            mine.wanted["labels"] = labels
            assert not DaytonaBackend(account).collect_garbage()
            assert (await sandbox.run(Request(code="print(2)"))).stdout == "2\n"

    asyncio.run(main())


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_killed_callers_leave_nothing(server: DaytonaServer, account: RemoteAccount) -> None:
    """In ten rounds of ten."""
    for _ in range(10):
        kill_callers(server, account, 10)
        assert not server.boxes


# Whose account it is.


def test_nothing_of_the_folder_or_the_environment_counts(
    server: DaytonaServer, account: RemoteAccount, authority: Authority, tmp_path: Path
) -> None:
    """A stranger's `.env`, `.env.local`, variables, proxies and .netrc change nothing, and send nothing anywhere."""
    with DaytonaServer(authority.server_context()) as other, DaytonaServer(None) as plain:
        hostile = {
            "DAYTONA_API_URL": other.url, "DAYTONA_SERVER_URL": other.url, "DAYTONA_API_KEY": "stranger",
            "DAYTONA_TARGET": "stranger", "DAYTONA_JWT_TOKEN": "stranger", "DAYTONA_ORGANIZATION_ID": "stranger",
            "DAYTONA_OTEL_ENABLED": "true", "DAYTONA_EXPERIMENTAL_OTEL_ENABLED": "true",
            "DAYTONA_HAPPY_EYEBALLS_DELAY": "nonsense", "DAYTONA_USE_DEPRECATED_POLLING": "nonsense",
        }  # fmt: skip
        lines = "".join(f"{name}={value}\n" for name, value in hostile.items())
        for name in (".env", ".env.local"):
            (tmp_path / name).write_text(lines)
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login stranger password stranger\n")
        proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "http_proxy"), plain.origin)
        more = {"OTEL_EXPORTER_OTLP_ENDPOINT": plain.origin, "HOME": str(tmp_path), "NETRC": str(tmp_path / ".netrc")}
        environment = {**os.environ, **hostile, **proxies, **more}
        caller = start_caller(account, "print(6 * 7)", cwd=tmp_path, env=environment)
        output, errors = caller.communicate(timeout=120)
        assert b"42" in output, errors
        assert b"imported: []" in output
        assert not other.requests
        assert not plain.requests
    posted = [headers for method, path, headers in server.requests if path == "/api/sandbox" and method == "POST"]
    assert len(posted) == 1
    assert "X-Daytona-Organization-ID" not in posted[0]
    assert server.created[-1].get("target") is None


def test_an_organisation_is_told(server: DaytonaServer, account: RemoteAccount) -> None:
    """It goes with every request."""
    run(replace(account, organisation="org-7"))
    assert {headers.get("X-Daytona-Organization-ID") for *_, headers in server.requests} == {"org-7"}


def test_quotas_are_counted(account: RemoteAccount, tmp_path: Path) -> None:
    """Sandboxes at once, across backends."""
    limited = replace(account, quota=Quota(sandboxes_at_once=1), quota_file=str(tmp_path / "quota.sqlite"))

    async def main() -> None:
        async with DaytonaBackend(limited).open(Policy(), Limits()) as sandbox:
            await sandbox.run(Request(code="print(1)"))
            async with DaytonaBackend(limited).open(Policy(), Limits()) as second:
                with pytest.raises(BackendUnavailable, match="sandboxes at once"):
                    await second.run(Request(code="print(1)"))

    asyncio.run(main())


def test_what_is_not_given_is_refused(account: RemoteAccount) -> None:
    """A level or control that is required is only claimed; networks with rules, users and other levels are not had."""
    backend = DaytonaBackend(account)
    found = backend.capabilities()
    assert (found.available, found.level, found.level_source) == (True, Level.VM, "claimed")
    assert found.controls["network"].state is State.CLAIMED  # type: ignore[index]

    async def opened(policy: Policy, name: str = "open") -> None:
        async with getattr(backend, name)(policy, Limits()):
            pass

    wrong: list[tuple[Policy, str]] = [
        (Policy(network="allowlist", network_allow=("example.org",)), "off or open"),
        (Policy(level=Level.JAIL), "claims .vm"),
        (Policy(require_level=Level.VM), "only claimed"),
    ]
    for policy, words in wrong:
        with pytest.raises(BackendUnavailable, match=words):
            asyncio.run(opened(policy))
    with pytest.raises(BackendUnavailable, match="one user"):
        asyncio.run(opened(Policy(users=True), "open_live"))
    asyncio.run(opened(Policy(require_level=Level.VM, accept_claimed=True)))
    for missing in (None, replace(account, api_key=HiddenText())):
        said = DaytonaBackend(missing).capabilities()
        assert (said.available, "DAYTONA_API_KEY" in said.remedy) == (False, True)


SDK = """
import asyncio, sys
from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams, DaytonaConfig

async def main(url):
    config = DaytonaConfig(api_key=sys.stdin.read(), api_url=url, target="us", use_deprecated_polling=True)
    async with AsyncDaytona(config) as daytona:
        made = await daytona.create(CreateSandboxFromSnapshotParams(labels={"a": "b"}, os_user="root"))
        done = await made.process.exec("echo $((6 * 7)); exit 3")
        await made.fs.upload_file(b"text", "/workspace/a.txt")
        seen = bytearray()
        terminal = await made.process.create_pty_session("one", seen.extend)
        await terminal.wait_for_connection()
        await terminal.send_input("exit\\n")
        ended = await terminal.wait()
        names = [one.id async for one in daytona.list()]
        print(done.result.strip(), done.exit_code, await made.fs.download_file("/workspace/a.txt"), ended.exit_code,
              names == [made.id], len(seen) > 0)
        await daytona.delete(made)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.soak
def test_the_server_speaks_as_the_sdk_expects(server: DaytonaServer, account: RemoteAccount, tmp_path: Path) -> None:
    """The SDK itself, unchanged, makes a sandbox there, runs, writes, reads, lists, deletes, and uses a terminal."""
    pytest.importorskip("daytona", reason="the SDK daytona is not installed")
    words = [sys.executable, "-W", "ignore", "-c", SDK, server.url]
    environment = {**os.environ, "SSL_CERT_FILE": account.ca_file}
    done = subprocess.run(
        words, input=KEY.encode(), env=environment, cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    assert done.stdout == b"42 3 b'text' 0 True True\n", done.stderr.decode()
