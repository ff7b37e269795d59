"""Servers in a live sandbox, reached from outside, against the real jail."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest

import cloche
from cloche.execution import ports

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]
# Answers with what came, in capitals, once nothing more comes: half a connection is closed before the other half.
UPPER = """
import socketserver
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(self.rfile.read().upper())
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
Server(("127.0.0.1", 7001), Handler).serve_forever()
"""
# Sends without an end, and says so of each piece that was taken.
FLOOD = """
import socket
server = socket.create_server(("::1", 7002), family=socket.AF_INET6)
client = server.accept()[0]
count = 0
while True:
    client.sendall(bytes(65536))
    count += 1
    open("/tmp/sent", "w").write(str(count))
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[cloche.Sandbox]:
    """Open a sandbox with the two servers, and one of HTTP."""
    with cloche.Sandbox(live=True, timeout=60, pids=600, memory="1g", cpus=2) as sandbox:
        for words in (["-c", UPPER], ["-c", FLOOD], ["-m", "http.server", "7003"]):
            sandbox.start(["python3", *words])
        while len(sandbox.ports()) < 3:
            time.sleep(0.02)
        yield sandbox


def test_who_listens_is_listed(opened: cloche.Sandbox) -> None:
    """Each server has its port and its address."""
    assert {(one.port, one.address) for one in opened.ports()} == {
        (7001, "127.0.0.1"), (7002, "::1"), (7003, "0.0.0.0"),
    }  # fmt: skip


def test_a_connection_is_closed_by_halves(opened: cloche.Sandbox) -> None:
    """What was sent is answered once its end was said, whole, in both directions."""
    text = b"abc" * 1_000_000
    with opened.connect(7001) as connection:
        connection.write(text)
        connection.end()
        answer = b""
        while piece := connection.read():
            answer += piece
    assert answer == text.upper()


def test_nobody_listens_is_an_error_as_of_a_socket(opened: cloche.Sandbox) -> None:
    """A port without a server refuses, and one that is none is an error of the caller's."""
    with pytest.raises(ConnectionRefusedError, match="7009"):
        opened.connect(7009)
    with pytest.raises(cloche.InvalidRequest, match="port"):
        opened.connect(0)


def test_a_forwarded_port_leads_to_a_server(opened: cloche.Sandbox) -> None:
    """Programs here reach it at a loopback port of their own, by halves too, until it is closed."""
    opened.write_file("page.html", "hello")
    with opened.forward(7003) as web, opened.forward(7001) as upper:
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{web.host_port}/page.html", timeout=60) as answer:
                assert answer.read() == b"hello"
        text = b"xyz" * 1_000_000
        with socket.create_connection(("127.0.0.1", upper.host_port), timeout=60) as client:
            client.sendall(text)
            client.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == text.upper()
        taken = upper.host_port
        with pytest.raises(cloche.InvalidRequest, match="give another one, or 0"):
            opened.forward(7003, taken)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", taken), timeout=60)


def test_a_client_that_does_not_read_stops_its_server_alone(opened: cloche.Sandbox) -> None:
    """A server that sends without an end waits for a client that does not read, with a bounded amount under way."""
    with opened.forward(7002) as flood, socket.create_connection(("127.0.0.1", flood.host_port), timeout=60) as client:
        assert client.recv(1)
        before = ""
        while (now := opened.exec(shell="sleep 0.3; cat /tmp/sent").stdout) != before:
            before = now
        assert int(now) * 65536 < 32 << 20
        for _ in range(1000):
            assert client.recv(1 << 16)


def test_connections_are_bounded_and_refused_ones_closed(
    opened: cloche.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection too many is closed, as is one to a port where nobody listens; the others go on."""
    monkeypatch.setattr(ports, "MOST_CONNECTIONS", 2)
    with opened.forward(7001) as forward:
        address = ("127.0.0.1", forward.host_port)
        with socket.create_connection(address, 60) as first, socket.create_connection(address, 60) as second:
            with socket.create_connection(address, 60) as third:
                assert _is_closed(third)
            for client in (first, second):
                client.sendall(b"a")
                client.shutdown(socket.SHUT_WR)
                assert client.recv(10) == b"A"
    with opened.forward(7009) as nobody, socket.create_connection(("127.0.0.1", nobody.host_port), 60) as client:
        assert _is_closed(client)


def _is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_closing_a_sandbox_closes_its_ports() -> None:
    """With the sandbox go the listener here and the connections through it."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=True) as sandbox:
            await sandbox.start(["python3", "-c", UPPER])
            while not await sandbox.ports():  # noqa: ASYNC110 - asked inside, where there is nothing to wait for
                await asyncio.sleep(0.02)
            forward = await sandbox.forward(7001)
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.host_port)
            direct = await sandbox.connect(7001)
            waiting = asyncio.create_task(direct.read())
            await asyncio.sleep(0)
        assert await reader.read() == b""
        writer.close()
        assert await waiting == b""
        assert await direct.read() == b""
        with pytest.raises(BrokenPipeError):
            await direct.write(b"x")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", forward.host_port)

    asyncio.run(scenario())
