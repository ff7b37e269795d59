"""Pods as the nodes of a fleet, for the coordinator. See `fleets/engine.py`.

Theory of operation: an unclaimed pod that is ready counts as a node that starts: it has a share, and no address. Its
block is all of it, and to take the block is to claim the pod; then it has an address, and the coordinator connects.
Before the claim the certificate is read from the log of the pod, and a connection is tried: no pod is claimed in vain.

Coordinators look at the pods in different orders. A claimed pod whose container has started again, or that is deleted,
is lost: its server's certificate is another one, and so are its files. A pod that was given back is deleted, and tried
again until it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable, ClocheError
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import dataclass, replace

from ..engine import BlockTaken, EngineNode, ReservedBlock
from ..tending import Reach, reach
from .api import ApiError, KubernetesApi
from .forwarding import PodAddresses
from .holders import Holder
from .pods import READY, NodeFacts, Pod, claim_patch, facts_of
from .watching import PodWatch

MOST_LOG = 1 << 16
READ_AHEAD, READS_AT_ONCE = 4, 8  # pods whose logs are read before they are needed, at most
SERVES_S, AGAIN_S = 10.0, 0.5  # for the first words of a server whose port is open
TRIES, UNFIT_S = 3, 15.0  # how long a pod that cannot be used is not tried again
ALL = "*"  # in place of a container, where no pod may be claimed
POOL_S = 1.0  # how often the Deployment is asked why there is no pod
DELETES_AT_ONCE = 16
LAST_WORDS_S, LOOK_S, MOST_ENDS = 3.0, 0.1, 256
log = logging.getLogger("cloche.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedPod:
    """A pod that this coordinator holds: the start of its container, and the facts of its server."""

    pod: Pod
    facts: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unfit:
    reason: str
    until: float


class KubernetesEngine:
    """Implement FleetEngine on the pods of one namespace. `fleet` is the owner reference of the fleet's own object."""

    name, has_blocks = "kubernetes", True

    def __init__(
        self,
        api: KubernetesApi,
        settings: FleetSettings,
        *,
        fleet: dict[str, str],
        version: str = "",
        reach: Callable[[str], Awaitable[Reach]] = reach,
    ):
        self._api, self._settings, self._version = api, settings, version
        self.scaling_s = settings.scaling_s
        core, apps = f"/api/v1/namespaces/{settings.namespace}", f"/apis/apps/v1/namespaces/{settings.namespace}"
        self._path, self._deployments = f"{core}/pods", f"{apps}/deployments"
        self.ways = PodAddresses(api, self._path, settings.reach, reach=reach)
        self.watch = PodWatch(api, self._path)
        self.changed = self.watch.changed
        self.claimed: dict[str, ClaimedPod] = {}
        self.holder = Holder(api, settings.namespace, fleet, self.watch, self.claimed)
        self._leaving: dict[str, Pod] = {}  # given back, and not yet known to be deleted
        self._facts: dict[str, NodeFacts] = {}  # by the container
        self._unfit: dict[str, _Unfit] = {}
        self._reading: dict[str, asyncio.Task[NodeFacts]] = {}
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._tasks: set[asyncio.Future[Any]] = set()
        self._claims = 0
        self._ends: dict[str, str] = {}  # of claimed pods, and why
        self._pool_reason, self._pool_asked_at = "", 0.0

    async def start(self, public_key: str) -> None:
        """Read the pods, and begin to watch them. Raises ApiError, BackendUnavailable."""
        del public_key  # the pods have it from the fleet's object
        await self.watch.start()
        await self.holder.start()

    # Nodes

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the pods that this coordinator holds or may claim, else the Deployment with the reason."""
        pods = sorted(self.watch.pods.values(), key=self._turn)
        hosts = self._addresses() if self.claimed else ()
        listed = [self._held(claim, hosts) for claim in self.claimed.values()]
        open_pods = [pod for pod in pods if self._is_open(pod)]
        self._forget_old()
        self._read_ahead(pod for pod in open_pods if pod.is_ready)
        listed += [self._unclaimed(pod) for pod in open_pods]
        if not any(pod.is_ready and not self._reason(pod) for pod in open_pods):
            await self._ask_pool()
            if self._pool_reason:
                pool = f"deployment/cloche-{self._settings.template}"
                listed.append(EngineNode(id=pool, cpus=0.0, memory_bytes=0, reason=self._pool_reason))
        return listed

    def _turn(self, pod: Pod) -> bytes:
        """Return a pod's place in the order of this coordinator."""
        return hashlib.sha256(f"{self.holder.name}:{pod.uid}".encode()).digest()

    def _is_open(self, pod: Pod) -> bool:
        return (
            pod.state == READY
            and pod.template == self._settings.template
            and not pod.is_leaving
            and pod.name not in self.claimed
            and pod.name not in self._leaving
        )

    def _unclaimed(self, pod: Pod) -> EngineNode:
        return EngineNode(
            id=pod.name, cpus=pod.cpus, memory_bytes=pod.memory_bytes, reason=self._reason(pod),
            is_coming=not pod.is_ready,
        )  # fmt: skip

    def _reason(self, pod: Pod) -> str:
        unfit = [self._unfit[key] for key in (pod.container, ALL) if key in self._unfit]
        return next((each.reason for each in unfit if each.until > self._now()), pod.over or pod.stuck)

    def _held(self, claim: ClaimedPod, hosts: tuple[str, ...]) -> EngineNode:
        pod = self.watch.pods.get(claim.pod.name)
        if reason := why_lost(pod, claim.pod):
            self._ends[claim.pod.name] = reason
        return EngineNode(
            id=claim.pod.name, cpus=claim.pod.cpus, memory_bytes=claim.pod.memory_bytes, address=claim.facts.address,
            certificate=claim.facts.certificate, boot=claim.facts.boot, hosts=hosts,
            reason=reason, is_leaving=pod is not None and self._is_to_go(pod),
        )  # fmt: skip

    def _is_to_go(self, pod: Pod) -> bool:
        is_old = bool(pod.started_at) and self._api.now() - pod.started_at > self._settings.pod_age_s
        return pod.is_leaving or (is_old and self._settings.isolation == "jail")

    def _addresses(self) -> tuple[str, ...]:
        """Return the addresses that no guest may reach: the pods, their machines, the API server."""
        hosts = [urlsplit(self._api.host).hostname or ""]
        for pod in self.watch.pods.values():
            hosts += (pod.address, pod.machine_address)
        return tuple(sorted({host for host in hosts if _is_address(host)}))

    async def _ask_pool(self) -> None:
        """Ask the Deployment why there is no pod, such as a quota: no request of a coordinator would fail for it."""
        if self._now() - self._pool_asked_at < POOL_S:
            return
        self._pool_asked_at = self._now()
        try:
            self._pool_reason = pool_reason(
                await self._api.get(f"{self._deployments}/cloche-{self._settings.template}")
            )
        except ApiError as error:
            self._pool_reason = str(error)
            if error.status == 404:
                self._pool_reason = (
                    f"namespace {self._settings.namespace} has no template {self._settings.template}: "
                    '"cloche fleet up --engine kubernetes --apply" makes it'
                )
        except ClocheError as error:
            log.debug("the Deployment: %s", error)

    # What a server is

    def _forget_old(self) -> None:
        """Forget the facts of containers that are gone, from time to time."""
        if len(self._facts) + len(self._unfit) > 2 * len(self.watch.pods) + MOST_ENDS:
            here = {ALL, *(pod.container for pod in self.watch.pods.values())}
            self._facts = {name: facts for name, facts in self._facts.items() if name in here}
            self._unfit = {name: unfit for name, unfit in self._unfit.items() if name in here}

    def _read_ahead(self, pods: Iterable[Pod]) -> None:
        """Read what the next claims need; a process that has claimed one pod so far may need no other."""
        for pod in islice(pods, max(min(self._claims - 1, READ_AHEAD), 0)):
            if pod.container not in self._facts and not self._reason(pod):
                self._read(pod)

    def _read(self, pod: Pod) -> asyncio.Task[NodeFacts]:
        reading = self._reading.get(pod.container)
        if reading is None:
            reading = self._reading[pod.container] = asyncio.create_task(self._read_facts(pod))
            reading.add_done_callback(lambda done: self._note_read(pod, done))
        return reading

    def _note_read(self, pod: Pod, done: asyncio.Task[NodeFacts]) -> None:
        self._reading.pop(pod.container, None)
        if done.cancelled():
            return
        if (error := done.exception()) is None:
            self._facts[pod.container] = done.result()
        else:
            self._note_unfit(pod.container, error)

    def _note_unfit(self, container: str, error: BaseException) -> None:
        self._unfit[container] = _Unfit(reason=str(error), until=self._now() + UNFIT_S)

    async def _read_facts(self, pod: Pod) -> NodeFacts:
        """Return the facts of a pod's server, after checks that it can be used. Raises BackendUnavailable."""
        facts, ends = await self._printed(pod), self._now() + SERVES_S
        while facts is None and self._now() < ends:  # its port is open somewhat before it serves
            await asyncio.sleep(AGAIN_S)
            facts = await self._printed(pod)
        if facts is None or urlsplit(facts.address).hostname != pod.address:
            raise BackendUnavailable("the log of the pod has no address and certificate of its server.")
        if self._version and facts.version != self._version:
            raise BackendUnavailable(
                f"it has Cloche {facts.version}, and this is {self._version}.",
                remedy="Use an image with the same version (fleet.image).",
            )
        await self.ways.check(pod.name, facts.address)
        return facts

    async def _printed(self, pod: Pod) -> NodeFacts | None:
        async with self._reads:
            text = await self._api.text(f"{self._path}/{pod.name}/log", container="node", limitBytes=str(MOST_LOG))
        return facts_of(text)

    async def _facts_of(self, pod: Pod) -> NodeFacts:
        facts = self._facts.get(pod.container)
        return facts if facts is not None else await asyncio.shield(self._read(pod))

    # Blocks

    async def blocks(self) -> Sequence[ReservedBlock]:
        """Return the pods that this coordinator holds: none at its start."""
        return [_block(claim.pod) for claim in self.claimed.values()]

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        """Claim a pod, all of it."""
        del cpus, memory_bytes
        claiming = asyncio.ensure_future(self._claim(node))
        try:
            return _block(await asyncio.shield(claiming))
        except asyncio.CancelledError:
            claiming.add_done_callback(self._undo_claim)
            self._keep(claiming)
            raise

    def _undo_claim(self, claiming: asyncio.Future[Pod]) -> None:
        if not claiming.cancelled() and claiming.exception() is None:
            self._keep(asyncio.ensure_future(self.give_back(claiming.result().name)))

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    async def _claim(self, name: str) -> Pod:
        for _ in range(TRIES):
            pod = self._claimable(name)
            facts = await self._facts_of(pod)
            patch = claim_patch(pod, self.holder.owner, now=self._api.now(), longest_s=self._settings.lease_age_s)
            try:
                pod = self.watch.put(await self._api.patch(f"{self._path}/{name}", patch))
            except ApiError as error:
                if error.status == 403:
                    self._note_unfit(ALL, error)
                if error.status != 409:
                    raise
                pod = self.watch.put(await self._api.get(f"{self._path}/{name}"))
            if pod.holder == self.holder.name:
                facts = replace(facts, address=self.ways.open(name, facts.address))
                self.claimed[name] = ClaimedPod(pod=pod, facts=facts)
                self._claims += 1
                return pod
        raise BlockTaken(f"pod {name} changes all the time, and was not claimed.")

    def _claimable(self, name: str) -> Pod:
        """Return a pod that may be claimed. Raises BackendUnavailable."""
        pod = self.watch.pods.get(name)
        if pod is None or not self._is_open(pod) or not pod.is_ready or not pod.address or pod.over or pod.stuck:
            raise BlockTaken(f"pod {name} is another's, or not ready.")
        return pod

    async def give_back(self, block: str) -> None:
        """Delete a claimed pod."""
        claim = self.claimed.pop(block, None)
        if claim is not None:
            self._leaving[block] = claim.pod
            if block not in self._ends and await self.ways.reach(claim.facts.address) == "refused":
                await self._note_end(claim.pod)
            await self.ways.close(claim.facts.address)
        pod = self._leaving.get(block)
        if pod is None:
            return
        await self._api.delete(f"{self._path}/{block}", uid=pod.uid)
        self._leaving.pop(block, None)
        self.watch.drop(block, pod.uid)

    async def _note_end(self, pod: Pod) -> None:
        """Wait a moment for the kubelet's reason of a server's end; it is deleted with the pod."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while not (reason := why_lost(self.watch.pods.get(pod.name), pod)):  # noqa: ASYNC110 - a moment
                    await asyncio.sleep(LOOK_S)
                self._ends[pod.name] = reason
        self._ends.setdefault(pod.name, "")
        while len(self._ends) > MOST_ENDS:
            del self._ends[next(iter(self._ends))]

    async def why_lost(self, node: str) -> str:
        """Return why a pod was lost, once it is known."""
        while node not in self._ends and (node in self.claimed or node in self._leaving):  # noqa: ASYNC110 - a moment
            await asyncio.sleep(LOOK_S)
        return self._ends.get(node, "")

    # Its end

    async def stop(self) -> None:
        """Delete the pods that this coordinator holds."""
        names = [*self.claimed, *self._leaving]
        for at in range(0, len(names), DELETES_AT_ONCE):
            results = await asyncio.gather(
                *map(self.give_back, names[at : at + DELETES_AT_ONCE]), return_exceptions=True
            )
            for error in filter(None, results):
                log.warning("a pod of the fleet was left to its deadline: %s", error)

    async def close(self) -> None:
        """Delete the pods that this coordinator holds, and disconnect."""
        for work in [*self._reading.values()]:
            work.cancel()
        await asyncio.gather(*self._reading.values(), *self._tasks, return_exceptions=True)
        await self.stop()
        await self.ways.close()
        await self.watch.close()
        try:
            await self.holder.close()
        except ClocheError as error:
            log.debug("the fleet's object of this process was left: %s", error)
        await self._api.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def why_lost(pod: Pod | None, claimed: Pod) -> str:
    """Return why a claimed pod is lost, empty for one that is well."""
    if pod is None or pod.uid != claimed.uid:
        return "the pod is gone"
    if pod.over:
        return f"{pod.over}{f' ({pod.ended})' if pod.ended else ''}"
    if pod.container != claimed.container or not pod.is_running:
        return f"its container has ended{f': {pod.ended}' if pod.ended else ''}"
    return ""


def pool_reason(deployment: Mapping[str, Any]) -> str:
    """Return why a Deployment makes no pods; empty if it does."""
    for row in (deployment.get("status") or {}).get("conditions") or ():
        if row.get("type") == "ReplicaFailure" and row.get("status") == "True":
            return f"its pods are refused: {row.get('message', '')}"[:400]
    if not (deployment.get("spec") or {}).get("replicas", 1):
        return "its Deployment has 0 replicas"
    return ""


def _block(pod: Pod) -> ReservedBlock:
    return ReservedBlock(id=pod.name, node=pod.name, cpus=pod.cpus, memory_bytes=pod.memory_bytes)


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
