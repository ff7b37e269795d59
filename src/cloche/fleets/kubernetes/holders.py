"""Holders of pods: each coordinator renews an object of its own, and removes the pods of dead coordinators.

Theory of operation: a coordinator makes a Lease of `coordination.k8s.io`, which owns the pods that it claims, and
renews it. Any other one that sees it unrenewed deletes its pods, and then the object. Times are those of the API
server's clock. Besides, an object has to stay unrenewed while this process looks: after an outage of the server each
coordinator has the time to renew its own first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Container
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError

from .api import ApiError, KubernetesApi
from .pods import CLAIMED, FLEET, HOLDER, READY, Owner, Pod, _seconds, stamp
from .watching import PodWatch

LASTS_S, RENEW_S, AGAIN_S = 120, 20.0, 4.0
WATCHED_S = 15.0  # how long this process has to see that it is not renewed
log = logging.getLogger("cloche.fleet")


class Holder:
    """Keep the object of one coordinator.

    `fleet` is the fleet's own object, as an owner reference. `held` has the pods that the coordinator knows to hold;
    `retry` deletes the pods that it gave back and could not delete.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        fleet: dict[str, str],
        watch: PodWatch,
        held: Container[str],
        retry: Callable[[], Awaitable[None]],
    ):
        self.name = secrets.token_hex(6)
        self._api, self._fleet, self._watch, self._held = api, fleet, watch, held
        self._retry = retry
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._uid = ""
        self._seen: dict[str, tuple[str, float]] = {}  # of others: what was seen, and since when
        self._task: asyncio.Task[None] | None = None

    @property
    def owner(self) -> Owner:
        """Return the owner of what this coordinator claims."""
        return Owner(holder=self.name, name=self._object, uid=self._uid)

    @property
    def _object(self) -> str:
        return f"cloche-{self.name}"

    async def start(self) -> None:
        """Make the object. Raises ApiError, BackendUnavailable."""
        await self._create()
        self._task = asyncio.create_task(self._tend())

    async def close(self) -> None:
        """Delete the object."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._uid:
            await self._api.delete(f"{self._leases}/{self._object}", uid=self._uid)

    async def _create(self) -> None:
        now = stamp(self._api.now())
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._object, "labels": {FLEET: "cloche", HOLDER: self.name}, "ownerReferences": [self._fleet],
            },
            "spec": {
                "holderIdentity": f"{socket.gethostname()}:{os.getpid()}", "leaseDurationSeconds": LASTS_S,
                "acquireTime": now, "renewTime": now,
            },
        }  # fmt: skip
        try:
            made = await self._api.create(self._leases, body)
        except ApiError as error:
            if error.status != 409:
                raise
            made = await self._own()
        self._uid = str(made["metadata"]["uid"])

    async def _own(self) -> dict[str, Any]:
        """Return the object, where the answer to its creation was lost."""
        rows = (await self._api.get(self._leases, labelSelector=f"{HOLDER}={self.name}")).get("items")
        if not rows:
            raise BackendUnavailable(f"the object {self._object} of this process is gone.", remedy="Try again.")
        row: dict[str, Any] = rows[0]
        return row

    async def _tend(self) -> None:
        wait_s = RENEW_S
        while True:
            await asyncio.sleep(wait_s)
            try:
                await self._renew()
                await self._remove_dead()
                await self._retry()
                wait_s = RENEW_S
            except (ClocheError, OSError) as error:
                log.warning("the fleet's object of this process: %s", error)
                wait_s = AGAIN_S

    async def _renew(self) -> None:
        try:
            body = {"spec": {"renewTime": stamp(self._api.now())}}
            await self._api.patch(f"{self._leases}/{self._object}", body)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._create()

    async def _remove_dead(self) -> None:
        """Delete the pods of dead coordinators, those that this one lost sight of, and ended ones without a holder."""
        rows = (await self._api.get(self._leases, labelSelector=FLEET)).get("items") or ()
        holders = {row["metadata"]["labels"].get(HOLDER, ""): row for row in rows}
        known = {*holders, *self._watch.pods, *(pod.holder for pod in self._watch.pods.values())}
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}
        dead = {name for name, row in holders.items() if name != self.name and self._is_dead(name, row)}
        for pod in list(self._watch.pods.values()):
            if self._is_left(pod, dead, holders):
                log.warning("pod %s is deleted: %s", pod.name, pod.over or "its coordinator is gone")
                await self._api.delete(f"{self._pods}/{pod.name}", uid=pod.uid)
        for name in dead:
            meta = holders[name]["metadata"]
            await self._api.delete(f"{self._leases}/{meta['name']}", uid=meta["uid"])

    def _is_left(self, pod: Pod, dead: set[str], holders: dict[str, Any]) -> bool:
        if pod.state != CLAIMED:
            return pod.state == READY and bool(pod.over) and not pod.is_leaving
        if pod.holder == self.name:
            return pod.name not in self._held and self._is_unchanged(pod.name, "not held")
        return pod.holder in dead or (pod.holder not in holders and self._is_unchanged(pod.holder, "no object"))

    def _is_dead(self, name: str, row: dict[str, Any]) -> bool:
        renewed = str((row.get("spec") or {}).get("renewTime", ""))
        lasts_s = float((row.get("spec") or {}).get("leaseDurationSeconds") or LASTS_S)
        is_unchanged = self._is_unchanged(name, renewed)
        return is_unchanged and self._api.now() - _seconds(renewed) > lasts_s

    def _is_unchanged(self, name: str, seen: str) -> bool:
        now = asyncio.get_running_loop().time()
        before, since = self._seen.get(name, ("", now))
        if before != seen:
            since = now
        self._seen[name] = seen, since
        return now - since >= WATCHED_S
