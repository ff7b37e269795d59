"""Work over a fleet on Ray: a batch, Ray Data, and thousands of leases: `make soak AREA=fleet`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness import fleet_calls
from tests.harness.ray_cluster import RayCluster

pytestmark = [pytest.mark.root, pytest.mark.soak]
WARM, LEASES = 4_000, int(os.environ.get("FLEET_LEASES", "20000"))
MOST_GROWN_MIB = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Start three nodes, and the fleet on them."""
    with RayCluster() as made:
        made.start(1)
        made.start(2, 3)
        made.call(fleet_calls.up, 3)
        yield made


def test_tasks_of_ray_data_that_hold_every_cpu_run_code(cluster: RayCluster) -> None:
    """Six tasks at once on six CPUs; each runs its programs in sandboxes of the same nodes."""
    rows = cluster.call(fleet_calls.data, 6)
    assert rows == [[f"print({number} ** 2)", f"{number**2}\n", "ok"] for number in range(12)]


def test_a_thousand_programs_over_nodes_whose_servers_are_killed(cluster: RayCluster) -> None:
    """One in a hundred crashes, hangs or exhausts memory; each has one result, and it is right."""
    assert cluster.call(fleet_calls.batch, 1_000, 3) == {"results": 1_000, "wrong": [], "kills": 3, "left": 0}


def test_leases_do_not_stay_in_the_memory_of_the_coordinator_and_of_rays_head(cluster: RayCluster) -> None:
    """After thousands of leases they have what they had before."""
    before, after = cluster.call(fleet_calls.memory_over_leases, WARM, LEASES)
    grown = {name: after[name] - before[name] for name in before}
    assert max(grown.values()) < MOST_GROWN_MIB, grown
