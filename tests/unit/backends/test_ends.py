"""What ends a run: whose report decides, and which ends need none of the helper's."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.backends.local.run_report import Ask, ReportSource, RunEnd, is_short
from cloche.core.errors import OutcomeUnknown, StartFailed

WELL = {"wait_status": 0, "is_alone": True, "is_worn": False, "at": 10.005}


def test_a_short_run_that_ended_well_needs_none() -> None:
    """Five milliseconds, exit code 0, nothing left."""
    assert is_short(10.0, WELL, 30.0, is_counted=False)


def test_why_it_failed_is_counted_by_a_control_group() -> None:
    """With one, an exit code is no reason to ask; a signal is."""
    assert is_short(10.0, {**WELL, "wait_status": 256}, 30.0, is_counted=True)
    assert not is_short(10.0, {**WELL, "wait_status": 9}, 30.0, is_counted=True)


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
    """Where the helper might know more, its report is awaited."""
    assert not is_short(10.0, {**WELL, **change}, timeout_s, is_counted=False)


RUN, JAIL = 7, 3  # the numbers of the run and of the prefork jail that its orders went to
SHORT = {"number": RUN, "user_s": 0.002, "system_s": 0.001, "most_kib": 2, **WELL}
LONG = {**SHORT, "at": 11.0}
FAILED = {"number": RUN, "message": "no room", "step": "helper", "index": 0, "errno": 28}
STARTED = ("status", "started", {"at": 10.0})
KILL = (None, "", {})

Message = tuple[ReportSource | None, str, dict[str, Any]]


def jail(tag: str, body: dict[str, Any]) -> Message:
    """Return what a prefork jail says."""
    return "jail", tag, {"generation": JAIL, **body}


def helper(tag: str, **body: object) -> Message:
    """Return what a helper says, of this run in this jail unless it says otherwise."""
    return "helper", tag, {"number": RUN, "generation": JAIL, "cause": "", **body}


def what_came_of(messages: list[Message], *, generation: int = JAIL) -> list[object]:
    """Return what each message was found to mean: an error's type, `Ask.HELPER`, or whose report it is."""
    end = RunEnd(RUN, 30.0, generation=generation)
    found: list[object] = []
    for source, tag, body in messages:
        if source is None:
            end.was_killed = True
            continue
        one = end.take(source, tag, body)
        if isinstance(one, Exception):
            found.append(type(one))
        else:
            found.append(("the helper's" if one is body else "the jail's") if isinstance(one, dict) else one)
    return found


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([STARTED, jail("ended", SHORT)], [None, "the jail's"], id="a short run"),
        pytest.param(
            [STARTED, jail("ended", LONG), helper("ended")],
            [None, Ask.HELPER, "the helper's"],
            id="a long run",
        ),
        pytest.param(
            [jail("ended", SHORT), helper("failed", **FAILED)],
            [Ask.HELPER, StartFailed],
            id="an end without a start",
        ),
        pytest.param(
            [STARTED, KILL, jail("ended", SHORT), helper("ended", cause="timeout")],
            [None, Ask.HELPER, "the helper's"],
            id="a run that was killed",
        ),
        pytest.param([KILL, helper("ended", cause="cancelled")], ["the helper's"], id="killed before it started"),
        pytest.param([STARTED, helper("ended")], [None, "the helper's"], id="the helper overtakes the jail"),
        pytest.param(
            [jail("started", SHORT), jail("ended", SHORT)], [None, Ask.HELPER], id="a start that is in no status"
        ),
        pytest.param(
            [jail("ready", {"number": 0}), jail("ended", {**SHORT, "number": RUN - 1})],
            [None, None],
            id="the jail reports an earlier run",
        ),
        pytest.param([helper("ended", number=RUN - 1)], [None], id="the helper reports an earlier run"),
        pytest.param(
            [helper("ended", number=RUN - 1, generation=JAIL + 1)],
            [StartFailed],
            id="the jail ended after an earlier run",
        ),
        pytest.param(
            [STARTED, helper("ended", number=RUN - 1, generation=JAIL + 1)],
            [None, OutcomeUnknown],
            id="the jail ended after an earlier run, with this one in it",
        ),
        pytest.param([helper("failed", **{**FAILED, "number": RUN - 1})], [None], id="an earlier run failed"),
        pytest.param([helper("failed", **FAILED)], [StartFailed], id="it failed before the start"),
        pytest.param([STARTED, helper("failed", **FAILED)], [None, OutcomeUnknown], id="it failed after the start"),
        pytest.param([helper("lost")], [StartFailed], id="a fault of the helper's before the start"),
        pytest.param([("helper", "", {})], [StartFailed], id="the helper is gone before the start"),
        pytest.param([STARTED, ("helper", "", {})], [None, OutcomeUnknown], id="the helper is gone after the start"),
        pytest.param([helper("exceeded"), helper("answer"), helper("here")], [None] * 3, id="what is about no end"),
    ],
)
def test_whose_report_ends_a_run(messages: list[Message], expected: list[object]) -> None:
    """Each message says how the run ended, whom to ask, or nothing, whatever order they come in."""
    assert what_came_of(messages) == expected


def test_a_helper_that_hands_the_orders_over_may_have_ended_other_jails() -> None:
    """Where no prefork jail was given the orders, that one is no more says nothing about the run."""
    assert what_came_of([helper("ended", number=RUN - 1, generation=JAIL + 1)], generation=0) == [None]


def test_a_start_is_told_by_the_helper_too() -> None:
    """Where it hands the orders over, it says so itself; what fails afterwards leaves the outcome unknown."""
    messages = [helper("started", at=10.0), helper("failed", **FAILED)]
    assert what_came_of(messages, generation=0) == [None, OutcomeUnknown]


def test_the_report_of_a_short_run() -> None:
    """It says what the helper would have said, but for what the caller alone can add."""
    end = RunEnd(RUN, 30.0, generation=JAIL)
    end.take(*STARTED)
    assert end.take("jail", "ended", SHORT) == {
        "cause": "",
        "ended": SHORT,
        "cpu_user_s": 0.002,
        "cpu_system_s": 0.001,
        "peak_bytes": 2048,
        "is_task_limit_seen": False,
        "is_folder_over": False,
    }
