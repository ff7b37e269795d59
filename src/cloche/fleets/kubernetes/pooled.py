"""Mode `agent-sandbox`: a claim on a warm pool of the project agent-sandbox, in a cluster that serves its objects.

A SandboxClaim names the pool. The controller of agent-sandbox binds a pod to it, which then has a label with the
claim's uid, and deletes both at the claim's end, or at its time for it. The claim is owned by the coordinator's object.
Source of the fields: github.com/kubernetes-sigs/agent-sandbox, extensions.agents.x-k8s.io/v1beta1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cloche.core.errors import BackendUnavailable

from ..engine import EngineNode
from .api import ApiError, KubernetesApi
from .offers import Offers
from .pods import DO_NOT_DISRUPT, FLEET, GROUP, HOLDER, Pod
from .sources import ClaimedPod, FleetPods

ASKS_S, PATIENCE_S = 1.0, 2.0  # between two looks at a claim; for errors that may pass
FINAL = (
    "TemplateNotFound", "WarmPoolNotFound", "InvalidMetadata", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError",
    "ClaimExpired", "SandboxExpired", "PodFailed", "PodSucceeded", "MultiplePods",
)  # fmt: skip
PASSING = ("ReconcilerError",)
NOT_SERVED = 'Install agent-sandbox with its extensions there, or use "fleet.mode: warm", which needs no such objects.'


class PooledSandboxes:
    """Implement PodSource with claims on the warm pool of a template."""

    takes_long = True

    def __init__(self, fleet: FleetPods):
        self._fleet, self._pool = fleet, f"cloche-{fleet.settings.template}"
        self._path = f"/apis/{GROUP}/namespaces/{fleet.settings.namespace}/sandboxclaims"
        self._offers = Offers(fleet, f"sandboxwarmpool/{self._pool}")

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the claims that wait for a pod, and those that may be made, or the reason against them."""
        return self._offers.nodes()

    async def take(self, node: str) -> ClaimedPod:
        """Claim a pod of the pool. Raises BackendUnavailable, with the words of the cluster."""
        async with self._offers.making(node):
            try:
                row = await self._offers.created(self._path, self._described(node))
            except ApiError as error:
                raise not_served(self._fleet.api) if error.status == 404 else error from error
            pod = await self._bound(node, row["metadata"]["uid"])
            return ClaimedPod(pod=pod, facts=await self._fleet.servers.facts(pod))

    def _described(self, name: str) -> dict[str, Any]:
        fleet = self._fleet
        ends = datetime.fromtimestamp(fleet.api.now() + fleet.settings.lease_age_s, UTC)
        metadata = {
            "name": name,
            "namespace": fleet.settings.namespace,
            "labels": {FLEET: "cloche", HOLDER: fleet.holder.name},
            "ownerReferences": [fleet.holder.owner.reference()],
        }
        lifecycle = {"shutdownTime": ends.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        kept = {"additionalPodMetadata": {"annotations": DO_NOT_DISRUPT}} if fleet.settings.do_not_disrupt else {}
        spec = {"warmPoolRef": {"name": self._pool}, "lifecycle": lifecycle, **kept}
        return {"apiVersion": GROUP, "kind": "SandboxClaim", "metadata": metadata, "spec": spec}

    async def _bound(self, name: str, uid: str) -> Pod:
        """Wait for the pod of a claim, and ask the claim meanwhile. Raises BackendUnavailable."""
        binding = asyncio.ensure_future(self._offers.ready(lambda: self._pod_of(uid), _failed))
        refusal = asyncio.ensure_future(self._refused(name))
        try:
            await asyncio.wait((binding, refusal), return_when=asyncio.FIRST_COMPLETED)
            if not binding.done():
                raise refusal.result()
            return binding.result()
        finally:
            binding.cancel()
            refusal.cancel()
            await asyncio.gather(binding, refusal, return_exceptions=True)

    def _pod_of(self, uid: str) -> Pod | None:
        return next((pod for pod in self._fleet.watch.pods.values() if pod.claim == uid), None)

    async def _refused(self, name: str) -> BackendUnavailable:
        """Return why a claim will get no pod, once that is known."""
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            await asyncio.sleep(ASKS_S)
            reason, message = reason_of(await self._fleet.api.get(f"{self._path}/{name}"))
            if reason in FINAL or (reason in PASSING and now() - began >= PATIENCE_S):
                return BackendUnavailable(f"sandboxclaim {name}: {message} ({reason}).")

    async def end(self, node: str, uid: str) -> None:
        """Delete a claim, and its pod with it. A claim's name is used once, so the uid of the pod is not compared."""
        await self._fleet.api.delete(f"{self._path}/{node}")
        self._offers.note_end(uid)


def reason_of(claim: Mapping[str, Any]) -> tuple[str, str]:
    """Return why a claim is not ready, with the controller's sentence; empty for one that is."""
    rows = (claim.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((row for row in rows if row.get("type") == "Ready"), {})
    if ready.get("status") == "True":
        return "", ""
    return str(ready.get("reason", "")), " ".join(str(ready.get("message", "")).split())[:400]


def _failed(pod: Pod) -> BackendUnavailable:
    return BackendUnavailable(f"pod {pod.name}: {pod.ended or pod.over or pod.stuck}.")


def not_served(api: KubernetesApi) -> BackendUnavailable:
    """Return the error for a cluster without the objects of agent-sandbox."""
    return BackendUnavailable(f"the cluster at {api.host} serves no {GROUP} (agent-sandbox).", remedy=NOT_SERVED)


async def check_served(api: KubernetesApi) -> None:
    """Raise BackendUnavailable where a cluster does not serve the objects of agent-sandbox."""
    try:
        await api.get(f"/apis/{GROUP}")
    except ApiError as error:
        raise not_served(api) if error.status == 404 else error from error
