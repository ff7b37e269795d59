"""What tests do beside the API server of a Kubernetes cluster: each function runs there (`KubernetesCluster.call`)."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Coroutine
from typing import Any

import cloche
from cloche.backends.cloche.links import link_to
from cloche.core.errors import OutcomeUnknown
from cloche.core.fleet import LeaseSpec
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.coordinator import Coordinator
from cloche.fleets.kubernetes.fleet import connect

from .kubernetes_cluster import PROGRAMS
from .namespace_calls import order

MIB = 1 << 20
SPEC = LeaseSpec(cpus=0.05, memory_bytes=32 * MIB, wait_s=120)
SMALL: dict[str, Any] = {"backend": "kubernetes", "cpus": 0.05, "memory": "32m"}
PATIENCE_S = 120.0


def with_fleet(work: Callable[[Coordinator], Coroutine[Any, Any, Any]]) -> Any:
    """Do something with a coordinator, and return the answer; what it claimed is given back."""

    async def main() -> Any:
        fleet = await connect(FleetSettings(), link_to)
        await fleet.start()
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


def used() -> dict[str, Any]:
    """Run a program, and use all that a live sandbox has."""
    seen = cloche.run("print(6 * 7)", **SMALL)
    with cloche.Sandbox(live=True, **SMALL) as sandbox:
        sandbox.write_file("new.txt", b"made outside")
        shown = sandbox.exec(["cat", "new.txt"]).stdout
        with sandbox.session() as session:
            session.run("x = 6")
            cell = session.run("x * 7").value
        with sandbox.terminal(["bash", "--norc"], rows=30, columns=100) as terminal:
            terminal.write("stty size; exit\n")
            size = b"30 100" in terminal.stdout.read_all(10_000)
    return {
        "stdout": seen.stdout, "engine": seen.meta["remote"]["provider"], "level": str(seen.enforcement.level),
        "source": seen.enforcement.level_source, "file": shown, "cell": cell, "terminal": size,
    }  # fmt: skip


def claims(count: int, coordinators: int) -> dict[str, Any]:
    """Claim pods at once, by several coordinators; return how many and after how long."""

    async def main() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            fleets = [await connect(FleetSettings(), link_to) for _ in range(coordinators)]
            for fleet in fleets:
                await fleet.start()
                stack.push_async_callback(fleet.close)
            began = time.monotonic()
            asked = [fleets[number % coordinators].lease(SPEC) for number in range(count)]
            leases = await asyncio.gather(*asked)
            return {"pods": len({lease.node for lease in leases}), "seconds": time.monotonic() - began}

    return asyncio.run(main())


def machine_of(result: Any) -> int:
    """Return the number of the node that a result's pod is on."""
    return int(kubectl("get", "pod", result.meta["remote"]["node"], "--output=jsonpath={.spec.nodeName}")[-1])


def lost(how: str, *more: Any) -> dict[str, Any]:
    """Lose a node, by a method of the cluster, while a sandbox lives there; say when and how its holder is told."""

    async def main() -> dict[str, Any]:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            number = machine_of(await sandbox.exec(shell="true"))
            running = asyncio.create_task(sandbox.exec(shell="sleep 1000", timeout=2000))
            await asyncio.sleep(1)
            lost_at = time.monotonic()
            ordered = asyncio.create_task(asyncio.to_thread(order, how, number, *more))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await running
            except OutcomeUnknown as error:
                seconds = time.monotonic() - lost_at
                kind, text = type(error).__name__, str(error)
            else:
                raise AssertionError("it ended")
            await ordered
        again = await cloche.arun("print(7)", **SMALL)
        return {
            "number": number, "seconds": seconds, "kind": kind, "text": text, "again": again.stdout,
            "elsewhere": machine_of(again) != number,
        }  # fmt: skip

    return asyncio.run(main())


def without_api_server(seconds: float) -> dict[str, Any]:
    """Use a sandbox while the API server is away, and ask for another one."""

    async def main() -> dict[str, Any]:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            await sandbox.exec(shell="true")
            await asyncio.to_thread(order, "stop_apiserver")
            began = time.monotonic()
            asked = asyncio.create_task(cloche.arun("print(8)", **SMALL))
            answers = 0
            while time.monotonic() - began < seconds:
                answers += (await sandbox.exec(shell="echo 7")).stdout == "7\n"
                await asyncio.sleep(1)
            await asyncio.to_thread(order, "start_apiserver")
            async with asyncio.timeout(PATIENCE_S):
                later = (await asked).stdout
            return {"answers": answers, "after": (await sandbox.exec(shell="echo 9")).stdout, "later": later}

    return asyncio.run(main())


def kubectl(*words: str) -> str:
    """Ask the API server as this caller."""
    command = [str(PROGRAMS / "kubectl"), "--namespace=cloche", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
