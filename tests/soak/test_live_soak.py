"""Interpreters that go on, hundreds of times over: of many clients, few are alive, and nothing of the others stays."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from cloche.agent.approval import auto
from cloche.agent.interpreters import Room
from cloche.agent.toolbox import Toolbox
from tests.harness.leaks import Snapshot, wait_for_leftovers

PATIENCE_S = 60
CLIENTS, OWNERS, CALLS, MOST = 24, 3, 400, 4

pytestmark = pytest.mark.soak


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_many_clients_share_few_interpreters() -> None:
    """Each finds its own state or is told that it is gone, some calls are given up or end badly; nothing is left."""
    dice = random.Random(5)

    async def client(room: Room, number: int, calls: int) -> None:
        async with Toolbox(approve=auto("high"), interpreters=room.share_of(str(number % OWNERS))) as tools:
            held = ""
            for call in range(calls):
                word = f"{number}-{call}"
                code = f"before = globals().get('word', 'none'); word = {word!r}; before"
                answer = await tools.call("run_code", {"code": code})
                assert not answer.is_error, answer.text
                if answer.state == "kept":
                    assert answer.text.endswith(held), (answer.text, held)
                else:
                    assert answer.text.endswith("none")
                    assert ("is gone" in answer.text) is bool(held)
                held = word
                if dice.random() < 0.1:
                    held = await _end_badly(tools, held)

    async def main() -> None:
        room = Room(most=MOST)
        work = [client(room, number, CALLS // CLIENTS) for number in range(CLIENTS)]
        watching = asyncio.ensure_future(_watch(room))
        await asyncio.gather(*work)
        watching.cancel()
        await asyncio.wait({watching})
        assert watching.cancelled()  # and not ended by what it saw
        assert room._entries == []

    async def warm() -> None:
        await client(Room(), 0, 3)

    asyncio.run(warm())
    before, descriptors, resident = Snapshot.take(), len(os.listdir("/proc/self/fd")), _resident_mib()
    for _ in range(3):
        asyncio.run(main())
    assert wait_for_leftovers(before, patience_s=PATIENCE_S) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    assert _resident_mib() <= resident + 64


async def _end_badly(tools: Toolbox, held: str) -> str:
    """Give up a call, or have one end its interpreter; return what is still held."""
    if len(held) % 2:
        await tools.call("run_code", {"code": "import os; os._exit(3)"})
        return ""
    call = asyncio.ensure_future(tools.call("run_code", {"code": "while True: pass"}))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait({call})
    return held


async def _watch(room: Room) -> None:
    """See that there are never more alive than there may be."""
    while True:
        assert sum(one.is_alive for one in room._entries) <= MOST
        await asyncio.sleep(0.01)
