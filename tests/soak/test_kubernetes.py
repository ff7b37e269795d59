"""A real Kubernetes cluster of two nodes: `make soak AREA=kubernetes`, which makes its programs and the image."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import kubernetes_calls, kubernetes_cluster
from tests.harness.kubernetes_cluster import IMAGE, SYSCTLS, KubernetesCluster

pytestmark = [pytest.mark.root, pytest.mark.soak]
LABELS = {"app": "waits"}
LATE_S, OUTAGE_S = 20.0, 30.0  # for a machine that does other things, too
FLEET = {
    "CLOCHE_FLEET_IMAGE": IMAGE, "CLOCHE_FLEET_PODS": "6", "CLOCHE_FLEET_POD_CPUS": "0.2",
    "CLOCHE_FLEET_POD_MEMORY": "128m",
}  # fmt: skip


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


def _fleet(cluster: KubernetesCluster, *words: str) -> None:
    """Run `cloche fleet` as the administrator."""
    command = [sys.executable, "-m", "cloche", "fleet", words[0], "--engine", "kubernetes", *words[1:]]
    done = cluster.run(command, env=cluster.environment() | FLEET, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_fleet_on_a_cluster() -> None:
    """Sandboxes in pods, with the least role: all that they do, claims at once, outages, lost nodes, a dead holder."""
    if lacks := kubernetes_cluster.missing():
        pytest.skip(f"missing: {', '.join(lacks)}")
    with KubernetesCluster() as cluster:
        cluster.start(1, 2)
        _fleet(cluster, "up", "--apply")
        caller = {"KUBECONFIG": str(cluster.kubeconfig_for("cloche-caller", "cloche"))}

        def call(name: str, *values: Any) -> dict[str, Any]:
            cluster.kubectl("rollout", "status", "deployment/cloche-default", "--namespace=cloche", "--timeout=200s")
            answer: dict[str, Any] = cluster.call(getattr(kubernetes_calls, name), *values, variables=caller)
            return answer

        assert call("used") == {
            "stdout": "42\n", "engine": "kubernetes", "level": "confined", "source": "claimed", "file": "made outside",
            "cell": 42, "terminal": True,
        }  # fmt: skip
        claims = call("claims", 6, 3)
        assert claims["pods"] == 6
        assert claims["seconds"] < LATE_S
        away = call("without_api_server", OUTAGE_S)
        assert (away["answers"] > 10, away["after"], away["later"]) == (True, "9\n", "8\n")
        for how in ("kill", "cut"):
            lost = call("lost", how)
            assert (lost["kind"], lost["again"], lost["elsewhere"]) == ("NodeLost", "7\n", True)
            assert lost["seconds"] < LATE_S
            if how == "kill":
                cluster.start(lost["number"])
            else:
                cluster.mend(lost["number"])
        _fleet(cluster, "down")
        assert not cluster.kubectl("get", "deployments", "--namespace=cloche", "--output=name")
