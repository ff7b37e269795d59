"""Answers of servers inside sandboxes, which are hostile."""

from __future__ import annotations

import asyncio

import h11

from cloche.server.e2b.guest_http import PIECES_OF_TURN, GuestExchange
from tests.harness.loops import in_loop

CHUNKS = 2_000


class Connection:
    """Be a server that answers at once, in chunks of one byte."""

    async def read(self, most: int = 0, /) -> bytes:
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * CHUNKS + b"0\r\n\r\n"

    async def write(self, data: bytes, /) -> None:
        pass

    async def end(self) -> None:
        pass


def test_small_chunks_do_not_hold_the_event_loop() -> None:
    """A read of 128 KiB has 26 000 of them, which took seconds in which nothing else was answered."""

    async def claim() -> None:
        turns, exchange = 0, GuestExchange(Connection())

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.ensure_future(count())
        await exchange.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        await exchange.send(h11.EndOfMessage())
        await exchange.head()
        assert sum([len(piece) async for piece in exchange.body()]) == CHUNKS
        assert turns >= CHUNKS // PIECES_OF_TURN - 1
        counting.cancel()

    in_loop(claim)
