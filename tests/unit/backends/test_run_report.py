"""How many runs go on at once."""

from __future__ import annotations

import os

from cloche.backends.local import run_report


def test_more_runs_than_processors_are_a_crowd() -> None:
    """Each is counted once, and no more when it has ended; a fork has none of its parent's."""
    numbers = [-1 - number for number in range(len(os.sched_getaffinity(0)) + 1)]
    for number in (*numbers[:-1], numbers[0]):
        run_report.begin_run(number)
        assert not run_report.is_under_load()
    run_report.begin_run(numbers[-1])
    assert run_report.is_under_load()
    pid = os.fork()
    if pid == 0:
        os._exit(run_report.is_under_load())
    assert os.waitpid(pid, 0)[1] == 0
    for number in (*numbers, numbers[0]):
        run_report.end_run(number)
        assert not run_report.is_under_load()
