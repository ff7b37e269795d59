"""Pods as a fleet, against a small API server on loopback; a pod that runs code is a `cloche node` of this machine."""

import asyncio
import base64
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import cloche
from cloche.backends.cloche import connections, leased
from cloche.backends.cloche.kubernetes import KubernetesBackend
from cloche.cli.app import root
from cloche.core.errors import BackendUnavailable, NodeLost, OutcomeUnknown
from cloche.core.fleet import FleetSettings, LeaseSpec
from cloche.core.record import replace
from cloche.core.remote import HiddenText
from cloche.fleets.coordinator import Coordinator
from cloche.fleets.engine import EngineNode, KeepAnswer, NodeReport
from cloche.fleets.kubernetes import api as api_module
from cloche.fleets.kubernetes import engine as engine_module
from cloche.fleets.kubernetes import forwarding, holders, manifests
from cloche.fleets.kubernetes.api import KubernetesApi
from cloche.fleets.kubernetes.fleet import KubernetesOperator, connect
from cloche.fleets.kubernetes.forwarding import PodAddresses, PodForward
from cloche.fleets.signing import Signer
from cloche.fleets.tending import Reach
from tests.harness.kubernetes_api import CUT, CUT_AFTER, EXCEEDED, TOKEN, Cluster, NodePods

SETTINGS = FleetSettings(image="cloche:test")
SMALL = LeaseSpec(cpus=0.5, memory_bytes=128 << 20, wait_s=20)
SOON_S = 20.0
KINDS = ("configmaps", "secrets")


class QuietLink:
    """A link to a node that is in nobody's memory: it answers, and holds nothing."""

    def __init__(self, node: EngineNode, credential: Callable[[], HiddenText]):
        self.node = node

    async def status(self) -> NodeReport:
        return NodeReport(version=cloche.__version__)

    async def keep(self, denied: Sequence[str] | None, ttl_s: float, leases: Mapping[str, float]) -> KeepAnswer:
        return KeepAnswer()

    async def leases(self) -> Mapping[str, float]:
        return {}

    async def release(self, lease: str) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def is_open(address: str) -> Reach:
    """Reach any address."""
    return "open"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a cluster, which the environment names."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    made = Cluster(SETTINGS, version=cloche.__version__)
    monkeypatch.setenv("KUBECONFIG", made.kubeconfig(tmp_path))
    yield made
    made.close()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pods without a server count as reachable."""
    monkeypatch.setitem(engine_module.KubernetesEngine.__init__.__kwdefaults__, "reach", is_open)


async def coordinator_of(settings: FleetSettings = SETTINGS, link: Any = QuietLink) -> Coordinator:
    """Return a coordinator that has started."""
    coordinator = await connect(settings, link)
    coordinator._reach = is_open
    await coordinator.start()
    return coordinator


async def until(is_true: Callable[[], object], what: str) -> None:
    """Wait until something is true."""
    ends = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.01)


def test_twenty_claims_at_once_take_twenty_pods(cluster: Cluster, reached: None) -> None:
    """Twenty requests of four coordinators get a pod each; releases delete them, and the Deployment fills up."""

    async def work() -> None:
        cluster.fill(20)
        coordinators = [await coordinator_of() for _ in range(4)]
        began = time.monotonic()
        leases = await asyncio.gather(*(coordinator.lease(SMALL) for coordinator in coordinators * 5))
        took_s = time.monotonic() - began
        assert len({lease.node for lease in leases}) == 20
        claimed = [name for name, _ in cluster.claims]
        assert len(claimed) == len(set(claimed)), "no pod is claimed twice"
        assert took_s < SOON_S
        for coordinator, lease in zip(coordinators * 5, leases, strict=True):
            await coordinator.release(lease)
        await until(lambda: not cluster.held_by("claimed"), "released pods are deleted")
        assert len(cluster.held_by("ready")) == 20
        for coordinator in coordinators:
            await coordinator.close()
        leases_left = [path for path, rows in cluster.objects.items() if path.endswith("/leases") and rows]
        assert not leases_left

    asyncio.run(work())


@pytest.fixture
def pods(cluster: Cluster, tmp_path: Path) -> Iterator[NodePods]:
    """Let two pods at once be servers of this machine."""
    cluster.quota = 2
    made = NodePods(cluster, tmp_path)
    yield made
    for key in [key for key in leased._of_processes if key[0] == "kubernetes"]:
        leased._of_processes.pop(key).close()
    made.close()


def test_from_outside_pods_are_reached_through_the_api_server(
    cluster: Cluster, pods: NodePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the role for that, and without a word of the caller; a cut stream is a lost link, and the lease lives on."""
    pods.address = "127.0.0.9"  # where no server is: so a pod seems from outside
    cluster.fill(1)
    cluster.rules = [*manifests.rules("warm"), manifests.FORWARD]
    monkeypatch.setattr(connections, "LOST_S", 0.0)
    big = os.urandom(3 << 20)
    with cloche.Sandbox(backend="kubernetes", live=True, memory="64m", cpus=0.1) as sandbox:
        sandbox.write_file("big", big)
        assert sandbox.read_file("big") == big
        with sandbox.start(["sleep", "1000"]) as process:
            streams = cluster.requests["get pods/portforward"]
            cluster.cut_forwards()
            with pytest.raises(OutcomeUnknown, match="the connection to it was lost"):
                process.wait()
        assert sandbox.run("print(len(open('big', 'rb').read()))").stdout == f"{3 << 20}\n"
        assert cluster.requests["get pods/portforward"] > streams
    assert len(dict(cluster.claims)) == 1


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _is_closed(port: int | None) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    return True


