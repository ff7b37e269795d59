"""Kill the calling process with SIGKILL at random moments: nothing of its sandboxes may outlive it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.leaks import Snapshot, is_of_this_suite, wait_for_leftovers
from tests.harness.programs.killed_caller import WAYS

LATEST_S, AT_ONCE = 0.15, 4
PATIENCE_S = 60
ROOT = Path(__file__).parents[2]


def _namespaces() -> frozenset[str]:
    """Return every namespace that some live process is in, of those that could be this suite's."""
    found = set()
    for name in os.listdir("/proc"):
        folder = Path("/proc", name, "ns")
        try:
            is_ours = name.isdigit() and is_of_this_suite(int(name))
            found |= {os.readlink(link) for link in folder.iterdir()} if is_ours else set()
        except OSError:
            continue  # it ended while we looked, or is another user's
    return frozenset(found)


def _wait_for_namespaces(before: frozenset[str]) -> frozenset[str]:
    """Return the new namespaces that stay for the whole of our patience: other programs come and go."""
    deadline = time.monotonic() + PATIENCE_S
    left = _namespaces() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= _namespaces()
    return left


def _start(way: str, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.programs.killed_caller", way, str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _kill(caller: subprocess.Popen[bytes], moment_s: float) -> None:
    """Wait until it is at work, and for a random moment more; then end it as nobody can prevent."""
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    time.sleep(moment_s)
    assert caller.poll() is None, "the caller ended by itself"
    caller.kill()
    caller.stdout.close()
    caller.wait()


def _end(callers: list[subprocess.Popen[bytes]]) -> None:
    """End those that are left when one of them went wrong."""
    for caller in callers:
        caller.kill()
        caller.wait()


@pytest.mark.parametrize("kills", [len(WAYS) // 2, pytest.param(200, marks=pytest.mark.soak)])
def test_nothing_outlives_a_killed_caller(kills: int) -> None:
    """Killed at any moment, at any level, it leaves no process, namespace, mount, control group or folder."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    before, namespaces = Snapshot.take(), _namespaces()
    ways = [way for _ in range(-(-kills // len(WAYS))) for way in chance.sample(list(WAYS), len(WAYS))][:kills]
    for at in range(0, kills, AT_ONCE):
        callers = [_start(way, chance.randrange(1 << 32)) for way in ways[at : at + AT_ONCE]]
        try:
            for caller in callers:
                _kill(caller, chance.uniform(0, LATEST_S))
        finally:
            _end(callers)
    left = wait_for_leftovers(before, patience_s=PATIENCE_S)
    assert not left, f"seed {seed}:\n" + "\n".join(left)
    left_namespaces = _wait_for_namespaces(namespaces)
    assert not left_namespaces, f"seed {seed}: {sorted(left_namespaces)}"
