"""An operator's day with a fleet on Ray, and what is lost when each part dies: `make soak AREA=fleet`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche import __version__
from cloche.execution.registry import collect_garbage
from tests.harness import fleet_calls, fleet_losses
from tests.harness.ray_cluster import ROOT, RayCluster
from tests.harness.texts import blocks

pytestmark = [pytest.mark.root, pytest.mark.soak]
NODES = (1, 2, 3)
IDLE_S, ABANDONED_S, TTL_S, SCALING_S = 15.0, 60.0, 15.0, 40.0
# By its module: the wheel of Ray lacks the defaults of the type "fake_multinode".
FAKE_PROVIDER = "tests.harness.ray_machines.MachinesHere"
LATE_S = 60.0  # for a machine that does other things, too
# Makes a Python look as if Cloche were not installed there; modules of an editable installation are found by path.
WITHOUT_CLOCHE = """
import importlib.abc, importlib.metadata, sys


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cloche":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
known = importlib.metadata.Distribution.from_name


def from_name(name):
    if name == "cloche":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)


importlib.metadata.Distribution.from_name = from_name
"""


# Looks at the fleet until it has seen a whole state, then sends a signal.
WATCHES = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in what it runs in the background
with subprocess.Popen([sys.executable, "-m", "cloche", "fleet", "top"], stdout=subprocess.PIPE, text=True) as watching:
    while "refused" not in watching.stdout.readline():
        pass
    watching.send_signal(int(sys.argv[1]))
    print("code", watching.wait())
"""


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Remove what killed nodes left."""
    yield
    collect_garbage()


def started(cluster: RayCluster, *numbers: int, **settings: Any) -> None:
    """Start the nodes that are missing, and the fleet from the last of them."""
    cluster.start(1)
    cluster.start(*(number for number in numbers if number != 1))
    cluster.call(fleet_calls.up, len(numbers), settings, number=numbers[-1])


def fleet(cluster: RayCluster, *words: str, number: int = 1) -> tuple[int, str, str]:
    """Run `cloche fleet` on a node; return the exit code and what it printed."""
    done = cluster.run([cluster.python, "-m", "cloche", "fleet", *words], number)
    return done.returncode, done.stdout, done.stderr


def hidden(folder: Path) -> Mapping[str, str]:
    """Return variables of a node whose Python has no Cloche."""
    (folder / "sitecustomize.py").write_text(WITHOUT_CLOCHE)
    return {"PYTHONPATH": str(folder)}


def older(folder: Path) -> Mapping[str, str]:
    """Return variables of a node whose Python has another version of Cloche."""
    about = folder / "cloche-0.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cloche\nVersion: 0.0.1\n")
    return {"PYTHONPATH": str(folder)}


def test_nodes_without_this_cloche_are_named_and_take_no_lease(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One has none, one has another version: the status names the remedy of each, and all leases are elsewhere."""
    with RayCluster() as cluster:
        cluster.start(1)
        cluster.start(2, variables=hidden(tmp_path_factory.mktemp("none")))
        cluster.start(3, variables=older(tmp_path_factory.mktemp("older")))
        code, _, err = fleet(cluster, "up", "--json")
        assert code == 0, err
        cluster.call(fleet_calls.reasons, 2)
        nodes = json.loads(fleet(cluster, "status", "--json")[1])["nodes"]
        reasons = sorted(node["reason"] for node in nodes if node["reason"])
        assert f"has Cloche 0.0.1, and the fleet has {__version__}: install cloche[ray]=={__version__}" in reasons[0]
        assert f"has no Cloche, and the fleet has {__version__}: install cloche[ray]=={__version__}" in reasons[1]
        assert cluster.call(fleet_calls.hosts, 4) == ["10.77.0.1"]


def test_a_cluster_without_cloche_fails_within_seconds(tmp_path: Path) -> None:
    """`fleet up` says what to install where; no coordinator is left."""
    with RayCluster(variables=hidden(tmp_path)) as cluster:
        cluster.start(1)
        began = time.monotonic()
        code, _, err = fleet(cluster, "up")
        assert (code, time.monotonic() - began < 30) == (125, True)
        assert "the Python of Ray's workers on this node has no Cloche" in err
        assert f"Install cloche[ray]=={__version__}" in err
        assert len(err.splitlines()) == 1


def ends(cluster: RayCluster, limit_s: float) -> None:
    """Wait until nothing of a fleet is left: no process, no control group, no actor, no placement group."""
    until = time.monotonic() + limit_s
    while left := [line for number in NODES for line in cluster.call(fleet_losses.left_here, number=number)]:
        assert time.monotonic() < until, left
        time.sleep(1)
    assert cluster.call(fleet_losses.blocks_left) == []


def test_a_fleet_without_users_ends_itself_and_starts_again() -> None:
    """After `fleet.idle` nothing of it is left, also where its coordinator was killed, once or for good."""
    with RayCluster() as cluster:
        cluster.start(1)
        cluster.start(2, 3)
        for kills, limit_s in ((0, IDLE_S), (1, IDLE_S), (2, ABANDONED_S)):
            assert cluster.call(fleet_losses.used, IDLE_S, kills) == "7\n"
            began = time.monotonic()
            ends(cluster, limit_s + LATE_S)
        assert time.monotonic() - began > ABANDONED_S / 2
        assert cluster.call(fleet_losses.run_once) == "7\n"


