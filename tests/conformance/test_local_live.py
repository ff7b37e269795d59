"""The public conformance suite over sandboxes of the local backend that live."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import LIVE_CHECKS, Outcome, Row, run_conformance

pytestmark = pytest.mark.both_users
# What level confined has not, each of which it says when it is asked for.
NOT_CONFINED = {
    "live: ports", "sessions: loopback", "live files: watch", "rollback", "fork", "session apart",
}  # fmt: skip
# What a gate has time for: who is reached by whom, what ends with what, and where files lie.
CHOSEN = (
    "live: background", "live: exit codes", "live: kill", "live: not read", "live: signals", "live: fresh runs",
    "live: attach", "live files: content", "live files: errors", "live files: archives", "session closes",
)  # fmt: skip


def conformance(level: Level, only: Sequence[str] = (), *, at_once: int) -> tuple[Row, ...]:
    """Run checks at a level: as root with control groups, as an ordinary user with rlimits."""
    backend = LocalBackend(use_cgroups=os.geteuid() == 0)
    return run_conformance(backend, level=level, only=only, deviations={}, at_once=at_once, is_live=True)


def lines_of(rows: Sequence[Row]) -> str:
    """Return a line for each row that is not kept."""
    others = (row for row in rows if row.outcome is not Outcome.KEPT)
    return "\n".join(f"{row.outcome}: {row.check.name}: {row.reason}" for row in others)


def test_sandboxes_that_live_conform() -> None:
    """Every check is kept, and none skipped."""
    assert not lines_of(conformance(Level.JAIL, at_once=10))


def test_sandboxes_that_live_at_level_confined_keep_a_selection() -> None:
    """A selection of the checks passes at level confined, and none is skipped."""
    rows = conformance(Level.CONFINED, CHOSEN, at_once=4)
    assert len(rows) == len(CHOSEN)
    assert not lines_of(rows)


@pytest.mark.soak
def test_sandboxes_that_live_at_level_confined_conform() -> None:
    """Every check is kept at level confined; what it has not is skipped, with a sentence that says so."""
    rows = conformance(Level.CONFINED, at_once=4)
    assert len(rows) == len(LIVE_CHECKS)
    others = [row for row in rows if row.outcome is not Outcome.KEPT]
    assert {row.check.name for row in others} == NOT_CONFINED, lines_of(rows)
    assert all(row.outcome is Outcome.SKIPPED and "level confined" in row.reason for row in others), lines_of(rows)
