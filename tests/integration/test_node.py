"""`cloche node` in a process of its own: what a lease can do, what opens nothing, and that its end leaves nothing."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche.connections import ask
from cloche.backends.remote.failures import Failure, RemoteUnavailable
from cloche.core.errors import BackendUnavailable, InvalidRequest, NodeLost, PolicyDenied
from cloche.core.fleet import TTL_S
from cloche.execution.concurrency import default_count
from cloche.fleets.signing import Signer
from tests.harness.node import POD, Node, lease_id

PATIENCE_S = 60.0
SERVER = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    peer.sendall(peer.recv(100).upper())
    peer.close()
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Serve for all tests of this module that end no node."""
    served = Node(tmp_path_factory.mktemp("node"))
    served.ask("node.keep", denied=["10.77.0.1"], ttl=600)
    yield served
    assert served.end() == 128 + signal.SIGTERM


def processes_with(marker: str) -> list[int]:
    """Return the processes of this machine that have a text among their arguments."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            arguments = Path(path).read_bytes()
        except OSError:
            continue
        if marker.encode() in arguments.split(b"\0"):
            found.append(int(path.split("/")[2]))
    return found


def until(holds: Callable[[], object], why: str) -> None:
    """Wait for a condition that another process brings about."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends, why
        time.sleep(0.02)


class Running(threading.Thread):
    """Run a long command in a thread, and keep the error with which it ends."""

    def __init__(self, node: Node, lease: str, marker: str):
        super().__init__(daemon=True)
        self._node, self._lease, self._marker = node, lease, marker
        self.error: BaseException | None = None
        self.start()
        until(lambda: processes_with(marker), "the command did not start")

    def run(self) -> None:
        try:
            cloche.run(argv=["sleep", self._marker], backend=self._node.backend(self._lease), timeout=900)
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        """Return the error."""
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.error


def test_a_lease_runs_sessions_processes_files_and_ports(node: Node) -> None:
    """All by the classes of `backend="cloche"`, over one connection; nothing of the node's surroundings is inside."""
    backend = node.backend("all")
    result = cloche.run("import os; print(sorted(os.environ))", backend=backend, timeout=45)
    assert result.ok
    assert "RAY" not in result.stdout
    assert (result.meta["remote"]["node"], result.meta["level_source"]) == ("node-1", "claimed")
    with cloche.Sandbox(live=True, backend=backend) as sandbox:
        with sandbox.session() as session:
            session.run("x = 20")
            assert session.run("x + 1").value == 21
        sandbox.write_file("/workspace/a.txt", b"abc")
        with sandbox.start(["python3", "-c", SERVER]) as process:
            assert process.stdout.read(6) == b"ready\n"
            with sandbox.connect(8000) as connection:
                connection.write(b"hello")
                assert connection.read() == b"HELLO"
            assert process.wait().exit_code == 0
        assert sandbox.read_file("/workspace/a.txt") == b"abc"
    with cloche.Sandbox(backend=backend) as workspace:
        workspace.run("open('kept', 'w').write('1')")
        assert workspace.run("print(open('kept').read())").stdout == "1\n"
    assert node.ask("node.status")["level"] == "jail"


def test_a_node_at_level_confined_says_that_it_has_no_servers(tmp_path: Path) -> None:
    """In a pod no process inside listens: listing, forwarding and connecting are errors at once, with a remedy.

    The node itself listens at each address of its pod, loopback too, where a port-forward arrives.
    """
    pod = Node(tmp_path, "--require", "confined", "--all-addresses", before=POD)
    pod.facts["address"] = pod.facts["address"].replace("127.0.0.1", "127.0.0.2")
    backend = pod.backend("pod")
    backend.usual_level = None
    try:
        with cloche.Sandbox(live=True, backend=backend) as sandbox:
            assert str(sandbox.exec(["true"]).enforcement.level) == "confined"
            for ask in (sandbox.ports, lambda: sandbox.forward(8000), lambda: sandbox.connect(8000)):
                with pytest.raises(BackendUnavailable, match=r"no servers: .*host's own\. Use a host, or pods, that"):
                    ask()
    finally:
        pod.end()


