"""The store of layers: turns, what is taken for a layer, and what is left behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from pathlib import Path

from cloche.packages.store import Store


def test_a_fork_in_the_midst_of_a_turn_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It has the file of the lock, which is let go of at the end of the turn all the same."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))

    async def main() -> float:
        store = Store(str(tmp_path / "packages"))
        async with store.turn("key"):
            child.start()
        began = time.monotonic()
        async with asyncio.timeout(10), store.turn("key"):
            return time.monotonic() - began

    try:
        assert asyncio.run(main()) < 5
    finally:
        child.kill()
        child.join()