def test_a_forwarded_port_is_for_its_own_user_and_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's connection is closed at once, as is one too many; without the role its name is told."""
    cluster.fill(1)
    (pod,) = cluster.pods

    async def work() -> None:
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        api = KubernetesApi()
        forward = PodForward(api, f"{cluster.pods_path}/{pod}", echo.sockets[0].getsockname()[1])
        port = urlsplit(forward.listen()).port
        with pytest.raises(BackendUnavailable, match=r"no permission to get pods/portforward.*role cloche-outside"):
            await PodAddresses(api, cluster.pods_path, "auto").check(pod, "https://127.0.0.9:1")
        cluster.rules = [manifests.FORWARD]
        assert await forward.reach() == "open"
        monkeypatch.setattr(forwarding, "MOST_STREAMS", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * (1 << 22))
        assert await reader.readexactly(1 << 22) == b"x" * (1 << 22)
        assert await _is_closed(port), "one too many"
        writer.close()
        await until(lambda: not cluster.forwards, "the stream has ended")
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12_345)
            assert await _is_closed(port), "another user's"
        assert not cluster.forwards
        echo.close()
        assert await forward.reach() == "refused"
        await forward.close()
        await api.close()

    asyncio.run(work())


def test_code_runs_in_pods_and_a_restarted_one_is_lost(cluster: Cluster, pods: NodePods, tmp_path: Path) -> None:
    """Runs are in pods, which have a deadline; a sandbox whose container restarted in place is lost, and says why.

    A run uses a secret that its pod's server has in a folder, and sees a placeholder.
    """
    (tmp_path / "cloche").mkdir()
    (tmp_path / "cloche" / "config.yaml").write_text(f"secrets_from: {tmp_path}/held\n")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "OPENAI_API_KEY").write_text("sk-proj-0123456789abcdefghij")
    cluster.fill(2)
    code = "import os; key = os.environ['OPENAI_API_KEY']; print(6 * 7, len(key), key[-20:] == '0123456789abcdefghij')"
    result = cloche.run(code, backend="kubernetes", memory="64m", cpus=0.2, secrets=["OPENAI_API_KEY"])
    assert result.stdout == "42 28 False\n"
    pod = result.meta["remote"]["node"]
    assert pod in dict(cluster.claims)
    assert 86_400 <= cluster.pods[pod]["spec"]["activeDeadlineSeconds"] <= 86_400 + 60
    with cloche.Sandbox(backend="kubernetes", live=True, memory="64m", cpus=0.1) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"
        (other,) = set(dict(cluster.claims)) - {pod}
        pods.kill(other)
        cluster.restart(other)
        with pytest.raises(NodeLost, match="OOMKilled, exit code 137; its limit is 1152Mi"):
            sandbox.run("print(2)")
    ends = time.monotonic() + SOON_S
    while cluster.held_by("claimed") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not cluster.held_by("claimed")


