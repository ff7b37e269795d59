"""What nobody waits for makes way for runs, and not for ever."""

from __future__ import annotations

import threading
import time

import pytest

from cloche.backends.containers.pool import MOST_S, QUIET_S, Way


def test_nothing_waits_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at once."""
    way = Way()
    monkeypatch.setattr(way._turn, "wait", lambda _: pytest.fail("it waits"))
    way.make()


def test_it_waits_until_a_run_has_ended_and_a_moment_more() -> None:
    """Another run may follow at once."""
    way, begun_at = Way(), list[float]()

    def make() -> None:
        way.make(60)
        begun_at.append(time.monotonic())

    with way.taken():
        thread = threading.Thread(target=make)
        thread.start()
        time.sleep(0.1)
        assert not begun_at
        ends_at = time.monotonic()
    thread.join()
    assert QUIET_S <= begun_at[0] - ends_at < 30


def test_it_does_not_wait_for_a_long_run() -> None:
    """After a bounded time it begins whatever runs."""
    way = Way()
    with way.taken():
        started = time.monotonic()
        way.make()
        assert MOST_S <= time.monotonic() - started < 30