def test_what_is_not_signed_for_this_node_opens_nothing(node: Node) -> None:
    """Another coordinator's credential, another node's, and one that is over; and a lease is no coordinator."""
    for more in ({"signer": Signer()}, {"certificate": "0" * 64}):
        with pytest.raises(RemoteUnavailable) as refused:
            cloche.run("1", backend=node.backend("stolen", **more))
        assert refused.value.failure is Failure.UNAUTHORIZED
    with pytest.raises(NodeLost, match="its time is over"):
        cloche.run("1", backend=node.backend("late", for_s=-1))
    with pytest.raises(RemoteUnavailable) as refused:
        asyncio.run(ask(node.account("lease"), "node.status", {}))
    assert refused.value.failure is Failure.FORBIDDEN
    assert not {lease_id("stolen"), lease_id("late")} & node.ask("node.leases")["leases"].keys()


def test_two_leases_share_no_sandbox(node: Node) -> None:
    """Neither its id nor the list nor a workspace of one is there for the other; options that weaken are refused."""
    with cloche.Sandbox(live=True, backend=node.backend("one")) as sandbox:
        sandbox.run("1")
        opened: Any = sandbox._sandbox._opened
        other = node.account("other")
        with pytest.raises(RemoteUnavailable) as refused:
            asyncio.run(ask(other, "sandbox.look", {"sandbox": opened.id}))
        assert refused.value.failure is Failure.NOT_FOUND
        assert asyncio.run(ask(other, "sandbox.list", {}))["items"] == []
        assert len(asyncio.run(ask(node.account("one"), "sandbox.list", {}))["items"]) == 1
    for field in ({"level": "process"}, {"bestEffort": ["network"]}, {"backend": "e2b"}):
        with pytest.raises(PolicyDenied):
            asyncio.run(ask(node.account("other"), "code.exec", {"code": "1", **field}))


def test_the_addresses_of_the_fleet_are_denied_to_each_sandbox(node: Node) -> None:
    """Beside the caller's own rules, in sandboxes that are opened and in those that are open."""
    with cloche.Sandbox(live=True, backend=node.backend("net"), network="open", network_deny=["x.example"]) as sandbox:
        opened: Any = sandbox._sandbox._opened

        def denied() -> list[str]:
            look = asyncio.run(ask(node.account("net"), "network.look", {"sandbox": opened.id}))
            return list(look["deny"])

        assert denied() == ["x.example", "10.77.0.1"]
        node.ask("node.keep", denied=["10.77.0.1", "10.77.0.2"], ttl=600)
        assert denied() == ["x.example", "10.77.0.1", "10.77.0.2"]
    backend, mode = node.backend("net"), "allowlist"
    with (
        cloche.Sandbox(live=False, backend=backend, network=mode, network_allow=["10.77.0.3:80"]) as reaches,
        cloche.Sandbox(live=False, backend=backend, network=mode, network_allow=["10.78.0.1:80"]) as other,
    ):
        assert reaches.run("print(1)").ok
        node.ask("node.keep", denied=["10.77.0.1", "10.77.0.2", "10.77.0.3"], ttl=600)
        assert other.run("print(1)").ok
        with pytest.raises(PolicyDenied, match="reach a machine"):
            reaches.run("print(1)")
    with pytest.raises(InvalidRequest):
        node.ask("node.keep", denied=["not an address!"], ttl=600)
    with pytest.raises(InvalidRequest, match="bridge"):
        cloche.run("1", backend=node.backend("net"), network="bridge")


