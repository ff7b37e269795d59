"""A node's server in this process: which connections it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from cloche.fleets.signing import LeaseClaim, Signer, Verifier
from cloche.node import server
from cloche.node.admission import MOST_OF_ADDRESS, MOST_OF_HOLDER, MOST_STRANGERS, Admission
from cloche.node.host import NodeHost
from cloche.node.server import MOST_WRONG, BoundedConnection, listen, serving
from cloche.serving.certificate import make_certificate


class Served:
    """A node's server, and clients of it."""

    def __init__(self, host: NodeHost, signer: Signer, certificate: str, port: int):
        self.host, self._signer, self._certificate, self._port = host, signer, certificate, port
        self._clients: list[ClientConnection] = []

    async def tcp(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect from an address, and send nothing."""
        return await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))

    async def client(self, lease: str) -> tuple[ClientConnection, str]:
        """Return a new connection, and the answer to a lease's call over it."""
        client = await self.stranger()
        return client, await self.call(client, lease)

    async def stranger(self) -> ClientConnection:
        """Return a new connection, over which no call was made."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        client = await connect(f"wss://127.0.0.1:{self._port}/api/wire", ssl=context, proxy=None, ping_interval=None)
        self._clients.append(client)
        await client.recv()
        return client

    async def call(self, client: ClientConnection, lease: str, *, credential: str = "") -> str:
        """Call over a connection, and return the answer."""
        claim = LeaseClaim(lease=lease, until=time.time() + 60, certificate=self._certificate)
        credential = credential or self._signer.credential(claim).reveal()
        body = json.dumps({"verb": "lease.renew", "credential": credential}).encode()
        await client.send(struct.pack(">IIB", len(body), 1, 1) + body)
        answer = await client.recv()
        assert isinstance(answer, bytes)
        return answer[9:].decode()

    def abort(self) -> None:
        """End all connections at once."""
        for client in self._clients:
            client.transport.abort()


@asynccontextmanager
async def node_server() -> AsyncIterator[Served]:
    """Serve in this event loop."""
    signer, certificate, listener = Signer(), make_certificate("127.0.0.1"), listen("127.0.0.1", 0, Admission())
    host = NodeHost({}, boot="here")
    async with serving(host, Verifier(signer.public_key, certificate.sha256), certificate, listener):
        served = Served(host, signer, certificate.sha256, listener.getsockname()[1])
        try:
            yield served
        finally:
            served.abort()


def test_a_lease_has_few_connections_and_none_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is closed at once; another lease's call makes a connection its own, which then stays open."""
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    monkeypatch.setattr(server, "UNUSED_S", 0.05)

    async def main() -> None:
        async with node_server() as served:
            clients = [await served.client("one") for _ in range(MOST_OF_HOLDER)]
            assert all('"until"' in answer for _, answer in clients)
            further, answer = await served.client("one")
            assert "too-many-connections" in answer
            with pytest.raises(ConnectionClosed, match="too many connections"):
                await further.recv()
            shared = clients[0][0]
            assert '"until"' in await served.call(shared, "two")
            await served.host.end_lease("one")
            for client, _ in clients[1:]:
                with pytest.raises(ConnectionClosed, match="are over"):
                    await client.recv()
            assert '"until"' in await served.call(shared, "two")

    asyncio.run(main())


def test_strangers_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one address, nor of several, whether they say nothing or go halfway; nor do wrong credentials."""
    monkeypatch.setattr(server, "STRANGER_S", 60.0)
    monkeypatch.setattr(server, "OPENING_S", 60.0)

    async def main() -> None:
        async with node_server() as served:
            silent = [await served.tcp(f"127.0.0.{number % 4 + 1}") for number in range(2 * MOST_STRANGERS)]
            for _ in range(3):
                assert '"until"' in (await served.client("one"))[1]
            halfway = [await served.stranger() for _ in range(MOST_OF_ADDRESS + 1)]
            assert '"until"' in (await served.client("one"))[1]
            with pytest.raises(ConnectionClosed):
                await halfway[0].recv()
            for _ in range(3):
                shown = await served.stranger()
                for _ in range(MOST_WRONG):
                    await served.call(shown, "one", credential="x.y")
            assert '"until"' in (await served.client("one"))[1]
            for _, writer in silent:
                writer.transport.abort()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_opening_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of it together, whatever it has sent; a holder's connection goes on."""
    monkeypatch.setattr(server, "OPENING_S", 0.5)

    async def main() -> None:
        async with node_server() as served:
            client, _ = await served.client("one")
            reader, writer = await served.tcp()
            writer.write(b"\x16\x03\x01\x40")  # the beginning of a TLS record
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
            assert '"until"' in await served.call(client, "one")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_client_that_pings_and_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package answers each ping, and what is not read of that would be in the node's memory."""
    monkeypatch.setattr(server, "MOST_UNSENT", 1 << 16)
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    head = f"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
    pings = Frame(Opcode.PING, b"x" * 125).serialize(mask=True) * 1000

    async def handle(connection: BoundedConnection) -> None:
        await connection.wait_closed()

    async def flood(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(pings)
            await writer.drain()

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        async with serve(handle, sock=listener, create_connection=BoundedConnection):  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1 << 10)
            writer.write(head.encode())
            await reader.readuntil(b"\r\n\r\n")
            with pytest.raises(ConnectionError):
                await flood(writer)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.BINARY])
def test_frames_of_a_stranger_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch, opcode: Opcode) -> None:
    """Forty thousand empty ones are a quarter of a megabyte; heartbeats and calls of leases have their turns."""
    monkeypatch.setattr(server, "STRANGER_S", 1.0)
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    head = f"GET /api/wire HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
    frames = Frame(opcode, b"").serialize(mask=True) * 40_000

    def flood(port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as client, suppress(OSError):
            client.sendall(head.encode()[:-2])
            client.sendall(head.encode()[-2:] + frames)
            while client.recv(1 << 16):
                pass

    async def main() -> float:
        async with node_server() as served:
            flooding = asyncio.create_task(asyncio.to_thread(flood, served._port))
            longest, at = 0.0, time.thread_time()
            while not flooding.done():
                await asyncio.sleep(0)
                longest, at = max(longest, time.thread_time() - at), time.thread_time()
            return longest

    assert asyncio.run(asyncio.wait_for(main(), 60)) < 0.1
