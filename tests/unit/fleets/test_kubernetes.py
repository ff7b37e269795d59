"""What pods say about themselves, the manifests of a fleet, and nodes with one lease; nothing here has a cluster."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml

from cloche.backends.layout import ETC_SHOWN, SYSTEM_FOLDERS, is_below
from cloche.core.errors import InvalidRequest
from cloche.core.fleet_settings import FleetMode, FleetSettings
from cloche.core.record import replace
from cloche.fleets.decisions import AskBlock, Decisions, GiveBack, Grant, PlacingRules
from cloche.fleets.kubernetes.api import error_of
from cloche.fleets.kubernetes.manifests import FORWARD, PRIVATE, Served, foreign_pod, left_out, manifests, rules
from cloche.fleets.kubernetes.pods import FLEET, GROUP, Owner, born_claimed, claim_patch, facts_of, pod_of, quantity
from cloche.fleets.kubernetes.pooled import reason_of
from cloche.fleets.placing import ResourceSize
from cloche.fleets.waiting import LeaseRequest

ROOT = Path(__file__).parents[3]
SETTINGS = FleetSettings(image="cloche:test")
MODES: tuple[FleetMode, FleetMode] = ("warm", "agent-sandbox")
SIZE = ResourceSize.of(1, 1 << 30)
PREEMPTED = {"reason": "PreemptionByScheduler", "message": "preempting to accommodate a higher priority pod"}
PODS = "/api/v1/namespaces/here/pods"


def pod_with(container: dict[str, Any] | None = None, **status: Any) -> Any:
    """Return a pod with such a status."""
    rows = [{"name": "sidecar"}, {"name": "node", **(container or {})}]
    limits = {"cpu": "500m", "memory": "1Gi"}
    return pod_of(
        {
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "7", "labels": {"cloche/state": "ready"}},
            "spec": {"containers": [{"name": "node", "resources": {"limits": limits}}]},
            "status": {"containerStatuses": rows, "startTime": "2026-11-30T05:00:00Z", **status},
        }
    )


def waiting(reason: str, **more: Any) -> dict[str, Any]:
    """Return the state of a container that waits."""
    return {"state": {"waiting": {"reason": reason, **more}}}


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (pod_with(waiting("ErrImagePull", message="no host")), "its image cannot be pulled (ErrImagePull): no host"),
        (
            pod_with({**waiting("CrashLoopBackOff"), "lastState": {"terminated": {"reason": "Error", "exitCode": 2}}}),
            "its container does not start (CrashLoopBackOff): Error, exit code 2",
        ),
        (
            pod_with(
                {
                    **waiting("CrashLoopBackOff"),
                    "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                }
            ),
            "its container does not start (CrashLoopBackOff): OOMKilled, exit code 137; its limit is 1Gi of memory",
        ),
        (
            pod_with(phase="Failed", conditions=[{"type": "DisruptionTarget", **PREEMPTED}]),
            "the pod has ended: PreemptionByScheduler preempting to accommodate a higher priority pod",
        ),
        (
            pod_with(waiting("CreateContainerConfigError", message='configmap "cloche-fleet" not found')),
            'its container does not start (CreateContainerConfigError): configmap "cloche-fleet" not found',
        ),
        (pod_with(waiting("ContainerCreating")), ""),
        (
            pod_with(phase="Failed", reason="Evicted", message="low on memory"),
            "the pod has ended: Evicted low on memory",
        ),
        (pod_with(phase="Failed", reason="DeadlineExceeded"), "the pod has ended: DeadlineExceeded"),
        (pod_with(phase="Failed", message="\x1b[2J of a\nlog"), "the pod has ended: \\x1b[2J of a log"),
    ],
)
def test_a_pod_says_what_is_wrong_with_it(pod: Any, words: str) -> None:
    """The kubelet's reason and message are part of the sentence; a pod that starts has none."""
    assert (pod.stuck or pod.over) == words


