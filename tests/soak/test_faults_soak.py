"""What a guest does wrong, and what we do, fifty times each: exactly right or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import CHECKS, run_conformance
from tests.harness.faults import OUR_FAULTS, fail
from tests.harness.leaks import Snapshot, wait_for_leftovers

REPETITIONS = 50
# Those that end a run from outside, and those that end it by themselves.
STATUSES = ["busy loop", *(check.name for check in CHECKS if check.family == "statuses")]
MODES = pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "rlimits"])

pytestmark = pytest.mark.soak


@MODES
@pytest.mark.timeout(1800)
def test_a_guests_fault_is_always_the_same_status(use_cgroups: bool) -> None:
    """Fifty of fifty have the status and the exit code of their check."""
    backend, wrong = LocalBackend(use_cgroups=use_cgroups), Counter[str]()
    for _ in range(REPETITIONS):
        rows = run_conformance(backend, level=Level.JAIL, only=STATUSES, deviations={}, at_once=3)
        wrong.update(f"{row.check.name}: {row.reason}" for row in rows if not row.ok)
    assert not wrong


async def _fail_often(name: str, use_cgroups: bool) -> Counter[str]:
    return Counter([(await fail(name, use_cgroups=use_cgroups)).partition(":")[0] for _ in range(REPETITIONS)])


@MODES
@pytest.mark.parametrize("name", OUR_FAULTS)
def test_a_fault_of_ours_is_always_the_same_exception(name: str, use_cgroups: bool) -> None:
    """Fifty of fifty raise what the table says, and nothing is left behind."""
    before = Snapshot.take()
    assert asyncio.run(_fail_often(name, use_cgroups)) == {OUR_FAULTS[name][1].__name__: REPETITIONS}
    left = wait_for_leftovers(before, patience_s=20)
    assert not left, "\n".join(left)
