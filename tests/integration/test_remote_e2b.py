"""The e2b backend, with the provider's own package, against a server of the tests' that speaks its wire over TLS."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloche.backends.e2b import E2BBackend, machine, sdk, wire
from cloche.backends.e2b.machine import NAME_LABEL, OWNER_LABEL, plan_sandbox
from cloche.backends.remote.failures import RemoteUnavailable
from cloche.backends.remote.quota import Counter
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, OutcomeUnknown, StartFailed
from cloche.core.events import OutputChunk, Started, discard
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import OpenSandbox
from cloche.core.remote import HiddenText, Quota, RemoteAccount
from cloche.core.request import InputFile, Request
from cloche.core.result import Status
from tests.harness.containers import make_certificates
from tests.harness.e2b_server import KEY, E2BServer, Fault, serving

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
Work = Callable[[OpenSandbox], Awaitable[Any]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an authority, and what a server shows."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture
def server(certificates: Path) -> Iterator[E2BServer]:
    """Give a server that serves E2B's wire, and nothing of which is left."""
    with serving(certificates) as server:
        yield server
        machine.background.wait_for_all()
        assert not server.sandboxes, "a sandbox is left"


@pytest.fixture
def account(server: E2BServer, certificates: Path) -> RemoteAccount:
    """Give the account at that server."""
    return RemoteAccount(
        provider="e2b", api_key=HiddenText(KEY), url=server.url, sandbox_url=server.url,
        ca_file=str(certificates / "ca.pem"),
    )  # fmt: skip


def tried(account: RemoteAccount, work: Work, policy: Policy | None = None, **limits: float) -> Any:
    """Do some work in an open sandbox."""

    async def main() -> Any:
        async with E2BBackend(account).open(policy or Policy(), Limits(**limits)) as sandbox:  # type: ignore[arg-type]
            return await work(sandbox)

    return asyncio.run(main())


def run(account: RemoteAccount, code: str, **more: Any) -> Any:
    """Run code in a sandbox of its own."""
    return tried(account, lambda sandbox: sandbox.run(Request(code=code, **more)))


def creations(server: E2BServer) -> list[dict[str, Any]]:
    """Return what was asked for when sandboxes were to be made."""
    return [one.json() for one in server.requests if re.search(CREATE, f"{one.method} {one.path}")]


# What goes well.


def test_a_run_goes_through(server: E2BServer, account: RemoteAccount) -> None:
    """Files, input, environment, value, exit code; the workspace is there for the next; and who says what is told."""

    async def work(sandbox: OpenSandbox) -> None:
        code = (
            "import os, sys; print(open('a.txt').read(), sys.stdin.read(), os.environ['B']); open('c', 'w').write('d')"
        )
        files = (InputFile(path="a.txt", data=b"one"),)
        result = await sandbox.run(Request(code=f"{code}\n1 + 1", files=files, stdin=b"two", env={"B": "three"}))
        assert (result.status, result.stdout, result.value) == (Status.OK, "one two three\n", 2), result.stderr
        assert [file.path for file in result.files] == ["c"]
        again = await sandbox.run(Request(code="print(open('c').read()); raise SystemExit(3)"))
        assert (again.stdout, again.exit_code) == ("d\n", 3)
        assert await sandbox.read_file("c", max_bytes=9) == b"d"
        assert result.meta["level_source"] == result.enforcement.level_source == "claimed"
        name = next(iter(server.sandboxes))
        where = server.url.removeprefix("https://")
        assert result.meta["remote"] == {"provider": "e2b", "account": account.id, "host": where, "sandbox": name}
        assert result.enforcement["network"].mechanism == "claimed by E2B"

    tried(account, work)
    asked = creations(server)[0]
    assert (asked["templateID"], asked["timeout"], asked["allow_internet_access"]) == ("base", 3600, False)
    assert asked["network"] == {"allowPublicTraffic": False}
    assert {OWNER_LABEL, NAME_LABEL} < set(asked["metadata"])


