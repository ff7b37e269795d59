"""Programs at a service call functions of their caller: the service in a process of its own, and what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection

import cloche
from cloche.agent.approval import ApprovalRequest, Decision
from cloche.backends.cloche import ClocheBackend
from cloche.core.errors import BackendUnavailable, InvalidRequest, OutcomeUnknown
from cloche.core.remote import RemoteAccount
from cloche.functions.tool import Tool, ToolLimits
from cloche.init import wire
from tests.harness.containers import make_certificates
from tests.harness.remote import posing, relayed, serving_tls
from tests.harness.service import Service
from tests.integration.test_host_functions import HOSTILE, IN_A_RUN, IN_NODE, MANY, RAW, SEEN, TOOLS, USES, resident

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, RemoteAccount]]:
    """Serve over TLS for all tests of this module."""
    with serving_tls(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(scope="module")
def account(served: tuple[Service, RemoteAccount]) -> RemoteAccount:
    """Return the account of an admin's key."""
    return served[1]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return certificates for who poses as a service."""
    return make_certificates(tmp_path_factory.mktemp("posed") / "certificates")


# Where programs call.


def run_alone(backend: ClocheBackend) -> cloche.Result:
    """Run in a sandbox of its own."""
    return cloche.run(IN_A_RUN, tools=TOOLS, backend=backend)


def run_in_workspace(backend: ClocheBackend) -> cloche.Result:
    """Run as one of several runs in the same files."""
    with cloche.Sandbox(tools=TOOLS, backend=backend, live=False) as sandbox:
        sandbox.run("1")
        return sandbox.run(IN_A_RUN)


def run_live(backend: ClocheBackend) -> cloche.Result:
    """Run as a process of a live sandbox."""
    with cloche.Sandbox(tools=TOOLS, backend=backend) as sandbox:
        return sandbox.run(IN_A_RUN)


def cell_live(backend: ClocheBackend) -> cloche.Result:
    """Run as a cell, after another one that leaves a call open."""
    with cloche.Sandbox(tools=TOOLS, backend=backend) as sandbox:
        session = sandbox.session()
        session.run("import threading, cloche_host; threading.Thread(target=cloche_host.later, args=(1,)).start()")
        session.run(USES)
        return session.run("[*seen, await many()]")


def cell_apart(backend: ClocheBackend) -> cloche.Result:
    """Run as a cell of a session with checkpoints, after a fork and a rollback; the fork calls, too."""
    with cloche.Sandbox(tools=TOOLS, backend=backend) as sandbox:
        session = sandbox.session(checkpoints=True)
        session.run(USES)
        session.checkpoint("before")
        first, second = session.fork(2)
        for after in (second, session, first):
            assert after.run("await many()").value == MANY
        first.close()
        second.close()
        session.rollback("before")
        return session.run("[*seen, await many()]")


@pytest.mark.parametrize("place", [run_alone, run_in_workspace, run_live, cell_live, cell_apart])
def test_a_program_elsewhere_calls_functions_of_its_caller(
    account: RemoteAccount, place: Callable[[ClocheBackend], cloche.Result]
) -> None:
    """As here: from threads and tasks at once, with the function's own errors, and counts that are this side's."""
    result = place(ClocheBackend(account))
    assert result.value == [*SEEN, MANY], result.stderr
    assert result.meta["tools"]["by_name"]["later"] == 20


def test_node_calls_too_and_a_language_that_cannot_is_refused(account: RemoteAccount) -> None:
    """As the service's own backend has it."""
    backend = ClocheBackend(account)
    node = cloche.run(IN_NODE, language="javascript", tools=TOOLS, backend=backend)
    assert json.loads(node.stdout)[0] == [*range(20)], node.stderr
    with pytest.raises(InvalidRequest, match="not ruby"):
        cloche.run("1", language="ruby", tools=TOOLS, backend=backend)


def test_limits_approval_and_errors_are_those_of_this_side(account: RemoteAccount) -> None:
    """The service knows none of them."""
    code = "from cloche_host import search\nfor _ in range(3): search('x')"
    limited = cloche.run(code, tools=TOOLS, tool_limits=ToolLimits(calls=2), backend=ClocheBackend(account))
    assert "tool_limits: calls" in limited.stderr
    risky = [Tool(TOOLS["search"], risk="high")]
    assert "was not approved" in cloche.run(code, tools=risky, backend=ClocheBackend(account)).stderr


