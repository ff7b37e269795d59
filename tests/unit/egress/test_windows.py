"""What is counted between two moments, for whoever asks for it, and for nobody else."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any, cast

from cloche.core.network import NetworkRules
from cloche.egress.windows import SharedNetwork


class _Network:
    """Be a network that is asked for reports, and says nothing."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.on_message: Any = None

    def fileno(self) -> int:
        return self.ours.fileno()

    def ask_report(self, number: int, *, ends: bool) -> None:
        """Take note of nothing."""

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def test_a_window_that_nobody_closes_is_not_kept() -> None:
    """A process that is started and never asked for its result leaves none behind."""

    async def main() -> None:
        shared = SharedNetwork(cast("Any", _Network()), NetworkRules(mode="allowlist"))
        kept, left = shared.open_window(), weakref.ref(shared.open_window())
        gc.collect()
        assert left() is None
        row = {"host": "a.example", "port": 443, "is_allowed": True, "why": "", "connections": 1, "sent": 2}
        shared.network.on_message("report", {"number": 3, "rows": [{**row, "received": 3}], "unlisted": 0})  # type: ignore[misc]
        assert [one["sent"] for one in kept.traffic(is_lost=False).rows] == [2]
        shared.close()

    asyncio.run(main())
