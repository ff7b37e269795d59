"""Sessions a hundred times over: nothing is left behind, nothing gets slower or deeper, whoever ends them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cloche
from tests.harness.leaks import Snapshot, wait_for_leftovers

ROOT = Path(__file__).parents[2]
KILLS, SESSIONS, ROLLBACKS = 20, 100, 200
PATIENCE_S = 60

pytestmark = pytest.mark.soak


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_hundred_sessions_leave_nothing() -> None:
    """Each is opened, used, forked and closed; descriptors and processes are those of before."""
    with cloche.Sandbox(live=False) as sandbox:
        sandbox.session().close()  # what is kept ready from here on is there
    before, descriptors = Snapshot.take(), _descriptors()
    for number in range(SESSIONS):
        with cloche.Sandbox(live=False) as sandbox:
            session = sandbox.session()
            assert session.run(f"x = {number}; x").value == number
            if number % 5 == 0:
                (fork,) = session.fork()
                assert fork.run("x").value == number
            if number % 2:
                session.close()
    assert wait_for_leftovers(before, patience_s=PATIENCE_S) == []
    assert _descriptors() <= descriptors + 4


def test_two_hundred_rollbacks() -> None:
    """Memory and files come back each time; nothing of what was rolled back stays."""
    before = Snapshot.take()
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        session.run("x = 'early'; f = open('f', 'w'); _ = f.write(x); f.close()")
        session.checkpoint("c")
        session.rollback("c")
        descriptors = _descriptors()
        for number in range(ROLLBACKS):
            session.run(f"x = {number}; f = open('f', 'w'); _ = f.write(str(x)); f.close(); y = bytearray(1 << 20)")
            session.rollback("c")
            assert session.run("[x, open('f').read(), 'y' in globals()]").value == ["early", "early", False]
        assert _descriptors() <= descriptors + 4
    assert wait_for_leftovers(before, patience_s=PATIENCE_S) == []


def test_two_hundred_forks() -> None:
    """Fork and close nest no deeper; with the sandbox all that they held is given back."""
    before, descriptors = Snapshot.take(), _descriptors()
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        for number in range(ROLLBACKS):
            session.run(f"x = {number}")
            (fork,) = session.fork()
            assert fork.run("x").value == number
            fork.close()
    assert wait_for_leftovers(before, patience_s=PATIENCE_S) == []
    assert _descriptors() <= descriptors + 4


def test_nothing_outlives_a_killed_holder_of_sessions() -> None:
    """Killed at any moment, a caller with five sessions and their forks leaves nothing."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = Snapshot.take()
    for _ in range(KILLS):
        command = [sys.executable, "-m", "tests.harness.programs.held_sessions", str(chance.randrange(1 << 32))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as caller:
            try:
                assert caller.stdout is not None
                assert caller.stdout.readline() == b"ready\n"
                time.sleep(chance.uniform(0, 0.5))
                assert caller.poll() is None, "the caller ended by itself"
            finally:
                caller.kill()
    left = wait_for_leftovers(before, patience_s=PATIENCE_S)
    assert not left, f"seed {seed}:\n" + "\n".join(left)