def in_fleet(
    cluster: Cluster, work: Callable[[Coordinator], Coroutine[Any, Any, None]], settings: FleetSettings = SETTINGS
) -> None:
    """Do something with a coordinator that is closed at the end, and leaves no claim."""

    async def main() -> None:
        coordinator = await coordinator_of(settings)
        try:
            await work(coordinator)
        finally:
            await coordinator.close()
        assert not cluster.held_by("claimed")

    asyncio.run(main())


def test_a_server_that_fails_now_and_then_costs_no_claim(cluster: Cluster, reached: None) -> None:
    """Claims go on over 429, 500, a lost answer, a stale version, cut, doubled and forgotten watches.

    A server that says when to ask again is not asked before.
    """
    cluster.repeats_events = True
    cluster.fail("create", "/leases", CUT_AFTER)

    async def work(fleet: Coordinator) -> None:
        cluster.fill(2)
        held = [await fleet.lease(SMALL)]
        for status in (429, 500, CUT, CUT_AFTER):
            cluster.fail("patch", "/pods/", status)
            held.append(await fleet.lease(SMALL))
        cluster.fail("list", "/pods", 429, **{"Retry-After": "1"})
        api, began = KubernetesApi(), time.monotonic()
        await api.get(cluster.pods_path)
        await api.close()
        assert time.monotonic() - began >= 1
        cluster.cut_watches()
        held.append(await fleet.lease(SMALL))
        cluster.forget()
        cluster.cut_watches()
        for name in cluster.held_by("ready"):  # their versions change, unseen
            cluster.change_pod(name, qosClass="Guaranteed")
        held += [await fleet.lease(SMALL) for _ in range(4)]
        assert len({lease.node for lease in held}) == len(held) == 10
        assert len(cluster.claims) == len(set(cluster.claims)) == 10
        for lease in held:
            await fleet.release(lease)
        await until(lambda: not cluster.held_by("claimed"), "all are deleted")

    in_fleet(cluster, work)


def test_a_request_waits_for_the_pod_that_a_slow_controller_will_make(cluster: Cluster, reached: None) -> None:
    """There is no pod, and the Deployment has no reason for that: its controller may just be away."""

    async def work(fleet: Coordinator) -> None:
        deployments = cluster.objects[f"/apis/apps/v1/namespaces/{SETTINGS.namespace}/deployments"]
        deployments["cloche-default"]["spec"]["replicas"] = 1
        asked = asyncio.create_task(fleet.lease(SMALL))
        await asyncio.sleep(2 * fleet.decisions.rules.unmet_s)
        assert not asked.done()
        cluster.fill(1)
        await asked

    in_fleet(cluster, work)


def test_leases_go_on_while_the_api_server_is_away(cluster: Cluster, reached: None) -> None:
    """Leases are renewed meanwhile; one that is released is deleted afterwards, and one that waits is granted."""

    async def work(fleet: Coordinator) -> None:
        cluster.fill(2)
        lived, released = await fleet.lease(SMALL), await fleet.lease(SMALL)
        with cluster.away():
            assert (await fleet.renew(lived)).until > lived.until
            await fleet.release(released)
            asked = asyncio.create_task(fleet.lease(SMALL))
            await asyncio.sleep(2)
            assert not asked.done()
            assert (await fleet.renew(lived)).node == lived.node
        await asked
        await until(lambda: released.node not in cluster.pods, "it is deleted when the server is back")

    in_fleet(cluster, work)


