"""The attempts at the network once more on gVisor: where a network is served, guests have the host kernel's sockets.

What is shown to arrive without a policy, what is allowed and where it leads are those of `test_egress`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.escape.test_egress import ALLOWED, ALLOWLIST, LISTED_ENDPOINTS, ONLY_LISTED, ROWS, TABLE
from tests.harness.containers import Daemon
from tests.harness.escape.egress import Came, run_inside, run_outside
from tests.harness.world import World, open_world

pytestmark = pytest.mark.root
ARRIVING = (*ALLOWED, *ONLY_LISTED)
POLICY: Mapping[str, Any] = {**ALLOWLIST, "level": "gvisor", "timeout": 150}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world whose names lead everywhere."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(scope="module")
def outside(world: World) -> Mapping[str, Came]:
    """Run all rows where there is no policy."""
    return run_outside(world, ROWS)


def assert_held(world: World, outside: Mapping[str, Came], policy: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Fail unless every row arrives outside and none inside, where what is allowed arrives, and nothing else leaves."""
    batch = run_inside(world, [*ARRIVING, *ROWS], {**POLICY, **policy}, env=env)
    assert "passes socket calls to the host's kernel" in batch.run["mechanism"]
    assert [row.name for row in ROWS if not outside[row.name].succeeded] == []
    assert [row.name for row in ARRIVING if not batch.came[row.name].arrived] == [], batch.run
    assert {row.name: batch.came[row.name] for row in ROWS if batch.came[row.name].crashed} == {}
    assert {row.name: batch.came[row.name] for row in ROWS if batch.came[row.name].succeeded} == {}
    assert batch.seen.endpoints <= LISTED_ENDPOINTS


@pytest.mark.soak
def test_on_docker_it_holds_them(gvisor: Daemon, world: World, outside: Mapping[str, Came]) -> None:
    """In a container of a daemon, whose runtime gives gVisor the host's stack in docker's empty namespace."""
    image = gvisor.image("cloche-test:python")
    env = {"DOCKER_HOST": gvisor.url, "CLOCHE_RUNSC": "none"}
    assert_held(world, outside, {"backend": "docker", "image": image}, env)


@pytest.mark.usefixtures("runsc_alone")
def test_without_docker_it_holds_them(world: World, outside: Mapping[str, Came]) -> None:
    """In a namespace that our shim made."""
    assert_held(world, outside, {"backend": "gvisor"}, {"DOCKER_HOST": "unix:///nowhere"})
