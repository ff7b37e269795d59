"""The calls that are refused by the reaper, which counts them: never one that a program may make."""

from __future__ import annotations

import pytest

from cloche.jail.setup.syscall_table import ALLOWED, LAST_KNOWN, REPORTED


@pytest.mark.parametrize("machine", ALLOWED)
def test_what_is_counted_is_what_is_refused(machine: str) -> None:
    """A number in both tables would take the call away; one beyond the table would answer EPERM instead of ENOSYS."""
    assert REPORTED.keys() == ALLOWED.keys()
    numbers = REPORTED[machine]
    assert list(numbers) == sorted(set(numbers))
    assert not set(numbers) & set(ALLOWED[machine].values())
    assert numbers[-1] <= LAST_KNOWN[machine]
