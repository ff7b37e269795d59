"""The engine Ray on three nodes, each with an address, a process table and a share of the processors of its own.

It runs with the packages of requirements/frameworks/ray.txt; losses of nodes are in tests/soak/test_fleet.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import fleet_calls
from tests.harness.ray_cluster import RayCluster

pytestmark = pytest.mark.root
QUOTA = 32


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Start three nodes, and the fleet on them."""
    with RayCluster() as made:
        made.start(1)
        made.start(2, 3)
        made.call(fleet_calls.up, 3, {"quota": QUOTA})
        yield made


def test_a_program_runs_on_a_node_and_sees_nothing_of_ray(cluster: RayCluster) -> None:
    """Neither variables, nor the worker's signal mask or OOM score; and Ray prints nothing on the caller's terminal."""
    seen = cluster.call(fleet_calls.runs)
    node = seen.pop("node")
    assert seen == {
        "level": "jail", "source": "claimed", "engine": "ray", "variables": "[]", "status": "signaled", "live": "42\n",
        "score": ["0"],
    }  # fmt: skip
    assert node
    assert cluster.stderr == ""


def test_leases_spread_wait_and_are_cancelled(cluster: RayCluster) -> None:
    """Three leases of whole nodes are on three; one that waits gets the place that is given back."""
    assert cluster.call(fleet_calls.spread) == {"nodes": 3, "same": True}


def test_the_queue_is_in_order_and_fair_and_bounded(cluster: RayCluster) -> None:
    """Keys take turns, each in order of arrival; a request that waits too long, or beyond the quota, is refused."""
    queued = cluster.call(fleet_calls.queued, QUOTA)
    assert queued["order"] == ["a1", "b1", "a2", "a3"]
    assert "no node had 1 processors and 256 MiB of memory free within 1 s" in queued["late"]
    assert f"the quota of {QUOTA} leases at once is used up" in queued["beyond"]


def test_what_no_node_can_have_is_refused_at_once(cluster: RayCluster) -> None:
    """The error says what was asked for, and what there is."""
    refused = cluster.call(fleet_calls.unmet)
    assert "no node can ever meet 50 processors" in refused["text"]
    assert "the largest share of a node is 1 processors" in refused["text"]
    assert refused["seconds"] < 10


def test_a_coordinator_that_was_killed_comes_back_with_its_leases(cluster: RayCluster) -> None:
    """The holder of a lease renews it as if nothing had happened."""
    back = cluster.call(fleet_calls.coordinator_killed)
    assert back["same"]
    assert back["leases"] == 1
    assert back["seconds"] < 30


def test_a_guest_reaches_no_port_of_ray_on_any_node(cluster: RayCluster) -> None:
    """Not a byte comes from one that this caller allowed by name, with the network open."""
    count = cluster.call(fleet_calls.bytes_from_ports)
    assert sum(map(bool, count["outside"])) >= 2
    assert set(count["inside"]) == {0}