def test_claims_avoid_cordoned_machines_and_are_not_disrupted(cluster: Cluster, reached: None) -> None:
    """As the operator wants it: a pod elsewhere is taken first, and autoscalers are told in the claim's own patch."""
    cluster.settings = replace(SETTINGS, cordons=True, do_not_disrupt=True)
    cluster.apply_fleet()
    sight = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    cluster.rules = [*manifests.rules("warm"), sight]
    for name, spec in {"machine-1": {"unschedulable": True}, "machine-2": {}}.items():
        cluster.put("/api/v1/nodes", {"metadata": {"name": name}, "spec": spec})

    async def work(fleet: Coordinator) -> None:
        cluster.fill(4)
        elsewhere = list(cluster.pods)[2]
        row = cluster.pods[elsewhere]
        cluster.put(cluster.pods_path, {**row, "spec": {**row["spec"], "nodeName": "machine-2"}})
        patches = cluster.requests["patch pods"]
        first = await fleet.lease(SMALL)
        assert (first.node, cluster.requests["patch pods"] - patches) == (elsewhere, 1)
        annotations = cluster.pods[first.node]["metadata"]["annotations"]
        assert annotations["karpenter.sh/do-not-disrupt"] == "true"
        assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert (await fleet.lease(SMALL)).node != elsewhere, "where there is no other, a cordoned machine serves"
        assert cluster.requests["list nodes"] == 1

    in_fleet(cluster, work)


def refusal(cluster: Cluster, settings: FleetSettings = SETTINGS, *, wait_s: float = 20.0) -> str:
    """Return how a request for a lease is refused."""

    async def work() -> None:
        coordinator = await connect(settings, QuietLink)
        coordinator._reach = is_open
        try:
            await coordinator.lease(replace(SMALL, wait_s=wait_s))
        finally:
            await coordinator.close()

    with pytest.raises(BackendUnavailable) as raised:
        asyncio.run(work())
    return str(raised.value)


def test_pods_that_do_not_start_are_named_within_seconds(cluster: Cluster, reached: None) -> None:
    """A request has the scheduler's own words, long before its time is over."""
    cluster.fill(1)
    (pod,) = cluster.pods
    message = "0/2 nodes are available: 2 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cluster.change_pod(pod, conditions=[condition])
    began = time.monotonic()
    assert f"no machine of the cluster fits: {message}" in refusal(cluster)
    assert time.monotonic() - began < SOON_S / 2


