"""The check at the end of a session finds what it is there to find, and nothing of anybody else's."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.harness.leaks import DIRECTORY_PREFIX, Snapshot, wait_for_leftovers, what_stays
from tests.harness.processes import kill_and_wait

NOBODY_HERE = 61235
# A child that leaves a grandchild behind: an orphan, in a folder of its own choice.
ORPHAN = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"], cwd=sys.argv[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""


def leave_an_orphan(folder: str, user: int | None = None) -> int:
    """Start a process whose parent is gone when this returns."""
    words = [sys.executable if user is None else "/usr/bin/python3", "-c", ORPHAN, folder]
    orphan = int(subprocess.run(words, capture_output=True, check=True, user=user).stdout)
    wait_for_command(orphan)
    return orphan


def wait_for_command(pid: int) -> None:
    """Return when a process has the command line by which it is told: it gets that a moment after its program."""
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
        assert time.monotonic() < deadline, f"process {pid} does not become what it is to be"
        time.sleep(0.001)


def test_nothing_new_is_nothing_left() -> None:
    """A machine on which nothing happened shows no leftovers."""
    assert wait_for_leftovers(Snapshot.take(), patience_s=1) == []


def test_a_child_that_lives_on_is_found() -> None:
    """A process of this session's is a leftover for as long as it lives."""
    before = Snapshot.take()
    child = subprocess.Popen(["sleep", "60"])
    try:
        wait_for_command(child.pid)
        assert f"process {child.pid}: sleep 60" in before.leftovers()
    finally:
        child.kill()
        child.wait()
    assert f"process {child.pid}: sleep 60" not in before.leftovers()


def test_an_orphan_is_found_by_its_mark() -> None:
    """An orphan in a folder of ours is a leftover, and so is the folder; one elsewhere is somebody else's."""
    before = Snapshot.take()
    with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as folder:
        ours, theirs = leave_an_orphan(folder), leave_an_orphan("/")
        try:
            left = before.leftovers()
            assert {f"directory: {folder}", f"process {ours}: sleep 60"} <= set(left)
            assert f"process {theirs}: sleep 60" not in left
        finally:
            os.kill(ours, signal.SIGKILL)
            os.kill(theirs, signal.SIGKILL)
    assert wait_for_leftovers(before, patience_s=2) == []


def test_what_another_living_process_made_is_its_own() -> None:
    """A folder named after a process counts once that process is gone, or when it is one of ours."""
    before = Snapshot.take()
    with tempfile.TemporaryDirectory() as elsewhere:
        maker = leave_an_orphan(elsewhere)
        folder = Path(tempfile.gettempdir(), f"{DIRECTORY_PREFIX}{maker}-0a1b2c")
        folder.mkdir()
        try:
            assert f"directory: {folder}" not in before.leftovers()
            kill_and_wait([maker])
            assert f"directory: {folder}" in what_stays(before, for_s=0.5)
        finally:
            folder.rmdir()


def test_a_folder_in_shared_memory_is_found() -> None:
    """Not only the temporary folder is looked at."""
    before = Snapshot.take()
    folder = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/dev/shm"))
    try:
        assert f"directory: {folder}" in before.leftovers()
    finally:
        folder.rmdir()


@pytest.mark.root
def test_what_belongs_to_the_user_beside_root_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process nor a folder of theirs counts; before it is known that they are at work, both do."""
    before = Snapshot.take()
    with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as folder:
        os.chown(folder, NOBODY_HERE, NOBODY_HERE)
        theirs = leave_an_orphan(folder, user=NOBODY_HERE)
        try:
            seen = {f"directory: {folder}", f"process {theirs}: sleep 60"}
            assert seen <= set(before.leftovers())
            monkeypatch.setattr("tests.harness.leaks.BESIDE", str(NOBODY_HERE))
            assert not seen & set(before.leftovers())
        finally:
            os.kill(theirs, signal.SIGKILL)
