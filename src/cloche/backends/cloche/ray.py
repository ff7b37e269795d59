"""The backend `ray`: sandboxes on the nodes of a Ray cluster."""

from __future__ import annotations

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import Fleet
from cloche.core.protocols import Capabilities
from cloche.core.record import replace
from cloche.core.remote import RemoteAccount

from ..remote.claims import unavailable
from .leased import LeasedBackend


class RayBackend(LeasedBackend):
    """Run code on the nodes of the Ray cluster of RAY_ADDRESS, or of this machine."""

    name = package = "ray"

    def capabilities(self) -> Capabilities:
        """Return what the nodes claim, if a cluster answers. Nothing is started and no node is asked."""
        can = super().capabilities()
        if not can.available:
            return can
        from cloche.fleets.ray import cluster

        try:
            address = cluster.find(self._checked().fleet.address)
            if address:
                cluster.check_answers(address)
        except BackendUnavailable as error:
            return unavailable(self.name, error)
        return can if address else replace(can, reason=cluster.NONE_HERE, remedy=cluster.START_ONE)

    async def connect(self, account: RemoteAccount) -> Fleet:
        """Return the fleet of the cluster. Its coordinator starts with the first lease."""
        from cloche.fleets.ray import cluster
        from cloche.fleets.ray.fleet import RayFleet

        await cluster.joined(account.fleet.address)
        return RayFleet(account.fleet)
