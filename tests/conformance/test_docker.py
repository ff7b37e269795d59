"""The public conformance suite over the docker backend, on a daemon of the tests' own."""

from __future__ import annotations

import pytest

from cloche.backends.docker import DockerBackend
from cloche.core.levels import Level
from cloche.testing.conformance import CHECKS, run_conformance
from tests.daemon import Daemon

pytestmark = pytest.mark.root

OLD_STAT = "this gVisor refuses the statx of the image's stat"
# What docs/limitations/docker.md says of gVisor, by name.
ON_GVISOR = {
    "syscalls is true": "system calls are those of gVisor's kernel: what is tried does not reach the host's",
    "modes": OLD_STAT,
    "workspace lives": OLD_STAT,
}
# gVisor's clock of CPU time counts ticks in which a program could have run: what a program reads there says nothing.
UNTELLING_ON_GVISOR = "cpu is true"


# Families whose every check is part of each test run; of the others it is the first one that stands for them.
ALWAYS_WHOLE = ("truth", "walls", "tree kill", "cleanup", "cancellation", "capabilities")


def a_check_of_everything() -> list[str]:
    """Return what a test run has time for."""
    firsts = {check.family: check.name for check in reversed(CHECKS)}
    return [check.name for check in CHECKS if check.family in ALWAYS_WHOLE or firsts[check.family] == check.name]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names", [pytest.param(a_check_of_everything(), id="some"), pytest.param([], id="all", marks=pytest.mark.soak)]
)
def test_docker_conforms(docker: Daemon, names: list[str]) -> None:
    """Every check is kept in an image with Python, without a deviation."""
    backend = DockerBackend({"*": docker.image("cloche-test:python")})
    rows = run_conformance(backend, only=names, deviations={}, at_once=4)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.soak  # for its length
@pytest.mark.timeout(600)
def test_docker_on_gvisor_conforms(gvisor: Daemon) -> None:
    """Every check is kept on gVisor too, but for deviations that are named and real."""
    backend = DockerBackend({"*": gvisor.image("cloche-test:python")})
    names = [check.name for check in CHECKS if check.name != UNTELLING_ON_GVISOR]
    rows = run_conformance(backend, level=Level.GVISOR, only=names, deviations=ON_GVISOR, at_once=4)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
