"""Ten thousand programs over a fleet whose node is killed three times: each has one result, and it is right."""

from __future__ import annotations

import os
import signal

import pytest

import cloche
from tests.harness import batches
from tests.harness.fleets import LocalFleetBackend, node_pid
from tests.harness.leaks import Snapshot, wait_for_leftovers

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
COUNT, KILLS, AT_ONCE = 10_000, 3, 8


def test_ten_thousand_programs_over_a_node_that_is_killed_three_times() -> None:
    """They may run twice. One in a hundred crashes, hangs or exhausts memory; nothing is left at the end."""
    before = Snapshot.take()
    backend = LocalFleetBackend()
    backend.share = 2.0
    kill_at = {COUNT * (kill + 1) // (KILLS + 1) for kill in range(KILLS)}
    wrong, repeated = list[str](), 0
    try:
        results = cloche.map(
            batches.programs(COUNT), backend=backend, concurrency=AT_ONCE, retries=8, idempotent=True,
            accept_claimed=True,
        )  # fmt: skip
        for number, result in enumerate(results):
            if batches.is_wrong(number, str(result.status), result.stdout):
                wrong.append(f"{number}: {result}")
            repeated += result.meta["program"]["attempts"] > 1
            if number in kill_at:
                os.kill(node_pid(), signal.SIGKILL)
        assert number == COUNT - 1
    finally:
        backend.leases.close()
    assert wrong == []
    assert repeated >= KILLS
    assert wait_for_leftovers(before, patience_s=60) == []
