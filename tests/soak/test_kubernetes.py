"""A real Kubernetes cluster of two nodes: `make soak AREA=kubernetes`, which makes its programs and the image.

One cluster for all tests of this file, in their order. What they measure is in `build/kubernetes/measured.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.fleets.kubernetes.manifests import rules
from cloche.fleets.kubernetes.pods import PORT
from tests.harness import kubernetes_calls, kubernetes_cluster
from tests.harness.kubernetes_cluster import IMAGE, IMAGES, SYSCTLS, KubernetesCluster, until

pytestmark = [pytest.mark.root, pytest.mark.soak]
FEW, MANY, PROCESSES = 6, 50, 5
NO_IMAGE = "127.0.0.1:1/cloche-test:none"  # where no registry is
LATE_S, MADE_S, ENDED_S, ROLLOUT_S = 20.0, 120.0, 200.0, 400  # for a machine that does other things, too
OUTAGE_S = 30.0
FLEET = {
    "CLOCHE_FLEET_IMAGE": IMAGE, "CLOCHE_FLEET_PODS": str(FEW), "CLOCHE_FLEET_POD_CPUS": "0.03",
    "CLOCHE_FLEET_POD_MEMORY": "128m",
}  # fmt: skip


class Fleet:
    """A fleet on a cluster, with an operator, and callers that have the least role."""

    def __init__(self, cluster: KubernetesCluster):
        self.cluster, self.measured = cluster, dict[str, Any]()
        self.caller: dict[str, str] = {}
        self.killed: dict[str, Any] = {}

    def command(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run `cloche fleet` as the administrator."""
        command = [sys.executable, "-m", "cloche", "fleet", words[0], "--engine", "kubernetes", *words[1:]]
        variables = {f"CLOCHE_FLEET_{name.upper()}": value for name, value in settings.items()}
        return self.cluster.run(command, env=self.cluster.environment() | FLEET | variables, timeout=ROLLOUT_S)

    def done(self, *words: str, **settings: str) -> str:
        """Run `cloche fleet`, which has to succeed."""
        done = self.command(*words, **settings)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def become(self, account: str) -> None:
        """Let calls have another account of the namespace."""
        self.caller = {"KUBECONFIG": str(self.cluster.kubeconfig_for(account, "cloche"))}

    def call(self, name: str, *values: Any, is_full: bool = True) -> Any:
        """Call a function as the caller, by default once all pods of the Deployment are ready."""
        if is_full:
            self.wait()
        answer = self.cluster.call(getattr(kubernetes_calls, name), *values, variables=self.caller)
        self.note(" ".join(map(str, (name, *values))), answer)
        return answer

    def wait(self) -> float:
        """Wait until all pods of the Deployment are ready, and return for how long."""
        began = time.monotonic()
        words = ("rollout", "status", "deployment/cloche-default", f"--timeout={ROLLOUT_S}s")
        self.kubectl(*words)
        return time.monotonic() - began

    def kubectl(self, *words: str) -> str:
        """Run kubectl in the fleet's namespace."""
        return self.cluster.kubectl("--namespace=cloche", *words)

    def note(self, name: str, value: Any) -> None:
        """Write what was measured."""
        self.measured[name] = value
        (IMAGES / "measured.json").write_text(json.dumps(self.measured, indent=1))