@pytest.mark.parametrize(
    ("verb", "status", "message", "words"),
    [
        ("list", 401, "Unauthorized", "refuses these credentials: Unauthorized. They have expired"),
        (
            "watch",
            403,
            "x is forbidden",
            "no permission to watch pods in namespace here: x is forbidden. Bind ",
        ),
        ("watch", 403, "", '"kubectl auth can-i watch pods -n here"'),
        ("create", 403, "exceeded quota: q", "a quota of namespace here is used up: exceeded quota: q. "),
        ("create", 403, "exceeded quota: q", '"kubectl describe quota -n here" shows it'),
        ("list", 429, "too many", "takes no further requests of this account for now: too many. Try again in a minute"),
        ("list", 500, "etcd", "refuses to list pods: etcd (status 500). Look at the API server."),
    ],
)
def test_a_refusal_of_the_api_server_is_a_sentence_with_a_remedy(
    verb: str, status: int, message: str, words: str
) -> None:
    """It has the server's own message, and the verb, the resource and the namespace where they matter."""
    error = error_of(verb, PODS, status, json.dumps({"message": message}).encode(), again="7")
    assert words in str(error)
    assert (error.status, error.again_s) == (status, 7.0)


def test_a_pod_has_what_leases_may_use_and_how_it_ended() -> None:
    """The node's own memory is not the leases'; an end for memory has the limit."""
    ended = {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "state": {"running": {}}}
    pod = pod_with(ended)
    assert (pod.cpus, pod.memory_bytes) == (0.5, (1 << 30) - (128 << 20))
    assert pod.ended == "OOMKilled, exit code 137; its limit is 1Gi of memory"
    log = '{"address": "https://a:1"}\nTraceback\nOSError: no room\n'
    failed = pod_with({"state": {"terminated": {"reason": "Error", "exitCode": 1, "message": log}}}).ended
    assert failed == "Error, exit code 1, OSError: no room"
    assert [quantity(text) for text in ("2", "250m", "1Ki", "1e3", "0.5", "x")] == [2, 0.25, 1024, 1000, 0.5, 0]


def test_a_claim_is_one_guarded_patch() -> None:
    """The patch has the version and the uid, an owner in place of the ReplicaSet, and a deadline since the start."""
    pod, owner = pod_with(), Owner(holder="h", name="cloche-h", uid="l")
    patch = claim_patch(pod, owner, now=pod.started_at + 100, longest_s=50)
    assert patch["metadata"]["resourceVersion"] == "7"
    assert patch["metadata"]["uid"] == "u"
    assert [(row["uid"], row["controller"]) for row in patch["metadata"]["ownerReferences"]] == [("l", True)]
    assert patch["spec"] == {"activeDeadlineSeconds": 151}


def test_the_log_says_what_the_server_is() -> None:
    """The line with the address is found among others; a part of it is none."""
    line = '{"address": "https://a:1", "certificate": "c", "pid": 1, "boot": "b", "version": "1"}'
    facts = facts_of(f"a warning\n{{}}\n{line}\n")
    assert facts is not None
    assert (facts.address, facts.certificate, facts.boot, facts.version) == ("https://a:1", "c", "b", "1")
    assert facts_of(line[:40]) is None


def objects(minor: int) -> Iterator[dict[str, Any]]:
    """Yield each object that any settings of a fleet give, once, and those of `deploy/kubernetes/serve`."""
    more = {"network": True, "runtime_class": "gvisor", "reach": "forward", "cordons": True}
    seen = set[str]()
    for mode, isolation, options in product(get_args(FleetMode), ("pod", "jail"), ({}, more)):
        settings = replace(SETTINGS, mode=mode, isolation=isolation, **options)
        for row in manifests(settings, Served(minor=minor), data={"publicKey": "k"}):
            if row["apiVersion"] != GROUP and (text := json.dumps(row)) not in seen:
                seen.add(text)
                yield row
    yield from yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "serve" / "serve.yaml").read_text())


@pytest.mark.parametrize("minor", range(30, 38))
def test_the_manifests_are_valid(minor: int) -> None:
    """Each object has the schema of the server's version; those of agent-sandbox have none, and the fleet's pod."""
    kinds = set()
    for row in objects(minor):
        kubernetes_validate.validate(row, f"1.{minor}", strict=True)
        kinds.add(row["kind"])
    assert {"Deployment", "ClusterRole", "Service"} <= kinds


