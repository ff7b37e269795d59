"""The attempts of every module once more, on gVisor without docker."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.escape.attempts import JAIL, Attempt, play
from tests.escape.ledger import Ledger, all_attempts
from tests.escape.places import Inside

GVISOR = "gvisor"
# Some minutes of attempts that the jail is held to in every test run: there, gVisor is held to a few.
PER_FAMILY = 2
# What gVisor does not hold and the jail does; docs/limitations/runsc.md says so too.
NOT_HELD: dict[str, str] = {}


@pytest.fixture(autouse=True)
def gvisor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runsc, and no daemon."""
    if shutil.which("runsc") is None:
        pytest.skip("missing: runsc (make setup-system)")
    monkeypatch.delenv("CLOCHE_RUNSC", raising=False)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")


def attempts() -> Iterator[Any]:
    """Yield the attempts that a jail must hold: a few now, the others as soak."""
    seen: Counter[str] = Counter()
    for attempt in all_attempts():
        if JAIL in attempt.levels and attempt.has_control_here:
            seen[attempt.family] += 1
            marks = [pytest.mark.soak] if seen[attempt.family] > PER_FAMILY else []
            yield pytest.param(attempt, id=f"{attempt.family}: {attempt.name}", marks=marks)


@pytest.mark.parametrize("attempt", list(attempts()))
def test_gvisor_holds_it(ledger: Ledger, attempt: Attempt) -> None:
    """What works outside does not work in it."""
    ledger.control(attempt)
    place = Inside(ledger.stage, level=GVISOR, backend="gvisor", require=GVISOR)
    verdict = play(attempt, place, ledger.stage)
    if verdict.breach and place.promises.get(attempt.promise, "enforced") != "enforced":
        return
    why = NOT_HELD.get(f"{attempt.family}/{attempt.name}")
    if why is not None:
        assert verdict.breach, f"held after all, although {why}; take it off the list"
        return
    assert not verdict.breach, f"escaped from gVisor: {verdict.breach}"
    assert verdict.stopped_by, f"broke instead of trying: {verdict.trace}"
