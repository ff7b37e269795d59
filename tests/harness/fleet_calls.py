"""What tests do on a node of a Ray cluster: each function runs in a process there (`RayCluster.call`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import cloche
from cloche.core.errors import BackendUnavailable, OutcomeUnknown
from cloche.core.fleet import LeaseSpec
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.ray import cluster
from cloche.fleets.ray.fleet import RayFleet

from . import batches
from .fleet_claims import World, checked
from .namespace_calls import order

MIB, HEAD, LEASING = 1 << 20, "10.77.0.1", 16
WHOLE = LeaseSpec(cpus=1.0, memory_bytes=256 * MIB)  # all processors of a node's share
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
PATIENCE_S = 60.0
SERVER = b"\0node\0"  # in the command of a node's server
# Processes whose memory must not grow with the number of leases, by a part of their command.
KEEPERS = {"coordinator": b"ray::Coord", "gcs": b"gcs_server", "raylet": b"/raylet/raylet", "server": SERVER}
# Prints how many bytes each port answers; `connect` alone would succeed at the proxy.
ASKS = f"""
import socket
for host, port in TARGETS:
    count = 0
    try:
        with socket.create_connection((host, port), 3) as connection:
            connection.settimeout(2)
            connection.sendall({PREFACE!r})
            count = len(connection.recv(100))
    except OSError:
        pass
    print(count)
"""


def with_fleet(work: Callable[[RayFleet], Coroutine[Any, Any, Any]], settings: FleetSettings | None = None) -> Any:
    """Do something with the fleet, and return its answer."""

    async def main() -> Any:
        fleet = RayFleet(settings)
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


def up(count: int, settings: Mapping[str, Any] | None = None) -> float:
    """Start the fleet with such settings, and return after how many seconds so many nodes were ready."""
    began = time.monotonic()

    async def work(fleet: RayFleet) -> None:
        await fleet.up()
        await ready(fleet, count)

    with_fleet(work, FleetSettings(**settings or {}))
    return time.monotonic() - began


async def ready(fleet: RayFleet, count: int) -> list[str]:
    """Wait until exactly so many nodes are ready, and return their ids."""
    async with asyncio.timeout(PATIENCE_S):
        while len(nodes := [node.id for node in await fleet.nodes() if node.state == "ready"]) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return nodes


def runs() -> dict[str, Any]:
    """Run programs, and look at where they ran and what they saw."""
    code = "import os\nprint(sorted(name for name in os.environ if name.startswith('RAY_')))\nos.kill(os.getpid(), 2)"
    seen = cloche.run(code, backend="ray")
    with cloche.Sandbox(backend="ray", live=True) as sandbox:
        live = sandbox.exec(shell="echo $((6 * 7))")
    remote = seen.meta["remote"]
    return {
        "level": str(seen.enforcement.level), "source": seen.enforcement.level_source, "node": remote["node"],
        "engine": remote["provider"], "variables": seen.stdout.strip(), "status": str(seen.status),
        "live": live.stdout, "score": server_score(),
    }  # fmt: skip


def hosts(count: int, memory: str = "64m") -> list[str]:
    """Return the addresses of the nodes that so many sandboxes at once are on."""

    async def main() -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            options: Any = {"backend": "ray", "live": True, "cpus": 0.2, "memory": memory}
            opened = [await stack.enter_async_context(cloche.AsyncSandbox(**options)) for _ in range(count)]
            return sorted({sandbox_host(await sandbox.exec(shell="true")) for sandbox in opened})

    return asyncio.run(main())


def reasons(count: int) -> None:
    """Wait until so many nodes say why they take no lease."""
    with_fleet(lambda fleet: until(lambda status: sum(bool(node.reason) for node in status.nodes) == count, fleet))


def server_score() -> list[str]:
    """Return the OOM scores of the servers on this node."""
    return [Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in _pids(SERVER)]


def kill_server() -> None:
    """Kill the server of this node."""
    for pid in _pids(SERVER):
        os.kill(pid, signal.SIGKILL)


def _pids(mark: bytes) -> list[int]:
    """Return the processes of this node whose command has a mark."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and mark in command_of(entry)]


def command_of(pid: str) -> bytes:
    """Return the command of a process, empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def until(condition: Callable[[Any], bool], fleet: RayFleet) -> None:
    """Wait until a condition holds of the fleet's state."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await fleet.status()):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)


