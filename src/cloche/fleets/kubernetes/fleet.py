"""A fleet of pods: a coordinator in the caller's process, and the calls of an operator."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, get_args

from cloche.core.errors import BackendUnavailable, InvalidRequest, NotFound
from cloche.core.fleet import FleetStatus, NodeInfo
from cloche.core.fleet_settings import FleetMode, FleetSettings
from cloche.core.record import replace

from ..coordinator import Coordinator
from ..decisions import PlacingRules
from ..engine import LinkTo
from ..signing import Signer
from ..tending import Timing
from .api import ApiError, KubernetesApi
from .engine import KubernetesEngine
from .pods import FLEET, GROUP, LEAVING, Pod, pod_of, remedy_of
from .warm import pool_reason

OBJECT = "cloche-fleet"
READY_S, LOOK_S = 300.0, 1.0
UNMET_S = 1.0  # pods that start are known, so nothing else is waited for
UNUSED_S, IDLE_S = 30.0, 300.0  # of a claimed pod without a lease: one that never had any, one that had some
MAKING_S = 600.0  # of a pod with its image, which may be large
UP = 'Make it: "cloche fleet up --engine kubernetes --apply".'


async def connect(settings: FleetSettings, link_to: LinkTo) -> Coordinator:
    """Return a coordinator of the fleet, which starts with its first lease. Raises BackendUnavailable.

    How pods are used is the operator's choice: it comes from the fleet's object in the cluster.
    """
    api = KubernetesApi(settings.address)
    try:
        fleet = await _object(api, settings.namespace, "configmaps")
        settings = settings_of(settings, fleet["data"])
        signer = Signer(_private_key(await _object(api, settings.namespace, "secrets")))
        if signer.public_key != fleet["data"].get("publicKey"):
            raise BackendUnavailable(
                f"the keys of {OBJECT} in namespace {settings.namespace} are no pair.",
                remedy="End the fleet, and make it anew: its pods have another key.",
            )
    except BaseException:
        await api.close()
        raise
    version = metadata.version("cloche")
    engine = KubernetesEngine(api, settings, fleet=owner_of(fleet), data=fleet["data"], version=version)
    is_pod = settings.isolation == "pod"
    rules = PlacingRules(
        quota=settings.quota,
        unmet_s=UNMET_S,
        scaling_s=settings.scaling_s,
        block_part=1.0,
        one_lease=is_pod,
        block_idle_s=UNUSED_S if is_pod else IDLE_S,
    )
    timing = Timing() if settings.mode == "warm" else Timing(block_s=MAKING_S)
    return Coordinator(
        engine, link_to, signer=signer, version=version, rules=rules, timing=timing, reach=engine.ways.reach
    )


def settings_of(settings: FleetSettings, data: Mapping[str, str]) -> FleetSettings:
    """Return the settings, those of the operator from the cluster. Raises InvalidRequest for an image that is refused.

    In a fleet of mode `pod` the image of the template is in its warm pods; each other one has pods of its own.
    """
    is_foreign = bool(settings.image and data.get("image")) and settings.image != data["image"]
    mode = _mode(data)
    if is_foreign and mode != "pod":
        raise InvalidRequest(
            f"image: the pods of this fleet have {data['image']}, and not {settings.image}: its mode is {mode}. An "
            "operator lets callers name images with fleet.mode: pod, or makes another template"
        )
    return replace(
        settings,
        mode="warm" if mode == "pod" and not is_foreign else mode,
        isolation="jail" if data.get("isolation") == "jail" else "pod",
        pod_age_s=_number(data.get("podAge"), settings.pod_age_s),
        lease_age_s=_number(data.get("leaseAge"), settings.lease_age_s),
        do_not_disrupt=data.get("doNotDisrupt") == "true",
        cordons=data.get("cordons") == "true",
    )


async def mode_of(api: KubernetesApi, namespace: str) -> FleetMode:
    """Return the mode of a fleet, the usual one where there is no fleet yet, or none that may be read."""
    try:
        data = (await _object(api, namespace, "configmaps"))["data"]
    except BackendUnavailable:
        return "warm"
    return _mode(data)


def _mode(data: Mapping[str, str]) -> FleetMode:
    """Return the mode that the fleet's object names. Raises BackendUnavailable for another word."""
    mode = data.get("mode", "warm")
    if mode not in get_args(FleetMode):
        raise BackendUnavailable(f"the fleet has the mode {mode[:64]!r}, which this version does not know.", remedy=UP)
    return mode  # type: ignore[return-value]


def owner_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the owner reference of the fleet's object."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": OBJECT, "uid": str(row["metadata"]["uid"])}


