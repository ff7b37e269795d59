"""The source of a fleet's pods, one class for each mode, and the objects that it shares with the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Protocol

from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import dataclass

from ..engine import EngineNode
from .api import KubernetesApi
from .holders import Holder
from .pods import NodeFacts, Pod
from .servers import PodServers
from .watching import PodWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedPod:
    """A pod that this coordinator holds: the start of its container, and the facts of its server."""

    pod: Pod
    facts: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPods:
    """Hold the objects that a source shares with its engine.

    `data` is that of the fleet's object in the cluster. `is_used` tells whether a node is held, or not deleted yet.
    `making` has the nodes that are being made, with their uids once these are known; they count as held. `give_up`
    ends one of them.
    """

    api: KubernetesApi
    settings: FleetSettings
    data: Mapping[str, str]
    watch: PodWatch
    servers: PodServers
    holder: Holder
    making: MutableMapping[str, str]
    is_used: Callable[[str], bool]
    give_up: Callable[[str], None]

    @property
    def path(self) -> str:
        """Return the path of the pods."""
        return f"/api/v1/namespaces/{self.settings.namespace}/pods"

    @property
    def apps(self) -> str:
        """Return the path of Deployments and their like."""
        return f"/apis/apps/v1/namespaces/{self.settings.namespace}"

    async def delete_pod(self, name: str, uid: str) -> None:
        """Delete a pod, and forget it."""
        await self.api.delete(f"{self.path}/{name}", uid=uid)
        self.watch.drop(name, uid)


class PodSource(Protocol):
    """Offer nodes, and take a pod for one of them. `takes_long` is true where a pod is made first."""

    takes_long: bool

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that may be taken, or one with the reason why there are no others."""
        ...

    async def take(self, node: str) -> ClaimedPod:
        """Take a pod with a server that serves. Raises BackendUnavailable; then the pod is deleted soon."""
        ...

    async def end(self, node: str, uid: str) -> None:
        """End a node that was taken or given up; `uid` is that of its pod, empty before there is a pod."""
        ...
