"""A node that waits for its first coordinator."""

import asyncio
from typing import Any

import pytest

from cloche.node import host as host_module
from cloche.node.host import NodeHost


def test_a_node_that_waits_ends_only_after_a_coordinator_has_been_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a coordinator it serves on; once one was there and is gone, it ends as any other node does."""
    monkeypatch.setattr(host_module, "ABANDONED_S", 0.0)
    monkeypatch.setattr(host_module, "LOOK_EVERY_S", 0.001)

    async def work() -> None:
        options: Any = {}
        await asyncio.wait_for(NodeHost(options, boot="b").tend(), 10)
        waiting = NodeHost(options, boot="b", waits=True)
        tending = asyncio.create_task(waiting.tend())
        await asyncio.sleep(0.1)
        assert not tending.done()
        await waiting.keep((), 0.0, {})
        await asyncio.wait_for(tending, 10)

    asyncio.run(work())