def test_a_lease_is_held_to_its_amounts(node: Node) -> None:
    """A sandbox has no more than its lease, by default and if asked; nor have all at once: runs wait for others."""
    lease = lease_id("small", cpus=0.5, mib=128)
    account = node.account(lease)
    for more in ({"memoryLimit": "200g"}, {"cpuLimit": 64}, {"diskLimit": "1t"}):
        for verb, fields in (("code.exec", {"code": "1"}), ("sandbox.open", {}), ("workspace.open", {})):
            with pytest.raises(PolicyDenied, match=r"is above the lease's amount .*take a larger lease"):
                asyncio.run(ask(account, verb, {**fields, **more}))
    facts = asyncio.run(ask(account, "sandbox.open", {}))
    assert (facts["limits"]["memoryBytes"], facts["limits"]["cpus"]) == (128 << 20, 0.5)
    for verb, fields in (("sandbox.open", {}), ("session.open", {"sandbox": facts["id"], "checkpoints": True})):
        with pytest.raises(RemoteUnavailable, match=r"this lease has 0\.5 processors .*no room for 0\.5"):
            asyncio.run(ask(account, verb, fields))
    assert asyncio.run(ask(account, "session.open", {"sandbox": facts["id"]}))["isAlive"]
    asyncio.run(ask(account, "sandbox.end", {"sandbox": facts["id"]}))

    async def several() -> list[float]:
        code = "import time; begun = time.monotonic(); time.sleep(0.3); print(begun, time.monotonic())"
        results = await asyncio.gather(*(ask(account, "code.exec", {"code": code}) for _ in range(3)))
        return [float(text) for times in sorted(result["stdout"] for result in results) for text in times.split()]

    times = asyncio.run(several())
    assert times == sorted(times), "two runs of the lease went on at once"
    with pytest.raises(PolicyDenied, match="has no amounts"):
        asyncio.run(ask(node.account("ls_0"), "code.exec", {"code": "1"}))


def test_a_release_ends_all_that_a_lease_has(node: Node) -> None:
    """A run under way ends with NodeLost and its processes are gone; the id is refused; other leases go on."""
    with cloche.Sandbox(live=True, backend=node.backend("kept")) as kept:
        kept.write_file("a", b"1")
        running = Running(node, "released", "7531.25")
        node.ask("node.release", lease="released")
        assert processes_with("7531.25") == []
        error = running.ended()
        assert isinstance(error, NodeLost)
        assert (error.node, error.lease) == ("node-1", lease_id("released"))
        with pytest.raises(NodeLost, match="it was released"):
            cloche.run("1", backend=node.backend("released", for_s=900))
        assert kept.read_file("a") == b"1"
    status = node.ask("node.status")
    assert (status["sandboxes"], status["runs"]) == (0, 0)


def test_wrong_credentials_and_silent_strangers_are_disconnected(node: Node) -> None:
    """Soon after eight wrong ones the connection is closed; so is one with garbage for a frame. The node serves on."""

    async def main() -> int:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed

        from cloche.backends.cloche.websocket import _context

        context = _context(node.account())
        address = node.facts["address"].replace("https", "wss") + "/api/wire"
        async with connect(address, ssl=context, proxy=None) as client:
            assert json.loads(await client.recv())["hello"]["wire"] == 2
            refused = 0
            body = json.dumps({"verb": "sandbox.list", "credential": "x.y"}).encode()

            async def try_all() -> None:
                nonlocal refused
                for number in range(1, 100):
                    await client.send(struct.pack(">IIB", len(body), number, 1) + body)
                    refused += b"not-authenticated" in await client.recv()  # type: ignore[operator]

            with pytest.raises(ConnectionClosed, match="1008"):
                await try_all()
        async with connect(address, ssl=context, proxy=None) as client:
            await client.recv()
            await client.send(b"\xff" * 9)
            with pytest.raises(ConnectionClosed, match="1007"):
                await client.recv()
        return refused

    assert 8 <= asyncio.run(main()) < 16
    assert cloche.run("print(1)", backend=node.backend("after")).stdout == "1\n"


