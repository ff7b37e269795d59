"""`cloche fleet`: start, look at and end the fleet of an engine, and take nodes out of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.escape import escape_line
from cloche.core.limits import format_size

from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import say, show

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
UNBOUNDED_S = 86_400.0  # of a command without a time-out, as a job
CLEAR = "\x1b[H\x1b[2J"

_address = option(
    "--address", metavar="ADDRESS",
    help="The cluster's; from outside of it, its dashboard's: http://HEAD:8265; for Kubernetes a context of the "
    "kubeconfig. Default: fleet.address.",
)  # fmt: skip
_pip = option(
    "--runtime-env-pip", "pip", metavar="REQUIREMENT", multiple=True,
    help="From outside: let Ray install this for the job. Repeatable.",
)  # fmt: skip


fleet = root.group("fleet", help="Start, look at and end a fleet of machines.")(lambda: None)


def _engine_option() -> Callable[[Callable[..., int]], Callable[..., int]]:
    return option(
        "--engine", type=_choice(), help="What knows the machines. Default: the backend if it is one, or ray."
    )


def _choice() -> object:
    import click

    return click.Choice(ENGINES)


@fleet.command("up")
@_engine_option()
@option("--apply", is_flag=True, help="Kubernetes: apply the manifests, after showing what that changes.")
@_address
@_pip
@option(
    "--service-port",
    metavar="N",
    type=int,
    default=0,
    help="The port of the service for callers outside; 0: a free one.",
)
@option("--key-sha256", metavar="HEX", help="Serve the fleet outside of the cluster, to the key with this SHA-256.")
@option("--key-name", metavar="NAME", default="outside", help="The name of that key's owner.")
@sandbox_options("config")
@json_option()
def _up(
    engine: str | None,
    apply: bool,
    address: str | None,
    pip: tuple[str, ...],
    service_port: int,
    key_sha256: str | None,
    key_name: str,
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Start the coordinator and node servers.

    It waits until a node is ready. The cluster is that of --address or fleet.address, else of RAY_ADDRESS, else the one
    on this machine. With the address of a dashboard, from outside of the cluster, it starts a service there as well,
    and prints the account with which backend cloche runs code there. For Kubernetes it prints the manifests of the
    fleet, and starts it with --apply alone.
    """
    from cloche.core.errors import InvalidRequest

    engine, settings = _settings(engine, options, address)
    if apply and engine != "kubernetes":
        raise InvalidRequest(f"--apply: engine {engine} has no manifests")
    if key_sha256 is not None and engine != "ray":
        raise InvalidRequest(f"--key-sha256: engine {engine} has no service for callers outside")
    if engine == "kubernetes" and not apply:
        return _print_manifests(settings, as_json=as_json)
    if apply:
        _run(engine, settings, _apply)
    if _is_outside(engine, settings):
        return _up_outside(settings, pip, service_port, as_json=as_json)

    async def up(made: RayFleet | KubernetesOperator) -> dict[str, Any]:
        document = status_as_dict(await made.up())
        if key_sha256 is None:
            return document
        from cloche.fleets.ray.service import serve

        from ._fleet_jobs import variables_of

        variables = variables_of(settings)
        served = await serve(variables, name=key_name, sha256=key_sha256, port=service_port)
        return {**document, "service": served}

    document = _run(engine, settings, up)
    print_status(document, as_json=as_json)
    if not as_json and (service := document.get("service")):
        print(f"served at {service['address']}, with the certificate {service['certificate']}")
    return 0


def _up_outside(settings: FleetSettings, pip: tuple[str, ...], port: int, *, as_json: bool) -> int:
    import contextlib
    import sys

    from ._fleet_jobs import new_key, print_account, run_in_cluster, service_of

    key, words = new_key()
    document = run_in_cluster(settings, ["up", "--service-port", str(port), *words], pip=pip)
    service = service_of(document)
    if as_json:
        document["service"]["key"] = key
        print(json.dumps(document))
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # what is printed is the account alone
        print_status(document, as_json=False)
    print_account(service, key)
    return 0


@fleet.command("status")
@_engine_option()
@_address
@_pip
@sandbox_options("config")
@json_option()
def _status(
    engine: str | None, address: str | None, pip: tuple[str, ...], options: SandboxOptions, as_json: bool
) -> int:
    """Show the nodes of a fleet, its leases and its queue."""

    async def status(made: RayFleet | KubernetesOperator) -> dict[str, Any]:
        return status_as_dict(await made.status())

    document = _here_or_there(*_settings(engine, options, address), status, ["status"], pip)
    print_status(document, as_json=as_json)
    return 0


