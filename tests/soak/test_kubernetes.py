"""A real Kubernetes cluster of two nodes: `make soak AREA=kubernetes`, which makes its programs and the image."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import kubernetes_cluster
from tests.harness.kubernetes_cluster import IMAGE, SYSCTLS, KubernetesCluster

pytestmark = [pytest.mark.root, pytest.mark.soak]
LABELS = {"app": "waits"}


def _deployment(count: int) -> dict[str, Any]:
    """Return a Deployment of pods that wait, spread over the nodes."""
    spread = {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": LABELS},
    }  # fmt: skip
    container = {"name": "waits", "image": IMAGE, "command": ["sleep", "infinity"], "imagePullPolicy": "Never"}
    pod = {"terminationGracePeriodSeconds": 1, "topologySpreadConstraints": [spread], "containers": [container]}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "waits"},
        "spec": {"replicas": count, "selector": {"matchLabels": LABELS}, "template": template},
    }  # fmt: skip


def _ready_pods(cluster: KubernetesCluster) -> Counter[str]:
    """Count the ready pods of each node."""
    pods = json.loads(cluster.kubectl("get", "pods", "--output=json"))["items"]
    ready = {"type": "Ready", "status": "True"}.items()
    return Counter(
        pod["spec"]["nodeName"]
        for pod in pods
        if any(ready <= each.items() for each in pod["status"].get("conditions", ())) and "nodeName" in pod["spec"]
    )


def _of_the_machine() -> dict[str, Any]:
    """Return what a cluster could leave or change."""
    sysctls = {name: Path("/proc/sys", name).read_text() for name in SYSCTLS}
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/cloche-kubernetes-*")}
    links = {line.split()[1] for line in subprocess.check_output(["ip", "-oneline", "link"], text=True).splitlines()}
    return sysctls | {"groups": groups, "links": links, "folders": set(Path("/var/tmp").glob("cloche-kubernetes-*"))}


def test_a_cluster_runs_pods_and_leaves_nothing() -> None:
    """Pods of the image are ready on two nodes; a killed node is noticed, and its pods are replaced on the other."""
    if lacks := kubernetes_cluster.missing():
        pytest.skip(f"missing: {', '.join(lacks)}")
    before = _of_the_machine()
    with KubernetesCluster() as cluster:
        cluster.start(1, 2)
        cluster.apply(_deployment(4))
        cluster.kubectl("rollout", "status", "deployment/waits", "--timeout=120s")
        assert _ready_pods(cluster) == {"node-1": 2, "node-2": 2}
        pod = cluster.kubectl("get", "pods", "--output=name").split()[0]
        assert cluster.kubectl("exec", pod, "--", "cloche", "--version").startswith("cloche ")
        cluster.kill(2)
        cluster.kubectl("wait", "node/node-2", "--for=condition=Ready=Unknown", "--timeout=60s")
        kubernetes_cluster.until(lambda: _ready_pods(cluster)["node-1"] == 4, 120.0)
    assert _of_the_machine() == before
