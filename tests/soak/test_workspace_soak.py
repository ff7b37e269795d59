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


MANY = """
import os, resource, sys
from pathlib import Path
from cloche.workspace.compare import make_diff
from tests.harness.changes import opened, read_stream

count, host = int(sys.argv[1]), Path(sys.argv[2])
row = b'{"path":"some_folder/a_file_of_that_name_%07d.py","kind":"file","mode":420}'
size, end = (1 << 31 | 1).to_bytes(4, "big"), (1 << 31).to_bytes(4, "big")
stream = b"".join(len(row % at).to_bytes(4, "big") + row % at + size + b"x" + end for at in range(count))
streamed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
snapshot = read_stream(stream, {"count": count}, host.parent)
with opened(host) as folder:
    diff, again = make_diff(snapshot, folder), make_diff(snapshot, folder)
assert (len(diff.changes), diff.changes[count - 1].size, diff.id) == (count, 1, again.id)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - streamed) * 1024)
"""


def test_a_diff_of_very_many_changes_takes_little_memory(tmp_path: Path) -> None:
    """200,000 new files take less than 200 bytes of the caller's memory each, one with another."""
    count, host = 200_000, tmp_path / "host"
    host.mkdir()
    command = [sys.executable, "-c", MANY, str(count), os.fspath(host)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert int(done.stdout) < 200 * count
