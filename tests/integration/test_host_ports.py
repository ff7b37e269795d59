"""Ports of the host's loopback that a sandbox was given, and those of its own servers, forwarded to the host's."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cloche
from cloche.coding_agents.dev_servers import forward_all
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.execution.host_ports import give_host_ports, read_host_ports

pytestmark = pytest.mark.both_users
REACH = """
import socket, sys
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 20) as caller:
            caller.sendall(b"hello")
            caller.shutdown(socket.SHUT_WR)
            print(caller.recv(100).decode() or "nothing")
    except OSError as error:
        print(type(error).__name__)
"""


@contextmanager
def echo(name: str) -> Iterator[int]:
    """Serve on a port of loopback: each connection gets a name, and what it sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.sendall(f"{name} {caller.recv(100).decode()}".encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(autouse=True)
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the names of these sandboxes apart."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def open_with(port: int) -> None:
    """Open a sandbox that is kept, and leave it."""

    async def main() -> None:
        sandbox = cloche.AsyncSandbox(name="ports", keep="5m", network="allowlist", timeout=60)
        give_host_ports(sandbox, read_host_ports([f"127.0.0.1:{port}"]))
        async with sandbox:
            pass

    asyncio.run(main())


def test_a_kept_sandbox_reaches_its_ports_of_the_host_and_no_others() -> None:
    """Also without its opener; each connection is counted; a denying rule ends it."""
    with echo("given") as given, echo("other") as other:
        open_with(given)
        with cloche.Sandbox.attach("ports") as sandbox:

            def reach(*targets: str) -> list[str]:
                return sandbox.exec(["python3", "-c", REACH, *targets]).stdout.split("\n")[:-1]

            assert reach(f"127.0.0.1:{given}", f"localhost:{given}") == ["given hello"] * 2
            others = [f"127.0.0.1:{other}", f"127.0.0.2:{given}", f"0.0.0.0:{other}", f"10.1.2.3:{given}"]
            assert [said for said in reach(*others) if said.startswith(("given", "other"))] == []
            rows = [row for row in sandbox.network.traffic() if row["is_allowed"]]
            assert [(row["host"], row["port"], row["connections"]) for row in rows] == [("127.0.0.1", given, 2)]
            sandbox.network.deny("127.0.0.1")
            assert reach(f"127.0.0.1:{given}")[0].startswith("given") is False
            sandbox.kill()


def test_wrong_ports_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other hosts, names without a port, a sandbox without a network, an operator's ceiling."""
    for text in ("10.0.0.1:80", "example.org:80", "127.0.0.1", "::1:80", "0", "53", "x"):
        with pytest.raises(InvalidRequest, match="--host-port"):
            read_host_ports([text])
    with pytest.raises(InvalidRequest, match="the network of this sandbox is 'off'"):
        give_host_ports(cloche.AsyncSandbox(), (6006,))
    config = tmp_path / "cloche.yaml"
    config.write_text("ceilings: {network: allowlist}")
    with pytest.raises(PolicyDenied, match="ceiling"):
        give_host_ports(cloche.AsyncSandbox(network="allowlist", config=str(config)), (6006,))


def test_servers_are_forwarded_while_they_listen() -> None:
    """Found by themselves, without those of the sandbox's network; one that ends is reached no more."""
    serve = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
    serve += "s.accept()"

    async def main() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        async with cloche.AsyncSandbox(name="ports", keep="5m", network_allow=["good.example"], timeout=60) as sandbox:
            forwarding = asyncio.create_task(forward_all(sandbox, told.put_nowait, look_s=0.02))
            process = await sandbox.start(["python3", "-c", serve])
            port = int(await process.stdout.read())
            first, _, host_port = (await told.get()).rpartition(":")
            assert first == f"{port} is at http://127.0.0.1"
            words = ["-m", "cloche", "agent", "ports", "ports", "--json"]
            listing = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
            assert json.loads((await listing.communicate())[0]) == [{"port": port}]
            socket.create_connection(("127.0.0.1", int(host_port)), 20).close()
            assert await told.get() == f"{port} has ended"
            forwarding.cancel()
            await asyncio.wait([forwarding])
            await sandbox.kill()

    asyncio.run(main())


NAMES_LOOPBACK = """
import random, socket, struct
def address_of(name):  # as one label, too: a name that reads as an address
    question = b"".join(bytes([len(part)]) + part for part in name) + b"\\0" + struct.pack(">HH", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(20)
        asking.sendto(struct.pack(">HHHHHH", random.randrange(65536), 256, 1, 0, 0, 0) + question, ("198.18.0.1", 53))
        answer = asking.recv(512)
    return socket.inet_ntoa(answer[-4:]) if answer[7] else None
for name in ([b"127", b"0", b"0", b"1"], [b"127.0.0.1"], [b"localhost"]):
    address = address_of(name)
    try:
        with socket.create_connection((address, PORT), 20) as caller:
            caller.sendall(b"hello\\n")
            print(address, caller.recv(100))
    except (OSError, TypeError) as error:
        print(address, type(error).__name__)
"""


def test_a_name_that_reads_as_loopback_is_no_port_of_the_host() -> None:
    """Neither where the sandbox was given another port, nor where it serves that one for a host."""
    with echo("host") as port, echo("given") as given:

        async def main() -> str:
            sandbox = cloche.AsyncSandbox(
                network_allow=[f"good.example:{port}"], on_network="ask", live=True, timeout=60
            )
            give_host_ports(sandbox, (given,))
            async with sandbox:
                program = NAMES_LOOPBACK.replace("PORT", str(port))
                return (await sandbox.exec(["python3", "-c", program])).stdout

        said = asyncio.run(main())
        assert len(said.splitlines()) == 3
        assert "host" not in said, said