def test_a_sandbox_elsewhere_stands_still_while_an_approver_decides(account: RemoteAccount) -> None:
    """Its run's clock is the service's, and stops, too; other runs at the service go on."""

    async def decide(_: ApprovalRequest) -> Decision:
        await cloche.arun("1", backend=ClocheBackend(account))
        await asyncio.sleep(1.2)
        return Decision(is_approved=True, by="me")

    tools = [Tool(TOOLS["search"], risk="high")]
    code = "from cloche_host import search\nsearch('x', limit=1)"
    result = cloche.run(code, tools=tools, approve=decide, timeout=1, backend=ClocheBackend(account))
    assert result.value == ["x 0"], (result.status, result.stderr)


def test_the_service_records_the_names_alone(served: tuple[Service, RemoteAccount]) -> None:
    """Its operator reads which functions a program was offered; the calls are in the caller's log."""
    service, account = served
    cloche.run("from cloche_host import search\nsearch('secret words')", tools=TOOLS, backend=ClocheBackend(account))
    with service.client(verify=ssl.create_default_context(cafile=account.ca_file)) as client:
        text = client.get("/api/audit", params={"kind": "sandbox", "limit": 200}).text
    assert '"what":"tools"' in text.replace(" ", "")
    assert '"tools":["search","later","fail"]' in text.replace(" ", "")
    assert "secret words" not in text


# What carries no calls.


def test_a_request_without_a_connection_is_refused_with_the_reason(served: tuple[Service, RemoteAccount]) -> None:
    """A client of the routes cannot be called back."""
    service, account = served
    with service.client(verify=ssl.create_default_context(cafile=account.ca_file)) as client:
        answer = client.post("/api/code/exec", json={"code": "1", "tools": ["search"]})
    assert (answer.status_code, answer.json()["field"]) == (422, "tools")
    assert "over an open connection, which a request has not" in answer.json()["detail"]


def test_an_older_service_is_named_before_anything_is_sent(certificates: Path) -> None:
    """It would run the program without its functions."""

    def talk(connection: ServerConnection) -> None:
        connection.recv()
        raise AssertionError("something was sent")

    with posing(certificates, talk) as (account, _):
        with pytest.raises(BackendUnavailable, match=r"tools: Cloche 1 at 127\.0\.0\.1.* carries no calls") as refused:
            cloche.run("1", tools=TOOLS, backend=ClocheBackend(account))
        assert "Update it" in str(refused.value)


# What may go wrong.


def test_a_lost_connection_cancels_the_calls_and_ends_the_run(account: RemoteAccount, tmp_path: Path) -> None:
    """The caller is told that the run's end is unknown, and the program is killed."""
    began, ends = threading.Event(), list[str]()

    async def wait(word: str) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append(word)
            raise

    async def attempt(backend: ClocheBackend, cut: Callable[[], None]) -> None:
        running = asyncio.ensure_future(
            cloche.arun("from cloche_host import wait\nwait('x')", tools=[wait], backend=backend)
        )
        await asyncio.to_thread(began.wait, PATIENCE_S)
        cut()
        with pytest.raises(OutcomeUnknown, match=r"connection to .* was lost"):
            await running

    with relayed(account) as (relay, through):
        asyncio.run(asyncio.wait_for(attempt(ClocheBackend(through), relay.cut), PATIENCE_S))
    assert ends == ["x"]


def test_a_session_whose_connection_was_lost_says_that_nobody_answers(account: RemoteAccount) -> None:
    """Its next cells run; a call in them ends at once, and waits for nobody."""
    with relayed(account) as (relay, through), cloche.Sandbox(tools=TOOLS, backend=ClocheBackend(through)) as sandbox:
        session = sandbox.session()
        assert session.run("from cloche_host import search; search('x', limit=1)").value == ["x 0"]
        relay.cut()
        with contextlib.suppress(OutcomeUnknown):  # where this side has not noticed yet
            session.run("0")
        assert session.run("1 + 1").value == 2
        assert "takes no more calls" in session.run("search('x')").stderr


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_elsewhere_holds_neither_the_service_nor_the_caller(
    served: tuple[Service, RemoteAccount], name: str
) -> None:
    """Both loops go on, the service's memory stays, and another program's calls are served meanwhile."""
    backend = ClocheBackend(served[1])

    async def large() -> str:
        return "x" * 100_000

    async def claim() -> None:
        attacker = asyncio.create_task(cloche.arun(RAW + HOSTILE[name], tools=[large], timeout=1.2, backend=backend))
        victim = asyncio.create_task(
            cloche.arun("from cloche_host import search\nfor _ in range(30): search('x')", tools=TOOLS, backend=backend)
        )
        assert (await victim).meta["tools"]["ok"] == 30
        assert (await attacker).status == "timeout"

    asyncio.run(asyncio.wait_for(claim(), PATIENCE_S))


