"""The engine Ray on three nodes, each with an address, a process table and a share of the processors of its own.

It runs with the packages of requirements/frameworks/ray.txt; losses of nodes are in tests/soak/test_fleet.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import fleet_calls
from tests.harness.fleet_claims import NAMES, QUOTA
from tests.harness.ray_cluster import RayCluster

pytestmark = pytest.mark.root


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


@pytest.fixture(scope="module")
def answers(cluster: RayCluster) -> dict[str, str]:
    """Return what is wrong with each claim about a fleet."""
    wrong: dict[str, str] = cluster.call(fleet_calls.claims)
    return wrong


@pytest.mark.parametrize("claim", NAMES)
def test_a_fleet_on_ray_keeps_the_promises_of_the_seam(answers: dict[str, str], claim: str) -> None:
    """As `test_fleet_claims.py` has them for this machine and for pods."""
    assert not answers[claim], answers[claim]


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