def test_what_is_lost_when_a_part_dies() -> None:
    """The rows of the table in docs/fleet.md, one after the other."""
    with RayCluster() as cluster:
        started(cluster, 1, 3, 2, ttl_s=TTL_S)
        cluster.call(fleet_calls.ready_nodes, 3)
        ttl = {"CLOCHE_FLEET_TTL": f"{TTL_S:g}s"}
        assert cluster.call(fleet_losses.client_killed, variables=ttl) < TTL_S + LATE_S
        assert cluster.call(fleet_losses.guest_out_of_memory) == {"status": ["out_of_memory"], "lives": [True] * 3}
        supervisor = cluster.call(fleet_losses.supervisor_killed)
        assert (supervisor["lives"], supervisor["same"]) == ([True] * 3, True)
        server = cluster.call(fleet_losses.server_killed)
        assert (server["lost"], server["again"]) == (["10.77.0.1"], "7\n")
        while cluster.call(fleet_losses.has_coordinator):  # on the head, with which the fleet ends
            cluster.call(fleet_calls.down)
            cluster.call(fleet_calls.up, 3)
        place = 2 if cluster.call(fleet_losses.has_coordinator, number=2) else 3
        node = cluster.call(fleet_losses.coordinators_node_killed, place, 2 * TTL_S, variables=ttl)
        assert node == {"lost": [f"10.77.0.{place}"], "again": "7\n"}


def test_sandboxes_elsewhere_go_on_without_rays_head() -> None:
    """For more than the time of a lease; after a minute Ray itself ends what has joined it."""
    with RayCluster() as cluster:
        started(cluster, 1, 3, 2)
        ttl = {"CLOCHE_FLEET_TTL": f"{TTL_S:g}s"}
        assert cluster.call(fleet_losses.head_killed, 2 * TTL_S, number=2, variables=ttl) == ["10.77.0.1"]


def test_a_drain_is_undone_and_top_ends_quietly() -> None:
    """`drain --undo` lets the node take leases again; SIGTERM and Ctrl-C end `top` without a trace."""
    with RayCluster() as cluster:
        started(cluster, 1, 2)
        node = json.loads(fleet(cluster, "status", "--json")[1])["nodes"][0]["node"]
        assert fleet(cluster, "drain", node)[:2] == (0, f"{node} takes no lease, and has none\n")
        assert len(cluster.call(fleet_calls.hosts, 4)) == 1
        assert fleet(cluster, "drain", node, "--undo")[:2] == (0, f"{node} takes leases again\n")
        assert len(cluster.call(fleet_calls.hosts, 2, "1500m")) == 2
        for number in (signal.SIGTERM, signal.SIGINT):
            done = cluster.run([cluster.python, "-c", WATCHES, str(int(number))])
            assert (done.stdout.splitlines()[-1], done.stderr) == (f"code {128 + number}", "")


def test_ten_lines_lead_from_one_machine_to_three(tmp_path: Path) -> None:
    """The lines of docs/fleet.md, each run where its comment says; pip alone has run before."""
    (text,) = (text for text in blocks(ROOT / "docs" / "fleet.md", "sh") if "--address=FIRST" in text)
    lines = text.splitlines()
    assert len(lines) == 10
    by_place: dict[str, list[str]] = {}
    for line in lines:
        command, _, comment = line.partition("  # on ")
        by_place.setdefault(comment.partition(":")[0].strip() or "any one", []).append(command.strip())
    assert by_place.pop("each machine") == ["pip install 'cloche[ray]'"]
    with RayCluster(bare=True) as cluster:
        cluster.start(*NODES)
        path = {**cluster.environment(), "PATH": f"{Path(cluster.python).parent}:{os.environ['PATH']}"}
        del path["RAY_ADDRESS"]
        for place, numbers in (("the first", [1]), ("each other one", [2, 3]), ("any one", [2])):
            text = "\n".join(by_place[place]).replace("FIRST", "10.77.0.1")
            for number in numbers:
                done = cluster.run(["bash", "-ec", f"cd {tmp_path}\n{text}"], number, env=path)
                assert done.returncode == 0, done
    assert done.stdout.count(" ready ") == 6, "three nodes, shown twice"
    assert "\n42\n" in done.stdout
    assert json.loads((tmp_path / "results.jsonl").read_text())["stdout"] == "7\n"


def autoscaling(folder: Path, cpus: int) -> tuple[list[str], Mapping[str, str]]:
    """Return words and variables of a head whose autoscaler may start one more node, as a process beside it."""
    head = f"{'f' * 51}00000"
    kinds = {
        "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "large": {
            "resources": {"CPU": cpus, "memory": 4_000_000_000, "object_store_memory": 80_000_000},
            "node_config": {}, "min_workers": 0, "max_workers": 1,
        },
    }  # fmt: skip
    config = {
        "cluster_name": "scaling", "max_workers": 1, "upscaling_speed": 1.0, "idle_timeout_minutes": 60,
        "provider": {
            "type": "external", "module": FAKE_PROVIDER, "head_node_id": head, "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "available_node_types": kinds, "head_node_type": "ray.head.default",
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in ("setup", "head_setup", "worker_setup", "initialization")},
    }  # fmt: skip
    (folder / "scaling.json").write_text(json.dumps(config))
    variables = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    variables |= {"RAY_CLOUD_INSTANCE_ID": head, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head}
    modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return [f"--autoscaling-config={folder}/scaling.json"], variables | {"PYTHONPATH": modules}


def test_an_autoscaler_brings_a_machine_for_a_request(tmp_path: Path) -> None:
    """A request that no present node can meet waits for a machine of Ray's autoscaler; one that none has is refused."""
    words, variables = autoscaling(tmp_path, cpus=8)
    with RayCluster(head=words, variables=variables) as cluster:
        cluster.start(1)
        cluster.call(fleet_calls.up, 1, {"scaling_s": SCALING_S})
        scaled = cluster.call(fleet_losses.scaled, 3.0)
        assert scaled["nodes"] == 2
        assert scaled["seconds"] < SCALING_S + LATE_S
        assert "no node can ever meet 50 processors" in cluster.call(fleet_calls.unmet)["text"]
