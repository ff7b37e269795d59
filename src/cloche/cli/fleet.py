"""`cloche fleet`: start, look at and end the fleet of an engine, and take nodes out of it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.escape import escape_line
from cloche.core.limits import format_size

from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import show

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.core.fleet import FleetStatus
    from cloche.core.fleet_settings import FleetSettings
    from cloche.fleets.findings import FleetFindings
    from cloche.fleets.kubernetes.fleet import KubernetesOperator
    from cloche.fleets.ray.fleet import RayFleet

T = TypeVar("T")
ENGINES = ("ray", "kubernetes")
COUNTS = ("leases", "waiting", "granted", "refused")
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
@option("--apply", is_flag=True, help="Kubernetes: apply the manifests, after showing what that changes.")
@sandbox_options("config")
@json_option()
def _up(engine: str, apply: bool, options: SandboxOptions, as_json: bool) -> int:
    """Start the coordinator and node servers.

    It waits until a node is ready. The cluster is that of fleet.address, else of RAY_ADDRESS, else the one on this
    machine. For Kubernetes it prints the manifests of the fleet, and starts it with --apply alone.
    """
    from cloche.core.errors import InvalidRequest

    if apply and engine != "kubernetes":
        raise InvalidRequest(f"--apply: engine {engine} has no manifests")
    if engine == "kubernetes" and not apply:
        return _print_manifests(options)
    if apply:
        _run(engine, options, _apply)
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

    async def watch(made: RayFleet | KubernetesOperator) -> None:
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
@flag("--undo", help="Let a drained node take leases again.")
@_engine_option()
@sandbox_options("config")
def _drain(node: str, timeout: str | None, undo: bool, engine: str, options: SandboxOptions) -> int:
    """Give a node no further lease, and wait until it has none."""
    from cloche.core.errors import ClocheError, InvalidRequest, NotFound
    from cloche.core.limits import parse_duration

    if not node:
        raise InvalidRequest('NODE is empty; "cloche fleet status" lists the nodes\' ids')
    timeout_s = None if timeout is None else parse_duration(timeout, name="--timeout")

    async def drain(made: RayFleet | KubernetesOperator) -> str:
        ids = [row.id for row in await made.nodes() if row.id.startswith(node)]
        if len(ids) != 1:
            raise NotFound(f'{len(ids)} nodes have an id that begins with {node!r}; "cloche fleet status" lists them.')
        try:
            await (made.undrain(ids[0]) if undo else made.drain(ids[0], timeout_s=timeout_s))
        except TimeoutError:
            raise ClocheError(
                f"node {ids[0]} takes no further lease, but has some yet; the same command waits for their end, and "
                "--undo lets it take leases again"
            ) from None
        return ids[0]

    print(f"{_run(engine, options, drain)} {'takes leases again' if undo else 'takes no lease, and has none'}")
    return 0


@fleet.command("down")
@_engine_option()
@sandbox_options("config")
def _down(engine: str, options: SandboxOptions) -> int:
    """End all leases, node servers and the coordinator."""
    _run(engine, options, lambda made: made.down())
    print("the fleet has ended")
    return 0


def _print_manifests(options: SandboxOptions) -> int:
    from cloche.config.settings import load_settings
    from cloche.fleets.kubernetes.applying import printed

    print(printed(load_settings(options).fleet), end="")
    return 0


async def _apply(made: RayFleet | KubernetesOperator) -> None:
    from cloche.fleets.kubernetes.applying import apply, plan
    from cloche.fleets.kubernetes.fleet import KubernetesOperator

    assert isinstance(made, KubernetesOperator)  # noqa: S101 - the caller has checked it
    changes, missing = await plan(made.api, made.settings)
    for change in changes:
        print("\n".join(change.lines()) or f"{change.name}: the same")
    for sentence in missing:
        print(sentence)
    await apply(made.api, changes)


def _shown(
    engine: str,
    options: SandboxOptions,
    work: Callable[[RayFleet | KubernetesOperator], Awaitable[FleetStatus]],
    *,
    as_json: bool,
) -> int:
    print_status(_run(engine, options, work), as_json=as_json)
    return 0


def _run(engine: str, options: SandboxOptions, work: Callable[[RayFleet | KubernetesOperator], Awaitable[T]]) -> T:
    """Do something with the fleet of an engine."""
    import asyncio

    from cloche.config.settings import load_settings

    async def main() -> T:
        made = _made(engine, load_settings(options).fleet)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(main())


def _made(engine: str, settings: FleetSettings) -> RayFleet | KubernetesOperator:
    if engine == "kubernetes":
        from cloche.fleets.kubernetes.fleet import KubernetesOperator

        return KubernetesOperator(settings)
    from cloche.fleets.ray.fleet import RayFleet

    return RayFleet(settings)


def examined(backend: str | None) -> FleetFindings | None:
    """Return what there is of a fleet, None unless a backend of one is named or configured. Raises InvalidRequest."""
    from cloche.config.settings import load_settings
    from cloche.core.errors import InvalidRequest

    settings = load_settings()
    if backend not in (None, *ENGINES):
        raise InvalidRequest(f"--backend {backend}: the machines of {', '.join(ENGINES)} are looked at")
    if backend is None and settings.backend not in ENGINES and not settings.fleet.address:
        return None
    if "kubernetes" in (backend, settings.backend if backend is None else ""):
        from cloche.fleets.kubernetes.examine import examine
    else:
        from cloche.fleets.ray.examine import examine
    return examine(settings.fleet)


def fleet_as_dict(findings: FleetFindings) -> dict[str, object]:
    """Return plain data for JSON."""
    names = ("engine", "address", "version", "python", "problem", "remedy")
    facts = {name: getattr(findings, name) for name in names}
    return {**facts, "status": None if findings.status is None else status_as_dict(findings.status)}


def print_fleet(findings: FleetFindings) -> None:
    """Print what there is of a fleet."""
    where = f"at {findings.address}" if findings.address else "nowhere"
    here = f"here Ray {findings.version or 'is missing'}, Python {findings.python}"
    there = findings.version or "of no known version"
    print()
    print(escape_line(f"fleet on {findings.engine}: cluster {where}; {here if findings.engine == 'ray' else there}"))
    for label, text in (("why it does not work", findings.problem), ("what to do", findings.remedy)):
        if text:
            print(escape_line(f"{label}: {text}"))
    if findings.status is not None:
        print_status(findings.status, as_json=False)


def status_as_dict(status: FleetStatus, *, is_short: bool = False) -> dict[str, Any]:
    """Return plain data, with short ids and sizes in words for a table."""
    shown = 12 if is_short and status.engine == "ray" else None
    rows = [
        {
            "node": node.id[:shown], "state": node.state, "leases": node.leases,
            "cpus": round(node.cpus, 3), "memory": format_size(node.memory_bytes) if is_short else node.memory_bytes,
            "level": node.level, "version": node.version, "address": node.address, "reason": node.reason,
        }
        for node in status.nodes
    ]  # fmt: skip
    return {**{name: getattr(status, name) for name in ("engine", *COUNTS, "version")}, "nodes": rows}


def print_status(status: FleetStatus, *, as_json: bool) -> None:
    """Print a row for each node, and the counts."""
    facts = status_as_dict(status, is_short=not as_json)
    rows = facts["nodes"]
    if as_json:
        print(json.dumps(facts))
        return
    if not rows:
        print(f'there is no fleet on {escape_line(status.engine)}; "cloche fleet up" starts one')
        return
    show(rows, as_json=False, below=("address", "reason"))
    print(", ".join(f"{facts[name]} {name}" for name in COUNTS))
