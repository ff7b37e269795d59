"""Mode `pod`: a pod for each lease, made with an image that no template has.

Theory of operation: the nodes that are offered are names of pods that do not exist. To take one is to create the pod,
which is claimed from the beginning: it has its holder, its owner and its deadline. A name is used once, so that a
create whose answer was lost is found again, and not done twice. The description of the pod is the operator's, from the
fleet's object; the image alone is the caller's. Where a pod does not start, nothing is offered for a while, and the
reason is that of the cluster.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError

from ..engine import BlockTaken, EngineNode
from .api import ApiError
from .pods import COPYING, Pod, born_claimed, pod_of
from .servers import Unfit
from .sources import ClaimedPod, FleetPods

OFFERED = 16  # pods that may be made at once, beside those that are being made
UNSCHEDULED_S = 2.0  # a pod has to have a machine by then, without an autoscaler
CREATES, AGAIN_S, LOOK_S = 5, 0.2, 0.1
TEMPLATE = (
    'It needs Python 3.11 or later as "python3", and glibc. Else make a template of it: build an image from it with '
    'Python 3.11 and "pip install cloche[node]", and "cloche fleet up --engine kubernetes --apply" with its name as '
    "fleet.image, and another fleet.template."
)


class MadePods:
    """Implement PodSource with pods of the image of the settings."""

    takes_long = True

    def __init__(self, fleet: FleetPods):
        self._fleet, self._image = fleet, fleet.settings.image
        self._spec: dict[str, Any] = json.loads(fleet.data["pod"])
        self._like = pod_of({"spec": self._spec})
        self._numbers, self._names = count(1), list[str]()
        self._failure: Unfit | None = None

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the pods that are being made, and those that may be; or why there are none."""
        making = [*self._fleet.making]
        if self._failure is not None and self._failure.holds:
            failed = EngineNode(id=f"image {self._image}", cpus=0.0, memory_bytes=0, reason=self._failure.reason)
            return [*map(self._offered, making), failed]
        while len(self._names) < OFFERED:
            self._names.append(f"cloche-{self._fleet.holder.name}-{next(self._numbers)}")
        return [*map(self._offered, [*making, *self._names])]

    def _offered(self, name: str) -> EngineNode:
        return EngineNode(id=name, cpus=self._like.cpus, memory_bytes=self._like.memory_bytes)

    async def take(self, node: str) -> ClaimedPod:
        """Make a pod. Raises BackendUnavailable, with the words of the cluster."""
        if node not in self._names or (self._failure is not None and self._failure.holds):
            raise BlockTaken(f"pod {node} is not offered any longer.")
        self._names.remove(node)
        self._fleet.making[node] = ""
        try:
            row = await self._created(node)
            self._fleet.making[node] = row["metadata"]["uid"]
            self._fleet.watch.put(row)
            pod = await self._ready(node, row["metadata"]["uid"])
            claimed = ClaimedPod(pod=pod, facts=await self._fleet.servers.facts(pod))
        except BaseException as error:
            if isinstance(error, ClocheError):
                self._failure = Unfit.now(str(error))
            self._fleet.give_up(node)
            raise
        del self._fleet.making[node]
        return claimed

    async def _created(self, name: str) -> dict[str, Any]:
        fleet = self._fleet
        spec = copy.deepcopy(self._spec)
        spec["containers"][0]["image"] = self._image
        row = born_claimed(spec, fleet.holder.owner, name=name, longest_s=fleet.settings.lease_age_s)
        row["metadata"]["namespace"] = fleet.settings.namespace
        for tries_left in reversed(range(CREATES)):
            try:
                return await fleet.api.create(fleet.path, row)
            except ApiError as error:
                if error.word == "AlreadyExists":  # the answer to an earlier request was lost
                    return await fleet.api.get(f"{fleet.path}/{name}")
                if error.status != 409 or not tries_left:  # else a quota is counted for others at the same moment
                    raise
            await asyncio.sleep(AGAIN_S)
        raise AssertionError

    async def _ready(self, name: str, uid: str) -> Pod:
        """Wait until a pod is ready. Raises BackendUnavailable once it will not be."""
        began = asyncio.get_running_loop().time()
        while True:
            pod = self._fleet.watch.pods.get(name)
            if pod is None or pod.uid != uid:
                raise BackendUnavailable(f"pod {name} is gone: somebody deleted it.", remedy="Try again.")
            waited_s = asyncio.get_running_loop().time() - began
            patience_s = 0.0 if pod.machine else max(self._fleet.settings.scaling_s, UNSCHEDULED_S)
            if pod.over or (pod.stuck and waited_s >= patience_s):
                raise self._failed(pod)
            if pod.is_ready and pod.address:
                return pod
            await asyncio.sleep(LOOK_S)

    def _failed(self, pod: Pod) -> BackendUnavailable:
        """Return the error for a pod that does not start: its container's last words, or the cluster's."""
        reason = f"pod {pod.name}: {pod.ended or pod.over or pod.stuck}."
        return BackendUnavailable(reason, remedy="" if not pod.ended or pod.ended.startswith(COPYING) else TEMPLATE)

    async def end(self, node: str, uid: str) -> None:
        """Delete a pod, and offer others again."""
        await self._fleet.delete_pod(node, uid)
        if uid and self._failure is not None and "quota" in self._failure.reason:
            self._failure = None
