"""Which ends of runs need no word of the helper's."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.backends.local.ends import is_short

WELL = {"wait_status": 0, "is_alone": True, "is_worn": False, "at": 10.005}


def test_a_short_run_that_ended_well_needs_none() -> None:
    """Five milliseconds, exit code 0, nothing left."""
    assert is_short(10.0, WELL, 30.0)


@pytest.mark.parametrize(
    ("change", "timeout_s"),
    [
        ({"wait_status": 256}, 30.0),
        ({"wait_status": 9}, 30.0),
        ({"is_alone": False}, 30.0),
        ({"is_worn": True}, 30.0),
        ({"at": 10.021}, 30.0),
        ({}, 0.5),
    ],
    ids=[
        "an error",
        "a signal",
        "somebody is left",
        "the network was used",
        "the memory was looked at",
        "a near clock",
    ],
)
def test_anything_else_waits_for_it(change: dict[str, Any], timeout_s: float) -> None:
    """Where the helper might know more, its word is awaited."""
    assert not is_short(10.0, {**WELL, **change}, timeout_s)
