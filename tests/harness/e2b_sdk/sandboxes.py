"""Sandboxes: create, connect, list, describe, extend, pause, snapshot, fork, end."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from e2b import (
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SandboxQuery,
    SandboxState,
)

from .both import Both
from .rows import shows


@shows("Sandbox.create", "Sandbox.get_info", "Sandbox.kill", "Sandbox.is_running")
async def life(sdk: Both) -> None:
    """A sandbox is described as it was asked for, and gone after its end."""
    before = datetime.now(UTC) - timedelta(seconds=1)
    sandbox = await sdk.create(timeout=100, metadata={"user": "a b", "ö": "1=2&3"}, envs={"GREETING": "héllo"})
    info = await sdk(sandbox.get_info())
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"user": "a b", "ö": "1=2&3"}
    assert info.state == SandboxState.RUNNING
    assert before <= info.started_at <= info.end_at
    assert abs((info.end_at - info.started_at).total_seconds() - 100) < 10
    assert (info.cpu_count >= 1, info.memory_mb >= 1, info.template_id != "") == (True, True, True)
    assert (await sdk(sdk.Sandbox.get_info(sandbox.sandbox_id))).sandbox_id == sandbox.sandbox_id
    assert (await sdk(sandbox.commands.run("echo $GREETING"))).stdout == "héllo\n"
    assert await sdk(sandbox.is_running())
    assert await sdk(sandbox.kill()) is True
    assert await sdk(sandbox.is_running()) is False
    assert await sdk(sdk.Sandbox.kill(sandbox.sandbox_id)) is False
    await sdk.raises(NotFoundException, lambda: sdk.Sandbox.get_info(sandbox.sandbox_id))
    await sdk.raises(SandboxException, lambda: sandbox.commands.run("true"))


@shows("Sandbox.connect")
async def connect(sdk: Both) -> None:
    """Another object for the same sandbox; its life is extended, never shortened; nothing else is connected to."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.files.write("kept", "1"))
    again = await sdk(sdk.Sandbox.connect(sandbox.sandbox_id, timeout=10))
    assert again.sandbox_id == sandbox.sandbox_id
    assert await sdk(again.files.read("kept")) == "1"
    end = (await sdk(again.get_info())).end_at
    assert (end - datetime.now(UTC)).total_seconds() > 200
    await sdk(sandbox.connect(timeout=600))
    assert ((await sdk(sandbox.get_info())).end_at - datetime.now(UTC)).total_seconds() > 500
    await sdk.raises(NotFoundException, lambda: sdk.Sandbox.connect("nosuchsandbox"))


@shows("Sandbox.set_timeout", is_long=True)
async def set_timeout(sdk: Both) -> None:
    """The end is so many seconds from now, later or sooner; then the sandbox is gone by itself."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.set_timeout(20))
    assert ((await sdk(sandbox.get_info())).end_at - datetime.now(UTC)).total_seconds() < 25
    await sdk(sdk.Sandbox.set_timeout(sandbox.sandbox_id, 1))
    ended = await sdk.until(lambda: _not(sdk, sandbox))
    assert ended
    await sdk.raises(NotFoundException, lambda: sandbox.set_timeout(10))


async def _not_async(sandbox: Any) -> bool:
    return not await sandbox.is_running()


def _not(sdk: Both, sandbox: Any) -> Any:
    return _not_async(sandbox) if sdk.is_async else not sandbox.is_running()


@shows("Sandbox.list", "SandboxPaginator.next_items")
async def listing(sdk: Both) -> None:
    """By metadata and state, in pages, the newest first or last; a filter that matches nothing lists nothing."""
    mark = {"mark": f"a&b=c {time.time_ns()}"}
    ids = [(await sdk.create(metadata={**mark, "n": str(number)}, timeout=100)).sandbox_id for number in range(3)]
    query = SandboxQuery(metadata=mark)

    async def listed(**options: Any) -> list[str]:
        return [info.sandbox_id for info in await sdk.pages(sdk.Sandbox.list(**options))]

    assert await listed(query=query) == ids[::-1]
    assert await listed(query=query, limit=1) == ids[::-1]
    assert await listed(query=SandboxQuery(metadata={**mark, "n": "1"})) == [ids[1]]
    assert await listed(query=SandboxQuery(metadata={**mark, "n": "9"})) == []
    assert await listed(query=SandboxQuery(metadata=mark, state=[SandboxState.PAUSED])) == []
    assert set(ids) <= set(await listed(query=SandboxQuery(state=[SandboxState.RUNNING])))
    first = sdk.Sandbox.list(query=query, limit=2)
    assert len(await sdk(first.next_items())) == 2
    assert first.has_next
    rest = sdk.Sandbox.list(query=query, limit=2, next_token=first.next_token)
    assert [info.sandbox_id for info in await sdk(rest.next_items())] == [ids[0]]
    assert not rest.has_next


@shows("Sandbox.pause", "Sandbox.beta_pause")
async def pause(sdk: Both) -> None:
    """Processes and files are there again after a connect; a second pause says that it was paused."""
    sandbox = await sdk.create(timeout=300, metadata={"paused": "yes"})
    handle = await sdk(sandbox.commands.run("sleep 999", background=True, timeout=0))
    await sdk(sandbox.files.write("kept", "1"))
    assert await sdk(sandbox.pause()) is True
    assert await sdk(sandbox.pause()) is False
    assert await sdk(sandbox.is_running()) is False
    assert (await sdk(sandbox.get_info())).state == SandboxState.PAUSED
    query = SandboxQuery(metadata={"paused": "yes"}, state=[SandboxState.PAUSED])
    assert sandbox.sandbox_id in [info.sandbox_id for info in await sdk.pages(sdk.Sandbox.list(query=query))]
    again = await sdk(sandbox.connect(timeout=100))
    assert await sdk(again.files.read("kept")) == "1"
    assert handle.pid in [process.pid for process in await sdk(again.commands.list())]
    assert await sdk(again.commands.kill(handle.pid)) is True
    assert await sdk(sdk.Sandbox.beta_pause(sandbox.sandbox_id)) is True
    await sdk.raises(NotFoundException, lambda: sdk.Sandbox.pause("nosuchsandbox"))


@shows("Sandbox.get_metrics")
async def metrics(sdk: Both) -> None:
    """Processor, memory and disk, at times since the start."""
    sandbox = await sdk.shared()
    rows = await sdk.until(lambda: sandbox.get_metrics())
    assert all(row.cpu_count >= 1 and row.mem_total > 0 and row.disk_total > 0 for row in rows)
    assert all(0 <= row.mem_used <= row.mem_total and 0 <= row.disk_used <= row.disk_total for row in rows)
    assert await sdk(sdk.Sandbox.get_metrics(sandbox.sandbox_id))
    await sdk.raises(NotFoundException, lambda: sdk.Sandbox.get_metrics("nosuchsandbox"))


@shows(
    "Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot", "SnapshotPaginator.next_items",
    differs={},
)  # fmt: skip
async def snapshots(sdk: Both) -> None:
    """A new sandbox has the files of a snapshot; the snapshot outlives its sandbox, and ends when it is deleted."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.files.write("kept", "1"))
    snapshot = await sdk(sandbox.create_snapshot())
    assert await sdk(sandbox.is_running())
    assert [item.snapshot_id for item in await sdk.pages(sandbox.list_snapshots())] == [snapshot.snapshot_id]
    assert snapshot.snapshot_id in [item.snapshot_id for item in await sdk.pages(sdk.Sandbox.list_snapshots())]
    await sdk(sandbox.kill())
    other = await sdk.create(snapshot.snapshot_id, timeout=100)
    assert await sdk(other.files.read("kept")) == "1"
    assert await sdk(sdk.Sandbox.delete_snapshot(snapshot.snapshot_id)) is True
    assert await sdk(sdk.Sandbox.delete_snapshot(snapshot.snapshot_id)) is False
    await sdk.raises((NotFoundException, SandboxException), lambda: sdk.Sandbox.create(snapshot.snapshot_id))


