"""How often memory is summed: a sum that takes long is not made all the time."""

import time

from cloche.jail.accounting import LONGEST_PAUSE_S, TICK_S, Accounting


def test_a_look_that_takes_long_is_followed_by_a_pause() -> None:
    """Nine times as long, in processor time, but no longer than memory may be left alone."""
    accounting = Accounting()
    for burnt_s in (0.03, 0.5):
        assert accounting.begin()
        until = time.process_time() + burnt_s
        while time.process_time() < until:
            pass
        accounting.end()
        assert not accounting.begin()
        assert min(5 * burnt_s, LONGEST_PAUSE_S / 2) < accounting.pause_s() <= LONGEST_PAUSE_S
        accounting.renew()


def test_a_cheap_look_is_made_at_every_tick() -> None:
    """Whoever is small is watched closely."""
    accounting = Accounting()
    assert accounting.begin()
    accounting.end()
    assert accounting.pause_s() <= 2 * TICK_S
