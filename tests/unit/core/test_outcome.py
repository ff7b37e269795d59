"""The one place that knows the precedence of statuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.core.result import KillCause, Observed, Status, decide


@pytest.mark.parametrize(
    ("seen", "status", "exit_code"),
    [
        (Observed(exit_code=0), Status.OK, 0),
        (Observed(exit_code=3), Status.ERROR, 3),
        (Observed(exit_code=127), Status.ERROR, 127),
        (Observed(signal=11), Status.SIGNALED, 139),
        (Observed(signal=9), Status.SIGNALED, 137),
        (Observed(signal=9, cause=KillCause.TIMEOUT), Status.TIMEOUT, -1),
        (Observed(cause=KillCause.TIMEOUT, oom_kills=1), Status.TIMEOUT, -1),
        (Observed(signal=9, oom_kills=1), Status.OUT_OF_MEMORY, 137),
        (Observed(exit_code=1, oom_kills=2), Status.OUT_OF_MEMORY, 137),
        (Observed(cause=KillCause.OUT_OF_MEMORY), Status.OUT_OF_MEMORY, 137),
        (Observed(signal=9, cause=KillCause.OUTPUT_LIMIT, pids_hits=1), Status.OUTPUT_LIMIT, 137),
        (Observed(exit_code=1, pids_hits=4), Status.PIDS_LIMIT, 1),
        (Observed(exit_code=1, workspace_full=True), Status.DISK_LIMIT, 1),
        (Observed(signal=25), Status.DISK_LIMIT, 153),
        (Observed(), Status.SIGNALED, 137),
        (Observed(exit_code=3, denied=2), Status.DENIED, 3),
        (Observed(signal=11, denied=2), Status.SIGNALED, 139),
        (Observed(exit_code=1, denied=2, pids_hits=1), Status.PIDS_LIMIT, 1),
        (Observed(cause=KillCause.TIMEOUT, denied=2), Status.TIMEOUT, -1),
    ],
)
def test_precedence(seen: Observed, status: Status, exit_code: int) -> None:
    """Each observation has one status and one exit code."""
    verdict = decide(seen)
    assert (verdict.status, verdict.exit_code) == (status, exit_code)


@given(oom_kills=st.integers(0, 3), pids_hits=st.integers(0, 3), workspace_full=st.booleans(), denied=st.integers(0, 3))
def test_exit_zero_is_ok(oom_kills: int, pids_hits: int, workspace_full: bool, denied: int) -> None:
    """A program that ended with 0 is ok whatever was hit; the hits are counted."""
    seen = Observed(exit_code=0, oom_kills=oom_kills, pids_hits=pids_hits, workspace_full=workspace_full, denied=denied)
    verdict = decide(seen)
    assert verdict.status is Status.OK
    disk = int(workspace_full)
    counts = {"out_of_memory": oom_kills, "pids_limit": pids_hits, "disk_limit": disk, "denied": denied}
    assert verdict.hits == {name: count for name, count in counts.items() if count}


def test_a_bare_sigkill_has_no_cause() -> None:
    """A kill that nobody of ours owns up to is a signal, not a guess."""
    assert decide(Observed(signal=9)).hits == {}