@fleet.command("top")
@_engine_option()
@_address
@sandbox_options("config")
def _top(engine: str | None, address: str | None, options: SandboxOptions) -> int:
    """Show the same every 2 seconds, until Ctrl-C."""
    import asyncio

    from cloche.core.errors import InvalidRequest

    engine, settings = _settings(engine, options, address)
    if _is_outside(engine, settings):
        raise InvalidRequest('from outside of the cluster each look is a job there; use "cloche fleet status"')

    async def watch(made: RayFleet | KubernetesOperator) -> None:
        while True:
            status = await made.status()
            print((CLEAR if sys.stdout.isatty() else "") + time.strftime("%H:%M:%S"))
            print_status(status_as_dict(status), as_json=False)
            sys.stdout.flush()  # each look is shown at once, in a pipe, too
            await asyncio.sleep(EVERY_S)

    _run(engine, settings, watch)
    return 0


@fleet.command("drain")
@argument("node", metavar="NODE", help="The node's id, or the beginning of it.")
@option("--timeout", metavar="TIME", help="How long to wait for its leases to end.")
@flag("--undo", help="Let a drained node take leases again.")
@_engine_option()
@_address
@_pip
@sandbox_options("config")
@json_option()
def _drain(
    node: str,
    timeout: str | None,
    undo: bool,
    engine: str | None,
    address: str | None,
    pip: tuple[str, ...],
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Give a node no further lease, and wait until it has none."""
    from cloche.core.errors import ClocheError, InvalidRequest, NotFound
    from cloche.core.limits import parse_duration

    if not node:
        raise InvalidRequest('NODE is empty; "cloche fleet status" lists the nodes\' ids')
    timeout_s = None if timeout is None else parse_duration(timeout, name="--timeout")

    async def drain(made: RayFleet | KubernetesOperator) -> dict[str, Any]:
        rows = [row for row in await made.nodes() if row.id.startswith(node)]
        if len(rows) != 1:
            raise NotFound(f'{len(rows)} nodes have an id that begins with {node!r}; "cloche fleet status" lists them.')
        ids, leases = [rows[0].id], rows[0].leases
        if leases and not undo:
            say(f"node {ids[0]} takes no further lease, and has {leases} yet: their end is waited for")
        try:
            await (made.undrain(ids[0]) if undo else made.drain(ids[0], timeout_s=timeout_s))
        except TimeoutError:
            raise ClocheError(
                f"node {ids[0]} takes no further lease, but has some yet; the same command waits for their end, and "
                "--undo lets it take leases again"
            ) from None
        return {"node": ids[0]}

    words = ["drain", node, *(("--undo",) if undo else ()), *(() if timeout is None else ("--timeout", timeout))]
    done = _here_or_there(*_settings(engine, options, address), drain, words, pip, more_s=timeout_s)
    text = f"{escape_line(str(done.get('node')))} {'takes leases again' if undo else 'takes no lease, and has none'}"
    print(json.dumps(done) if as_json else text)
    return 0


@fleet.command("down")
@_engine_option()
@_address
@_pip
@sandbox_options("config")
@json_option()
def _down(engine: str | None, address: str | None, pip: tuple[str, ...], options: SandboxOptions, as_json: bool) -> int:
    """End all leases, node servers, coordinator and service."""

    async def down(made: RayFleet | KubernetesOperator) -> dict[str, Any]:
        await made.down()
        return {"ended": True}

    done = _here_or_there(*_settings(engine, options, address), down, ["down"], pip)
    print(json.dumps(done) if as_json else "the fleet has ended")
    return 0


def _print_manifests(settings: FleetSettings, *, as_json: bool) -> int:
    from cloche.fleets.kubernetes.applying import printed

    print(printed(settings, as_json=as_json), end="")
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


def _settings(engine: str | None, options: SandboxOptions, address: str | None) -> tuple[str, FleetSettings]:
    """Return the engine and the fleet's settings. RAY_ADDRESS may be a dashboard's, as for Ray's own commands."""
    from cloche.config.settings import load_settings
    from cloche.core.record import replace
    from cloche.fleets.ray.jobs import is_jobs_address

    loaded = load_settings(options)
    settings, engine = loaded.fleet, engine or (loaded.backend if loaded.backend in ENGINES else ENGINES[0])
    of_ray = os.environ.get("RAY_ADDRESS", "") if engine == "ray" else ""
    address = address or settings.address or (of_ray if is_jobs_address(of_ray) else "")
    return engine, replace(settings, address=address)


def _is_outside(engine: str, settings: FleetSettings | FleetFindings) -> bool:
    from cloche.fleets.ray.jobs import is_jobs_address

    return engine == "ray" and is_jobs_address(settings.address)


def _here_or_there(
    engine: str,
    settings: FleetSettings,
    work: Callable[[RayFleet | KubernetesOperator], Awaitable[dict[str, Any]]],
    words: list[str],
    pip: tuple[str, ...],
    *,
    more_s: float | None = 0.0,
) -> dict[str, Any]:
    """Do something with the fleet of an engine, or have it done by a job of the cluster."""
    if not _is_outside(engine, settings):
        return _run(engine, settings, work)
    from ._fleet_jobs import DONE_S, run_in_cluster

    return run_in_cluster(settings, words, pip=pip, timeout_s=DONE_S + (UNBOUNDED_S if more_s is None else more_s))


def _run(engine: str, settings: FleetSettings, work: Callable[[RayFleet | KubernetesOperator], Awaitable[T]]) -> T:
    """Do something with the fleet of an engine."""
    import asyncio

    async def main() -> T:
        made = _made(engine, settings)
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
    from cloche.core.errors import ClocheError, InvalidRequest

    if backend not in (None, *ENGINES):
        raise InvalidRequest(f"--backend {backend}: the machines of {', '.join(ENGINES)} are looked at")
    try:
        settings = load_settings()
    except ClocheError:
        if backend is not None:
            raise
        return None  # the host is measured, whatever the configuration says
    if backend is None and settings.backend not in ENGINES and not settings.fleet.address:
        return None
    if "kubernetes" in (backend, settings.backend if backend is None else ""):
        from cloche.fleets.kubernetes.examine import examine
    else:
        from cloche.fleets.ray.examine import examine
    return examine(settings.fleet)


def fleet_as_dict(findings: FleetFindings) -> dict[str, object]:
    """Return plain data for JSON."""
    names = ("engine", "address", "version", "python", "problem", "remedy", "network_policy")
    facts = {name: getattr(findings, name) for name in names}
    return {**facts, "status": None if findings.status is None else status_as_dict(findings.status)}


def print_fleet(findings: FleetFindings) -> None:
    """Print what there is of a fleet."""
    where = f"at {findings.address}" if findings.address else "unknown"
    here = f"here Ray {findings.version or 'is missing'}, Python {findings.python}"
    there = f"{'Ray ' if findings.engine == 'ray' else ''}{findings.version}" if findings.version else "version unknown"
    print()
    is_here = findings.engine == "ray" and not _is_outside(findings.engine, findings)
    print(escape_line(f"fleet on {findings.engine}: cluster {where}; {here if is_here else there}"))
    shown = ("why it does not work", findings.problem), ("what to do", findings.remedy)
    for label, text in (*shown, ("NetworkPolicy", findings.network_policy)):
        if text:
            print(escape_line(f"{label}: {text}"))
    if findings.status is not None:
        print_status(status_as_dict(findings.status), as_json=False)


def status_as_dict(status: FleetStatus) -> dict[str, Any]:
    """Return plain data for JSON."""
    rows = [
        {
            "node": node.id, "state": node.state, "leases": node.leases, "cpus": round(node.cpus, 3),
            "memory": node.memory_bytes, "level": node.level, "version": node.version, "address": node.address,
            "reason": node.reason,
        }
        for node in status.nodes
    ]  # fmt: skip
    return {**{name: getattr(status, name) for name in ("engine", *COUNTS, "version")}, "nodes": rows}


def print_status(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a row for each node, and the counts."""
    if as_json:
        print(json.dumps(facts))
        return
    shown = 12 if facts["engine"] == "ray" else None
    rows = [{**row, "node": row["node"][:shown], "memory": format_size(row["memory"])} for row in facts["nodes"]]
    if not rows:
        engine = escape_line(facts["engine"])
        words = "" if engine == "ray" else f" --engine {engine} --apply"
        print(f'there is no fleet on {engine}; "cloche fleet up{words}" starts one')
        return
    show(rows, as_json=False, below=("address", "reason"))
    print(escape_line(", ".join(f"{facts[name]} {name}" for name in COUNTS)))
