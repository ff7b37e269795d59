"""Mode `agent-sandbox`: a claim on a warm pool of the project agent-sandbox, in a cluster that serves its objects.

A SandboxClaim names the pool. The controller of agent-sandbox binds a Sandbox to it, and writes its name to the claim's
status; the pod has the same name. The controller deletes all of them with the claim, or at the time that this sets. The
claim is owned by the coordinator's object. Source: github.com/kubernetes-sigs/agent-sandbox of August 2026, v1beta1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cloche.core.errors import BackendUnavailable

from ..engine import EngineNode
from .api import ApiError, KubernetesApi
from .offers import Offers
from .pods import DO_NOT_DISRUPT, FLEET, GROUP, HOLDER, Pod
from .sources import ClaimedPod, FleetPods

WATCH_S, AGAIN_S, SILENT_S = 2, 0.1, 10.0  # of one watch of a claim; before the next look; for a dead connection
PATIENCE_S = 2.0  # for errors that may pass
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
            pod = await self._bound(row)
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

    async def _bound(self, claim: dict[str, Any]) -> Pod:
        """Wait for the pod of a claim, and follow the claim meanwhile. Raises BackendUnavailable."""
        newest = [claim]
        binding = asyncio.ensure_future(self._offers.ready(lambda: self._pod_of(newest[-1]), _failed))
        refusal = asyncio.ensure_future(self._refused(newest))
        try:
            await asyncio.wait((binding, refusal), return_when=asyncio.FIRST_COMPLETED)
            if not binding.done():
                raise refusal.result()
            return binding.result()
        finally:
            binding.cancel()
            refusal.cancel()
            await asyncio.gather(binding, refusal, return_exceptions=True)

    def _pod_of(self, claim: Mapping[str, Any]) -> Pod | None:
        sandbox = ((claim.get("status") or {}).get("sandbox") or {}).get("name", "")
        return self._fleet.watch.pods.get(sandbox)

    async def _refused(self, newest: list[dict[str, Any]]) -> BackendUnavailable:
        """Note a claim as it changes, and return why it will get no pod, once that is known."""
        now = asyncio.get_running_loop().time
        began = now()
        async for claim in self._changes(newest[-1]):
            newest[:] = [claim]
            reason, message = reason_of(claim)
            if reason in FINAL or (reason in PASSING and now() - began >= PATIENCE_S):
                return BackendUnavailable(f"sandboxclaim {claim['metadata']['name']}: {message} ({reason}).")
        raise AssertionError

    async def _changes(self, claim: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield a claim after each change, and every few seconds. Raises ApiError, BackendUnavailable."""
        name = claim["metadata"]["name"]
        query = {"watch": "1", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": str(WATCH_S)}
        while True:
            version = str(claim["metadata"]["resourceVersion"])
            with suppress(ApiError, OSError, TimeoutError):  # it is read anew below
                async for event in self._fleet.api.lines(
                    self._path, timeout_s=SILENT_S, resourceVersion=version, **query
                ):
                    if event.get("type") == "MODIFIED":
                        yield event["object"]
            await asyncio.sleep(AGAIN_S)
            claim = await self._fleet.api.get(f"{self._path}/{name}")
            yield claim

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
