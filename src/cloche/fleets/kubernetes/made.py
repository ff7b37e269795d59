"""Mode `pod`: a pod that is made for an image that no template has.

The pod is claimed from the beginning: it has its holder, its owner and its deadline. Its description is the operator's,
from the fleet's object; the image alone is the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable

from ..engine import EngineNode
from .offers import Offers
from .pods import COPYING, Pod, born_claimed
from .sources import ClaimedPod, FleetPods

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
        self._offers = Offers(fleet, f"image {self._image}")

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the pods that are being made, and those that may be, or the reason against them."""
        return self._offers.nodes()

    async def take(self, node: str) -> ClaimedPod:
        """Make a pod. Raises BackendUnavailable, with the words of the cluster."""
        async with self._offers.making(node):
            row = await self._offers.created(self._fleet.path, self._described(node))
            uid = self._fleet.making[node] = row["metadata"]["uid"]
            self._fleet.watch.put(row)
            pod = await self._offers.ready(lambda: self._pod_of(node, uid), failed)
            return ClaimedPod(pod=pod, facts=await self._fleet.servers.facts(pod))

    def _described(self, name: str) -> dict[str, Any]:
        spec, settings = copy.deepcopy(self._offers.spec), self._fleet.settings
        spec["containers"][0]["image"] = self._image
        row = born_claimed(
            spec, self._fleet.holder.owner, name=name, longest_s=settings.lease_age_s, is_kept=settings.do_not_disrupt
        )
        row["metadata"]["namespace"] = settings.namespace
        return row

    def _pod_of(self, name: str, uid: str) -> Pod:
        pod = self._fleet.watch.pods.get(name)
        if pod is None or pod.uid != uid:
            raise BackendUnavailable(f"pod {name} was deleted while it started.", remedy="Try again.")
        return pod

    async def end(self, node: str, uid: str) -> None:
        """Delete a pod, and offer others again."""
        await self._fleet.delete_pod(node, uid)
        self._offers.note_end(uid)


def failed(pod: Pod) -> BackendUnavailable:
    """Return the error for a pod that does not start: its container's last words, or the cluster's."""
    reason = f"pod {pod.name}: {pod.ended or pod.over or pod.stuck}."
    return BackendUnavailable(reason, remedy="" if not pod.ended or pod.ended.startswith(COPYING) else TEMPLATE)
