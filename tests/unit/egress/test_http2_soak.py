"""Frames by chance on both sides of a relay of HTTP/2: whatever comes, it ends well and keeps its memory."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.egress.http2 import relay_http2
from cloche.egress.stream import SocketStream
from tests.harness.http2 import frame
from tests.harness.loops import in_loop
from tests.unit.egress.test_http2 import HOST, PREFACE, Edits

pytestmark = pytest.mark.soak
REQUEST = b"\x82\x87\x84\x41\x09a.example"
BLOCKS = (
    REQUEST,
    b"\x83" + REQUEST[1:],
    b"\x88",
    b"\x88\x5c\x015",
    b"\x08\x03103",
    b"\x00\x0bgrpc-status\x010",
    b"\xff\x82",
)
NUMBERS = (0, 1, 3, 100, 65_535, 1 << 24, (1 << 31) - 1)
ROUNDS, MOST_MIB = 1000, 64


def some_frames(chance: random.Random) -> bytes:
    """Write frames of all kinds, some of them wrong."""
    contents: dict[int, Callable[[], bytes]] = {
        0: lambda: bytes(chance.randrange(3000)),
        1: lambda: chance.choice(BLOCKS),
        3: lambda: struct.pack("!I", chance.randrange(15)),
        4: lambda: struct.pack("!HI", chance.randrange(10), chance.choice(NUMBERS)),
        6: lambda: bytes(8),
        7: lambda: struct.pack("!II", chance.choice(NUMBERS), chance.randrange(15)),
        8: lambda: struct.pack("!I", chance.choice(NUMBERS)),
        9: lambda: chance.randbytes(chance.randrange(20)),
    }
    frames = b""
    for _ in range(chance.randrange(1, 25)):
        kind, number = chance.choice((0, 0, 1, 1, 1, 3, 4, 6, 7, 8, 8, 9)), chance.choice((0, 1, 1, 1, 3, 3, 5, 2, 99))
        frames += frame(kind, chance.choice((0, 1, 4, 5, 5, 8, 32, 45, 255)), number, contents[kind]())
    if chance.random() < 0.3:
        at = chance.randrange(len(frames))
        frames = frames[:at] + chance.randbytes(chance.randrange(20)) + frames[at + chance.randrange(20) :]
    return frames


async def relay(of_guest: bytes, of_host: bytes) -> None:
    """Carry what both sides send, until they have ended; anything but an end is an error."""
    guest, ours = socket.socketpair()
    host, theirs = socket.socketpair()
    ends = (SocketStream(ours), SocketStream(theirs))
    work = asyncio.create_task(relay_http2(*ends, HOST, 443, str, edits=Edits(), idle_s=20))
    for side, data in ((guest, of_guest), (host, of_host)):
        side.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(side, data)
        side.shutdown(socket.SHUT_WR)
    await asyncio.wait_for(work, 20)
    guest.close()
    host.close()


def resident_mib() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 >> 10


@pytest.mark.parametrize("seed", range(8))
def test_no_frames_make_the_relay_fail(seed: int) -> None:
    """It returns at the end of either side, and raises nothing."""

    async def claim() -> None:
        chance, before = random.Random(seed), resident_mib()
        for _ in range(ROUNDS):
            begin = PREFACE + frame(4, 0, 0) + frame(1, chance.choice((4, 5)), 1, chance.choice(BLOCKS[:2]))
            answer = chance.choice((b"", frame(1, 4, 1, b"\x88"), frame(1, 4, 1, b"\x88") + frame(0, 0, 1, b"hello")))
            await relay(begin + some_frames(chance), frame(4, 0, 0) + answer + some_frames(chance))
        assert resident_mib() - before < MOST_MIB

    in_loop(claim)
