"""What nobody waits for makes way for runs, and not for ever."""

from __future__ import annotations

import threading
import time

from cloche.backends.containers.way import MOST_S, QUIET_S, Way


def waited_s(way: Way, most_s: float = MOST_S) -> float:
    """Make way, and return how long that took."""
    started = time.monotonic()
    way.make(most_s)
    return time.monotonic() - started


def test_nothing_waits_where_nothing_runs() -> None:
    """It begins at once."""
    assert waited_s(Way()) < QUIET_S


def test_it_waits_until_a_run_has_ended_and_a_moment_more() -> None:
    """Another run may follow at once."""
    way, times = Way(), list[float]()
    with way.taken():
        thread = threading.Thread(target=lambda: times.append(waited_s(way, 5)))
        thread.start()
        time.sleep(0.1)
        assert not times
    thread.join()
    assert 0.1 + QUIET_S <= times[0] < 1


def test_it_does_not_wait_for_a_long_run() -> None:
    """After a bounded time it begins whatever runs."""
    way = Way()
    with way.taken():
        assert MOST_S <= waited_s(way) < MOST_S + 0.5
