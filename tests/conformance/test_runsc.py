"""The public conformance suite over gVisor without docker: with control groups and without."""

from __future__ import annotations

import pytest

from cloche.backends.gvisor.backend import RunscBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import CHECKS, Outcome, run_conformance

# What docs/limitations/gvisor.md says, by name.
OLD_STAT = "this gVisor refuses the statx of the host's stat"
DEVIATIONS = {"modes": OLD_STAT, "workspace lives": OLD_STAT}
# gVisor's clock of CPU time counts ticks in which a program could have run: what a program reads there says nothing.
UNTELLING = "cpu is true"
# What is part of each test run: that it says what is there, and that its walls stand.
ALWAYS = ("capabilities", "walls")
SESSIONS = ("session", "session ends: exit", "session files")
BATCH = "batch"
SKIPPED = {"rollback", "fork"}  # of all that is tried, what gVisor has not
# Without control groups, the families whose outcome hangs on them; the other checks take the same way as with them.
HANGS_ON_GROUPS = ("capabilities", "truth", "limits")


# Of live sandboxes: what is part of each test run, and what differs.
LIVE = ("live: background", "live: time-out", "live: memory", "live files: content", "live files: stopped", "session")
LIVE_DEVIATIONS = {
    "live: terminal": "this gVisor's terminals have no Ctrl-C, no Ctrl-D and no signal of a new size",
    "live files: archives": OLD_STAT,
    "live files: streams": "this gVisor has no files without a name: half a file stays where its writer was killed",
}


def checks(*families: str) -> list[str]:
    """Return the names of all checks, or of those of some families."""
    return [check.name for check in CHECKS if check.name != UNTELLING and (not families or check.family in families)]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("runsc_alone")
@pytest.mark.parametrize(
    ("names", "use_cgroups"),
    [
        pytest.param([*checks(*ALWAYS), *SESSIONS, BATCH], True, id="some"),
        pytest.param(checks(), True, id="all", marks=pytest.mark.soak),
        pytest.param(checks(*HANGS_ON_GROUPS), False, id="without control groups", marks=[pytest.mark.soak]),
    ],
)
def test_gvisor_without_docker_conforms(names: list[str], use_cgroups: bool) -> None:
    """Every check is kept, but for deviations that are named and real."""
    deviations = {name: why for name, why in DEVIATIONS.items() if name in names}
    backend = RunscBackend(use_cgroups=use_cgroups)
    rows = run_conformance(backend, level=Level.GVISOR, only=names, deviations=deviations, at_once=3)
    backend.drain()
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == SKIPPED & set(names)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("runsc_alone")
@pytest.mark.parametrize(
    ("names", "skipped"),
    [
        pytest.param(LIVE, set(), id="some"),
        pytest.param((), SKIPPED | {"session apart"}, id="all", marks=pytest.mark.soak),
    ],
)
def test_sandboxes_that_live_conform(names: tuple[str, ...], skipped: set[str]) -> None:
    """Every check is kept, but for deviations that are named and real."""
    deviations = {} if names else LIVE_DEVIATIONS
    backend = RunscBackend()
    rows = run_conformance(backend, level=Level.GVISOR, only=names, deviations=deviations, at_once=3, is_live=True)
    backend.drain()
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == skipped
