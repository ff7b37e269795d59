"""Folders that stand in for a workspace below level jail, of callers that were killed together with their helpers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.garbage_collection import remove_folders
from tests.harness.processes import descendants, kill_and_wait, tell

pytestmark = pytest.mark.both_users
CALLER = """
import sys, cloche
with cloche.Sandbox(live=False, level=sys.argv[1], screen="off") as sandbox:
    sandbox.write_file("a/b", b"c")
    sandbox.run("import os, time; os.symlink('/etc', 'link'); os.mkdir('shut', 0)\\n"
                "if os.fork(): print('up', flush=True)\\ntime.sleep(600)", on_output=lambda *_: print("up", flush=True))
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a temporary folder of its own, through which guests of other ids can pass."""
    folder = Path(tempfile.mkdtemp(prefix="left-", dir="/tmp"))
    folder.chmod(0o711)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def left_by_a_killed_caller(place: Path, level: str) -> tuple[Path, list[int]]:
    """Kill a caller and its helpers; return the folder that stays, and the guest's processes, which are stopped."""
    before = set(place.iterdir())
    with subprocess.Popen([sys.executable, "-c", CALLER, level], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        try:
            assert caller.stdout.readline() == b"up\n"
            (folder,) = set(place.iterdir()) - before
            tell([caller.pid], signal.SIGSTOP)
            started = descendants(caller.pid)
            tell(started, signal.SIGSTOP)
            guests = [pid for pid in started if is_in(folder, pid)]
            kill_and_wait([pid for pid in started if pid not in guests])
        finally:
            caller.kill()
    return folder, guests


def is_in(folder: Path, pid: int) -> bool:
    """Tell whether a process works in a folder; into a guard of ours nobody may look."""
    try:
        return os.readlink(f"/proc/{pid}/cwd").startswith(str(folder))
    except OSError:
        return False


@pytest.mark.parametrize("level", ["confined", "process"])
def test_gc_removes_the_folder_of_the_dead_alone(place: Path, level: str) -> None:
    """It says so, follows no link of the guest's, and leaves what is in use, not ours, or a link to somewhere else."""
    folder, guests = left_by_a_killed_caller(place, level)
    link, looks_alike = place / "cloche-1-work-0123456789ab", place / "cloche-2-work-0123456789abc"
    link.symlink_to(folder)
    looks_alike.mkdir()
    kept = {link, looks_alike}
    if os.geteuid() == 0:
        others = place / "cloche-3-work-0123456789ab"
        others.mkdir()
        os.chown(others, 12345, 12345)
        kept.add(others)
    try:
        assert guests
        assert remove_folders() == []  # what the guest left is still in it
    finally:
        kill_and_wait(guests)
    assert (folder / "workspace" / "a" / "b").read_bytes() == b"c"
    with cloche.Sandbox(live=False, level=level, screen="off") as sandbox:
        sandbox.write_file("a", b"1")
        done = subprocess.run([sys.executable, "-m", "cloche", "gc"], capture_output=True, text=True, check=True)
        assert f"local: removed folder {folder}\n" in done.stdout
        assert sandbox.run("print(open('a').read())").stdout == "1\n"
    assert set(place.iterdir()) == kept
    assert os.path.isdir("/etc")


def test_a_temporary_folder_that_cannot_be_read_holds_nothing_of_ours(place: Path) -> None:
    """Whoever asks goes on with what else is left: of groups, say."""
    tempfile.gettempdir()
    place.chmod(0o333)
    assert remove_folders() == []
    place.rmdir()
    assert remove_folders() == []
