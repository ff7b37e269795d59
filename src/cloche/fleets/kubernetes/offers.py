"""Nodes that do not exist yet: names for the pods or claims that a source makes.

Theory of operation: to take such a node is to create an object with its name. A name is used once: where the answer to
a create was lost, the object is read, and no second one is made. After a failure no node is offered for a while, and
the reason is the cluster's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError

from ..engine import BlockTaken, EngineNode
from .api import ApiError
from .pods import Pod, pod_of
from .servers import Unfit
from .sources import FleetPods

OFFERED = 16  # nodes that may be made at once, beside those that are being made
UNSCHEDULED_S = 2.0  # a pod has to have a machine by then, without an autoscaler
CREATES, AGAIN_S, LOOK_S = 5, 0.2, 0.1


class Offers:
    """Offer nodes of one size. Where none can be made, `source` is the node that has the reason."""

    def __init__(self, fleet: FleetPods, source: str):
        self._fleet, self._source = fleet, source
        self.spec: dict[str, Any] = json.loads(fleet.data["pod"])
        self._like = pod_of({"spec": self.spec})
        self._numbers, self._names = count(1), list[str]()
        self._failure: Unfit | None = None

    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that are being made and those that may be, or the reason against them."""
        making = [*map(self._offered, self._fleet.making)]
        if self._failure is not None and self._failure.holds:
            return [*making, EngineNode(id=self._source, cpus=0.0, memory_bytes=0, reason=self._failure.reason)]
        while len(self._names) < OFFERED:
            self._names.append(f"cloche-{self._fleet.holder.name}-{next(self._numbers)}")
        return [*making, *map(self._offered, self._names)]

    def _offered(self, name: str) -> EngineNode:
        return EngineNode(id=name, cpus=self._like.cpus, memory_bytes=self._like.memory_bytes)

    @asynccontextmanager
    async def making(self, node: str) -> AsyncIterator[None]:
        """Count a node as held during the body, which makes it. End it where the body fails."""
        if node not in self._names or (self._failure is not None and self._failure.holds):
            raise BlockTaken(f"{node} is not offered any longer.")
        self._names.remove(node)
        self._fleet.making[node] = ""
        try:
            yield
        except BaseException as error:
            if isinstance(error, ClocheError):
                self._failure = Unfit.now(str(error))
            self._fleet.give_up(node)
            raise
        del self._fleet.making[node]

    def note_end(self, uid: str) -> None:
        """Offer nodes again after a used-up quota, once a pod with this uid has ended."""
        if uid and self._failure is not None and "quota" in self._failure.reason:
            self._failure = None

    async def created(self, path: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, or return that of an earlier try. Raises ApiError, BackendUnavailable."""
        api = self._fleet.api
        for tries_left in reversed(range(CREATES)):
            try:
                return await api.create(path, row)
            except ApiError as error:
                if error.word == "AlreadyExists":  # the answer to an earlier request was lost
                    return await api.get(f"{path}/{row['metadata']['name']}")
                if error.status != 409 or not tries_left:  # else a quota is counted for others at the same moment
                    raise
            await asyncio.sleep(AGAIN_S)
        raise AssertionError

    async def ready(self, find: Callable[[], Pod | None], failed: Callable[[Pod], BackendUnavailable]) -> Pod:
        """Wait until a pod is found and ready. Raises the error of `failed` for one that cannot become ready."""
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            pod = find()
            if pod is not None:
                patience_s = 0.0 if pod.machine else max(self._fleet.settings.scaling_s, UNSCHEDULED_S)
                if pod.over or (pod.stuck and now() - began >= patience_s):
                    raise failed(pod)
                if pod.is_ready and pod.address:
                    return pod
            await asyncio.sleep(LOOK_S)
