"""The public conformance suite over the docker backend, on a daemon of the tests' own."""

from __future__ import annotations

import pytest

from cloche.backends.docker import DockerBackend
from cloche.testing.conformance import run_conformance
from tests.daemon import Daemon

pytestmark = pytest.mark.root


@pytest.mark.timeout(600)
def test_docker_conforms(docker: Daemon) -> None:
    """Every check is kept in an image with Python, without a deviation."""
    backend = DockerBackend({"*": docker.image("cloche-test:python")})
    rows = run_conformance(backend, deviations={}, at_once=4)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
