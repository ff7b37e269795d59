"""Look at the fleet of a Ray cluster without starting anything, for `cloche doctor`."""

from __future__ import annotations

import asyncio
from importlib import metadata

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import FleetStatus
from cloche.core.fleet_settings import FleetSettings

from ..findings import FleetFindings
from . import cluster
from .fleet import RayFleet
from .jobs import is_jobs_address, jobs_at

STATUS = '"cloche fleet status" asks for the nodes, by a job there.'


def examine(settings: FleetSettings) -> FleetFindings:
    """Look at the cluster of these settings and its fleet; takes a second or two."""
    address = version = ""
    if is_jobs_address(settings.address):
        return asyncio.run(_from_outside(settings.address))
    try:
        address = cluster.find(settings.address)
        version = metadata.version("ray")
        if not address:
            raise BackendUnavailable("no Ray cluster was found.", remedy=cluster.START_ONE)
        cluster.check_answers(address)
        status = asyncio.run(_status(settings))
    except BackendUnavailable as error:
        return FleetFindings(engine="ray", address=address, version=version, problem=error.reason, remedy=error.remedy)
    problem, remedy = _judged(status)
    return FleetFindings(engine="ray", address=address, version=version, status=status, problem=problem, remedy=remedy)


async def _from_outside(address: str) -> FleetFindings:
    """Look whether the dashboard answers: each look at the fleet is a job there."""
    try:
        version = await jobs_at(address, pip=(), version="").version_of_ray()
    except BackendUnavailable as error:
        return FleetFindings(engine="ray", address=address, problem=error.reason, remedy=error.remedy)
    return FleetFindings(engine="ray", address=address, version=version, remedy=STATUS)


async def _status(settings: FleetSettings) -> FleetStatus:
    fleet = RayFleet(settings)
    try:
        return await fleet.status()
    finally:
        await fleet.close()


def _judged(status: FleetStatus) -> tuple[str, str]:
    """Return what is wrong with a fleet, and the remedy; empty if a node takes leases, or none was started yet."""
    if not status.version or any(node.state == "ready" for node in status.nodes):
        return "", ""
    return "no node takes leases.", "Mend a node, by the reasons below, or add one."