def _of_the_machine() -> dict[str, Any]:
    """Return what a cluster could leave or change."""
    sysctls = {name: Path("/proc/sys", name).read_text() for name in SYSCTLS}
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/cloche-kubernetes-*")}
    links = {line.split()[1] for line in subprocess.check_output(["ip", "-oneline", "link"], text=True).splitlines()}
    mounts = {line for line in Path("/proc/mounts").read_text().splitlines() if "cloche-kubernetes" in line}
    folders = set(Path("/var/tmp").glob("cloche-kubernetes-*"))
    return sysctls | {"groups": groups, "links": links, "folders": folders, "mounts": mounts}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Return a fleet of a few pods on two nodes; at its end nothing of it, or of the cluster, is left."""
    if lacks := kubernetes_cluster.missing():
        pytest.skip(f"missing: {', '.join(lacks)}")
    before, began = _of_the_machine(), time.monotonic()
    with KubernetesCluster() as cluster:
        made = Fleet(cluster)
        made.note("control plane", time.monotonic() - began)
        cluster.start(1, 2)
        made.note("two nodes", time.monotonic() - began)
        made.note("up", made.done("up", "--apply"))
        made.become("cloche-caller")
        yield made
        made.done("down")
        left = ("get", "deployments,pods,configmaps,leases", "--selector=cloche/fleet", "--output=name")
        until(lambda: not made.kubectl(*left), ENDED_S)  # a hundred pods have to end
    assert _of_the_machine() == before
    assert not cluster.processes_left()


def test_a_sandbox_in_a_pod_does_all_but_listen(fleet: Fleet) -> None:
    """Programs, files, sessions and terminals, with the least role; a holder is killed here, for a later test."""
    assert '"gitVersion": "v1.20.2"' in fleet.cluster.kubectl("get", "--raw", "/version")
    fleet.killed = fleet.call("holder_killed")
    assert fleet.killed["is there"]
    assert fleet.call("used", is_full=False) == {
        "stdout": "42\n", "engine": "kubernetes", "level": "confined", "source": "claimed", "file": "made outside",
        "cell": 42, "terminal": True, "no servers": [True, True],
    }  # fmt: skip


def test_the_doctor_says_what_the_network_enforces(fleet: Fleet) -> None:
    """The network of this cluster enforces no NetworkPolicy; packets that a node drops look like one that does."""
    assert "NetworkPolicy: NOT enforced" in fleet.call("doctor")
    rule = ["iptables", "--insert", "FORWARD", "--protocol", "tcp", "--dport", str(PORT + 1), "--jump", "DROP"]
    for number in (1, 2):
        done = fleet.cluster.run(rule, number)
        assert done.returncode == 0, done.stderr
    assert "NetworkPolicy: enforced" in fleet.call("doctor")


def test_a_missing_right_is_named_with_verb_and_resource(fleet: Fleet) -> None:
    """An account without the role may not even read the fleet's object; one may read pods, and not claim them."""
    fleet.become("cloche-node")
    assert "no permission to get configmaps in namespace cloche" in fleet.call("refused")["text"]
    allowed = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]} for rule in rules("warm")]
    here: dict[str, Any] = {"name": "reader", "namespace": "cloche"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    subject = {"kind": "ServiceAccount", **here}
    version = "rbac.authorization.k8s.io/v1"
    fleet.cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": here},
        {"apiVersion": version, "kind": "Role", "metadata": here, "rules": allowed},
        {"apiVersion": version, "kind": "RoleBinding", "metadata": here, "roleRef": role, "subjects": [subject]},
    )
    fleet.become("reader")
    said = fleet.call("refused", is_full=False)
    assert "no permission to patch pods in namespace cloche" in said["text"]
    assert said["seconds"] < LATE_S
    fleet.become("cloche-caller")


def test_a_quota_that_is_used_up_is_named(fleet: Fleet) -> None:
    """All pods are claimed, and the quota permits no further one: who asks then is told within seconds."""
    fleet.wait()
    count = len(fleet.kubectl("get", "pods", "--output=name").split())
    spec = {"hard": {"pods": str(count)}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight", "namespace": "cloche"}}
    fleet.cluster.apply({**quota, "spec": spec})
    said = fleet.call("all_taken", FEW)
    assert "exceeded quota: tight" in said["text"]
    assert said["seconds"] < LATE_S
    fleet.kubectl("delete", "resourcequota", "tight")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "huge", "pod_cpus": "100"}, "2 Insufficient cpu"),
        ({"template": "none", "image": NO_IMAGE}, "its image cannot be pulled"),
    ],
)
def test_pods_that_cannot_start_are_named(fleet: Fleet, settings: dict[str, str], words: str) -> None:
    """`cloche fleet up` fails with the scheduler's words, or with the image."""
    began = time.monotonic()
    done = fleet.command("up", "--apply", **settings, pods="3")
    fleet.note(f"up {settings['template']}", {"text": done.stderr, "seconds": time.monotonic() - began})
    assert words in done.stderr
    said = fleet.call("refused", settings["template"])
    assert words in said["text"]
    fleet.kubectl("delete", "deployment", f"cloche-{settings['template']}")
    fleet.done("up", "--apply")


def test_the_pod_of_a_killed_process_is_deleted(fleet: Fleet) -> None:
    """The holder was killed in the first test; any other coordinator deletes what it had."""
    fleet.note("reaped after", fleet.call("reaped", fleet.killed["pod"]) - fleet.killed["at"])


