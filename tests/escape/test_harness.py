"""Claims about this suite itself: that enough attempts count, and that its checks can fail."""

from collections import Counter

import pytest

from tests.escape.attempts import IS_ROOT, play
from tests.escape.ledger import Ledger, all_attempts
from tests.escape.places import Inside

LEAST_COUNTED = 100 if IS_ROOT else 80
WITHOUT_WALLS = [
    "files/a file at home",
    "files/write to a file of the host",
    "processes/signal (host)",
    "processes/see processes of others",
    "system calls/io_uring_setup",
    "network/loopback, version 4 (host)",
    "leaks/the host's name",
    "residue/a file in tmp",
]


def test_names_are_unique() -> None:
    """Every attempt has a name of its own in its family."""
    twice = [key for key, count in Counter((a.family, a.name) for a in all_attempts()).items() if count > 1]
    assert not twice


def test_enough_attempts_count(ledger: Ledger) -> None:
    """At least a hundred attempts are shown to work outside when root makes them."""
    counted = list(ledger.counted(all_attempts()))
    print("\n".join(ledger.report()))
    assert len(counted) >= LEAST_COUNTED


@pytest.mark.parametrize("name", WITHOUT_WALLS)
def test_a_breach_is_seen(name: str, ledger: Ledger) -> None:
    """Where there are no walls, the same checks report that the attempt escaped."""
    attempt = next(a for a in all_attempts() if f"{a.family}/{a.name}" == name)
    place = Inside(ledger.stage, level="process", backend="subprocess")
    assert play(attempt, place, ledger.stage).breach
