"""Where actions run, row by row."""

import pytest

import cloche
from cloche.core.policy import PLACEMENTS

ROWS = {
    "generated_code": "sandbox",
    "package_install": "sandbox",
    "outside_write": "sandbox",
    "skill_loading": "workspace",
    "tool_function": "workspace",
    "peer_call": "workspace",
    "platform_call": "workspace",
}


def test_the_seven_rows() -> None:
    """Each action has its place, and a reason."""
    assert {action: str(cloche.placement(action).place) for action in PLACEMENTS} == ROWS
    assert all(row.why for row in PLACEMENTS.values())


@pytest.mark.parametrize("action", ["", "fly", None, ["generated_code"]])
def test_an_action_that_nobody_knows_is_named(action: str) -> None:
    """And those that are known."""
    with pytest.raises(cloche.InvalidRequest, match=r"unknown action .*; known actions: generated_code, "):
        cloche.placement(action)