def claims() -> dict[str, str]:
    """Try what every fleet does, on three nodes."""

    async def lose(node: str) -> None:
        await asyncio.to_thread(order, "kill_server", int(host_of(node).rpartition(".")[2]))

    answers: dict[str, str] = with_fleet(lambda fleet: checked(World(fleet, fleet, 3, lose)))
    return answers


def unmet() -> dict[str, Any]:
    """Ask for what no node can ever have."""
    began = time.monotonic()
    try:
        cloche.run("print(1)", backend="ray", cpus=50)
    except BackendUnavailable as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    raise AssertionError("it was granted")


def coordinator_killed() -> dict[str, Any]:
    """Kill the coordinator while a lease is held, and renew it."""

    async def work(fleet: RayFleet) -> dict[str, Any]:
        lease = await fleet.lease(WHOLE)
        killed_at = time.monotonic()
        await kill_coordinator()
        renewed = await fleet.renew(lease)
        seconds = time.monotonic() - killed_at
        await ready(fleet, 3)
        leases = (await fleet.status()).leases
        await fleet.release(renewed)
        return {"same": renewed.id == lease.id, "seconds": seconds, "leases": leases}

    answer: dict[str, Any] = with_fleet(work)
    return answer


async def kill_coordinator() -> None:
    """Kill the coordinator's process, which Ray then starts again, and wait until it is gone."""
    ray, handle = cluster.imported(), cluster.actor(cluster.COORDINATOR)
    ray.kill(handle, no_restart=False)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            await cluster.answer(handle.hello.remote())


def bytes_from_ports() -> dict[str, list[int]]:
    """Return how many bytes Ray's ports answer: to this process, and to a guest with the widest network."""
    ray = cluster.imported()
    cluster.join()
    targets = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()]
    targets += [(host, port) for host, _ in targets for port in (6379, 8265, 52365)]
    code = f"TARGETS = {targets!r}\n{ASKS}"
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    hosts = sorted({f"{host}:{port}" for host, port in targets})
    result = cloche.run(code, backend="ray", network="open", network_allow=hosts, timeout=60)
    assert result.ok, result
    return {"outside": [*map(int, outside.split())], "inside": [*map(int, result.stdout.split())]}


