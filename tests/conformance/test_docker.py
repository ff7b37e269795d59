"""The public conformance suite over the docker backend, on a daemon of the tests' own."""

from __future__ import annotations

import pytest

from cloche.backends.docker.backend import DockerBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import CHECKS, run_conformance
from tests.harness.containers import Daemon

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


@pytest.mark.soak  # for its length, here and below
@pytest.mark.timeout(600)
def test_docker_conforms(docker: Daemon) -> None:
    """Every check is kept in an image with Python, without a deviation."""
    backend = DockerBackend({"*": docker.image("cloche-test:python")})
    rows = run_conformance(backend, deviations={}, at_once=4)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_docker_on_gvisor_conforms(gvisor: Daemon) -> None:
    """Every check is kept on gVisor too, but for deviations that are named and real."""
    backend = DockerBackend({"*": gvisor.image("cloche-test:python")})
    names = [check.name for check in CHECKS if check.name != UNTELLING_ON_GVISOR]
    rows = run_conformance(backend, level=Level.GVISOR, only=names, deviations=ON_GVISOR, at_once=4)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