def test_a_service_has_the_least_role_and_reaches_the_pods() -> None:
    """Its account is bound to the fleet's caller, and the fleet's policy lets its pods in."""
    text = (ROOT / "deploy" / "kubernetes" / "serve" / "serve.yaml").read_text()
    rows = {row["kind"]: row for row in yaml.safe_load_all(text)}
    fleet = {row["kind"]: row for row in manifests(SETTINGS)}
    pod = rows["Deployment"]["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == rows["RoleBinding"]["subjects"][0]["name"] == "cloche-serve"
    assert rows["RoleBinding"]["roleRef"] == fleet["RoleBinding"]["roleRef"]
    (rule,) = fleet["NetworkPolicy"]["spec"]["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert wanted <= pod["metadata"]["labels"].items()
    assert FLEET not in pod["metadata"]["labels"], "it is no pod of the fleet"


@pytest.mark.parametrize("minor", [30, 33, 37])
def test_a_pod_for_another_image_is_valid_and_made_by_that_mode_alone(minor: int) -> None:
    """It has the schema of the server's version, and the role of its mode may create it."""
    settings = replace(SETTINGS, mode="pod")
    spec = foreign_pod(settings, Served(minor=minor))
    pod = born_claimed(spec, Owner(holder="h", name="cloche-h", uid="l"), name="cloche-h-1", longest_s=50)
    kubernetes_validate.validate(pod, f"1.{minor}", strict=True)
    (copying,), (container,) = spec["initContainers"], spec["containers"]
    assert (
        copying["securityContext"]["capabilities"] == container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    )
    rows = {row["kind"]: row for row in manifests(settings)}
    assert {*rows["Role"]["rules"][0]["verbs"]} - {*rules("warm")[0]["verbs"]} == {"create"}


def test_a_pool_of_agent_sandbox_takes_the_place_of_the_deployment() -> None:
    """Its pods are the Deployment's, but for a label; no budget selects them, and the role may only read them."""
    plain, pooled = ({row["kind"]: row for row in manifests(replace(SETTINGS, mode=mode))} for mode in MODES)
    of_pool, of_deployment = pooled["SandboxTemplate"]["spec"]["podTemplate"], plain["Deployment"]["spec"]["template"]
    assert of_pool["spec"] == of_deployment["spec"]
    labels = of_pool["metadata"]["labels"].items()
    assert not pooled["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert pooled["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels
    name = pooled["SandboxTemplate"]["metadata"]["name"]
    assert pooled["SandboxWarmPool"]["spec"]["sandboxTemplateRef"] == {"name": name}
    assert "Deployment" not in pooled
    verbs = {rule["resources"][0]: rule["verbs"] for rule in pooled["Role"]["rules"]}
    assert (verbs["pods"], verbs["sandboxclaims"]) == (["get", "list", "watch"], ["create", "get", "watch", "delete"])


def test_a_claim_says_why_it_waits() -> None:
    """The condition Ready has the controller's reason and message; one that is ready has none."""
    waiting = {"type": "Ready", "status": "False", "reason": "TemplateNotFound", "message": "a  b"}
    assert reason_of({"status": {"conditions": [{"type": "Finished"}, waiting]}}) == ("TemplateNotFound", "a b")
    assert reason_of({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "R"}]}}) == ("", "")
    assert reason_of({}) == ("", "")


