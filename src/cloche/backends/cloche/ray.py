"""The backend `ray`: sandboxes on the nodes of a Ray cluster."""

from __future__ import annotations

from cloche.core.fleet import Fleet
from cloche.core.remote import RemoteAccount

from .leased import LeasedBackend


class RayBackend(LeasedBackend):
    """Run code on the nodes of the Ray cluster of RAY_ADDRESS, or of this machine."""

    name = package = "ray"

    async def connect(self, account: RemoteAccount) -> Fleet:
        """Return the fleet of the cluster. Its coordinator starts with the first lease."""
        from cloche.fleets.ray import cluster
        from cloche.fleets.ray.fleet import RayFleet

        await cluster.in_thread(cluster.join, account.fleet.address)
        return RayFleet(account.fleet)
