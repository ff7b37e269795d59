"""Kill commits to a host's folder at random times: the old tree or the new one is found each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.both_users]
ROOT = Path(__file__).parents[2]
KILLS = 200


def killed(place: Path, *words: str) -> dict[str, int]:
    """Run the program that kills, and return how often it found what."""
    program = [sys.executable, "-m", "tests.harness.programs.killed_commit", os.fspath(place), *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found: dict[str, int] = eval(done.stdout)
    return found


def test_kill_9_at_random_times_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """200 commits of some 60 changes are killed from outside; nothing is lost, and nothing is left after recovery."""
    found = killed(tmp_path, "15", "random", str(KILLS))
    assert found["killed"] == KILLS
    assert found["old"] > 10
    assert found["new"] > 10


def test_kill_9_at_every_step_of_a_recovery_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """A commit is killed at each of its steps, and each recovery at each of its own, one after the other."""
    found = killed(tmp_path, "1", "1")
    assert found["recovery"] > 100
    assert found["old"] > 10
    assert found["new"] > 10
