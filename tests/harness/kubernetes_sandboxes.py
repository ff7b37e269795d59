"""The controller of agent-sandbox for the small API server: a warm pool, and claims that are bound to its pods."""

from __future__ import annotations

import copy
from typing import Any

from cloche.fleets.kubernetes.pods import GROUP, IN_POOL
from tests.harness.kubernetes_api import Cluster

Json = dict[str, Any]


class SandboxController:
    """Keep the warm pool of a cluster's fleet full, and bind each claim to a pod of it."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        cluster.created = self._created

    def _path(self, kind: str) -> str:
        return f"/apis/{GROUP}/namespaces/{self._cluster.settings.namespace}/{kind}"

    @property
    def claims(self) -> dict[str, Json]:
        """Return the claims by name."""
        return self._cluster.objects.get(self._path("sandboxclaims"), {})

    def fill(self) -> None:
        """Make the pods that the pool has not."""
        (pool,) = self._cluster.objects[self._path("sandboxwarmpools")].values()
        name = pool["spec"]["sandboxTemplateRef"]["name"]
        template = copy.deepcopy(self._cluster.objects[self._path("sandboxtemplates")][name]["spec"]["podTemplate"])
        template["metadata"]["labels"][IN_POOL] = "pool"
        for _ in range(pool["spec"]["replicas"] - len(self._free())):
            self._cluster.make_pod(pool["metadata"]["name"], template)

    def _free(self) -> list[Json]:
        return [row for row in list(self._cluster.pods.values()) if IN_POOL in row["metadata"]["labels"]]

    def _created(self, path: str, row: Json) -> None:
        if path != self._path("sandboxclaims"):
            return
        pool = row["spec"]["warmPoolRef"]["name"]
        if pool not in self._cluster.objects[self._path("sandboxwarmpools")]:
            message = f'SandboxWarmPool "{pool}" not found'
            self._tell(row, {"status": "False", "reason": "WarmPoolNotFound", "message": message})
            return
        pod = copy.deepcopy(self._free()[0])
        del pod["metadata"]["labels"][IN_POOL]
        pod["metadata"]["ownerReferences"] = [{"kind": "SandboxClaim", "uid": row["metadata"]["uid"]}]
        self._cluster.put(self._cluster.pods_path, pod)
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        self._tell(row, {"status": "True", "reason": "DependenciesReady"}, {"name": name, "podIPs": [address]})
        self.fill()

    def _tell(self, row: Json, ready: Json, sandbox: Json | None = None) -> None:
        row["status"] = {"conditions": [{"type": "Ready", **ready}], "sandbox": sandbox or {}}
        self._cluster.put(self._path("sandboxclaims"), row)
