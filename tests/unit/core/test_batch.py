"""The decisions of a batch: what a program is, which may start, whose result is due, what is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.backends.remote.failures import Failure, RemoteUnavailable
from cloche.core.batch import BatchOrder, Program, delay_s, may_try_again, read_program
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, OutcomeUnknown, StartFailed
from cloche.core.result import FileRecord, Result


def result(*, files: int = 0) -> Result:
    """Return a result with a file of so many bytes."""
    record = FileRecord(path="a", size=files, sha256="")
    return Result("", "", 0, 0.0, files=(record,) if files else ())


@pytest.mark.parametrize(
    "value",
    ["print(1)", {"code": "print(1)"}, Program(code="print(1)"), {"argv": ["true"], "id": 7, "timeout": "5s"}],
)
def test_a_program_is_text_a_mapping_or_a_record(value: Any) -> None:
    """Only the given keywords replace those of the call."""
    program = read_program(value)
    assert program.code == "print(1)" or program.keywords() == {"argv": ["true"], "timeout": "5s"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3, "not int"),
        ({}, "give `code`"),
        ({"cod": "1"}, "unknown key 'cod'"),
        ({"code": 5}, "code: give str, not int"),
        ({"code": "1", "argv": "ls"}, "argv: give list or tuple, not str"),
        ({"code": "1", "timeout": True}, "timeout: give int or float or str, not bool"),
    ],
)
def test_a_wrong_program_is_told_by_its_key(value: Any, told: str) -> None:
    """The message names the key and the wrong type."""
    with pytest.raises(InvalidRequest, match=told):
        read_program(value)


def test_results_are_due_in_the_order_of_the_programs() -> None:
    """A result waits for those before it; as they come, none waits."""
    for in_order, taken in ((True, [0, 1, 2]), (False, [2, 0, 1])):
        order = BatchOrder(concurrency=3, in_order=in_order)
        assert [order.start() for _ in range(3)] == [0, 1, 2]
        assert not order.has_room
        indexes = []
        for index in (2, 0, 1):
            order.end(index, result())
            while (due := order.take()) is not None:
                indexes.append(due[0])
        assert indexes == taken
        assert order.running == 0


def test_the_number_and_the_bytes_of_held_results_are_bounded() -> None:
    """No program starts while too many results wait, or too much of them; the first one's result frees them."""
    by_number = BatchOrder(concurrency=2, in_order=True, most_ahead=3)
    by_bytes = BatchOrder(concurrency=2, in_order=True, most_bytes=1 << 20)
    for order, files in ((by_number, 0), (by_bytes, 1 << 20)):
        first, second = order.start(), order.start()
        order.end(second, result(files=files))
        if order.has_room:
            order.end(order.start(), result())
        assert not order.has_room
        assert order.take() is None
        order.end(first, result())
        while order.take() is not None:
            pass
        assert order.has_room


@pytest.mark.parametrize(
    ("error", "is_idempotent", "is_tried"),
    [
        (StartFailed("no room"), False, True),
        (RemoteUnavailable("e2b", remedy="", failure=Failure.RATE_LIMITED), False, True),
        (RemoteUnavailable("e2b", remedy="", failure=Failure.UNAUTHORIZED), True, False),
        (BackendUnavailable("none"), True, False),
        (OutcomeUnknown("lost"), False, False),
        (OutcomeUnknown("lost"), True, True),
        (InvalidRequest("wrong"), True, False),
    ],
)
def test_only_a_program_that_never_ran_or_may_run_twice_is_tried_again(
    error: ClocheError, is_idempotent: bool, is_tried: bool
) -> None:
    """And never more often than `retries` says."""
    assert may_try_again(error, tried=2, retries=2, is_idempotent=is_idempotent) is is_tried
    assert not may_try_again(error, tried=3, retries=2, is_idempotent=is_idempotent)


def test_delays_double_and_are_bounded() -> None:
    """A provider's demand replaces them, up to a minute."""
    assert [delay_s(StartFailed(""), tried=tried) for tried in (1, 2, 3, 50)] == [0.1, 0.2, 0.4, 5.0]
    asked = RemoteUnavailable("", remedy="", failure=Failure.RATE_LIMITED, retry_after_s=1e9)
    assert delay_s(asked, tried=1) == 60.0
