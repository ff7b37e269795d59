"""The backend `kubernetes`: sandboxes in pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import Fleet
from cloche.core.protocols import Capabilities
from cloche.core.record import replace
from cloche.core.remote import RemoteAccount

from ..remote.claims import unavailable
from .backend import ANY_LANGUAGE
from .leased import LeasedBackend
from .links import link_to


class KubernetesBackend(LeasedBackend):
    """Run code in pods of the cluster of the kubeconfig, or of that which this pod is in."""

    name, package = "kubernetes", "kubernetes_asyncio"
    usual_level = None  # the fleet's template requires one of its pods

    def with_images(self, images: Mapping[str, str]) -> KubernetesBackend:
        """Return the same backend with pods of the image that a call named."""
        account, image = self.account(), images.get(ANY_LANGUAGE, "")
        return type(self)(replace(account, fleet=replace(account.fleet, image=image)) if image else self._account)

    def capabilities(self) -> Capabilities:
        """Return what the pods claim, if a cluster is configured. It is not asked."""
        can = super().capabilities()
        if not can.available:
            return can
        from cloche.fleets.kubernetes.api import check_configured

        try:
            check_configured()
        except BackendUnavailable as error:
            return unavailable(self.name, error)
        return can

    async def connect(self, account: RemoteAccount) -> Fleet:
        """Return a coordinator in this process."""
        from cloche.fleets.kubernetes.fleet import connect

        return await connect(account.fleet, link_to)
