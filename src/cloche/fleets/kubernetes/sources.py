"""What the modes of a fleet have in common: where its pods come from, and what each source needs for it."""

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
    """What a source needs of its engine.

    `data` is that of the fleet's object in the cluster. `is_used` tells of a node whether it is held or leaves.
    `making` has what is made now, with its uid once that is known: it counts as held. `give_up` ends such a one.
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
        """Return what may be taken, and why there is nothing."""
        ...

    async def take(self, node: str) -> ClaimedPod:
        """Take a pod with a server that serves. Raises BackendUnavailable; then nothing is left of it, soon."""
        ...

    async def end(self, node: str, uid: str) -> None:
        """End what was taken, or what is left of it; `uid` is that of its pod, empty where there was none yet."""
        ...
