"""Of the versions of an agent the newest is used, and the one before is kept for what runs in it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cloche.coding_agents.install import remove_older
from cloche.coding_agents.installed import installed_agents, newest
from cloche.packages.folders import agents_store
from cloche.packages.npm import npm_target
from cloche.packages.store import Store


def test_the_newest_is_used_and_the_one_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of installation, not by number; other agents are not touched."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = Store(agents_store())

    async def publish(key: str) -> None:
        async with store.making() as folder:
            os.mkdir(f"{folder}/layer")
            facts = {"modules": [], "files": 0, "bytes": 0}
            await store.publish(
                f"{folder}/layer", store.place_for(key), key=key, pins=(), target=npm_target(), facts=facts
            )

    for key in ("other@1", "fake@3", "fake@2", "fake@1"):
        asyncio.run(publish(key))
    remove_older(store, "fake")
    assert [f"{row.agent}@{row.version}" for row in installed_agents()] == ["fake@1", "fake@2", "other@1"]
    assert (newest("other") is not None, newest("none")) == (True, None)
