"""What is lost when a part of a fleet on Ray dies: each function runs in a process on a node (`RayCluster.call`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import cloche
from cloche.core.errors import OutcomeUnknown
from cloche.core.fleet import LeaseSpec
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.ray import cluster
from cloche.fleets.ray.fleet import RayFleet

from .fleet_calls import MIB, command_of, ready, sandbox_host, until, with_fleet
from .namespace_calls import order

SERVER, SUPERVISOR, COORDINATOR = "\0node\0", "ray::NodeSupervisor", "ray::CoordinatorActor"
HOLDS = """
import time
import cloche
with cloche.Sandbox(backend="ray", live=True) as sandbox:
    sandbox.exec(shell="true")
    print("held", flush=True)
    time.sleep(1000)
"""
EATS = "x = []\nwhile True:\n    x.append(bytes(1 << 20))"


def pids_of(mark: str) -> list[int]:
    """Return the processes of this node with a mark in their command."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and mark.encode() in command_of(entry)]


def left_here() -> list[str]:
    """Return the processes and control groups of a fleet on this node."""
    marks = (SERVER, SUPERVISOR, COORDINATOR)
    left = [command_of(str(pid)).decode() for mark in marks for pid in pids_of(mark)]
    namespace = os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
    folders = [folder for folder, _, _ in os.walk("/sys/fs/cgroup")]  # some vanish meanwhile
    return left + [folder for folder in folders if "/cloche-" in folder and f"-{namespace}-" in folder]


def blocks_left() -> list[str]:
    """Return the names of a fleet's actors and placement groups."""
    cluster.join()
    rows = cluster.imported().util.placement_group_table().values()
    groups = [row["name"] for row in rows if row["name"].startswith("cloche-") and row["state"] != "REMOVED"]
    return sorted(cluster.actors()) + groups


def run_once() -> str:
    """Run a program, which takes a block."""
    result = cloche.run("print(7)", backend="ray")
    return result.stdout


def used(idle_s: float, kills: int) -> str:
    """Start a fleet, run a program, and kill the coordinator: not at all, once, or for good (2)."""
    with_fleet(lambda fleet: fleet.up(), FleetSettings(idle_s=idle_s))
    printed = run_once()
    if kills:
        cluster.imported().kill(cluster.actor(cluster.COORDINATOR), no_restart=kills > 1)
    return printed


def scaled(cpus: float) -> dict[str, Any]:
    """Take a lease that no present node can have; return after how many seconds it came, and the count of nodes."""

    async def work(fleet: RayFleet) -> dict[str, Any]:
        began = time.monotonic()
        lease = await fleet.lease(LeaseSpec(cpus=cpus, memory_bytes=256 * MIB))
        seconds, nodes = time.monotonic() - began, await fleet.nodes()
        await fleet.release(lease)
        return {"seconds": seconds, "nodes": len(nodes)}

    answer: dict[str, Any] = with_fleet(work)
    return answer


def client_killed() -> float:
    """Kill a process that holds a live sandbox; return after how many seconds its lease was over."""
    child = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    began = time.monotonic()
    with_fleet(lambda fleet: until(lambda status: status.leases == 0, fleet))
    return time.monotonic() - began


async def _one_on_each(stack: contextlib.AsyncExitStack, count: int) -> dict[str, cloche.AsyncSandbox]:
    """Open a live sandbox on each node; return them by their node's address."""
    opened = [await stack.enter_async_context(cloche.AsyncSandbox(backend="ray", live=True)) for _ in range(count)]
    by_host = {sandbox_host(await sandbox.exec(shell="true")): sandbox for sandbox in opened}
    assert len(by_host) == count, by_host
    return by_host


async def _lives(sandbox: cloche.AsyncSandbox) -> bool:
    try:
        return (await sandbox.exec(shell="echo 7")).stdout == "7\n"
    except OutcomeUnknown:
        return False


def server_killed() -> dict[str, Any]:
    """Kill the node's server of the head while each node has a sandbox."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = await _one_on_each(stack, 3)
            began = time.monotonic()
            (pid,) = pids_of(SERVER)
            os.kill(pid, signal.SIGKILL)
            lives = {host: await _lives(sandbox) for host, sandbox in sandboxes.items()}
        again = await cloche.arun("print(7)", backend="ray")
        return {"lost": [host for host in lives if not lives[host]], "again": again.stdout, "began": began}

    answer = asyncio.run(main())
    with_fleet(lambda fleet: ready(fleet, 3))
    return {"lost": answer["lost"], "again": answer["again"], "seconds": time.monotonic() - answer["began"]}


def supervisor_killed() -> dict[str, Any]:
    """Kill the head's supervisor while each node has a sandbox; wait for the next one."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = await _one_on_each(stack, 3)
            servers, (pid,) = pids_of(SERVER), pids_of(SUPERVISOR)
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            while pids_of(SUPERVISOR) in ([], [pid]):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
            seconds = time.monotonic() - began
            lives = [await _lives(sandbox) for sandbox in sandboxes.values()]
        return {"lives": lives, "same": pids_of(SERVER) == servers, "seconds": seconds}

    return asyncio.run(main())


def guest_out_of_memory() -> dict[str, Any]:
    """Let a guest on each node take more memory than it may, beside a sandbox of another lease."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = await _one_on_each(stack, 3)
            eaters = [cloche.arun(EATS, backend="ray", memory="64m", cpus=0.4, timeout=60) for _ in range(3)]
            results = await asyncio.gather(*eaters)
            lives = [await _lives(sandbox) for sandbox in sandboxes.values()]
        return {"status": sorted({str(result.status) for result in results}), "lives": lives}

    return asyncio.run(main())


def has_coordinator() -> bool:
    """Tell whether the coordinator is on this node."""
    return bool(pids_of(COORDINATOR))


def coordinators_node_killed(number: int, wait_s: float) -> dict[str, Any]:
    """Kill the node of the coordinator while each node has a sandbox; use the others after the time of a lease."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = await _one_on_each(stack, 3)
            await asyncio.to_thread(order, "kill", number)
            await asyncio.sleep(wait_s)
            lives = {host: await _lives(sandbox) for host, sandbox in sandboxes.items()}
        again = await cloche.arun("print(7)", backend="ray")
        return {"lost": [host for host in lives if not lives[host]], "again": again.stdout}

    return asyncio.run(main())


def head_killed(wait_s: float) -> list[str]:
    """Kill Ray's head while each node has a sandbox; return the nodes whose sandboxes are lost after a while."""

    async def main() -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = await _one_on_each(stack, 3)
            await asyncio.to_thread(order, "kill", 1)
            await asyncio.sleep(wait_s)
            lost = [host for host, sandbox in sandboxes.items() if not await _lives(sandbox)]
            print(json.dumps({"answer": lost}), flush=True)
            os._exit(0)  # the end of a process that has joined waits for the head
        return lost

    return asyncio.run(main())
