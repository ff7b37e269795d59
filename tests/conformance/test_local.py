"""The public conformance suite over the local backend: every level, with control groups and with rlimits only."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.core.enforcement import Control, Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.testing.conformance import CHECKS, Outcome, run_conformance

NO_WALLS = "level process is a child process with limits and no isolation"
NO_PIDS = "RLIMIT_NPROC does not bind root"
# What level process cannot keep, by name; and what it cannot besides as root without control groups.
AT_PROCESS = {"host files": NO_WALLS, "host loopback": NO_WALLS, "caller's process": NO_WALLS}
AT_PROCESS_ROOT = {
    "pids limit": NO_PIDS,
    "pids limit before signaled": NO_PIDS,
    "ok at the process limit": NO_PIDS,
    "timeout before pids limit": NO_PIDS,
}


def _deviations(level: Level, backend: LocalBackend) -> dict[str, str]:
    if level > Level.PROCESS:
        return {}
    has_cgroups = "cgroup" in backend.capabilities().controls[Control.PIDS].mechanism
    return AT_PROCESS if has_cgroups or os.geteuid() != 0 else {**AT_PROCESS, **AT_PROCESS_ROOT}


class ColdBackend(LocalBackend):
    """Start every run afresh."""

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[LocalOpenSandbox]:
        """Open a sandbox that takes nothing warm."""
        async with super().open(policy.with_changes(warm=False), limits) as sandbox:
            yield sandbox


# Level process with control groups is what `cloche conformance --backend subprocess` tries, in test_suite.py.
ROWS = {
    "jail, control groups": (Level.JAIL, True),
    "jail, control groups, cold": (Level.JAIL, True),
    "jail, rlimits only": (Level.JAIL, False),
    "confined, control groups": (Level.CONFINED, True),
    "confined, rlimits only": (Level.CONFINED, False),
    "process, rlimits only": (Level.PROCESS, False),
}


# What every test run tries: root with control groups, the ordinary user, who has none, with rlimits.
ALWAYS = "jail, control groups" if os.geteuid() == 0 else "jail, rlimits only"


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.both_users] if name == ALWAYS else [pytest.mark.soak]


@pytest.mark.root
def test_every_end_has_its_status_without_control_groups() -> None:
    """Also of root's, whom some limits of the kernel do not bind: what ends a run is told as with control groups."""
    names = ["busy loop", *(check.name for check in CHECKS if check.family == "statuses")]
    rows = run_conformance(LocalBackend(use_cgroups=False), level=Level.JAIL, only=names, deviations={}, at_once=10)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("level", "use_cgroups", "is_cold"),
    [pytest.param(*row, "cold" in name, id=name, marks=_marks(name)) for name, row in ROWS.items()],
)
def test_local_conforms(level: Level, use_cgroups: bool, is_cold: bool) -> None:
    """Every check is kept, but for deviations that are named and real."""
    backend = ColdBackend(use_cgroups=use_cgroups) if is_cold else LocalBackend(use_cgroups=use_cgroups)
    rows = run_conformance(backend, level=level, deviations=_deviations(level, backend), at_once=10)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    skipped = {row.check.name for row in rows if row.outcome is Outcome.SKIPPED}
    assert skipped == (set() if level is Level.JAIL else {"rollback", "fork"})
