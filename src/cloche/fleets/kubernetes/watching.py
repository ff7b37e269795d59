"""The pods of a fleet in memory, kept up to date by a watch.

Theory of operation: a list, then a watch from its resource version, again and again. A watch that is cut is resumed
where it was; where the server has forgotten that version (410), all is listed anew. An event that is older than the
known pod has no effect. While the server does not answer, the pods stay as they were: a claim is guarded anyway.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Any

from .api import ApiError, KubernetesApi
from .pods import FLEET, Pod, pod_of

WATCH_S, SILENT_S = 60, 90.0  # of one watch; a connection without a byte for so long is dead
AGAIN_S, MOST_AGAIN_S = 0.1, 5.0
log = logging.getLogger("cloche.fleet")


class PodWatch:
    """Hold the pods of a namespace that are of the fleet. `path` is that of its pods; `changed` tells of any change."""

    def __init__(self, api: KubernetesApi, path: str):
        self._api, self._path = api, path
        self.pods: dict[str, Pod] = {}
        self.changed = asyncio.Event()
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List the pods, and begin to watch. Raises ApiError, BackendUnavailable."""
        await self._list()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def put(self, row: Mapping[str, Any]) -> Pod:
        """Note a pod's JSON, unless a newer one is known, and return the known one then."""
        pod = pod_of(row)
        before = self.pods.get(pod.name)
        if before is None or before.uid != pod.uid or not _is_older(pod, before):
            self.pods[pod.name] = pod
            self.changed.set()
        return self.pods[pod.name]

    def drop(self, name: str, uid: str) -> None:
        """Forget a pod that is gone."""
        known = self.pods.get(name)
        if known is not None and known.uid == uid:
            del self.pods[name]
            self.changed.set()

    async def _list(self) -> None:
        answer = await self._api.get(self._path, labelSelector=FLEET)
        rows = [pod_of(row) for row in answer.get("items") or ()]
        self.pods = {pod.name: pod for pod in rows}
        self._version = str((answer.get("metadata") or {}).get("resourceVersion", ""))
        self.changed.set()

    async def _follow(self) -> None:
        again_s = AGAIN_S
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                again_s = AGAIN_S
            except Exception as error:  # the pods stay as they were, and it is tried again
                if isinstance(error, ApiError):  # such as 410; a connection that was cut is resumed
                    self._version = ""
                if again_s > AGAIN_S:
                    log.warning("the pods of the fleet are not up to date: %s", str(error) or type(error).__name__)
            await asyncio.sleep(again_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the callers
            again_s = min(2 * again_s, MOST_AGAIN_S)

    async def _watch(self) -> None:
        query = {"watch": "1", "labelSelector": FLEET, "resourceVersion": self._version, "allowWatchBookmarks": "true"}
        async for event in self._api.lines(self._path, timeout_s=SILENT_S, timeoutSeconds=str(WATCH_S), **query):
            self._note(str(event.get("type")), event.get("object") or {})

    def _note(self, kind: str, row: Mapping[str, Any]) -> None:
        if kind == "ERROR":
            raise ApiError(str(row.get("message")), status=int(row.get("code") or 0), reason=str(row.get("reason")))
        meta = row.get("metadata") or {}
        self._version = str(meta.get("resourceVersion") or self._version)
        if kind == "DELETED":
            self.drop(str(meta.get("name")), str(meta.get("uid")))
        elif kind in ("ADDED", "MODIFIED"):
            self.put(row)


def _is_older(pod: Pod, known: Pod) -> bool:
    """Tell whether a version is older than the known one; versions are numbers on all servers so far."""
    new, old = pod.resource_version, known.resource_version
    return new.isdecimal() and old.isdecimal() and int(new) < int(old)
