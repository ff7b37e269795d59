"""What is passed on between two connections: all of it, each end by itself, and nothing for ever."""

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from cloche.egress.stream import End, SocketStream, Turns, splice
from tests.harness.loops import LONG_S, HastyLoop, in_hasty_loop, in_loop


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@dataclass
class Spliced:
    """A client and a server with a splice between them; `inner` are the splice's own ends."""

    client: SocketStream
    server: SocketStream
    inner: tuple[SocketStream, SocketStream]
    splicing: asyncio.Task[End]


@asynccontextmanager
async def spliced(idle_s: float = LONG_S) -> AsyncIterator[Spliced]:
    """Put a splice between two connections."""
    (client, near), (far, server) = tcp_pair(), tcp_pair()
    inner = (SocketStream(near), SocketStream(far))
    task = asyncio.create_task(splice(*inner, idle_s=idle_s))
    outer = SocketStream(client), SocketStream(server)
    try:
        yield Spliced(*outer, inner, task)
    finally:
        task.cancel()
        await asyncio.wait({task})
        for stream in outer:
            stream.close()


async def read_all(stream: SocketStream) -> bytes:
    """Read to the end."""
    return b"".join([data async for data in pieces(stream)])


async def pieces(stream: SocketStream) -> AsyncIterator[bytes]:
    """Yield what comes, to the end."""
    while data := await stream.receive(1 << 16):
        yield data


def test_both_directions_arrive_whole_at_once() -> None:
    """Megabytes in both directions at the same time are the same on the other side, and are counted."""

    async def claim() -> None:
        up, down = os.urandom(5_000_003), os.urandom(3_000_001)
        async with spliced() as one:

            async def talk(stream: SocketStream, data: bytes) -> bytes:
                async def send() -> None:
                    await stream.send(data)
                    stream.end_sending()

                received, _ = await asyncio.gather(read_all(stream), send())
                return hashlib.sha256(received).digest()

            received = await asyncio.gather(talk(one.client, up), talk(one.server, down))
            assert received == [hashlib.sha256(data).digest() for data in (down, up)]
            assert await one.splicing == "ended"
            assert [(end.received_bytes, end.sent_bytes) for end in one.inner] == [
                (len(up), len(down)), (len(down), len(up)),
            ]  # fmt: skip

    in_loop(claim)


def test_an_end_is_passed_on_and_the_other_direction_goes_on() -> None:
    """A client that has said everything still hears the answer, as of git, PostgreSQL or nc."""

    async def claim() -> None:
        async with spliced() as one:
            await one.client.send(b"question")
            one.client.end_sending()
            assert await read_all(one.server) == b"question"
            await one.server.send(b"answer")
            assert await one.client.receive(100) == b"answer"
            assert not one.splicing.done()
            one.server.end_sending()
            assert await one.client.receive(100) == b""
            assert await one.splicing == "ended"

    in_loop(claim)


def test_a_slow_reader_holds_up_the_sender() -> None:
    """What is read nowhere is not taken from the sender, beyond what the sockets and one read hold."""

    async def claim() -> None:
        async with spliced() as one:
            sending = asyncio.create_task(one.client.send(bytes(256 << 20)))
            counts = [-1, one.inner[0].received_bytes]
            while counts[-1] != counts[-2] or not counts[-1]:
                await asyncio.wait({sending}, timeout=0.2)
                counts.append(one.inner[0].received_bytes)
            assert not sending.done()
            assert one.inner[0].received_bytes < 64 << 20
            sending.cancel()
            await asyncio.wait({sending})

    in_loop(claim)


@pytest.mark.parametrize("ends_half", [False, True])
def test_what_stands_still_is_closed(ends_half: bool) -> None:
    """Without a byte in any direction for the idle limit, both ends are closed, also when one had ended."""

    async def claim() -> None:
        async with spliced(idle_s=0.2) as one:
            if ends_half:
                one.client.end_sending()
            assert await one.splicing == "idle"
            assert (await read_all(one.client), await read_all(one.server)) == (b"", b"")

    in_loop(claim)


def test_what_moves_is_not_idle() -> None:
    """Bytes in one direction are enough, for however long."""

    async def claim(loop: HastyLoop) -> None:
        async with spliced(idle_s=1000) as one:
            for _ in range(5):
                loop.ahead_s += 900
                await one.server.send(b"tick")
                assert await one.client.receive(100) == b"tick"
            assert not one.splicing.done()
            loop.ahead_s += 1001
            assert await one.splicing == "idle"

    in_hasty_loop(claim)