def call_of(connection: ServerConnection) -> tuple[int, dict[str, Any]]:
    """Return the number and the fields of the first call."""
    body = connection.recv()
    assert isinstance(body, bytes)
    return wire.HEADER.unpack_from(body)[1], json.loads(body[wire.HEADER.size :][: wire.HEADER.unpack_from(body)[0]])


def calls_by(number: int, *frames: bytes) -> bytes:
    """Return what a service sends as calls of a program."""
    data = b"".join(frames)
    pieces = [data[at : at + wire.MOST_DATA] for at in range(0, len(data), wire.MOST_DATA)]
    return b"".join(wire.data_frame(number, wire.HOST_CALLS, piece) for piece in pieces)


def result_frame(number: int) -> bytes:
    """Return the end of a call, which is no result."""
    return wire.frame(wire.CLOSE, number, b'{"result": {}}')


LIES: dict[str, tuple[Callable[[int], bytes], str]] = {
    "a function that was not given": (
        lambda number: calls_by(number, wire.frame(wire.OPEN, 1, b'{"call":"__class__","data":{}}')), "refused",
    ),
    "arguments of another type": (
        lambda number: calls_by(number, wire.frame(wire.OPEN, 1, b'{"call":"note","data":{"word":5}}')), "refused",
    ),
    "an answer to a call that there is not": (
        lambda number: calls_by(number, wire.frame(wire.CLOSE, 77, b'{"value":1}')), "",
    ),
    "a call of a gibibyte": (lambda number: calls_by(number, wire.HEADER.pack(1 << 30, 1, wire.OPEN)), ""),
    "half a call": (lambda number: calls_by(number, wire.HEADER.pack(100, 1, wire.OPEN), b'{"call":"note"'), ""),
    "calls of another call of the wire": (
        lambda number: calls_by(number + 5, wire.frame(wire.OPEN, 1, b'{"call":"note","data":{"word":"x"}}')), "",
    ),
    "calls after the end": (
        lambda number: result_frame(number)
        + calls_by(number, wire.frame(wire.OPEN, 1, b'{"call":"note","data":{"word":"x"}}')), "",
    ),
    "more than a window": (lambda number: calls_by(number, bytes(wire.WINDOW_BYTES + 1)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_node_that_lies_reaches_nothing_but_the_functions(certificates: Path, name: str) -> None:
    """It can call what its guest could, with the same checks, while the run goes on, and nothing else."""
    make, kind = LIES[name]
    notes, answers = list[str](), list[bytes]()

    def note(word: str) -> None:
        notes.append(word)

    def talk(connection: ServerConnection) -> None:
        number, fields = call_of(connection)
        assert fields["tools"] == ["note"]
        connection.send(make(number))
        ends = time.monotonic() + 1
        while kind and not any(kind.encode() in answer for answer in answers) and time.monotonic() < ends:
            message = connection.recv(timeout=1)
            assert isinstance(message, bytes)
            answers.append(message)
        connection.send(result_frame(number))

    with posing(certificates, talk, tools=500) as (account, _), pytest.raises((BackendUnavailable, OutcomeUnknown)):
        cloche.run("1", tools=[note], backend=ClocheBackend(account))
    assert not notes
    assert not kind or any(kind.encode() in answer for answer in answers), answers


def test_calls_without_functions_end_the_connection(certificates: Path) -> None:
    """A caller that gave no functions is called by nobody."""

    def talk(connection: ServerConnection) -> None:
        number, fields = call_of(connection)
        assert "tools" not in fields
        connection.send(calls_by(number, wire.frame(wire.OPEN, 1, b"{}")))

    with posing(certificates, talk, tools=500) as (account, _), pytest.raises(OutcomeUnknown, match="stream 5"):
        cloche.run("1", backend=ClocheBackend(account))


def test_many_calls_leave_both_sides_as_they_were(served: tuple[Service, RemoteAccount]) -> None:
    """A thousand calls, eight at a time: none is lost, and the caller's memory stays."""
    code = (
        "import concurrent.futures, cloche_host\nwith concurrent.futures.ThreadPoolExecutor(8) as pool: "
        "total = sum(pool.map(cloche_host.double, range(1000)))\ntotal"
    )

    def double(number: int) -> int:
        return 2 * number

    before = resident()
    result = cloche.run(code, tools=[double], timeout=60, backend=ClocheBackend(served[1]))
    assert (result.value, result.meta["tools"]["ok"]) == (1000 * 999, 1000)
    assert resident() - before < 10 * 1024 * 1024