def test_many_bytes_go_both_ways(account: RemoteAccount) -> None:
    """More than is gathered for one request; and they are bytes, not text."""
    data = bytes(range(256)) * (2 * wire.MOST_UNSENT // 256)

    async def work(sandbox: OpenSandbox) -> None:
        await sandbox.write_file("a", data)
        result = await sandbox.run(Request(code="open('b', 'wb').write(open('a', 'rb').read()[::-1])"))
        assert result.status is Status.OK
        assert await sandbox.read_file("b", max_bytes=len(data)) == data[::-1]

    tried(account, work)


def test_output_streams_and_a_cancelled_run_ends(server: E2BServer, account: RemoteAccount) -> None:
    """What is printed arrives while the program runs; when its caller goes, so does it, and the next run works."""

    async def work(sandbox: Any) -> None:
        came = asyncio.Event()
        events: list[Any] = []

        def sink(event: Any) -> None:
            events.append(event)
            if isinstance(event, OutputChunk):
                came.set()

        code = "import time\nprint('up', flush=True)\ntime.sleep(600)"
        running = asyncio.create_task(sandbox.run_streaming(Request(code=code, timeout_s=25), sink))
        await asyncio.wait_for(came.wait(), 20)
        assert any(isinstance(event, Started) for event in events)
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 5
        after = await sandbox.run(
            Request(code="import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))")
        )
        assert after.stdout == "2\n"  # the first process and this one: nothing else is in there

    tried(account, work)


def test_time_is_counted_here(account: RemoteAccount) -> None:
    """A program that takes too long is ended, and what it printed is kept."""
    result = run(account, "print('up', flush=True)\nwhile True: pass", timeout_s=1)
    assert (result.status, result.stdout) == (Status.TIMEOUT, "up\n")


def test_a_session_and_a_sandbox_that_lives(account: RemoteAccount) -> None:
    """Cells share their state and show rich results; processes, files and runs are beside each other."""

    async def main() -> None:
        async with E2BBackend(account).open_live(Policy(), Limits()) as sandbox:
            session = await sandbox.open_session("python", {})
            code = "class Page:\n    def _repr_html_(self): return '<b>1</b>'\nx = 20"
            await session.run(code, timeout_s=20, sink=discard)
            shown = await session.run("print(x)\nPage()", timeout_s=20, sink=discard)
            assert shown.stdout == "20\n"
            assert [output.data.get("text/html") for output in shown.outputs] == ["<b>1</b>"]
            result = await sandbox.run(Request(code="echo $((1 + 1)); exit 4", language="bash"))
            assert (result.stdout, result.exit_code) == ("2\n", 4)
            assert result.meta["remote"]["provider"] == "e2b"
            await session.close()

    asyncio.run(main())


def test_the_guest_is_nobody_and_writes_nowhere_else(account: RemoteAccount) -> None:
    """It is not root and cannot become it, sees no process of the machine, and writes to its own folders alone."""
    code = """
import os
def writes(path):
    try: open(path + "/x", "w").close(); return True
    except OSError: return False
status = open("/proc/self/status").read()
{"uid": os.getuid(), "own": [p for p in ("/", "/usr", "/home/user", "/etc", "/run") if writes(p)],
 "caps": [line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapBnd"))],
 "new": "NoNewPrivs:\\t1" in status, "first": open("/proc/1/status").read().split()[1],
 "net": [line.split()[0] for line in open("/proc/net/dev") if ":" in line]}
"""
    found = run(account, code).value
    assert found["uid"] >= 1000
    assert found["own"] == []
    assert set(found["caps"]) == {"0" * 16}
    assert found["new"]
    assert found["first"].startswith("python3")
    assert found["net"] == ["lo:"]


# The network, as far as E2B's rules go.


def test_a_list_of_hosts_becomes_its_rules(server: E2BServer, account: RemoteAccount) -> None:
    """Hosts by name are allowed and all else is denied; what its rules cannot say is refused, and nothing is made."""
    policy = Policy(network="allowlist", network_allow=("example.org", "*.example.net"))
    tried(account, lambda sandbox: sandbox.run(Request(code="1")), policy)
    asked = creations(server)[0]
    listed = {"allowOut": ["example.org", "*.example.net"], "denyOut": ["0.0.0.0/0"]}
    assert asked["network"] == {"allowPublicTraffic": False, **listed}
    made = server.made
    for rule in ("example.org:5432", "example.org@10.0.0.0/8"):
        with pytest.raises(BackendUnavailable, match="cannot express"):
            plan_sandbox(Policy(network="allowlist", network_allow=(rule,)), Limits(), template="", lifetime_s=60)
    with pytest.raises(BackendUnavailable, match="a rule that denies"):
        tried(account, lambda sandbox: sandbox.run(Request(code="1")), Policy(network="open", network_deny=("a.org",)))
    assert server.made == made


# Whose account it is.

HOSTILE = """
import asyncio, sys, json
from cloche.backends.e2b import E2BBackend
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.remote import RemoteAccount, HiddenText
from cloche.core.request import Request
given = json.loads(sys.argv[1])
backend = E2BBackend(RemoteAccount(provider="e2b", api_key=HiddenText(given.pop("key")), **given))
async def main():
    async with backend.open(Policy(), Limits()) as sandbox:
        print((await sandbox.run(Request(code="print(6 * 7)"))).stdout)
    async with backend.open_live(Policy(), Limits()) as sandbox:
        await sandbox.run(Request(code="1"))
asyncio.run(main())
backend.collect_garbage()
"""


def test_nothing_found_sends_code_elsewhere(
    server: E2BServer, account: RemoteAccount, certificates: Path, tmp_path: Path
) -> None:
    """Variables and files that name another server, another key, no TLS: none is asked but the one of the account."""
    with serving(certificates) as other:
        said = {
            "E2B_API_URL": other.url, "E2B_SANDBOX_URL": other.url, "E2B_DOMAIN": f"127.0.0.1:{other.port}",
            "E2B_API_KEY": "e2b_0bad", "E2B_DEBUG": "true", "E2B_HTTP_VERSION": "1.1", "E2B_ACCESS_TOKEN": "sk_e2b_0",
            "E2B_VALIDATE_API_KEY": "true", "E2B_CONNECTION_RETRIES": "0", "E2B_MAX_CONNECTIONS": "1",
            "E2B_KEEPALIVE_EXPIRY": "1", "E2B_VOLUME_API_URL": other.url,
        }  # fmt: skip
        for name in (".env", ".env.local"):
            (tmp_path / name).write_text("".join(f"{key}={value}\n" for key, value in said.items()))
        given = {"key": KEY, "url": account.url, "sandbox_url": account.sandbox_url, "ca_file": account.ca_file}
        env = {**os.environ, **said, "PYTHONPATH": f"{ROOT}/src"}
        words = [sys.executable, "-c", HOSTILE, json.dumps(given)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr
        assert other.requests == []
    assert server.made == 2
    assert {one.headers["x-api-key"] for one in server.requests if "x-api-key" in one.headers} == {KEY}


def test_the_key_goes_to_the_api_alone(server: E2BServer, account: RemoteAccount) -> None:
    """A sandbox is told its own token, never the account's key."""
    run(account, "1")
    to_sandboxes = [one for one in server.requests if "e2b-sandbox-id" in one.headers]
    assert to_sandboxes
    assert not any(KEY in str(one.headers) or KEY.encode() in one.body for one in to_sandboxes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"api_key": HiddenText()}, "no key is configured"),
        ({"url": "http://203.0.113.7"}, "is not https"),
        ({"url": "localhost:8470"}, "is no whole address; write it with https://"),
        ({"ca_file": "/nowhere/ca.pem"}, "there is no file"),
        ({"sandbox_url": ""}, "no address of its sandboxes"),
    ],
)
def test_an_account_that_is_none_is_refused(account: RemoteAccount, changes: dict[str, Any], said: str) -> None:
    """Before anything is sent, with what to set."""
    with pytest.raises(BackendUnavailable, match=said):
        run(replace(account, **changes), "1")