def test_the_manifests_give_pods_nothing_that_they_do_not_need() -> None:
    """No token, no privilege, no way out, limits that are requests; what a server has not is left out and said."""
    rows = {row["kind"]: row for row in manifests(SETTINGS)}
    pod = rows["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert rows["NetworkPolicy"]["spec"]["egress"] == []
    assert not any("create" in rule["verbs"] for rule in rules("warm") if "pods" in rule["resources"])
    assert rows["Role"]["rules"] == rules("warm")
    assert "--all-addresses" in container["args"], "a port-forward arrives at loopback"
    assert {*PRIVATE} <= {*container["args"]}
    outside = manifests(replace(SETTINGS, reach="forward"))
    roles = {row["metadata"]["name"]: row["rules"] for row in outside if row["kind"] == "Role"}
    assert "ClusterRole" not in {row["kind"] for row in outside}
    assert roles == {"cloche-caller": rules("warm"), "cloche-outside": [*rules("warm"), FORWARD]}
    jail = replace(SETTINGS, isolation="jail", network=True)
    old = {row["kind"]: row for row in manifests(jail, Served(minor=20))}
    assert "hostUsers" not in old["Deployment"]["spec"]["template"]["spec"]
    assert old["PodDisruptionBudget"]["apiVersion"] == "policy/v1beta1"
    assert len(left_out(jail, Served(minor=20))) == 2
    (public, names) = old["NetworkPolicy"]["spec"]["egress"]
    denied = [network for block in public["to"] for network in block["ipBlock"]["except"]]
    assert (sorted(denied), len(names["ports"])) == (sorted(PRIVATE), 2)


def test_a_secret_is_mounted_for_the_fleets_own_server_alone() -> None:
    """Read-only; not in a pod whose image a caller names, and refused where guests see the files of their pod."""
    settings = replace(SETTINGS, secret="values", isolation="jail", network=True)
    for mode in MODES:
        made = manifests(replace(settings, mode=mode), Served())
        if mode == "warm":
            kubernetes_validate.validate(made[-1], "1.33", strict=True)
        pod = made[-1]["spec"]["template"]["spec"] if mode == "warm" else made[-2]["spec"]["podTemplate"]["spec"]
        (container,) = pod["containers"]
        (volume,) = [row for row in pod["volumes"] if "secret" in row]
        (mount,) = [row for row in container["volumeMounts"] if row["name"] == volume["name"]]
        assert (volume["secret"]["secretName"], mount["readOnly"]) == ("values", True)
        assert not any(is_below(mount["mountPath"], folder) for folder in (*SYSTEM_FOLDERS, *ETC_SHOWN))
        assert container["args"][-2:] == ["--secrets-from", mount["mountPath"]]
    named = json.dumps([rules(mode) for mode in get_args(FleetMode)])
    assert "values" not in named + json.dumps(foreign_pod(settings, Served()))
    with pytest.raises(InvalidRequest, match=r"with fleet.isolation 'pod' a guest shares the files of its pod"):
        manifests(replace(settings, isolation="pod"), Served())
    with pytest.raises(InvalidRequest, match=r"without fleet.network pods reach no host"):
        manifests(replace(settings, network=False), Served())


def test_deploy_has_the_manifests() -> None:
    """The folder deploy/kubernetes is what `scripts/manifests.py` makes."""
    file = ROOT / "deploy" / "kubernetes" / "fleet.yaml"
    settings = FleetSettings(image="cloche-node")
    assert list(yaml.safe_load_all(file.read_text())) == manifests(settings)


def request(name: str) -> LeaseRequest:
    """Return a request for a small place."""
    size = ResourceSize.of(0.1, 1 << 20)
    return LeaseRequest(id=name, key="k", size=size, prefers=(), ttl_s=60, arrived=0.0, wait_s=60)


def test_a_node_of_one_lease_is_given_back_after_it() -> None:
    """Two small requests have a node each; one that is coming is not asked for; a used node takes no other lease."""
    decisions = Decisions(PlacingRules(one_lease=True, block_part=1.0))
    decisions.resume(0.0)
    for name in ("a", "b"):
        decisions.node_known(name, SIZE, 0.0)
    decisions.node_known("c", SIZE, 0.0, is_coming=True)
    asks = [action for name in ("r1", "r2", "r3") for action in decisions.ask(request(name), 0.0)]
    assert [(ask.node, ask.size) for ask in asks if isinstance(ask, AskBlock)] == [("a", SIZE), ("b", SIZE)]
    for ask in asks:
        assert isinstance(ask, AskBlock)
        decisions.block_taken(ask.ask, ask.node, ask.node, SIZE, 0.0)
    grants = [action for name in ("a", "b") for action in decisions.node_ready(name, 0.0)]
    assert [(grant.request.id, grant.node) for grant in grants if isinstance(grant, Grant)] == [
        ("r1", "a"),
        ("r2", "b"),
    ]
    released = decisions.release("r1", 1.0)
    assert [action.block for action in released if isinstance(action, GiveBack)] == ["a"]
    assert not any(isinstance(action, Grant) for action in released), "nobody has a used node"
    (ask,) = decisions.node_known("c", SIZE, 1.0)
    assert isinstance(ask, AskBlock)
    assert ask.node == "c"
