"""Fleets whose pods are not a Deployment's alone, on a small API server; containers are processes of this machine."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche import leased
from cloche.backends.cloche.links import link_to
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.fleet import FleetSettings, LeaseSpec
from cloche.core.record import replace
from cloche.fleets.kubernetes import holders, manifests
from cloche.fleets.kubernetes.api import KubernetesApi
from cloche.fleets.kubernetes.applying import plan
from cloche.fleets.kubernetes.fleet import KubernetesOperator, connect
from cloche.fleets.kubernetes.pods import GROUP
from tests.harness.kubernetes_api import CUT_AFTER, Cluster
from tests.harness.kubernetes_kubelet import Kubelet, image_with
from tests.harness.kubernetes_sandboxes import SandboxController
from tests.harness.node import Node

SETTINGS = FleetSettings(image="cloche:test", mode="pod")
SMALL = LeaseSpec(cpus=0.5, memory_bytes=128 << 20, wait_s=30)
SOON_S = 120.0
PYTHON = os.path.realpath(sys.executable)
OLD = f"""#!/bin/sh
shift
exec {PYTHON} -c '
import runpy, sys
sys.version_info, sys.argv = (3, 9, 2, "final", 0), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a cluster, which the environment names."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    started = Cluster(SETTINGS, version=cloche.__version__)
    monkeypatch.setenv("KUBECONFIG", started.kubeconfig(tmp_path))
    yield started
    for key in [key for key in leased._of_processes if key[0] == "kubernetes"]:
        leased._of_processes.pop(key).close()
    started.close()


@pytest.fixture
def kubelet(cluster: Cluster, tmp_path: Path) -> Iterator[Kubelet]:
    """Return a kubelet that has Cloche's image, one with a Python of its own, an old one, and none."""
    command = ["#!/bin/sh", f'exec {sys.executable} -m cloche "$@"']
    programs: dict[str, dict[str, Any]] = {
        "cloche:test": {"cloche": command}, "science:1": {"python3": PYTHON},
        "old:1": {"python3": OLD.splitlines()}, "none:1": {},
    }  # fmt: skip
    images = {name: image_with(tmp_path, name, rows) for name, rows in programs.items()}
    started = Kubelet(cluster, tmp_path, images)
    yield started
    started.close()


async def until(is_true: Any, what: str) -> None:
    """Wait until something is true."""
    ends = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.01)


def test_an_image_that_no_template_has_gets_a_pod_of_its_own(cluster: Cluster, kubelet: Kubelet) -> None:
    """Its own Python runs a node and the code; the pod is made once, and goes with its lease."""
    cluster.fail("create", "/pods", CUT_AFTER)
    rows: list[dict[str, Any]] = []
    created, cluster.created = cluster.created, lambda path, row: (created(path, row), rows.append(row))[0]  # type: ignore[func-returns-value]
    with cloche.Sandbox(backend="kubernetes", image="science:1", live=True, memory="64m", cpus=0.2) as sandbox:
        result = sandbox.run("import sys; print(sys.prefix)")
        assert result.stdout == f"{sys.base_prefix}\n", result
        pods = [row for row in rows if row["kind"] == "Pod"]
        assert [row["metadata"]["name"] for row in pods] == [result.meta["remote"]["node"]], "it is made once"
        (pod,) = pods
        assert pod["spec"]["containers"][0]["image"] == "science:1"
        assert pod["spec"]["activeDeadlineSeconds"] == 86_401
        (owner,) = pod["metadata"]["ownerReferences"]
        leases = cluster.objects["/apis/coordination.k8s.io/v1/namespaces/cloche/leases"]
        assert leases[owner["name"]]["metadata"]["uid"] == owner["uid"]
    asyncio.run(until(lambda: not cluster.pods, "the pod is deleted with its lease"))


async def refused(image: str, *, wait_s: float = SOON_S, template: str = "default") -> str:
    """Return how a request for a pod with an image is refused."""
    coordinator = await connect(replace(SETTINGS, image=image, template=template), link_to)
    try:
        with pytest.raises(BackendUnavailable) as raised:
            await coordinator.lease(replace(SMALL, wait_s=wait_s))
    finally:
        await coordinator.close()
    return str(raised.value)


def test_an_image_that_gets_no_pod_is_told_in_the_words_of_the_cluster(cluster: Cluster, kubelet: Kubelet) -> None:
    """No Python, an old one, no such image, no machine, a used-up quota: within seconds, and nothing of it is left."""
    message = "0/2 nodes are available: 2 Insufficient memory."
    kubelet.unscheduled = {"large:1": message, "slow:1": ""}
    quota = 'pods "x" is forbidden: exceeded quota: cloche-node, used: pods=15, limited: pods=15'
    cluster.admits = lambda _, row: quota if "'many:1'" in str(row["spec"]) else ""

    async def work() -> list[str]:
        images = ("none:1", "old:1", "missing:1", "large:1", "many:1")
        return await asyncio.gather(*map(refused, images), refused("slow:1", wait_s=2))

    began = time.monotonic()
    none, old, missing, large, many, slow = asyncio.run(work())
    assert time.monotonic() - began < SOON_S
    assert 'StartError, exit code 128, exec: "python3": executable file not found in $PATH' in none
    assert "make a template of it: build an image from it with Python 3.11" in none
    assert "the python3 of this image is Python 3.9, and a node needs 3.11 or later" in old
    assert "make a template of it" in old
    assert 'its image cannot be pulled (ErrImagePull): failed to pull and unpack image "missing:1"' in missing
    assert f"no machine of the cluster fits: {message}" in large
    assert quota in many
    assert "within 2 s" in slow
    assert not cluster.pods, "nor of a create that was given up"
    assert not cluster.objects["/apis/coordination.k8s.io/v1/namespaces/cloche/leases"]