def test_what_the_cluster_refuses_is_said_with_a_remedy(
    cluster: Cluster, reached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing rights, a used-up quota, expired credentials, no such fleet or template, no cluster."""
    rules = cluster.rules
    cluster.fill(1)
    cluster.rules = [{**row, "verbs": sorted({*row["verbs"]} - {"patch"})} for row in rules or ()]
    assert "no permission to patch pods in namespace cloche" in refusal(cluster)
    cluster.rules = rules
    cluster.quota = 0
    cluster.remove(cluster.pods_path, *cluster.pods)
    text = refusal(cluster)
    assert f"its pods are refused: {EXCEEDED.format(used=0, limit=0)}" in text
    assert 'Raise it ("kubectl describe quota" shows it), or release leases.' in text
    cluster.rules = [row for row in rules or () if "pods" not in row["resources"]]
    text = refusal(cluster)
    assert "no permission to list pods in namespace cloche" in text
    assert "cloche-caller" in text
    assert "kubectl auth can-i list pods -n cloche" in text
    cluster.rules, cluster.token = rules, "another"
    assert "They have expired, or are another cluster's: log in again" in refusal(cluster)
    cluster.token = TOKEN
    assert "has no template gpu" in refusal(cluster, replace(SETTINGS, template="gpu"))
    assert "there is no fleet in namespace elsewhere" in refusal(cluster, replace(SETTINGS, namespace="elsewhere"))
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        cluster.port = silent.getsockname()[1]
        cluster.kubeconfig(tmp_path)
        for name, value in {"ANSWER_S": 0.2, "FIRST_S": 0.1}.items():
            patch.setattr(api_module, name, value)
        assert "does not answer: it is silent. Look at" in refusal(cluster)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "no Kubernetes cluster was found" in refusal(cluster)
    assert "no Kubernetes cluster was found" in KubernetesBackend().capabilities().reason


def test_pods_that_cannot_serve_are_not_claimed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod with another version, or one that cannot be reached from here, is named, and stays for others."""
    cluster.fill(1)
    assert "cannot be reached from here, and not by port-forward either: no permission to get" in refusal(cluster)
    cluster.version = "0.0.1"
    (pod,) = cluster.pods
    cluster.remove(cluster.pods_path, pod)
    monkeypatch.setitem(engine_module.KubernetesEngine.__init__.__kwdefaults__, "reach", is_open)
    time.sleep(0.1)
    assert f"it has Cloche 0.0.1, and this is {cloche.__version__}" in refusal(cluster)
    assert not cluster.claims


def test_what_a_dead_coordinator_left_is_removed(
    cluster: Cluster, reached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods and the object of a coordinator that is gone are deleted; those of a live one, and ready pods, stay."""
    for name, value in {"LASTS_S": 1, "RENEW_S": 0.2, "WATCHED_S": 0.5}.items():
        monkeypatch.setattr(holders, name, value)

    async def work(fleet: Coordinator) -> None:
        cluster.fill(3)
        dead = await coordinator_of()
        mine, left = await fleet.lease(SMALL), await dead.lease(SMALL)
        engine: Any = dead._engine
        engine.holder._task.cancel()  # as if its process were killed
        await until(lambda: left.node not in cluster.pods, "the pod is deleted")
        await until(lambda: len(cluster.objects[engine.holder._leases]) == 1, "and the object")
        cluster.change_pod(cluster.held_by("ready")[0], phase="Failed", reason="Evicted")
        await until(lambda: len(cluster.held_by("ready")) == 3, "an evicted pod of nobody is deleted")
        assert mine.node in cluster.pods
        for task in (*dead._tasks, *engine._servers._reading.values()):
            task.cancel()
        await dead.close()

    in_fleet(cluster, work)


def test_an_operator_sees_and_ends_a_fleet(cluster: Cluster, reached: None) -> None:
    """The state has all pods, of which one may have many leases; the end leaves nothing."""
    cluster.rules = None
    jail = replace(SETTINGS, isolation="jail")
    cluster.settings = jail
    cluster.apply_fleet()

    async def work(fleet: Coordinator) -> None:
        cluster.fill(2)
        operator = KubernetesOperator(jail)
        first, second = await fleet.lease(SMALL), await fleet.lease(SMALL)
        assert first.node == second.node, "many leases are in one pod"
        status = await operator.status()
        assert sorted((node.state, node.leases) for node in status.nodes) == [("ready", 0), ("ready", 0), ("ready", 1)]
        await operator.down()
        assert not cluster.pods
        await operator.close()

    in_fleet(cluster, work)


def test_up_shows_what_it_changes_and_makes_the_key_once(cluster: Cluster, tmp_path: Path) -> None:
    """The first time all is new, and the key is not shown; then nothing differs. Without --apply it prints alone."""
    cluster.rules = None
    cluster.objects.clear()
    cluster.settings = replace(SETTINGS, namespace="here", isolation="jail")
    config = tmp_path / "config.yaml"
    config.write_text("fleet: {image: 'cloche:test', namespace: here, isolation: jail}")

    def up(*words: str) -> str:
        command = [sys.executable, "-m", "cloche", "fleet", "up", "--engine", "kubernetes", "--config", config, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    first = up("--apply")
    data = {kind: cluster.objects[f"/api/v1/namespaces/here/{kind}"]["cloche-fleet"]["data"] for kind in KINDS}
    key, public = data["secrets"]["privateKey"], data["configmaps"]["publicKey"]
    assert "+kind: NetworkPolicy" in first
    assert "privateKey: (hidden)" in first
    assert key not in first
    assert "Kubernetes 1.20 has no user namespaces for pods" in first
    assert Signer(base64.b64decode(key)).public_key == public
    second = up("--apply")
    assert "Deployment/cloche-default: the same" in second
    assert "+" not in second
    assert cluster.objects["/api/v1/namespaces/here/secrets"]["cloche-fleet"]["data"]["privateKey"] == key
    assert "Secret" not in {row["kind"] for row in yaml.safe_load_all(up())}


def test_a_server_of_another_kind_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page in HTML is no refusal of an API server. The configured backend says which engine is meant."""
    monkeypatch.setenv("SANDBOX_TYPE", "kubernetes")
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(cluster, "port", server.server_port)
        cluster.kubeconfig(tmp_path)
        assert root.main(["fleet", "status"], standalone_mode=False) == 125
        server.shutdown()
    assert f"what answers at http://127.0.0.1:{server.server_port} is no API server" in capsys.readouterr().err
