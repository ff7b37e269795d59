"""What nobody waits for makes way for runs, and not for ever."""

from __future__ import annotations

import threading
import time

import pytest

from cloche.backends.containers.pool import MOST_S, QUIET_S, Deferral


def test_nothing_waits_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at once."""
    deferral = Deferral()
    monkeypatch.setattr(deferral._turn, "wait", lambda _: pytest.fail("it waits"))
    deferral.wait()


def test_it_waits_until_a_run_has_ended_and_a_moment_more() -> None:
    """Another run may follow at once."""
    deferral, begun_at = Deferral(), list[float]()

    def make() -> None:
        deferral.wait(60)
        begun_at.append(time.monotonic())

    with deferral.hold():
        thread = threading.Thread(target=make)
        thread.start()
        time.sleep(0.1)
        assert not begun_at
        ends_at = time.monotonic()
    thread.join()
    assert QUIET_S <= begun_at[0] - ends_at < 30


def test_it_does_not_wait_for_a_long_run() -> None:
    """After a bounded time it begins whatever runs."""
    deferral = Deferral()
    with deferral.hold():
        started = time.monotonic()
        deferral.wait()
        assert MOST_S <= time.monotonic() - started < 30
