"""TLS opened here: what a guest must trust, what is asked of a host, and bytes both ways."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloche.egress import stream as turns
from cloche.egress.stream import SocketStream
from cloche.egress.tls import Authority, TlsStream, host_context
from tests.harness import tls as certificates

HOST, BIG = "api.example.com", bytes(range(256)) * 2000


def between(
    serve: Callable[[SocketStream], Awaitable[object]], client: Callable[[SocketStream], Awaitable[object]]
) -> None:
    """Run the two ends of a connection."""

    async def both() -> None:
        ends = [SocketStream(end) for end in socket.socketpair()]
        try:
            async with asyncio.timeout(20):
                await asyncio.gather(serve(ends[0]), client(ends[1]))
        finally:
            for end in ends:
                end.close()

    asyncio.run(both())


async def received(stream: TlsStream) -> bytes:
    """Return all until the end."""
    data = b""
    while piece := await stream.receive(1 << 16):
        data += piece
    return data


@pytest.mark.parametrize("is_of_guest", [True, False])
def test_many_records_are_opened_in_turns(is_of_guest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sandboxes have many turns meanwhile: a record of some bytes, or of none, takes as long as a large one."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    monkeypatch.setattr(turns, "SHORT_TURN_S", 0.0)
    authority, are_sent = Authority(), asyncio.Event()

    async def read(stream: TlsStream) -> None:
        await stream.shake_hands()
        await are_sent.wait()
        reading, rounds = asyncio.ensure_future(stream.receive(1 << 16)), 0
        while not reading.done():
            rounds += 1
            await asyncio.sleep(0)
        assert await reading == bytes(2000)
        assert rounds > 50

    async def write(stream: TlsStream) -> None:
        await stream.shake_hands()
        for _ in range(2000):
            stream._tls.write(b"\0")
        await stream._flush()
        are_sent.set()

    async def serve(end: SocketStream) -> None:
        await (read if is_of_guest else write)(TlsStream(end, authority.guest_context(HOST)))

    async def call(end: SocketStream) -> None:
        context = ssl.create_default_context(cadata=authority.certificate)
        await (write if is_of_guest else read)(TlsStream(end, context, host=HOST))

    between(serve, call)


def test_what_is_received_ahead_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all connections of this process: a guest with very many takes no more of its memory."""
    monkeypatch.setattr(turns, "_directions", set(range(8192)))
    authority, asked = Authority(), []

    async def serve(end: SocketStream) -> None:
        receive = end.receive

        async def noted(size: int) -> bytes:
            asked.append(size)
            return await receive(size)

        monkeypatch.setattr(end, "receive", noted)
        await TlsStream(end, authority.guest_context(HOST)).shake_hands()

    async def call(end: SocketStream) -> None:
        await TlsStream(end, ssl.create_default_context(cadata=authority.certificate), host=HOST).shake_hands()

    between(serve, call)
    assert max(asked) == turns.LEAST_READ_BYTES


def test_bytes_pass_both_ways_until_each_ends() -> None:
    """More than a record at once, with an end of each direction that the other side sees."""
    authority = Authority()
    strict = ssl.create_default_context(cadata=authority.certificate)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT

    async def serve(end: SocketStream) -> None:
        stream = TlsStream(end, authority.guest_context(HOST))
        await stream.shake_hands()
        assert await received(stream) == BIG
        await stream.send(BIG[::-1])
        stream.end_sending()
        await asyncio.sleep(0)
        assert await stream.receive(1) == b""
        stream.close()

    async def client(end: SocketStream) -> None:
        stream = TlsStream(end, strict, host=HOST)
        await stream.shake_hands()
        await stream.send(BIG)
        stream.end_sending()
        assert await received(stream) == BIG[::-1]
        stream.close()

    between(serve, client)


@pytest.mark.parametrize("host", ["other.example.com", None])
def test_a_guest_accepts_its_own_authority_and_name_alone(host: str | None) -> None:
    """The certificate is for one host, and the authority of another sandbox does not vouch for it."""
    authority, trusted = Authority(), Authority()
    trusted = authority if host else trusted

    async def serve(end: SocketStream) -> None:
        with pytest.raises(OSError):
            await TlsStream(end, authority.guest_context(HOST)).shake_hands()

    async def client(end: SocketStream) -> None:
        context = ssl.create_default_context(cadata=trusted.certificate)
        with pytest.raises(ssl.SSLCertVerificationError):
            await TlsStream(end, context, host=host or HOST).shake_hands()
        end.close()

    between(serve, client)


@pytest.mark.parametrize("certified", ["other.example.com", HOST])
def test_a_host_is_verified(tmp_path: Path, certified: str) -> None:
    """A certificate for another name, or of an unknown authority, is no host's."""
    signer = certificates.Authority(tmp_path)
    trusted = signer if certified != HOST else certificates.Authority(tmp_path, "another")

    async def serve(end: SocketStream) -> None:
        with pytest.raises(OSError):
            await TlsStream(end, signer.server_context(certified)).shake_hands()

    async def client(end: SocketStream) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await TlsStream(end, host_context(trusted.file.read_text()), host=HOST).shake_hands()
        end.close()

    between(serve, client)


def test_an_end_without_a_word_is_an_error(tmp_path: Path) -> None:
    """A connection that is cut is no end of an answer."""
    signer = certificates.Authority(tmp_path)

    async def serve(end: SocketStream) -> None:
        stream = TlsStream(end, signer.server_context(HOST))
        await stream.shake_hands()
        await stream.send(b"half")
        end.close()

    async def client(end: SocketStream) -> None:
        stream = TlsStream(end, host_context(signer.file.read_text()), host=HOST)
        await stream.shake_hands()
        assert await stream.receive(10) == b"half"
        with pytest.raises(OSError):
            await stream.receive(10)
        stream.close()

    between(serve, client)
