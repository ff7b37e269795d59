"""The end of everything without a process namespace, in each of its three ways, against guests that try to survive."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloche.jail.setup.privileges import SCOPED_SINCE, abi

PROGRAM = Path(__file__).parents[2] / "harness/programs/ended.py"
GUEST_ID = 1_999_900_000 + os.getpid() % 90_000  # as root: above the ids that sandboxes get
HELD_S = 5.0
HAS_SCOPES = abi() >= SCOPED_SINCE
WAYS = [
    pytest.param("scope", marks=pytest.mark.skipif(not HAS_SCOPES, reason="this kernel has no Landlock scopes")),
    pytest.param("id", marks=pytest.mark.root),
    "walk",
]
GUESTS = ("double fork", "own subreaper", "sibling", "vfork", "runner", "20 runners", "bomb")
pytestmark = pytest.mark.both_users


def end(way: str, guest: str) -> dict[str, Any]:
    """Let a guest try, end it, and return what came of it."""
    uid = GUEST_ID if os.geteuid() == 0 else os.geteuid()
    words = [sys.executable, str(PROGRAM), way, guest, str(uid)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("guest", [pytest.param(one, marks=[pytest.mark.soak] * (one == "bomb")) for one in GUESTS])
def test_nobody_survives(way: str, guest: str) -> None:
    """Whoever outlives a kill of the first process and its group is ended, when the subreaper has no child left."""
    found = end(way, guest)
    assert found["outlived"] > 0, "the attempt does not work"
    assert found["left"] == 0, found


@pytest.mark.parametrize("way", WAYS[:2])
def test_who_kills_others_is_ended(way: str) -> None:
    """By scope no guest reaches those who end it; by id it may end the reaper, and then the helper does it."""
    found = end(way, "kills others")
    assert found["outlived"] > 0
    assert found["left"] == 0, found


@pytest.mark.parametrize("way", WAYS)
def test_a_reaper_that_guests_hold_up_is_ended(way: str) -> None:
    """One that waits, killed or not, for a lock that they pass among themselves is gone when they are."""
    found = end(way, "does not stop writing")
    assert (found["outlived"], found["left"]) == (1, 0), found
    assert found["seconds"] < HELD_S, found


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS[:2])
def test_a_fork_bomb_ends_without_a_search(way: str) -> None:
    """One signal reaches all 400 processes; without such a signal they are searched for, stopped and killed."""
    assert end(way, "bomb")["searched"] == 0
    assert end("walk", "bomb")["searched"] > 0
