"""The public conformance suite over the docker backend, on a daemon of the tests' own."""

from __future__ import annotations

import pytest

from cloche.backends.docker.backend import DockerBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import CHECKS, Outcome, Row, run_conformance
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
IMAGE = "cloche-test:sessions"
SKIPPED = frozenset({"rollback", "fork"})  # containers have neither
# Of live sandboxes: what is part of each test run, and what is skipped of all.
LIVE = (
    "live: background", "live: time-out", "live: memory", "live: terminal",
    "live files: content", "live files: stopped", "session",
)  # fmt: skip
LIVE_SKIPPED = SKIPPED | {"session apart"}


def assert_kept(rows: tuple[Row, ...], skipped: frozenset[str] = SKIPPED) -> None:
    """Fail for what is broken, and for what is skipped although containers have it."""
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == skipped


@pytest.mark.timeout(600)
def test_sessions_of_docker_conform(docker: Daemon) -> None:
    """What any session promises, in a few checks; and a batch."""
    backend = DockerBackend({"*": docker.image(IMAGE)})
    rows = run_conformance(backend, only=["session", "session ends: exit", "batch"], deviations={})
    assert [(row.check.name, row.outcome, row.reason) for row in rows if row.outcome is not Outcome.KEPT] == []


@pytest.mark.timeout(600)
def test_some_of_sandboxes_that_live_conforms(docker: Daemon) -> None:
    """What hangs on the container: whole trees, memory, terminals, a home, sessions as processes."""
    backend = DockerBackend({"*": docker.image(IMAGE)})
    rows = run_conformance(backend, level=Level.JAIL, only=LIVE, deviations={}, at_once=3, is_live=True)
    assert_kept(rows, frozenset())


@pytest.mark.soak  # for its length, here and below
@pytest.mark.timeout(600)
def test_sandboxes_that_live_conform(docker: Daemon) -> None:
    """Every check is kept, without a deviation."""
    backend = DockerBackend({"*": docker.image(IMAGE)})
    rows = run_conformance(backend, level=Level.JAIL, deviations={}, at_once=4, is_live=True)
    assert_kept(rows, LIVE_SKIPPED)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_docker_conforms(docker: Daemon) -> None:
    """Every check is kept in an image with Python, Node.js and Bash, without a deviation."""
    backend = DockerBackend({"*": docker.image(IMAGE)})
    assert_kept(run_conformance(backend, deviations={}, at_once=4))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_docker_on_gvisor_conforms(gvisor: Daemon) -> None:
    """Every check is kept on gVisor too, but for deviations that are named and real."""
    backend = DockerBackend({"*": gvisor.image(IMAGE)})
    names = [check.name for check in CHECKS if check.name != UNTELLING_ON_GVISOR]
    assert_kept(run_conformance(backend, level=Level.GVISOR, only=names, deviations=ON_GVISOR, at_once=4))
