"""Spare sandboxes: a caller gets what it would get without one; nobody else sees them, and none is left."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloche import Sandbox
from cloche.core.errors import InvalidRequest
from cloche.execution.prepare import prepare
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.spares import SparePool
from cloche.keeper import registry
from cloche.keeper.attach import Owner, owned_by, visit
from tests.harness.leaks import Snapshot, wait_for_leftovers

pytestmark = pytest.mark.both_users
PATIENCE_S = 60
OPTIONS: dict[str, Any] = {"memory": "200m", "timeout": 7, "network": "allowlist", "network_allow": ["a.example"]}
INFO = ("name", "keep_s", "lifetime_s", "idle_s", "owner_s", "clients", "is_paused", "paused_s")
TIMES: dict[str, Any] = {"keep": "10m", "lifetime": "1h", "idle": "20m"}
LOOKS = "env | grep -v CLOCHE_OUTPUT; id; cat /etc/passwd; stat -c '%A %u %g %n' /* ~/.* /workspace/*; ulimit -a"
OPENS_UNTIL_WARM = """
import itertools, time, cloche
for number in itertools.count():
    sandbox = cloche.Sandbox(name=f"kept-{number}", keep="5m").__enter__()
    print(sandbox.run("1").meta["start"], flush=True)
    time.sleep(0.1)
"""
HOLDS_ONE = """
import asyncio
from cloche.execution.prepare import prepare
from cloche.execution.spares import SparePool

async def main():
    pool = SparePool(1)
    pool.prepare(prepare())
    while not pool.ready:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a place for names of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "cloche"


async def _until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - what other processes do has no event
            await asyncio.sleep(0.01)


def _listed(names: Path) -> list[registry.Found]:
    """Return the sandboxes of this test that a user can see."""
    return [found for found in registry.found() if found.path == str(names)]


def _locks(names: Path) -> list[str]:
    return sorted(path.stem for path in names.glob("*.lock"))


async def _facts(sandbox: AsyncSandbox, name: str) -> list[str]:
    """Return all that the caller, the keeper, the registry and a program inside know about a sandbox."""
    found = await asyncio.to_thread(registry.find, name)
    info = await asyncio.to_thread(visit, found, "info")
    assert info["age_s"] < PATIENCE_S  # since it has the name
    seen = await sandbox.exec(shell=LOOKS)
    own = (*(os.path.basename(layer) for layer in sandbox.policy.layers), name)
    parts = [
        *(f"{key}: {value}" for key, value in found.entry.items() if key != "created"),
        *(f"{key}: {info[key]}" for key in INFO), *map(str, (sandbox.network.rules, sandbox.policy, sandbox.limits)),
        str(seen.enforcement.as_dict()), *seen.stdout.splitlines(),
    ]  # fmt: skip
    return [functools.reduce(lambda text, word: text.replace(word, "OWN"), own, part) for part in parts]


# An ordinary user may have no range of ids.
@pytest.mark.parametrize("own", [{}, *([{"users": True, "account": "user"}] if os.geteuid() == 0 else [])])
def test_a_spare_and_a_new_one_are_the_same(own: dict[str, Any], names: Path) -> None:
    """Rules, limits, environment, times, owner and description are equal; only one of them was there before."""

    async def main() -> None:
        pool = SparePool(1)
        try:
            pool.prepare(prepare(**OPTIONS, **own))
            await _until(lambda: pool.ready)
            assert _listed(names) == []  # nobody sees it
            (spare,) = _locks(names)
            with pytest.raises(InvalidRequest, match="not valid"):
                AsyncSandbox(name=spare)
            pid = visit(registry.find(spare), "info")["pid"]
            owner = Owner(about={"service": "s"}, absent_s=600.0)
            with owned_by(owner), pool.used():
                warm = await AsyncSandbox(
                    name="name-of-spare", **TIMES, **OPTIONS, **own, files={"a": b"text"}
                ).__aenter__()
            with owned_by(owner):
                cold = await AsyncSandbox(
                    name="name-of-new", **TIMES, **OPTIONS, **own, files={"a": b"text"}
                ).__aenter__()
            assert visit(registry.find("name-of-spare"), "info")["pid"] == pid
            assert await _facts(warm, "name-of-spare") == await _facts(cold, "name-of-new")
            for sandbox in (warm, cold):
                await sandbox.__aexit__(None, None, None)
            assert [found.name for found in _listed(names)] == [
                "name-of-new",
                "name-of-spare",
            ]  # which outlive their clients
        finally:
            await pool.close()
            for found in _listed(names):
                visit(found, "end", timeout_s=PATIENCE_S)
        await _until(lambda: not _locks(names))

    asyncio.run(main())


def test_a_spare_is_given_once_alive_and_under_a_free_name(names: Path) -> None:
    """One whose keeper was killed is not given; a used name is refused, and costs no spare."""

    async def main() -> None:
        pool = SparePool(2)
        try:
            pool.prepare(prepare())
            await _until(lambda: pool.ready == 2)
            first, second = (visit(registry.find(name), "info")["pid"] for name in _locks(names))
            os.kill(first, signal.SIGKILL)
            with pool.used():
                async with AsyncSandbox(name="x") as sandbox:
                    assert visit(registry.find("x"), "info")["pid"] == second
                    with pytest.raises(InvalidRequest, match="'x' already"):
                        await AsyncSandbox(name="x").__aenter__()
                    assert (await sandbox.exec(["true"])).ok
            await _until(lambda: pool.ready == 2)
            assert _listed(names) == []  # without `keep` it has ended with its block
        finally:
            await pool.close()
        assert len(_locks(names)) == 1  # of the killed one, whose name is free
        assert not any(registry.is_taken(name, str(names)) for name in _locks(names))

    asyncio.run(main())


def test_spares_end_with_the_process_that_opened_them(names: Path) -> None:
    """Even if it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDS_ONE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (spare,) = _locks(names)
        process.kill()
    until = time.monotonic() + PATIENCE_S
    while registry.is_taken(spare, str(names)):
        assert time.monotonic() < until, "the spare lives on"
        time.sleep(0.01)
    assert _locks(names) == []


def test_a_sandbox_that_started_warm_outlives_the_process_that_opened_it(names: Path) -> None:
    """Its helper is a fork of that process's fork server, which ends with it."""
    before = Snapshot.take()
    with subprocess.Popen([sys.executable, "-c", OPENS_UNTIL_WARM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        starts = []
        while "warm" not in starts:
            starts.append(process.stdout.readline().strip())
            assert starts[-1]
        process.kill()
    assert starts[0] == "cold"
    with Sandbox.attach(f"kept-{starts.index('warm')}") as sandbox:
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
    for found in _listed(names):
        visit(found, "end", timeout_s=PATIENCE_S)
    left = wait_for_leftovers(before, patience_s=PATIENCE_S)
    assert not left, "\n".join(left)
