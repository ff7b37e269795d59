"""The store of layers: turns, what is taken for a layer, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cloche.core.errors import StartFailed
from cloche.core.layers import packages_digest
from cloche.packages.folders import make_shown
from cloche.packages.install import digests_of
from cloche.packages.lock import Locked
from cloche.packages.requirements import parse_requirements
from cloche.packages.store import MANIFEST, Layer, Store
from cloche.packages.target import own_target


def _layer(store: Store, key: str, modules: Sequence[str]) -> Layer:
    """Make a layer without files."""

    async def make() -> Layer:
        async with store.making() as folder:
            made = f"{folder}/layer"
            make_shown(made)
            facts = {"modules": list(modules), "files": 0, "bytes": 0}
            final = store.place_for(key)
            return await store.publish(made, final, key=key, pins=(), target=own_target(), facts=facts)

    return asyncio.run(make())


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


def test_what_cannot_be_read_as_a_layer_is_not_kept(tmp_path: Path) -> None:
    """A package that brings too many modules to be listed becomes none, and what is none makes room for others."""
    store = Store(str(tmp_path / "packages"))
    modules = [f"{'m' * 60}{number}" for number in range(80_000)]
    with pytest.raises(StartFailed, match="too many modules to list"):
        _layer(store, "large", modules)
    assert os.listdir(f"{store.folder}/layers") == os.listdir(f"{store.folder}/making") == []
    kept = _layer(store, "small", modules[:3]).folder
    os.mkdir(f"{store.folder}/layers/other.version")
    store.prune()
    assert os.listdir(f"{store.folder}/layers") == [os.path.basename(kept)]


def test_a_store_that_others_can_write_to_serves_nothing(tmp_path: Path) -> None:
    """What lies there may be somebody else's, also where it has the right name."""
    store = Store(str(tmp_path / "packages"))
    os.makedirs(f"{store.folder}/layers/key.nonce")
    os.mkdir(f"{store.folder}/sets")
    facts = {"pins": [], "modules": [], "files": 0, "bytes": 0, "created": 0, "target": {}}
    Path(store.folder, "layers/key.nonce", MANIFEST).write_text(json.dumps({"version": 1, "key": "key", **facts}))
    Path(store.folder, "sets/asked.json").write_text(json.dumps({"layer": "key.nonce"}))
    os.chmod(store.folder, 0o700)
    assert store.find("asked") is not None
    os.chmod(store.folder, 0o777)
    assert store.find("asked") is None


def test_digests_are_those_of_layers_that_are_here(tmp_path: Path) -> None:
    """Those used last first, and none of a layer that was removed; other machines compute the same from the lines."""
    store = Store(str(tmp_path / "packages"))
    assert store.digests(10) == ()
    lists = [parse_requirements(lines) for lines in (["One", "two>=1"], ["three"])]
    made = [_layer(store, key, ()) for key in ("a", "b")]
    for requirements, layer, used_at in zip(lists, made, (2_000, 1_000), strict=True):
        store.note_set(f"key-{layer.key}", layer, requirements, *digests_of(requirements))
        os.utime(layer.folder, (used_at, used_at))
    first, second = (packages_digest(texts) for texts in (["two>=1", "one"], ["three"]))
    assert store.digests(10) == (first, second)
    assert store.digests(1) == (first,)
    store.prune(most_layers=1)
    assert store.digests(10) == (first,)
    assert digests_of(lists[0]) != digests_of(lists[0], Locked(file="", asked=lists[0], pins=()))