def test_a_fleet_of_templates_refuses_other_images(cluster: Cluster) -> None:
    """Only an operator lets callers name images: the role has no right to make pods otherwise."""
    cluster.settings = replace(SETTINGS, mode="warm")
    cluster.apply_fleet()
    with pytest.raises(InvalidRequest, match=r"the pods of this fleet have cloche:test, and not science:1.*mode: pod"):
        cloche.run("print(1)", backend="kubernetes", image="science:1")


@pytest.fixture
def sandboxes(cluster: Cluster) -> SandboxController:
    """Return the controller of agent-sandbox, and let callers have the role of its mode."""
    cluster.settings = replace(SETTINGS, mode="agent-sandbox", pods=2, do_not_disrupt=True)
    cluster.objects.clear()
    cluster.apply_fleet()
    cluster.rules = manifests.rules("agent-sandbox")
    return SandboxController(cluster)


@pytest.fixture
def node(cluster: Cluster, sandboxes: SandboxController, tmp_path: Path) -> Iterator[Node]:
    """Fill the pool with a server of this machine, and with pods that nobody serves."""
    started = Node(tmp_path, "--waits", signer=cluster.signer, variables={"PYTHONUNBUFFERED": "1"})
    facts = iter([started.facts])
    cluster.start_pod = lambda name: cluster.serve(name, next(facts, None))
    sandboxes.fill()
    yield started
    with suppress(ProcessLookupError):
        started.end(signal.SIGKILL)


async def end_fleet(settings: FleetSettings) -> None:
    """End a fleet as its operator."""
    operator = KubernetesOperator(settings)
    await operator.down()
    await operator.close()


def test_a_claim_on_a_warm_pool_gives_a_pod(
    cluster: Cluster, sandboxes: SandboxController, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least role of the mode is enough; the claim is made once, and is deleted in the end, also after failures."""
    monkeypatch.setattr(holders, "RENEW_S", 0.5)
    cluster.fail("create", "/sandboxclaims", CUT_AFTER)
    cluster.fail("delete", "/sandboxclaims", 403, times=3)
    with cloche.Sandbox(backend="kubernetes", live=True, memory="64m", cpus=0.2) as sandbox:
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
        (claim,) = sandboxes.claims.values()
        assert claim["spec"]["warmPoolRef"] == {"name": "cloche-default"}
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
        assert claim["spec"]["additionalPodMetadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        ends_s = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"]).timestamp() - time.time()
        assert 86_400 - SOON_S < ends_s < 86_401
        (owner,) = claim["metadata"]["ownerReferences"]
        assert owner["name"] in cluster.objects["/apis/coordination.k8s.io/v1/namespaces/cloche/leases"]
        assert len(cluster.pods) == 3, "the pool is full again"
    asyncio.run(until(lambda: not sandboxes.claims, "the claim is deleted with its lease"))
    assert len(cluster.pods) == 2, "and so is its pod"
    assert cluster.requests["patch pods"] == 0
    assert cluster.requests["get pods/log"] <= 2, "the log of a server that starts is followed"
    assert cluster.requests["watch sandboxclaims"] + cluster.requests["get sandboxclaims"] <= 2, "so is a claim"
    cluster.rules = None
    asyncio.run(end_fleet(cluster.settings))
    assert not any(rows for path, rows in cluster.objects.items() if GROUP in path), "nor is there a pool"


def test_a_cluster_without_agent_sandbox_is_told_what_needs_none(
    cluster: Cluster, sandboxes: SandboxController
) -> None:
    """Where its objects are not served, `warm` is named; a claim without a pool has the controller's words."""

    async def work() -> list[str]:
        api = KubernetesApi()
        cluster.rules = None
        cluster.fail("list", "agents.x-k8s.io", 404)
        with pytest.raises(
            BackendUnavailable, match=r"serves no extensions\.agents\.x-k8s\.io/v1beta1.*fleet\.mode: warm"
        ):
            await plan(api, cluster.settings)
        await api.close()
        cluster.rules = manifests.rules("agent-sandbox")
        cluster.fail("create", "/sandboxclaims", 404)
        return await asyncio.gather(refused("", template="other"), refused("", template="other"))

    no_pool, not_served = sorted(asyncio.run(work()), key=lambda text: "agent-sandbox" in text)
    assert 'SandboxWarmPool "cloche-other" not found (WarmPoolNotFound)' in no_pool
    assert "serves no extensions.agents.x-k8s.io/v1beta1 (agent-sandbox)" in not_served
    assert 'use "fleet.mode: warm", which needs no such objects' in not_served
    assert not sandboxes.claims