async def _object(api: KubernetesApi, namespace: str, kind: str) -> dict[str, Any]:
    try:
        row = await api.get(f"/api/v1/namespaces/{namespace}/{kind}/{OBJECT}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise BackendUnavailable(f"there is no fleet in namespace {namespace} at {api.host}.", remedy=UP) from error
    return {**row, "data": row.get("data") or {}}


def _private_key(row: Mapping[str, Any]) -> bytes:
    try:
        key = base64.b64decode(row["data"].get("privateKey", ""), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != 32:
        raise BackendUnavailable(f"the secret {OBJECT} has no key.", remedy=UP)
    return key


def _number(text: str | None, default: float) -> float:
    try:
        return float(text or default)
    except ValueError:
        return default


class KubernetesOperator:
    """Look at the fleet of a namespace, take pods out of it, and end it. It grants no lease."""

    engine = "kubernetes"

    def __init__(self, settings: FleetSettings):
        self.settings = self._settings = settings
        self.api = KubernetesApi(settings.address)
        self._core = f"/api/v1/namespaces/{settings.namespace}"
        self._apps = f"/apis/apps/v1/namespaces/{settings.namespace}"

    async def nodes(self) -> Sequence[NodeInfo]:
        """Return the pods, and the Deployment that makes none with its reason."""
        return await self._described(await self._pods())

    async def _described(self, pods: Sequence[Pod]) -> list[NodeInfo]:
        reason = "" if any(pod.is_ready for pod in pods) else await self._pool_reason()
        more = [NodeInfo(id=f"deployment/cloche-{self._settings.template}", reason=reason)] if reason else []
        return [*map(node_info, sorted(pods, key=lambda pod: pod.name)), *more]

    async def status(self) -> FleetStatus:
        """Return the pods; the claimed ones have at least a lease. Those who wait are in their own processes."""
        nodes = await self.nodes()
        version = ""
        if nodes:
            fleet = await _object(self.api, self._settings.namespace, "configmaps")
            version = fleet["data"].get("version", "")
        return FleetStatus(
            engine=self.engine, nodes=tuple(nodes), leases=sum(node.leases for node in nodes), version=version
        )

    async def up(self) -> FleetStatus:
        """Wait until a pod of the template is ready, and return the state. Raises BackendUnavailable."""
        ends = time.monotonic() + READY_S
        while True:
            nodes = await self._described(
                [pod for pod in await self._pods() if pod.template == self._settings.template]
            )
            if any(node.state == "ready" for node in nodes):
                return await self.status()
            reasons = [f"{node.id}: {node.reason}" for node in nodes if node.reason]
            if time.monotonic() > ends or (reasons and len(reasons) == len(nodes)):
                why = ", ".join(reasons[:3]).rstrip(".")
                raise BackendUnavailable(f"no pod of the fleet is ready: {why}.", remedy=remedy_of(why) or _LOOK)
            await asyncio.sleep(LOOK_S)

    async def drain(self, node: str, *, timeout_s: float | None = None) -> None:
        """Give a pod no further lease, and wait until it is gone."""
        pod = next((pod for pod in await self._pods() if pod.name == node), None)
        if pod is None:
            raise NotFound(f"the fleet has no pod {node}.")
        path = f"{self._core}/pods/{node}"
        try:
            if pod.is_claimed:
                await self.api.patch(path, {"metadata": {"uid": pod.uid, "labels": {LEAVING: "true"}}})
            else:
                await self.api.delete(path, uid=pod.uid)
        except ApiError as error:
            if error.status != 404:  # its last lease has just ended, and the pod with it
                raise
        async with asyncio.timeout(timeout_s):
            while any(row.uid == pod.uid for row in await self._pods()):  # noqa: ASYNC110 - in the cluster
                await asyncio.sleep(LOOK_S)

    async def undrain(self, node: str) -> None:
        """Refuse: the Deployment has made another pod in its place."""
        raise InvalidRequest(f"--undo: pod {node} is deleted once it has no lease, and another one is ready instead")

    async def down(self) -> None:
        """End all leases, pods and coordinators' claims. The namespace, its roles and its policies stay."""
        namespace = self._settings.namespace
        coordination = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        of_pools = [f"/apis/{GROUP}/namespaces/{namespace}/sandbox{kind}" for kind in ("warmpools", "templates")]
        pools = of_pools if await mode_of(self.api, namespace) == "agent-sandbox" else []
        for collection in (f"{self._apps}/deployments", *pools, coordination, f"{self._core}/pods"):
            await self.api.ask("DELETE", collection, query={"labelSelector": FLEET})
        for kind in ("configmaps", "secrets"):
            await self.api.delete(f"{self._core}/{kind}/{OBJECT}")

    async def close(self) -> None:
        """Disconnect."""
        await self.api.close()

    async def _pods(self) -> list[Pod]:
        rows: Iterable[Any] = (await self.api.get(f"{self._core}/pods", labelSelector=FLEET)).get("items") or ()
        return [pod_of(row) for row in rows]

    async def _pool_reason(self) -> str:
        try:
            row = await self.api.get(f"{self._apps}/deployments/cloche-{self._settings.template}")
        except ApiError as error:
            return "" if error.status == 404 else str(error)
        return pool_reason(row)


_LOOK = '"cloche fleet status --engine kubernetes" shows the pods; "kubectl describe pods" there has their events.'


def node_info(pod: Pod) -> NodeInfo:
    """Return a pod as `cloche fleet status` shows it."""
    reason, is_claimed = pod.over or pod.stuck, pod.is_claimed
    state = "draining" if pod.is_leaving else "lost" if pod.over else "ready" if pod.is_ready else "starting"
    return NodeInfo(
        id=pod.name,
        address=pod.address,
        state=state,  # type: ignore[arg-type]  # each word is one of NodeState
        cpus=pod.cpus,
        memory_bytes=pod.memory_bytes,
        leases=int(is_claimed),
        reason=reason,
    )