@shows("Sandbox.fork")
async def fork(sdk: Both) -> None:
    """Each fork has the files of then, and its own from there."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.files.write("kept", "1"))
    forks = await sdk(sandbox.fork(count=2, timeout=100))
    for number, result in enumerate(forks):
        twin = getattr(result, "sandbox", result)
        assert twin.sandbox_id != sandbox.sandbox_id
        assert await sdk(twin.files.read("kept")) == "1"
        await sdk(twin.files.write("kept", f"fork {number}"))
        await sdk(twin.kill())
    assert await sdk(sandbox.files.read("kept")) == "1"


@shows("Sandbox.update_network")
async def update_network(sdk: Both) -> None:
    """The rules of the network are replaced as a whole, and shown."""
    without = await sdk.create(timeout=100, allow_internet_access=False)
    assert (await sdk(without.get_info())).allow_internet_access is False
    sandbox = await sdk.create(timeout=100, network={"allow_out": ["acme.example"], "deny_out": ["0.0.0.0/0"]})
    await sdk(sandbox.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]}))
    network = (await sdk(sandbox.get_info())).network
    assert network["allow_out"] == ["example.com"]
    assert network["deny_out"] == ["0.0.0.0/0"]
    await sdk(sdk.Sandbox.update_network(sandbox.sandbox_id, {}))
    assert not (await sdk(sandbox.get_info())).network.get("allow_out")


@shows("Sandbox.get_host", "Sandbox.get_mcp_url")
async def hosts(sdk: Both) -> None:
    """The name of a port; without `--domain` it needs the header instead."""
    sandbox = await sdk.shared()
    assert sandbox.get_host(3000).startswith(f"3000-{sandbox.sandbox_id}.")
    assert sandbox.get_mcp_url().endswith("/mcp")


@shows(refused={"Sandbox.get_mcp_token": "E2B's MCP gateway is not here: `create(mcp=…)` is refused (501)"})
async def mcp_gateway(sdk: Both) -> None:
    """A gateway that is not here is refused at once, and leaves no sandbox."""
    error = await sdk.raises(SandboxException, lambda: sdk.Sandbox.create(mcp={"browserbase": {"apiKey": "x"}}))
    assert "mcp" in str(error).lower()
    sandbox = await sdk.shared()
    await sdk.raises(NotFoundException, lambda: sandbox.get_mcp_token())


@shows("Sandbox.create")
async def wrong_options(sdk: Both) -> None:
    """What the SDK refuses, and what the service refuses, each with words."""
    await sdk.raises(InvalidArgumentException, lambda: sdk.Sandbox.create(lifecycle={"auto_resume": True}))
    error = await sdk.raises((NotFoundException, SandboxException), lambda: sdk.Sandbox.create("no-such-template"))
    assert "no-such-template" in str(error)
