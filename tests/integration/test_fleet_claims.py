"""The seam between engines and the wire: each claim about `Fleet`, for this machine and for pods as fleets.

`test_ray.py` has the same claims for Ray.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.cloche.links import link_to
from cloche.core.fleet import FleetSettings
from cloche.fleets.kubernetes.fleet import KubernetesOperator, connect
from cloche.fleets.local import LocalFleet
from tests.harness.fleet_claims import NAMES, QUOTA, World, checked
from tests.harness.kubernetes_api import Cluster, NodePods

SETTINGS = FleetSettings(share=1.0, quota=QUOTA, image="cloche:test", isolation="jail")


async def on_this_machine(_: Path) -> dict[str, str]:
    """Try the claims on this machine; its server ends with the fleet."""
    fleet = LocalFleet(link_to, settings=SETTINGS, version=cloche.__version__)

    async def lose(_: str) -> None:
        os.kill(int(fleet._engine._child.facts["pid"]), signal.SIGKILL)  # type: ignore[attr-defined]

    try:
        await fleet.up()
        answers = await checked(World(fleet, fleet, 1, lose))
        pid = int(fleet._engine._child.facts["pid"])  # type: ignore[attr-defined]
    finally:
        await fleet.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    return answers


async def in_pods(home: Path) -> dict[str, str]:
    """Try the claims with two pods, which is as many as the cluster allows at once."""
    cluster = Cluster(SETTINGS, version=cloche.__version__)
    os.environ["KUBECONFIG"] = cluster.kubeconfig(home)
    cluster.rules, cluster.quota = None, 2
    pods, operator = NodePods(cluster, home), KubernetesOperator(SETTINGS)
    cluster.fill(2)

    async def lose(pod: str) -> None:
        await asyncio.to_thread(pods.kill, pod)
        cluster.restart(pod)

    try:
        await operator.up()
        fleet = await connect(SETTINGS, link_to)
        answers = await checked(World(fleet, operator, 2, lose))
        await fleet.close()
        assert not cluster.held_by("claimed")
    finally:
        await operator.close()
        pods.close()
        cluster.close()
    return answers


@pytest.fixture(scope="module", params=[on_this_machine, in_pods], ids=lambda tries: tries.__name__)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return what is wrong with each claim."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "KUBECONFIG"):
            patch.setenv(name, str(home))
        yield asyncio.run(request.param(home))


@pytest.mark.parametrize("claim", NAMES)
def test_a_fleet_keeps_the_promises_of_the_seam(answers: dict[str, str], claim: str) -> None:
    """Whatever its engine, a fleet does what `tests/harness/fleet_claims.py` says."""
    assert not answers[claim], answers[claim]