def test_without_its_package_it_names_the_extra(account: RemoteAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `cloche backends` can say so, too."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    found = E2BBackend(account).capabilities()
    assert not found.available
    assert "cloche[e2b]" in found.remedy


def test_a_claimed_level_is_required_only_knowingly(account: RemoteAccount) -> None:
    """`require` is not content with what E2B says of itself, unless the caller is."""
    policy = Policy(require_level=Level.VM)
    with pytest.raises(BackendUnavailable, match="only claimed"):
        tried(account, lambda sandbox: sandbox.run(Request(code="1")), policy)
    policy = replace(policy, accept_claimed=True)
    assert tried(account, lambda sandbox: sandbox.run(Request(code="1")), policy).status is Status.OK


# What goes wrong before anything ran: each has its own sentence.

CREATE = r"^POST (/v2)?/sandboxes$"  # older versions of the package, and newer ones
SENTENCES = [
    ("401", {}, r"does not accept the key \(401\)"),
    ("403", {}, r"may not do this \(403\)"),
    ("402", {}, r"quota is used up \(402\)"),
    ("429", {"retry-after": "70"}, r"too many requests \(429\).*wait for 70 s"),
    ("500", {}, r"it failed \(500\)"),
    ("html", {}, r"it failed \(502\).*does not follow its API"),
    ("half", {}, "it broke off"),
    ("junk", {}, "does not follow the protocol"),
    ("other", {}, "does not follow the protocol"),
    ("empty", {}, "does not follow the protocol"),
    ("drop", {}, "does not follow the protocol"),
    ("302", {"location": "https://127.0.0.1:1/"}, r"does not follow the protocol \(302\)"),
]


@pytest.mark.parametrize(("kind", "headers", "said"), SENTENCES, ids=[row[0] for row in SENTENCES])
def test_each_failure_has_its_sentence(
    server: E2BServer, account: RemoteAccount, caplog: pytest.LogCaptureFixture,
    kind: str, headers: dict[str, str], said: str,
) -> None:  # fmt: skip
    """It says what happened and what to do, never with the key, also where the provider repeats it; asked once."""
    caplog.set_level(logging.DEBUG)
    server.faults.append(Fault(CREATE, kind, headers=headers))
    with pytest.raises(RemoteUnavailable, match=said) as caught:
        run(account, "1")
    assert caught.value.remedy
    assert len(creations(server)) == 1
    everything = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(account) + repr(caught.value)
    assert KEY not in everything


def test_too_many_sandboxes_at_once_are_a_quota(server: E2BServer, account: RemoteAccount) -> None:
    """E2B answers with the status of too many requests, where waiting a moment would not help."""
    message = "you have reached the maximum number of concurrent E2B sandboxes (20)"
    server.faults.append(Fault(CREATE, "429", message=message))
    with pytest.raises(RemoteUnavailable, match=r"quota is used up.*\(20\)"):
        run(account, "1")


def test_it_asks_again_where_it_may(server: E2BServer, account: RemoteAccount) -> None:
    """A provider that wants a moment, and has done nothing, gets it."""
    server.faults.append(Fault(CREATE, "429", times=2, headers={"retry-after": "0.1"}))
    assert run(account, "print(1)").stdout == "1\n"
    assert server.made == 1


def test_a_provider_that_never_answers_keeps_nobody(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait has a bound of ours, whoever was asked for what."""
    monkeypatch.setattr(machine, "CREATE_S", 1.0)
    server.faults.append(Fault(CREATE, "hang"))
    with pytest.raises(RemoteUnavailable, match="did not answer in time"):
        run(account, "1")
    monkeypatch.setattr(wire, "STALL_S", 1.0)
    server.faults.append(Fault("SendInput", "hang"))
    with pytest.raises(StartFailed, match="did not answer in time"):
        run(account, "1")


@pytest.mark.parametrize("where", [CREATE, "Start$", "SendInput"])
@pytest.mark.parametrize("is_live", [False, True], ids=["in turns", "live"])
def test_nobody_waits_for_a_silent_provider(
    server: E2BServer, account: RemoteAccount, where: str, is_live: bool
) -> None:
    """Cancellation and the end of a sandbox do not wait for a provider that does not answer."""
    server.faults.append(Fault(where, "hang", times=9))

    async def main() -> float:
        backend = E2BBackend(account)
        async with (backend.open_live if is_live else backend.open)(Policy(), Limits()) as sandbox:
            running = asyncio.create_task(sandbox.run(Request(code="1")))
            await asyncio.to_thread(server.wait_for, where)
            running.cancel()
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await running
        return began

    began = asyncio.run(main())
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("kind", ["401", "500", "html", "drop", "junk", "hang", "permission_denied"])
def test_an_agent_that_fails_runs_nothing(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A sandbox whose agent does not start a process is ended, and the error is one of ours."""
    monkeypatch.setattr(machine, "START_S", 2.0)
    server.faults.append(Fault("Start$", kind, skip=1))
    with pytest.raises((BackendUnavailable, StartFailed)) as caught:
        run(account, "1")
    assert str(caught.value).startswith(('backend "e2b"', "backend 'e2b'"))


def test_a_lost_answer_leaves_no_sandbox(server: E2BServer, account: RemoteAccount) -> None:
    """One that was made, and of which nobody was told, is found by its name and ended."""
    server.faults.append(Fault(CREATE, "lost"))
    with pytest.raises(RemoteUnavailable, match="does not follow the protocol"):
        run(account, "1")
    machine.background.wait_for_all()
    assert (server.made, len(server.sandboxes)) == (1, 0)


@pytest.mark.parametrize(
    ("begins", "ends"), [(-30, -1), (1, 30)], ids=["a certificate that has expired", "a clock that is late"]
)
def test_a_certificate_out_of_its_time(
    certificates: Path, account: RemoteAccount, tmp_path: Path, begins: int, ends: int
) -> None:
    """It is a matter of TLS, and the remedy names the clock; the key was sent to nobody."""
    place = dated_certificate(certificates, tmp_path, begins, ends)
    with serving(certificates, certificate=place) as other:
        with pytest.raises(RemoteUnavailable, match=r"certificate cannot be verified.*clock"):
            run(replace(account, url=other.url, sandbox_url=other.url), "1")
        assert other.requests == []


def test_a_certificate_of_somebody_else(account: RemoteAccount, tmp_path: Path) -> None:
    """One that no authority of the account has signed, or for another name."""
    with serving(tmp_path / "others") as other:
        with pytest.raises(RemoteUnavailable, match="certificate cannot be verified"):
            run(replace(account, url=other.url, sandbox_url=other.url), "1")
        assert other.requests == []
    elsewhere = account.url.replace("127.0.0.1", "localhost")
    with pytest.raises(RemoteUnavailable, match="certificate cannot be verified"):
        run(replace(account, url=elsewhere), "1")


def test_nobody_listens(account: RemoteAccount) -> None:
    """It cannot be reached."""
    with pytest.raises(RemoteUnavailable, match="cannot be reached"):
        run(replace(account, url="https://127.0.0.1:9"), "1")


def dated_certificate(certificates: Path, folder: Path, begins: int, ends: int) -> Path:
    """Make a server's certificate for some days from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    place = certificates / "server"
    authority = x509.load_pem_x509_certificate((certificates / "ca.pem").read_bytes())
    signer: Any = serialization.load_pem_private_key((certificates / "ca-key.pem").read_bytes(), None)
    usual = x509.load_pem_x509_certificate((place / "cert.pem").read_bytes())
    builder = x509.CertificateBuilder(authority.subject, usual.subject, usual.public_key(), 77)  # type: ignore[arg-type]
    for extension in usual.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    moment = datetime.now(UTC)
    builder = builder.not_valid_before(moment + timedelta(days=begins)).not_valid_after(moment + timedelta(days=ends))
    made = builder.sign(signer, hashes.SHA256())
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes((place / "key.pem").read_bytes())
    return folder


# What goes wrong once the code was sent.


@pytest.mark.parametrize("kind", ["cut", "mute"])
def test_a_link_that_is_lost_leaves_the_outcome_unknown(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The stream breaks off, or says nothing more: the code may have run, and the sandbox is ended."""
    account = replace(account, silence_s=2.0)
    server.faults.append(Fault("Start$", kind, skip=1, after=20_000))
    with pytest.raises(OutcomeUnknown, match="may have run to its end"):
        run(account, "import sys\nfor _ in range(500): print('x' * 1000)\nimport time; time.sleep(600)")


def test_a_link_that_is_lost_with_the_order(server: E2BServer, account: RemoteAccount) -> None:
    """The order arrives and nothing comes back, not even that the program began: that is not called a failed start."""
    server.faults.append(Fault("SendInput", "lost", skip=1))
    with pytest.raises(OutcomeUnknown, match="may have run to its end"):
        run(account, "1")


def test_a_sandbox_that_the_provider_ends(server: E2BServer, account: RemoteAccount) -> None:
    """In the middle of a run its outcome is unknown; afterwards the workspace is gone, and that is said."""

    async def work(sandbox: Any) -> None:
        def sink(event: Any) -> None:
            if isinstance(event, OutputChunk):
                came.set()

        came = asyncio.Event()
        code = "import time\nprint('up', flush=True)\ntime.sleep(600)"
        running = asyncio.create_task(sandbox.run_streaming(Request(code=code), sink))
        await asyncio.wait_for(came.wait(), 20)
        await asyncio.to_thread(server.end_all)
        with pytest.raises(OutcomeUnknown, match="before you run the code again"):
            await running
        with pytest.raises((StartFailed, BackendUnavailable)):
            await sandbox.run(Request(code="1"))

    tried(account, work)


def test_a_refused_key_in_the_middle(server: E2BServer, account: RemoteAccount) -> None:
    """A sandbox whose end cannot be asked for is ended by its time, which it was given when it was made."""
    server.faults.append(Fault("DELETE", "401"))
    assert run(account, "print(1)").stdout == "1\n"
    assert len(server.sandboxes) == 1
    server.end_all()


# What is answered is not believed.


@pytest.mark.parametrize("name", ["a/../b", "a@127.0.0.1", "x" * 5000, ""])
def test_a_name_that_is_none(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The provider's name for a sandbox becomes part of addresses, so it is checked first."""
    usual = server._connection
    monkeypatch.setattr(server, "_connection", lambda sandbox: {**usual(sandbox), "sandboxID": name})
    with pytest.raises(RemoteUnavailable, match="the name of the sandbox is invalid"):
        run(replace(account, sandbox_url="", domain="example.org"), "1")
    assert not any("e2b-sandbox-id" in one.headers for one in server.requests)
    server.end_all()


def test_a_template_that_never_says_what_is_in_it_keeps_nobody(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it says, a look has an end."""
    monkeypatch.setattr(machine, "LOOK", "while :; do echo; sleep 0.05; done")
    monkeypatch.setattr(machine, "LOOK_S", 0.5)
    with pytest.raises(StartFailed, match="did not answer in time"):
        run(account, "1")


def test_too_much_is_not_read(server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer has a bound."""
    usual = server._connection
    monkeypatch.setattr(server, "_connection", lambda sandbox: {**usual(sandbox), "alias": "x" * (9 << 20)})
    with pytest.raises(RemoteUnavailable, match="it is too long"):
        run(account, "1")


# What is counted, and what is left.


def test_an_account_is_used_no_more_than_it_may_be(server: E2BServer, account: RemoteAccount, tmp_path: Path) -> None:
    """Sandboxes are counted over all processes; what was never made is not; and who is refused learns why."""
    account = replace(account, quota=Quota(sandboxes_at_once=1), quota_file=str(tmp_path / "used"))
    server.faults.append(Fault(CREATE, "500"))
    with pytest.raises(RemoteUnavailable, match="it failed"):
        run(account, "1")

    async def work(sandbox: OpenSandbox) -> None:
        await sandbox.run(Request(code="1"))
        with pytest.raises(BackendUnavailable, match="1 of 1 sandboxes at once"):
            async with E2BBackend(account).open(Policy(), Limits()) as second:
                await second.run(Request(code="1"))

    tried(account, work)
    assert Counter(account).used_today()["sandboxes"] == 1


LEFT = """
import asyncio, sys, json, os
from cloche.backends.e2b import E2BBackend
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.remote import RemoteAccount, HiddenText
from cloche.core.request import Request
given = json.loads(sys.argv[1])
async def main():
    backend = E2BBackend(RemoteAccount(provider="e2b", api_key=HiddenText(given.pop("key")), **given))
    async with backend.open_live(Policy(), Limits()) as sandbox:
        await sandbox.run(Request(code="1"))
        print("up", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def leave(account: RemoteAccount) -> None:
    """Open a sandbox in a process of its own, and kill that."""
    given = {"key": KEY, "url": account.url, "sandbox_url": account.sandbox_url, "ca_file": account.ca_file}
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
    words = [sys.executable, "-c", LEFT, json.dumps(given)]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "up\n"
        caller.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "times",
    [pytest.param(1, id="once"), pytest.param(100, id="often", marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_what_a_killed_caller_left_is_ended(
    server: E2BServer, account: RemoteAccount, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """`cloche gc` finds it page by page, and leaves that of a caller who lives."""
    monkeypatch.setattr(machine, "PAGE", 1)

    async def main() -> None:
        backend = E2BBackend(account)
        async with backend.open(Policy(), Limits()) as mine:
            await mine.run(Request(code="1"))
            for _ in range(times):
                await asyncio.to_thread(leave, account)
                found = await asyncio.to_thread(backend.collect_garbage)
                assert len(found) == 1
                assert (await mine.run(Request(code="print(1)"))).stdout == "1\n"

    asyncio.run(main())


def test_two_accounts_are_kept_apart(server: E2BServer, account: RemoteAccount, certificates: Path) -> None:
    """Each has connections, authorities and a key of its own, in one process and at the same time."""
    with serving(certificates, key="e2b_0123") as other:
        second = replace(account, api_key=HiddenText("e2b_0123"), url=other.url, sandbox_url=other.url)

        async def main() -> list[str]:
            async with (
                E2BBackend(account).open(Policy(), Limits()) as one,
                E2BBackend(second).open(Policy(), Limits()) as two,
            ):
                found = await asyncio.gather(*(box.run(Request(code="print(1)")) for box in (one, two)))
                return [result.meta["remote"]["account"] for result in found]

        assert asyncio.run(main()) == [account.id, second.id]
        assert (server.made, other.made) == (1, 1)
        assert sdk.provider_of(account).transport is not sdk.provider_of(second).transport
