"""`cloche doctor` at a fleet of pods: each fault with its remedy, and what it tries of the network."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import cloche
from cloche.core.fleet import FleetSettings
from cloche.core.record import replace
from cloche.fleets.kubernetes import api as api_module
from cloche.fleets.kubernetes import examine as examine_module
from cloche.fleets.kubernetes.examine import examine
from cloche.fleets.tending import Reach
from tests.harness.kubernetes_api import Cluster

SETTINGS = FleetSettings(image="cloche:test")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a cluster, which the environment names; nothing listens beside its API server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    started = Cluster(SETTINGS, version=cloche.__version__)
    monkeypatch.setenv("KUBECONFIG", started.kubeconfig(tmp_path))
    yield started
    started.close()


def test_the_doctor_looks_at_rights_and_pods(cluster: Cluster) -> None:
    """With all rights and a ready pod nothing is wrong; else the missing rights, or the missing pods, are named."""
    found = examine(SETTINGS)
    assert (found.version, found.problem) == ("v1.20.2", "no pod is ready: its Deployment has 0 replicas.")
    cluster.fill(1)
    assert examine(SETTINGS).problem == ""
    cluster.rules = [
        {**row, "verbs": [verb for verb in row["verbs"] if verb != "patch"]} for row in cluster.rules or ()
    ]
    found = examine(replace(SETTINGS, reach="forward"))
    assert "get pods/portforward, create pods/portforward in namespace cloche" in found.problem
    assert "role cloche-outside" in found.remedy
    assert examine(SETTINGS).problem == "this account may not patch pods, patch leases in namespace cloche."


def test_the_doctor_names_each_fault_with_its_remedy(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota, an image, no machine, a clock, expired credentials, no cluster."""
    cluster.fill(1)
    (pod,) = cluster.pods
    waiting = {"reason": "ErrImagePull", "message": "manifest unknown"}
    image = {"name": "node", "state": {"waiting": waiting}}
    cluster.change_pod(pod, containerStatuses=[image], conditions=[])
    found = examine(SETTINGS)
    assert "no pod is ready: its image cannot be pulled (ErrImagePull): manifest unknown." in found.problem
    assert "fleet.image" in found.remedy
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes."}
    cluster.change_pod(pod, containerStatuses=[], conditions=[condition])
    found = examine(SETTINGS)
    assert "no machine of the cluster fits: 0/2 nodes." in found.problem
    assert "fleet.pod_cpus" in found.remedy
    cluster.quota = 0
    cluster.remove(cluster.pods_path, pod)
    found = examine(SETTINGS)
    assert ("exceeded quota: cloche-node" in found.problem, "kubectl describe quota" in found.remedy) == (True, True)
    with monkeypatch.context() as patch:
        patch.setattr(api_module, "time", SimpleNamespace(time=lambda: time.time() - 60))
        found = examine(SETTINGS)
    assert ("s behind the API server's" in found.problem, "NTP" in found.remedy) == (True, True)
    cluster.token = "another"
    found = examine(SETTINGS)
    assert "refuses these credentials: Unauthorized." in found.problem
    assert "They have expired" in found.remedy
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    found = examine(SETTINGS)
    assert ("no Kubernetes cluster was found" in found.problem, "KUBECONFIG" in found.remedy) == (True, True)


@pytest.mark.parametrize(
    ("served", "beside", "words"),
    [
        ("open", "silent", "enforced: 127.0.0.1 accepts connections at 8471, and at 8472"),
        ("open", "refused", "NOT enforced: 127.0.0.1 accepts"),
        ("silent", "silent", "not tried, as 127.0.0.1:8471 cannot be reached from here"),
    ],
)
def test_the_doctor_tries_the_network_policy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, served: Reach, beside: Reach, words: str
) -> None:
    """What happens beside the server's port tells, if the port itself can be reached; and how to try by hand."""
    answers = {"https://127.0.0.1:8471": served, "https://127.0.0.1:8472": beside}

    async def reach(address: str) -> Reach:
        return answers[address]

    monkeypatch.setattr(examine_module, "reach", reach)
    assert examine(SETTINGS).network_policy == "not tried, as no pod is ready."
    cluster.fill(1)
    found = examine(SETTINGS)
    assert found.network_policy.startswith(words)
    assert ("kubectl run probe" in found.network_policy) is (beside == "refused" or served == "silent")
