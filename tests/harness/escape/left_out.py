"""Which attempts are not played as cells, and which were found to work there; all others for level jail are held."""

from __future__ import annotations

from collections.abc import Mapping

from tests.harness.escape.attempts import FORK, IS_ROOT, JAIL, SESSION, Attempt

# By family and name: why it makes no sense in a cell.
PATIENCE = "who resists the interrupt of a time-out has three seconds more: test_sessions.py plays them as cells"
NOT_AS_CELL: Mapping[str, str] = {
    "processes/ignore every signal that asks": PATIENCE,
    "processes/outlive a time-out": PATIENCE,
    "processes/stand still past the time-out": PATIENCE,
}
# What works in a cell and should not: expected to fail, and an error when it no longer does.
FOUND_OPEN: Mapping[tuple[str, str], str] = {}
if IS_ROOT:  # an ordinary user's forks have no groups of their own
    FOUND_OPEN = {
        ("leaks/the path of the control group", FORK): (
            "a fork's group is beside its session's, and its path shows its name with the caller's pid (as documented)"
        ),
    }


def key_of(attempt: Attempt) -> str:
    """Return what an attempt is called by."""
    return f"{attempt.family}/{attempt.name}"


def places_of(attempt: Attempt) -> tuple[str, ...]:
    """Return where an attempt is played: at its levels, and as a cell in a session and in a fork."""
    is_cell = JAIL in attempt.levels and key_of(attempt) not in NOT_AS_CELL
    return (*attempt.levels, SESSION, FORK) if is_cell else attempt.levels
