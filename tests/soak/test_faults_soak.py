"""The table of faults, fifty times each, three at once: exactly right or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.harness.faults import GUEST_FAULTS, OUR_FAULTS, fail, induce
from tests.harness.leaks import Snapshot, wait_for_leftovers

REPETITIONS, AT_ONCE = 50, 3
MODES = pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "rlimits"])

pytestmark = pytest.mark.soak


async def _induce_often(name: str, use_cgroups: bool) -> Counter[object]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def once() -> object:
        async with slots:
            return await induce(GUEST_FAULTS[name], use_cgroups=use_cgroups)

    return Counter(await asyncio.gather(*(once() for _ in range(REPETITIONS))))


@MODES
@pytest.mark.parametrize("name", GUEST_FAULTS)
def test_a_guests_fault_is_always_the_same_status(name: str, use_cgroups: bool) -> None:
    """Fifty of fifty have the status and the exit code of the table."""
    fault = GUEST_FAULTS[name]
    seen = asyncio.run(_induce_often(name, use_cgroups))
    wrong = {seen_as: count for seen_as, count in seen.items() if seen_as[:2] != (fault.status, fault.exit_code)}  # type: ignore[index]
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
