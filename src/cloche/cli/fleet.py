"""`cloche fleet`: start, look at and end the fleet of an engine, and take nodes out of it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from cloche.core.escape import escape_line
from cloche.core.limits import format_size

from .app import root
from .options import argument, json_option, option, sandbox_options
from .output import show

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.core.fleet import FleetStatus
    from cloche.fleets.ray.fleet import RayFleet

T = TypeVar("T")
ENGINES = ("ray",)
EVERY_S = 2.0
CLEAR = "\x1b[H\x1b[2J"

fleet = root.group("fleet", help="Start, look at and end a fleet of machines.")(lambda: None)


def _engine_option() -> Callable[[Callable[..., int]], Callable[..., int]]:
    return option("--engine", type=_choice(), default=ENGINES[0], help="What knows the machines.")


def _choice() -> object:
    import click

    return click.Choice(ENGINES)


@fleet.command("up")
@_engine_option()
@sandbox_options("config")
@json_option()
def _up(engine: str, options: SandboxOptions, as_json: bool) -> int:
    """Start the coordinator and node servers.

    It waits until a node is ready. The cluster is that of fleet.address, else of RAY_ADDRESS, else the one on this
    machine.
    """
    return _shown(engine, options, lambda made: made.up(), as_json=as_json)


@fleet.command("status")
@_engine_option()
@sandbox_options("config")
@json_option()
def _status(engine: str, options: SandboxOptions, as_json: bool) -> int:
    """Show the nodes of a fleet, its leases and its queue."""
    return _shown(engine, options, lambda made: made.status(), as_json=as_json)


@fleet.command("top")
@_engine_option()
@sandbox_options("config")
def _top(engine: str, options: SandboxOptions) -> int:
    """Show the same every 2 seconds, until Ctrl-C."""
    import asyncio

    async def watch(made: RayFleet) -> None:
        while True:
            status = await made.status()
            print(CLEAR + time.strftime("%H:%M:%S"))
            print_status(status, as_json=False)
            await asyncio.sleep(EVERY_S)

    _run(engine, options, watch)
    return 0


@fleet.command("drain")
@argument("node", metavar="NODE", help="The node's id, or the beginning of it.")
@option("--timeout", metavar="TIME", help="How long to wait for its leases to end.")
@_engine_option()
@sandbox_options("config")
def _drain(node: str, timeout: str | None, engine: str, options: SandboxOptions) -> int:
    """Give a node no further lease, and wait until it has none."""
    from cloche.core.errors import InvalidRequest, NotFound
    from cloche.core.limits import parse_duration

    if not node:
        raise InvalidRequest('NODE is empty; "cloche fleet status" lists the nodes\' ids')
    timeout_s = None if timeout is None else parse_duration(timeout, name="--timeout")

    async def drain(made: RayFleet) -> str:
        ids = [row.id for row in await made.nodes() if row.id.startswith(node)]
        if len(ids) != 1:
            raise NotFound(f'{len(ids)} nodes have an id that begins with {node!r}; "cloche fleet status" lists them.')
        await made.drain(ids[0], timeout_s=timeout_s)
        return ids[0]

    print(f"{_run(engine, options, drain)} takes no lease, and has none")
    return 0


@fleet.command("down")
@_engine_option()
@sandbox_options("config")
def _down(engine: str, options: SandboxOptions) -> int:
    """End all leases, node servers and the coordinator."""
    _run(engine, options, lambda made: made.down())
    print("the fleet has ended")
    return 0


def _shown(
    engine: str, options: SandboxOptions, work: Callable[[RayFleet], Awaitable[FleetStatus]], *, as_json: bool
) -> int:
    print_status(_run(engine, options, work), as_json=as_json)
    return 0


def _run(engine: str, options: SandboxOptions, work: Callable[[RayFleet], Awaitable[T]]) -> T:
    """Do something with the fleet of an engine."""
    import asyncio

    from cloche.config.settings import load_settings
    from cloche.fleets.ray.fleet import RayFleet

    assert engine in ENGINES  # noqa: S101 - click has checked it

    async def main() -> T:
        made = RayFleet(load_settings(options).fleet)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(main())


def print_status(status: FleetStatus, *, as_json: bool) -> None:
    """Print a row for each node, and the counts."""
    rows = [
        {
            "node": node.id if as_json else node.id[:12], "state": node.state, "leases": node.leases,
            "cpus": round(node.cpus, 3), "memory": node.memory_bytes if as_json else format_size(node.memory_bytes),
            "level": node.level, "version": node.version, "address": node.address, "reason": node.reason,
        }
        for node in status.nodes
    ]  # fmt: skip
    counts = {
        "engine": status.engine, "leases": status.leases, "waiting": status.waiting, "granted": status.granted,
        "refused": status.refused, "version": status.version,
    }  # fmt: skip
    if as_json:
        print(json.dumps({**counts, "nodes": rows}))
        return
    if not rows:
        print(f'there is no fleet on {escape_line(status.engine)}; "cloche fleet up" starts one')
        return
    show(rows, as_json=False, below=("address", "reason"))
    print(", ".join(f"{count} {name}" for name, count in counts.items() if name not in ("engine", "version")))
