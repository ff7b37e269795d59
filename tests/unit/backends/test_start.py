"""How a run starts: by a helper of its own or a slot's, in a jail that waits or in one that is built now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from cloche.backends.local.prefork import (
    COLD,
    FORKED,
    FORKED_KEPT,
    FORKED_SINGLE,
    POOLED_KEPT,
    POOLED_SINGLE,
    Start,
    WarmJail,
    choose_second_start,
    choose_start,
)
from cloche.forkserver.slot import Slot
from cloche.jail.messages import Run, Spec

PREFORK, PLAIN = (WarmJail("this kind", Spec(), Run(), is_prefork) for is_prefork in (True, False))


@dataclass
class Helper:
    """Play a slot in which a jail was built ahead."""

    key: object = None


EMPTY, SINGLE, KEPT, OTHER = Helper(), Helper("this kind"), Helper(PREFORK.key_of_kept), Helper("another kind")


@pytest.mark.parametrize(
    ("slot", "jail", "is_last", "expected"),
    [
        pytest.param(None, PREFORK, True, COLD, id="no slot"),
        pytest.param(None, PREFORK, False, COLD, id="no slot, and more runs to come"),
        pytest.param(None, None, False, COLD, id="no slot for a session"),
        pytest.param(SINGLE, None, False, FORKED, id="a session"),
        pytest.param(SINGLE, PREFORK, True, POOLED_SINGLE, id="the only run, and its jail waits"),
        pytest.param(SINGLE, PLAIN, True, POOLED_SINGLE, id="the only run, of several processes, and its jail waits"),
        pytest.param(OTHER, PREFORK, True, FORKED_SINGLE, id="the only run, and another jail waits"),
        pytest.param(KEPT, PREFORK, True, FORKED_SINGLE, id="the only run, and a jail with files waits"),
        pytest.param(EMPTY, PREFORK, True, FORKED_SINGLE, id="the only run, and none waits"),
        pytest.param(KEPT, PREFORK, False, POOLED_KEPT, id="one of several, and the sandbox's jail waits"),
        pytest.param(SINGLE, PREFORK, False, FORKED_KEPT, id="one of several, and a jail for single runs waits"),
        pytest.param(EMPTY, PREFORK, False, FORKED_KEPT, id="one of several, and none waits"),
        pytest.param(SINGLE, PLAIN, False, FORKED, id="one of several, of several processes"),
    ],
)
def test_how_a_run_starts(slot: Helper | None, jail: WarmJail | None, is_last: bool, expected: Start) -> None:
    """A jail that waits serves what it was built for, and nothing else."""
    assert choose_start(cast("Slot | None", slot), jail, is_last=is_last) is expected


@pytest.mark.parametrize(
    ("slot", "failed", "is_open", "expected"),
    [
        pytest.param(None, COLD, False, None, id="a helper of its own"),
        pytest.param(None, COLD, True, None, id="a helper of its own, with files"),
        pytest.param(SINGLE, POOLED_SINGLE, False, COLD, id="the only run, in a jail that waited"),
        pytest.param(OTHER, FORKED_SINGLE, False, COLD, id="the only run, in a jail built for it"),
        pytest.param(SINGLE, FORKED_KEPT, False, COLD, id="the first of several"),
        pytest.param(SINGLE, FORKED, False, COLD, id="the first of several, of several processes"),
        pytest.param(SINGLE, COLD, False, COLD, id="a slot that cannot be given the sandbox"),
        pytest.param(KEPT, POOLED_KEPT, True, FORKED_KEPT, id="a further one, and its guest had waited"),
        pytest.param(EMPTY, FORKED_KEPT, True, None, id="a further one, in a jail built for it with the files"),
        pytest.param(EMPTY, FORKED, True, None, id="a further one, of several processes"),
        pytest.param(KEPT, COLD, True, None, id="a helper that is gone, and the files with it"),
    ],
)
def test_how_a_run_starts_whose_first_try_failed(
    slot: Helper | None, failed: Start, is_open: bool, expected: Start | None
) -> None:
    """Afresh where no files can be lost by that, in another jail of the same helper where it has not had them."""
    assert choose_second_start(cast("Slot | None", slot), failed, is_open=is_open) is expected
