"""The public conformance suite over gVisor without docker: with control groups and without."""

from __future__ import annotations

import shutil

import pytest

from cloche.backends.runsc import RunscBackend
from cloche.core.levels import Level
from cloche.testing.conformance import CHECKS, run_conformance

# What docs/limitations/runsc.md says, by name.
OLD_STAT = "this gVisor refuses the statx of the host's stat"
DEVIATIONS = {"modes": OLD_STAT, "workspace lives": OLD_STAT}
# gVisor's clock of CPU time counts ticks in which a program could have run: what a program reads there says nothing.
UNTELLING = "cpu is true"
# Families whose every check is part of each test run; of the others it is the first one that stands for them.
ALWAYS_WHOLE = ("truth", "walls", "tree kill", "cleanup", "cancellation", "capabilities")


def a_check_of_everything() -> list[str]:
    """Return what a test run has time for."""
    firsts = {check.family: check.name for check in reversed(CHECKS)}
    kept = [check for check in CHECKS if check.family in ALWAYS_WHOLE or firsts[check.family] == check.name]
    return [check.name for check in kept if check.name != UNTELLING]


ALL = [check.name for check in CHECKS if check.name != UNTELLING]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("use_cgroups", [True, False], ids=["control groups", "without"])
@pytest.mark.parametrize(
    "names", [pytest.param(a_check_of_everything(), id="some"), pytest.param(ALL, id="all", marks=pytest.mark.soak)]
)
def test_gvisor_without_docker_conforms(names: list[str], use_cgroups: bool) -> None:
    """Every check is kept, but for deviations that are named and real."""
    if shutil.which("runsc") is None:
        pytest.skip("missing: runsc (make setup-system)")
    deviations = {name: why for name, why in DEVIATIONS.items() if name in names}
    backend = RunscBackend(use_cgroups=use_cgroups)
    rows = run_conformance(backend, level=Level.GVISOR, only=names, deviations=deviations, at_once=3)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