def test_slow_starts_hold_up_no_other(tmp_path: Path) -> None:
    """Five that wait for an index which never answers, each of another lease, and one that needs nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "UV_DEFAULT_INDEX": f"http://127.0.0.1:{silent.getsockname()[1]}/simple", "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        node = Node(tmp_path, variables=variables, program="tests.harness.node_outside")
        accepted = list[socket.socket]()

        async def main() -> None:
            packages = {"packages": ["one"]}
            slow = [asyncio.ensure_future(ask(node.account(f"slow-{n}"), "sandbox.open", packages)) for n in range(5)]
            accepted.append((await asyncio.to_thread(silent.accept))[0])
            assert (await ask(node.account("quick"), "sandbox.open", {}, timeout_s=15))["state"] == "running"
            assert not any(opening.done() for opening in slow)
            for opening in slow:
                opening.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

        try:
            asyncio.run(main())
        finally:
            node.end()
            for connection in accepted:
                connection.close()


def test_tiny_runs_of_two_leases_hold_up_no_third(node: Node) -> None:
    """More of them than the library runs at once on these processors; they end with their leases."""
    count = 1 + default_count() // 2
    tiny = {"argv": ["sleep", "7534.25"], "cpuLimit": 0.01, "memoryLimit": "16m", "timeout": 900}

    async def main() -> None:
        leases = [lease_id(name, cpus=0.5, mib=1024) for name in ("tiny-1", "tiny-2")]
        sleeping = [
            asyncio.ensure_future(ask(node.account(lease), "code.exec", tiny, timeout_s=900))
            for lease in leases
            for _ in range(count)
        ]
        await asyncio.to_thread(until, lambda: len(processes_with("7534.25")) >= 2 * count, "they do not all run")
        assert (await ask(node.account("third"), "code.exec", {"code": "print(1)"}, timeout_s=45))["stdout"] == "1\n"
        for lease in leases:
            await ask(node.account("coordinator", role="coordinator"), "node.release", {"lease": lease})
        ended = await asyncio.gather(*sleeping, return_exceptions=True)
        assert {type(error) for error in ended} == {NodeLost}

    asyncio.run(main())
    assert processes_with("7534.25") == []


def test_a_silent_coordinator_and_a_killed_node_leave_nothing(tmp_path: Path) -> None:
    """Its leases end when it is silent, also what runs. What a killed node leaves is cleared by the next one."""
    state = tmp_path / "state"
    node = Node(tmp_path, "--state", str(state))
    running = Running(node, "silent", "7532.25")
    node.ask("node.keep", denied=[], ttl=1)
    error = running.ended()
    assert isinstance(error, NodeLost)
    assert "its coordinator is silent" in str(error)
    assert processes_with("7532.25") == []
    node.ask("node.keep", denied=[], ttl=TTL_S)
    running = Running(node, "killed", "7533.25")
    assert json.loads((state / "node.json").read_text()) == node.facts
    node.end(signal.SIGKILL)
    running.ended()
    after = Node(tmp_path, "--state", str(state), signer=node.signer)
    try:
        assert after.facts["boot"] != node.facts["boot"]
        until(lambda: not processes_with("7533.25"), "a guest of the killed node lives")
        assert glob.glob(f"/sys/fs/cgroup/**/cloche-{node.pid}-*", recursive=True) == []
    finally:
        after.end()


def test_a_node_below_an_engines_worker_is_free_of_it(tmp_path: Path) -> None:
    """Blocked signals, RAY_* variables and a raised oom_score_adj are not passed on to it, nor to its guests."""
    before = Path("/proc/self/oom_score_adj").read_text()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
        node = Node(tmp_path, variables={"RAY_ADDRESS": "127.0.0.1:6379"})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        Path("/proc/self/oom_score_adj").write_text(before)
    try:
        with pytest.raises(PolicyDenied, match="does not know yet which addresses"):
            cloche.run("1", backend=node.backend(), network="open")
        result = cloche.run(argv=["sh", "-c", "env; kill -INT $$; echo survived"], backend=node.backend())
        assert "survived" not in result.stdout
        assert "RAY_" not in result.stdout
        assert Path(f"/proc/{node.pid}/oom_score_adj").read_text() == "0\n"
    finally:
        assert node.end() == 128 + signal.SIGTERM
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(node.facts["address"].rpartition(":")[2]))):
        pass
