"""The check at the end of a session finds what it is there to find, and nothing of anybody else's."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.leftovers import DIRECTORY_PREFIX, Snapshot, wait_for_leftovers

# A child that leaves a grandchild behind: an orphan, in a folder of its own choice.
ORPHAN = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"], cwd=sys.argv[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""


def leave_an_orphan(folder: str) -> int:
    """Start a process whose parent is gone when this returns."""
    return int(subprocess.run([sys.executable, "-c", ORPHAN, folder], capture_output=True, check=True).stdout)


def test_nothing_new_is_nothing_left() -> None:
    """A machine on which nothing happened shows no leftovers."""
    assert wait_for_leftovers(Snapshot.take(), patience_s=1) == []


def test_a_child_that_lives_on_is_found() -> None:
    """A process of this session's is a leftover for as long as it lives."""
    before = Snapshot.take()
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert before.leftovers() == [f"process {child.pid}: sleep 60"]
    finally:
        child.kill()
        child.wait()
    assert before.leftovers() == []


def test_an_orphan_is_found_by_its_mark() -> None:
    """An orphan in a folder of ours is a leftover, and so is the folder; one elsewhere is somebody else's."""
    before = Snapshot.take()
    with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as folder:
        ours, theirs = leave_an_orphan(folder), leave_an_orphan("/")
        try:
            assert before.leftovers() == [f"directory: {folder}", f"process {ours}: sleep 60"]
        finally:
            os.kill(ours, signal.SIGKILL)
            os.kill(theirs, signal.SIGKILL)
    assert wait_for_leftovers(before, patience_s=2) == []


def test_a_folder_in_shared_memory_is_found() -> None:
    """Not only the temporary folder is looked at."""
    before = Snapshot.take()
    folder = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/dev/shm"))
    try:
        assert before.leftovers() == [f"directory: {folder}"]
    finally:
        folder.rmdir()
