"""The shared status: what is written down of a run, by whom, and the timer."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from cloche.jail import shared_status


@pytest.fixture
def made() -> Iterator[tuple[int, int]]:
    """Return a shared status whose descriptors are closed in the end."""
    file, timer = shared_status.make()
    yield file, timer
    os.close(file)
    os.close(timer)


def is_off(timer: int, timeout_s: float) -> bool:
    """Tell whether the timer goes off in time."""
    return bool(select.select([timer], [], [], timeout_s)[0])


def test_a_new_shared_status_knows_of_no_run(made: tuple[int, int]) -> None:
    """Runs are counted from 1."""
    state = shared_status.PreforkState(made[0])
    assert (state.ordered, state.started, state.ended) == (0, 0, 0)


def test_order_start_and_end_are_kept_apart(made: tuple[int, int]) -> None:
    """Each has a field of its own, and what was written last is read."""
    file, _ = made
    for number in (1, 2**40):
        shared_status.note_order(file, number, 1.5, rebuilds=number > 1)
        shared_status.note_start(file, number, 1234.25, 7)
    shared_status.note_end(file, 1)
    state = shared_status.PreforkState(file)
    assert (state.ordered, state.timeout_s, state.rebuilds) == (2**40, 1.5, True)
    assert (state.started, state.started_at, state.ended) == (2**40, 1234.25, 1)


def test_no_half_of_an_order_is_read(made: tuple[int, int]) -> None:
    """Whoever reads while another order is written reads the one or the other."""
    file, _ = made
    shared_status.note_order(file, 1, 1.0, rebuilds=True)
    is_over = threading.Event()

    def write() -> None:
        number = 1
        while not is_over.is_set():
            number += 1
            shared_status.note_order(file, number, float(number), rebuilds=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5000):
            state = shared_status.PreforkState(file)
            assert state.timeout_s == state.ordered
    finally:
        is_over.set()
        writer.join()


def test_the_timer_goes_off_once(made: tuple[int, int]) -> None:
    """It goes off when it was set, and not again after it was read."""
    _, timer = made
    assert not is_off(timer, 0)
    shared_status.set_timer(timer, 0.001)
    assert is_off(timer, 10)
    shared_status.clear_timer(timer)
    assert not is_off(timer, 0.05)
    shared_status.clear_timer(timer)  # nothing to read


def test_winding_again_puts_the_timer_off(made: tuple[int, int]) -> None:
    """A run that follows soon has the time of its own."""
    _, timer = made
    shared_status.set_timer(timer, 60.0)
    shared_status.set_timer(timer, 3600.0)
    time.sleep(0.01)
    assert not is_off(timer, 0)
