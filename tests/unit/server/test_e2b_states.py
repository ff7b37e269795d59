"""The states of a sandbox of E2B's protocol, by its row and the time."""

import pytest

from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.server.e2b import states
from cloche.server.e2b.errors import E2BError

NOW = 1_800_000_000.0


def facts(status: str = "running", *, left_s: float | None = 60, at_end: str = "end") -> SandboxFacts:
    """Return a row whose time ends `left_s` seconds after NOW."""
    ends_at = {} if left_s is None else {"endsAt": moment(NOW + left_s)}
    return SandboxFacts(
        id="sb_1", project="default", name="sb-1", status=status, created_at=moment(NOW), ended_at=None, api_key="k",
        worker="w", document={**ends_at, "atEnd": at_end},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (facts(), states.RUNNING),
        (facts(left_s=None), states.RUNNING),
        (facts(left_s=0), states.EXPIRED),
        (facts(left_s=-1, at_end="pause"), states.PAUSED),
        (facts(left_s=-1, at_end="pause-files"), states.PAUSED),
        (facts("paused", left_s=None), states.PAUSED),
        (facts("paused", left_s=-1), states.PAUSED),
        (facts("ended"), states.DEAD),
        (facts("starting"), states.DEAD),
    ],
)
def test_the_end_of_a_life_counts_from_its_moment_on(row: SandboxFacts, state: str) -> None:
    """A row that says "running" is expired or paused once its time is over."""
    assert states.state_of(row, NOW) == state


def test_every_request_has_an_outcome_in_every_state() -> None:
    """The table, from which the handlers decide, leaves nothing open."""
    assert all(tuple(row) == states.STATES for row in states.TABLE.values())
    assert all(len(row) == 1 + len(states.STATES) for row in states.rows())


def test_a_request_is_refused_with_the_status_of_the_table() -> None:
    """What is not allowed in a state has the state in its message; what is gone is not found."""
    with pytest.raises(E2BError, match="which is paused") as refused:
        states.check("pause", facts("paused"), "1")
    assert refused.value.status == 409
    with pytest.raises(E2BError, match="was not found") as missing:
        states.check("pause", facts("ended"), "1")
    assert missing.value.status == 404
