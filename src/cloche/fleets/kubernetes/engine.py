"""Pods as the nodes of a fleet, for the coordinator. See `fleets/engine.py`.

Theory of operation: a source offers pods as nodes that start: each has a share, and no address. Its block
is all of it, and to take the block is to claim the pod, or to make it; then it has an address, and the coordinator
connects. The sources are the modes of a fleet: `warm.py`, `made.py`, `pooled.py`.

A claimed pod whose container has started again, or that is deleted, is lost: its server's certificate is another one,
and so are its files. A pod that was given back is deleted, and tried again until it is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import ChainMap
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from cloche.core.errors import ClocheError
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import replace

from ..engine import EngineNode, ReservedBlock
from ..tending import Reach, reach
from .api import KubernetesApi
from .forwarding import PodAddresses
from .holders import Holder
from .made import MadePods
from .pods import Pod, remedy_of
from .pooled import PooledSandboxes
from .servers import PodServers
from .sources import ClaimedPod, FleetPods, PodSource
from .warm import WarmPods
from .watching import PodWatch

DELETES_AT_ONCE = 16
LAST_WORDS_S, LOOK_S, MOST_ENDS = 3.0, 0.1, 256
SOURCES: Mapping[str, Callable[[FleetPods], PodSource]] = {
    "warm": WarmPods, "pod": MadePods, "agent-sandbox": PooledSandboxes,
}  # fmt: skip
log = logging.getLogger("cloche.fleet")


class KubernetesEngine:
    """Implement FleetEngine on the pods of one namespace.

    `fleet` is the owner reference of the fleet's own object, and `data` what that has. The mode of the settings names
    the source of the pods.
    """

    name, has_blocks = "kubernetes", True

    def __init__(
        self,
        api: KubernetesApi,
        settings: FleetSettings,
        *,
        fleet: dict[str, str],
        data: Mapping[str, str],
        version: str = "",
        reach: Callable[[str], Awaitable[Reach]] = reach,
    ):
        self._api, self._settings = api, settings
        self.scaling_s = settings.scaling_s
        path = f"/api/v1/namespaces/{settings.namespace}/pods"
        self.ways = PodAddresses(api, path, settings.reach, reach=reach)
        self.watch = PodWatch(api, path)
        self.changed = self.watch.changed
        self.claimed: dict[str, ClaimedPod] = {}
        self._making: dict[str, str] = {}
        self._leaving: dict[str, str] = {}  # given back, and not yet known to be deleted; by name, with the uid
        held: Container[str] = ChainMap[str, object](self.claimed, self._making)  # type: ignore[arg-type]
        self.holder = Holder(api, settings.namespace, fleet, self.watch, held, self._end_leaving)
        self._servers = PodServers(api, path, version, self.ways)
        self._source = SOURCES[settings.mode](
            FleetPods(
                api=api, settings=settings, data=data, watch=self.watch, servers=self._servers, holder=self.holder,
                making=self._making, is_used=lambda name: name in self.claimed or name in self._leaving,
                give_up=self._give_up,
            )
        )  # fmt: skip
        self._tasks: set[asyncio.Future[Any]] = set()
        self._ends: dict[str, str] = {}  # of claimed pods, and why

    async def start(self, public_key: str) -> None:
        """Read the pods, and begin to watch them. Raises ApiError, BackendUnavailable."""
        del public_key  # the pods have it from the fleet's object
        await self.watch.start()
        await self.holder.start()

    # Nodes

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the pods that this coordinator holds and those that it may take, or the reason against them."""
        hosts = self._addresses() if self.claimed else ()
        held = [self._held(name, claim, hosts) for name, claim in self.claimed.items()]
        self._servers.forget_all_but(self.watch.pods.values())
        return [*held, *await self._source.nodes()]

    def _held(self, name: str, claim: ClaimedPod, hosts: tuple[str, ...]) -> EngineNode:
        pod = self.watch.pods.get(claim.pod.name)
        if reason := why_lost(pod, claim.pod):
            self._ends[name] = reason
        return EngineNode(
            id=name, cpus=claim.pod.cpus, memory_bytes=claim.pod.memory_bytes, address=claim.facts.address,
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

    # Blocks

    async def blocks(self) -> Sequence[ReservedBlock]:
        """Return the pods that this coordinator holds: none at its start."""
        return [_block(name, claim.pod) for name, claim in self.claimed.items()]

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        """Claim a pod, all of it."""
        del cpus, memory_bytes
        taking = asyncio.ensure_future(self._take(node))
        try:
            return _block(node, (await asyncio.shield(taking)).pod)
        except asyncio.CancelledError:
            if self._source.takes_long:
                taking.cancel()
            taking.add_done_callback(lambda done: self._undo(node, done))
            self._keep(taking)
            raise

    async def _take(self, node: str) -> ClaimedPod:
        taken = await self._source.take(node)
        facts = replace(taken.facts, address=self.ways.open(taken.pod.name, taken.facts.address))
        self.claimed[node] = replace(taken, facts=facts)
        return self.claimed[node]

    def _give_up(self, node: str) -> None:
        """End a node that was being made."""
        self._leaving[node] = self._making.pop(node)
        self._keep(asyncio.ensure_future(self.give_back(node)))

    def _undo(self, node: str, taking: asyncio.Future[ClaimedPod]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._keep(asyncio.ensure_future(self.give_back(node)))

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._tasks.add(work)
        work.add_done_callback(self._end_of)

    def _end_of(self, work: asyncio.Future[Any]) -> None:
        self._tasks.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.debug("a pod of the fleet: %s", error)

    async def give_back(self, block: str) -> None:
        """Delete a claimed pod."""
        claim = self.claimed.pop(block, None)
        if claim is not None:
            self._leaving[block] = claim.pod.uid
            if block not in self._ends and await self.ways.reach(claim.facts.address) == "refused":
                await self._note_end(block, claim.pod)
            await self.ways.close(claim.facts.address)
        uid = self._leaving.get(block)
        if uid is None:
            return
        await self._source.end(block, uid)
        self._leaving.pop(block, None)

    async def _end_leaving(self) -> None:
        for block in list(self._leaving):
            await self.give_back(block)

    async def _note_end(self, name: str, pod: Pod) -> None:
        """Wait a moment for the kubelet's reason of a server's end; it is deleted with the pod."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while not (reason := why_lost(self.watch.pods.get(pod.name), pod)):  # noqa: ASYNC110 - a moment
                    await asyncio.sleep(LOOK_S)
                self._ends[name] = reason
        self._ends.setdefault(name, "")
        while len(self._ends) > MOST_ENDS:
            del self._ends[next(iter(self._ends))]

    async def why_lost(self, node: str) -> str:
        """Return why a pod was lost, once it is known."""
        while node not in self._ends and (node in self.claimed or node in self._leaving):  # noqa: ASYNC110 - a moment
            await asyncio.sleep(LOOK_S)
        return self._ends.get(node, "")

    def remedy(self, reasons: str) -> str:
        """Return what to do about the reasons why pods take no lease."""
        return remedy_of(reasons)

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
        await self._servers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stop()
        await self.ways.close()
        await self.watch.close()
        try:
            await self.holder.close()
        except ClocheError as error:
            log.debug("the fleet's object of this process was left: %s", error)
        await self._api.close()


def why_lost(pod: Pod | None, claimed: Pod) -> str:
    """Return why a claimed pod is lost, empty for one that is well."""
    if pod is None or pod.uid != claimed.uid:
        return "the pod is gone"
    if pod.over:
        return f"{pod.over}{f' ({pod.ended})' if pod.ended else ''}"
    if pod.container != claimed.container or not pod.is_running:
        return f"its container has ended{f': {pod.ended}' if pod.ended else ''}"
    return ""


def _block(name: str, pod: Pod) -> ReservedBlock:
    return ReservedBlock(id=name, node=name, cpus=pod.cpus, memory_bytes=pod.memory_bytes)


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