def lost(how: str) -> dict[str, Any]:
    """Lose a node, by `kill` or `cut`, while a sandbox lives there; say when its holder and the fleet notice."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            opened = [cloche.AsyncSandbox(backend="ray", live=True) for _ in range(3)]
            sandboxes = [await stack.enter_async_context(sandbox) for sandbox in opened]
            hosts = [sandbox_host(await sandbox.exec(shell="true")) for sandbox in sandboxes]
            host = next(host for host in hosts if host != HEAD)
            sandbox = sandboxes[hosts.index(host)]
            running = asyncio.create_task(sandbox.exec(shell="sleep 1000", timeout=2000))
            await asyncio.sleep(1)
            lost_at = time.monotonic()
            await asyncio.to_thread(order, how, int(host.rpartition(".")[2]))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await running
            except OutcomeUnknown as error:
                seconds = time.monotonic() - lost_at
                kind, text = type(error).__name__, str(error)
            else:
                raise AssertionError("it ended")
            hosts = sorted(set(hosts))
        began = time.monotonic()
        again = await cloche.arun("print(7)", backend="ray")
        return {
            "hosts": hosts, "seconds": seconds, "kind": kind, "text": text, "again": again.stdout,
            "again_s": time.monotonic() - began,
        }  # fmt: skip

    return asyncio.run(main())


def sandbox_host(result: Any) -> str:
    """Return the address of the node where something ran."""
    return host_of(result.meta["remote"]["node"])


def host_of(node: str) -> str:
    """Return the address of a node."""
    return next(str(row["NodeManagerAddress"]) for row in cluster.imported().nodes() if row["NodeID"] == node)


def ready_nodes(count: int) -> int:
    """Wait until exactly so many nodes are ready."""
    return len(with_fleet(lambda fleet: ready(fleet, count)))


def mixed(count: int) -> dict[str, Any]:
    """Run programs of several kinds, eight at once, and return how many had the outcome that they should have."""
    kinds = [
        ("print({n})", "ok"),
        ("1/0", "error"),
        ("import os; os.abort()", "signaled"),
        ("while 1: pass", "timeout"),
    ]

    async def one(number: int, places: asyncio.Semaphore) -> bool:
        code, status = kinds[number % len(kinds) if number % 10 == 0 else number % 3]
        async with places:
            result = await cloche.arun(code.format(n=number), backend="ray", cpus=0.2, timeout=2)
        return result.status == status and (status != "ok" or result.stdout == f"{number}\n")

    async def main() -> list[bool]:
        places = asyncio.Semaphore(8)
        return await asyncio.gather(*(one(number, places) for number in range(count)))

    right = sum(asyncio.run(main()))
    return {"right": right, "left": with_fleet(_left)}


def data(tasks: int) -> list[list[str]]:
    """Run the example of Ray Data from so many tasks, each of which waits until all of them hold a CPU."""
    import ray.data  # not in the environment of other tests

    from examples import ray_data

    cluster.join()
    ray.cloudpickle.register_pickle_by_value(ray_data)  # as the program's own module is

    class Meeting:
        def __init__(self) -> None:
            self.left, self.all_there = tasks, asyncio.Event()

        async def join(self) -> None:
            self.left -= 1
            if not self.left:
                self.all_there.set()
            await self.all_there.wait()

    meeting = ray.remote(num_cpus=0)(Meeting).remote()

    def together(batch: dict[str, Any]) -> dict[str, Any]:
        ray.get(meeting.join.remote(), timeout=PATIENCE_S)
        return ray_data.run_code(batch)

    ray.data.DataContext.get_current().enable_progress_bars = False
    programs = ray.data.from_items(
        [{"code": f"print({number} ** 2)"} for number in range(2 * tasks)], override_num_blocks=tasks
    )
    rows = programs.map_batches(together, batch_size=2, concurrency=tasks).take_all()
    return sorted(([row["code"], row["stdout"], row["status"]] for row in rows), key=lambda row: int(row[1]))


def batch(count: int, kills: int) -> dict[str, Any]:
    """Run programs that may run twice, while the server of one node after the other is killed."""
    kill_at = {count * (kill + 1) // (kills + 1): kill + 1 for kill in range(kills)}

    async def main() -> dict[str, Any]:
        number, wrong, killing = 0, list[str](), list[asyncio.Task[None]]()
        results = cloche.amap(
            batches.programs(count), backend="ray", cpus=0.3, concurrency=6, retries=8, idempotent=True
        )
        async for result in results:
            if batches.is_wrong(number, str(result.status), result.stdout):
                wrong.append(f"{number}: {result}")
            if number in kill_at:
                killing.append(asyncio.create_task(asyncio.to_thread(order, "kill_server", kill_at[number])))
            number += 1
        await asyncio.gather(*killing)
        return {"results": number, "wrong": wrong, "kills": len(killing)}

    return asyncio.run(main()) | {"left": with_fleet(_left)}


def memory_over_leases(*counts: int) -> list[dict[str, float]]:
    """Take and release so many leases, one number after the other; return what the coordinator and Ray's head have.

    In MiB: the proportional set size of each process of `KEEPERS` on this node, after each number.
    """

    async def take(fleet: RayFleet, count: int) -> None:
        for _ in range(count):
            await fleet.release(await fleet.lease(LeaseSpec(cpus=0.1, memory_bytes=64 * MIB)))

    async def work(fleet: RayFleet) -> list[dict[str, float]]:
        rows = []
        for count in counts:
            await asyncio.gather(*(take(fleet, count // LEASING) for _ in range(LEASING)))
            rows.append({name: sum(map(_pss_mib, _pids(mark))) for name, mark in KEEPERS.items()})
        return rows

    rows: list[dict[str, float]] = with_fleet(work)
    return rows


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has ended")


async def _left(fleet: RayFleet) -> int:
    await until(lambda status: status.leases == 0, fleet)
    return (await fleet.status()).leases


def down() -> list[str]:
    """End the fleet, and return the processes of it that are left on this node."""
    with_fleet(lambda fleet: fleet.down())
    ends = time.monotonic() + PATIENCE_S
    marks = (KEEPERS["coordinator"], b"ray::NodeSupervisor", SERVER)
    while True:
        left = [command_of(entry).decode() for entry in os.listdir("/proc") if entry.isdigit()]
        left = [command for command in left if any(mark.decode() in command for mark in marks)]
        if not left or time.monotonic() > ends:
            return left
        time.sleep(0.1)