def test_a_broken_connection_ends_the_other_one() -> None:
    """A reset on one side is an end for the other."""

    async def claim() -> None:
        (client, near), (far, server) = tcp_pair(), tcp_pair()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        stream = SocketStream(server)
        assert await splice(SocketStream(near), SocketStream(far), idle_s=LONG_S) == "broken"
        assert await stream.receive(1) == b""
        stream.close()

    in_loop(claim)


def test_cancellation_closes_both() -> None:
    """Whoever ends the passing on needs to close nothing."""

    async def claim() -> None:
        async with spliced() as one:
            await one.client.send(b"x")
            assert await one.server.receive(1) == b"x"
            one.splicing.cancel()
            assert (await read_all(one.client), await read_all(one.server)) == (b"", b"")
            assert one.splicing.cancelled()

    in_loop(claim)


def test_a_connection_that_never_pauses_lets_others_have_their_turn() -> None:
    """While megabytes pass that are always there to be read, another task goes on beside every read."""

    async def claim() -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        one, other = socket.socketpair()
        with one:
            one.setblocking(False)
            stream = SocketStream(other)
            sent = one.send(bytes(100_000))
            counting = asyncio.create_task(count())
            for _ in range(sent // 1000):
                await stream.receive(1000)
            counting.cancel()
            stream.close()
        assert turns >= sent // 1000

    in_loop(claim)


def test_turns_are_shared_by_who_shares_them() -> None:
    """Many who have a lot to do take one turn in each round, so that who is alone waits for one of theirs."""

    async def main() -> None:
        many = Turns()
        done: list[None] = []

        async def work() -> None:
            while True:
                await many.take()
                done.append(None)

        tasks = [asyncio.create_task(work()) for _ in range(100)]
        tasks[0].cancel()  # who goes away holds nobody up
        alone = Turns()
        for _ in range(50):
            await alone.take()
        assert 0 < len(done) <= 50
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.wait_for(many.take(), 10)

    asyncio.run(main())


def test_who_has_used_far_more_lets_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that computes at all times delays a short request by few of its turns, and is not starved."""

    async def claim(loop: HastyLoop) -> None:
        heavy, light, turns = Turns(), Turns(), 0

        def now() -> float:
            loop.ahead_s += 1e-6 if vars(loop)["_ready"] else 1e-5  # or it would stand still while all wait for it
            return loop.ahead_s

        loop.ahead_s = loop.time()
        loop.time = now  # type: ignore[method-assign]
        monkeypatch.setattr("cloche.egress.stream._recent", {})
        monkeypatch.setattr("cloche.egress.stream.time.thread_time", lambda: loop.ahead_s)

        async def compute() -> None:
            nonlocal turns
            while True:
                await heavy.take()
                turns += 1
                loop.ahead_s += 0.001

        async def turns_during(rounds: int, each_s: float) -> int:
            before = turns
            for _ in range(rounds):
                await light.take()
                loop.ahead_s += each_s
            return turns - before

        tasks = [asyncio.create_task(compute()) for _ in range(30)]
        await asyncio.sleep(0.3)
        assert turns > 100
        assert await turns_during(30, 0.00002) <= 2
        assert 1 <= await turns_during(1200, 0.00002) <= 10
        assert await turns_during(1000, 0.001) >= 300
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    in_hasty_loop(claim)


def test_what_the_kernel_holds_is_bounded_where_that_is_asked_for() -> None:
    """Nobody reads: it takes what its buffers hold, which otherwise grow to megabytes."""

    async def main() -> None:
        taken = []
        for buffer_bytes in (0, 64 << 10):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                stream = SocketStream(socket.create_connection(listener.getsockname()), None, buffer_bytes)
                other = SocketStream(listener.accept()[0], None, buffer_bytes)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stream.send(bytes(64 << 20))
            unread = 0
            stream.close()
            with contextlib.suppress(OSError):
                while piece := await other.receive(1 << 20):
                    unread += len(piece)
            other.close()
            taken.append(unread)
        assert taken[1] < 1 << 20 < taken[0], taken

    asyncio.run(main())
