"""Losses of nodes of a fleet on Ray, and many runs: `make soak AREA=fleet`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloche.execution.registry import collect_garbage
from tests.harness import fleet_calls
from tests.harness.ray_cluster import RayCluster

pytestmark = [pytest.mark.root, pytest.mark.soak]
LATE_S = 20.0  # for a machine that does other things, too


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Start three nodes, and the fleet on them."""
    with RayCluster() as made:
        made.start(1)
        made.start(2, 3)
        made.call(fleet_calls.up, 3)
        yield made
    collect_garbage()  # a killed node leaves control groups, which its next server or this removes


def test_mixed_runs_leave_nothing(cluster: RayCluster) -> None:
    """Programs that end, fail, crash and hang: each has its outcome, and no lease and no process is left."""
    assert cluster.call(fleet_calls.mixed, 500) == {"right": 500, "left": 0}
    assert cluster.call(fleet_calls.down) == []


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_lost_node_is_noticed_and_replaced(cluster: RayCluster, how: str) -> None:
    """Its sandbox is lost with a sentence, in time; the next run is elsewhere; a node that joins takes leases."""
    lost = cluster.call(fleet_calls.lost, how)
    assert lost["kind"] == "NodeLost"
    assert lost["seconds"] < LATE_S
    assert lost["again"] == "7\n"
    assert cluster.call(fleet_calls.ready_nodes, 2) == 2
    cluster.start(4)
    assert cluster.call(fleet_calls.ready_nodes, 3) == 3