def test_a_drained_pod_is_gone_with_its_sandbox(fleet: Fleet) -> None:
    """`cloche fleet drain` waits for the lease of a claimed pod, and ends a ready one at once."""
    answer = fleet.call("drained")
    assert (answer["lived"], answer["waited"], answer["left"]) == ("7\n", True, False)
    assert "takes no lease, and has none" in answer["printed"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("kill_container", "its container has ended: Error, exit code 137"), ("drain", "is being deleted")],
)
def test_what_becomes_of_a_pod_is_told(fleet: Fleet, how: str, reason: str) -> None:
    """A container that restarts and a machine that is drained lose their sandboxes, with the kubelet's reason."""
    lost = fleet.call("lost", how, *(["cloche"] if how == "kill_container" else []))
    if how == "drain":
        fleet.cluster.uncordon(lost["number"])
        assert lost["elsewhere"]
    assert (lost["kind"], lost["again"], lost["other pod"]) == ("NodeLost", "7\n", True)
    assert reason in lost["text"]
    assert lost["seconds"] < LATE_S


def test_without_controllers_ready_pods_are_claimed(fleet: Fleet) -> None:
    """The controller manager is killed: sandboxes live, and pods are claimed; once it is back, the pool fills."""
    answer = fleet.call("without_controllers", 3)
    assert answer == {"printed": ["0\n", "1\n", "2\n"], "lived": "9\n", "after": "8\n"}
    fleet.note("filled after", fleet.wait())


def test_the_api_server_may_be_away(fleet: Fleet) -> None:
    """For half a minute: the sandbox that lives goes on, and who asks for one gets it afterwards."""
    away = fleet.call("without_api_server", OUTAGE_S)
    assert (away["answers"] > 10, away["after"], away["later"]) == (True, "9\n", "8\n")


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_lost_node_is_noticed_before_kubernetes_does(fleet: Fleet, how: str) -> None:
    """Its holder gets NodeLost within seconds, the next run is elsewhere, and so are all ready pods later."""
    lost = fleet.call("lost", how)
    assert (lost["kind"], lost["again"], lost["elsewhere"]) == ("NodeLost", "7\n", True)
    assert lost["seconds"] < LATE_S
    number = lost["number"]
    if how == "cut":
        fleet.cluster.mend(number)
    else:
        fleet.cluster.kubectl("wait", f"node/node-{number}", "--for=condition=Ready=Unknown", "--timeout=60s")
        began = time.monotonic()
        fleet.wait()
        fleet.note("whole again on the other node", time.monotonic() - began)
        fleet.cluster.start(number)
    until(lambda: fleet.cluster.is_node_ready(number), 60.0)


def test_the_api_server_forwards_to_a_pod(fleet: Fleet) -> None:
    """With a role for it a sandbox is used from where no pod can be reached; without it the missing right is named."""
    fleet.done("up", "--apply", reach="forward")
    assert "no permission to get pods/portforward in namespace cloche" in fleet.call("forward_refused")
    fleet.become("cloche-outside")
    said = fleet.call("forwarded")
    assert (said["same"], said["terminal"]) == (True, True)
    fleet.become("cloche-caller")


def test_an_image_that_no_template_has_gets_a_pod(fleet: Fleet) -> None:
    """A pod is made for the image, and deleted after it; of one without Python, and of none, the cause is told."""
    fleet.done("up", "--apply", mode="pod")
    said = fleet.call("with_image", "cloche-test:python")
    assert said["text"] == "(3, 11)\n"
    for image, words in (("cloche-test:pause", "python3"), (NO_IMAGE, "its image cannot be pulled")):
        refused = fleet.call("with_image", image)
        assert words in refused["text"]
        assert refused["seconds"] < MADE_S
    until(lambda: "cloche/holder" not in fleet.kubectl("get", "pods", "--show-labels"), LATE_S)


def test_fifty_claims_at_once_take_fifty_pods(fleet: Fleet) -> None:
    """Five processes ask for ten each at the same moment: no pod is claimed twice."""
    began = time.monotonic()
    fleet.done("up", "--apply", pods=str(MANY))
    fleet.wait()
    fleet.note("fifty pods ready", time.monotonic() - began)
    claims = fleet.call("claims", PROCESSES, MANY // PROCESSES)
    assert len(claims["pods"]) == len(set(claims["pods"])) == MANY
    assert claims["seconds"] < MADE_S
