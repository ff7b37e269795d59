"""Mode `warm`: pods that a Deployment keeps ready, and the patch that claims one.

Theory of operation: a pod that is ready counts as a node that starts: it has a share, and no address. Before the claim
its certificate is read from its log, and a connection is tried: no pod is claimed in vain. Coordinators look at the
pods in different orders.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import ClocheError

from ..engine import BlockTaken, EngineNode
from .api import ApiError
from .pods import READY, NodeFacts, Pod, amounts_of, claim_patch
from .servers import ALL
from .sources import ClaimedPod, FleetPods

TRIES = 3
MACHINES, CORDONS_S = "/api/v1/nodes", 10.0
POOL_S = 1.0  # how often the Deployment is asked why there is no pod
log = logging.getLogger("cloche.fleet")


class WarmPods:
    """Implement PodSource with the ready pods of a template's Deployment."""

    takes_long = False

    def __init__(self, fleet: FleetPods):
        self._fleet, self._template = fleet, fleet.settings.template
        self._deployment = f"{fleet.apps}/deployments/cloche-{self._template}"
        self._pool_id = f"deployment/cloche-{self._template}"
        self._pool, self._pool_asked_at = EngineNode(id=self._pool_id, cpus=0.0, memory_bytes=0), 0.0
        self._claims = 0
        self._cordoned, self._cordoned_until, self._looking = frozenset[str](), 0.0, asyncio.Lock()

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the pods that may be claimed, and the Deployment where there is none."""
        pods = sorted(filter(self._is_open, self._fleet.watch.pods.values()), key=self._turn)
        servers = self._fleet.servers
        servers.read_ahead((pod for pod in pods if pod.is_ready), self._claims)
        listed = [self._unclaimed(pod) for pod in pods]
        if not any(pod.is_ready and not servers.reason(pod) for pod in pods):
            await self._ask_pool()
            if self._pool.reason or not pods:
                listed.append(self._pool)
        return listed

    def _turn(self, pod: Pod) -> bytes:
        """Return a pod's place in the order of this coordinator."""
        return hashlib.sha256(f"{self._fleet.holder.name}:{pod.uid}".encode()).digest()

    def _is_open(self, pod: Pod) -> bool:
        is_ours = pod.state == READY and pod.template == self._template
        return is_ours and not pod.is_leaving and not self._fleet.is_used(pod.name)

    def _unclaimed(self, pod: Pod) -> EngineNode:
        return EngineNode(
            id=pod.name, cpus=pod.cpus, memory_bytes=pod.memory_bytes, reason=self._fleet.servers.reason(pod),
            is_coming=not pod.is_ready,
        )  # fmt: skip

    async def _ask_pool(self) -> None:
        """Ask the Deployment why there is no pod, such as a quota: no request of a coordinator would fail for it.

        Without a reason there will be one: its controller is slow, or another one takes over.
        """
        now = asyncio.get_running_loop().time()
        if now - self._pool_asked_at < POOL_S:
            return
        self._pool_asked_at = now
        try:
            self._pool = pool_of(self._pool_id, await self._fleet.api.get(self._deployment))
        except ApiError as error:
            reason = str(error)
            if error.status == 404:
                reason = (
                    f"namespace {self._fleet.settings.namespace} has no template {self._template}: "
                    '"cloche fleet up --engine kubernetes --apply" makes it'
                )
            self._pool = EngineNode(id=self._pool_id, cpus=0.0, memory_bytes=0, reason=reason)
        except ClocheError as error:
            log.debug("the Deployment: %s", error)

    async def take(self, node: str) -> ClaimedPod:
        """Claim a pod. Raises BackendUnavailable; BlockTaken where another coordinator was faster."""
        for _ in range(TRIES):
            pod = self._claimable(node)
            facts = await self._fleet.servers.facts(pod)
            await self._avoid_cordoned(pod)
            latest = self._claimable(node)  # the watch may have told meanwhile that it is another's
            if latest.container == pod.container and (claimed := await self._patched(latest, facts)) is not None:
                self._claims += 1
                return claimed
        raise BlockTaken(f"pod {node} changes all the time, and was not claimed.")

    async def _patched(self, pod: Pod, facts: NodeFacts) -> ClaimedPod | None:
        fleet = self._fleet
        patch = claim_patch(
            pod, fleet.holder.owner, now=fleet.api.now(), longest_s=fleet.settings.lease_age_s,
            is_kept=fleet.settings.do_not_disrupt,
        )  # fmt: skip
        try:
            pod = fleet.watch.put(await fleet.api.patch(f"{fleet.path}/{pod.name}", patch))
        except ApiError as error:
            if error.status == 403:
                fleet.servers.note_unfit(ALL, error)
            if error.status != 409:
                raise
            pod = fleet.watch.put(await fleet.api.get(f"{fleet.path}/{pod.name}"))
        return ClaimedPod(pod=pod, facts=facts) if pod.holder == fleet.holder.name else None

    async def _avoid_cordoned(self, pod: Pod) -> None:
        """Raise BlockTaken for a pod on a cordoned machine, where another pod is ready elsewhere."""
        cordoned = await self._cordoned_machines()
        others = (other for other in self._fleet.watch.pods.values() if self._is_open(other) and other.is_ready)
        if pod.machine in cordoned and any(other.machine not in cordoned for other in others):
            why = BlockTaken(f"its machine {pod.machine} is cordoned.")
            self._fleet.servers.note_unfit(pod.container, why)
            raise why

    async def _cordoned_machines(self) -> frozenset[str]:
        """Return the machines that take no further pod, as of some seconds ago; none without the right to see them."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._fleet.settings.cordons and now > self._cordoned_until:
                self._cordoned_until = now + CORDONS_S
                await self._look_at_machines()
        return self._cordoned

    async def _look_at_machines(self) -> None:
        try:
            answer = await self._fleet.api.get(MACHINES, fieldSelector="spec.unschedulable=true")
        except ClocheError as error:
            log.warning("cordoned machines are not avoided: %s", error)
            return
        self._cordoned = frozenset(row["metadata"]["name"] for row in answer.get("items") or ())

    def _claimable(self, name: str) -> Pod:
        """Return a pod that may be claimed. Raises BackendUnavailable."""
        pod = self._fleet.watch.pods.get(name)
        if pod is None or not self._is_open(pod) or not pod.is_ready or not pod.address or pod.over or pod.stuck:
            raise BlockTaken(f"pod {name} is another's, or not ready.")
        return pod

    async def end(self, node: str, uid: str) -> None:
        """Delete a claimed pod."""
        await self._fleet.delete_pod(node, uid)


def pool_of(name: str, deployment: Mapping[str, Any]) -> EngineNode:
    """Return a Deployment as a node that starts: it has what one of its pods will have."""
    cpus, memory_bytes = amounts_of((deployment.get("spec") or {}).get("template") or {})
    reason = pool_reason(deployment)
    return EngineNode(id=name, cpus=cpus, memory_bytes=memory_bytes, reason=reason, is_coming=not reason)


def pool_reason(deployment: Mapping[str, Any]) -> str:
    """Return why a Deployment makes no pods; empty if it does."""
    for row in (deployment.get("status") or {}).get("conditions") or ():
        if row.get("type") == "ReplicaFailure" and row.get("status") == "True":
            return f"its pods are refused: {row.get('message', '')}"[:400]
    if not (deployment.get("spec") or {}).get("replicas", 1):
        return "its Deployment has 0 replicas"
    return ""
