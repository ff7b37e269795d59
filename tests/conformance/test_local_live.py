"""The public conformance suite over sandboxes of the local backend that live."""

from __future__ import annotations

import os

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import Outcome, run_conformance


@pytest.mark.both_users
def test_sandboxes_that_live_conform() -> None:
    """Every check is kept, and none skipped: root with control groups, the ordinary user with rlimits."""
    backend = LocalBackend(use_cgroups=os.geteuid() == 0)
    rows = run_conformance(backend, level=Level.JAIL, deviations={}, at_once=10, is_live=True)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if row.outcome is not Outcome.KEPT]
    assert not broken, "\n".join(broken)
