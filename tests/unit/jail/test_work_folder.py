"""What the folders hold that stand in for a workspace below level jail: measured beside a guest that is at work."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from cloche.backends.local.workspace import Workspace
from cloche.core.limits import Limits
from cloche.jail import work_folder
from cloche.jail.syscalls import attempt
from cloche.jail.work_folder import SPARE, WorkFolder

FS_IOC_SETFLAGS, FS_IOC_SETVERSION = 0x40086602, 0x40087602


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    """Return the folders of a sandbox."""
    place = tmp_path / "sandbox"
    folder = WorkFolder(str(place), str(place / "workspace"), str(place / "tmp"), None)
    folder.create()
    return folder


def test_paths_are_not_kept(folder: WorkFolder) -> None:
    """Folders with the longest paths that can be looked at cost their own names alone."""
    here = os.open(folder.workspace, os.O_RDONLY)
    for name in ("\U0001f514", *["n" * 255] * 13):
        os.mkdir(name, dir_fd=here)
        there = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    for number in range(1000):
        os.mkdir(f"{number:04}", dir_fd=here)
    os.close(here)
    tracemalloc.start()
    try:
        assert not folder.is_over(1 << 30, 2000, is_fresh=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert folder.is_over(1 << 30, 1013, is_fresh=True)
    assert most < 2 << 20
    folder.remove()
    assert not os.path.exists(folder.folder)


@pytest.mark.both_users
def test_a_guest_that_closes_its_folders_keeps_nobody_out(folder: WorkFolder) -> None:
    """Where it has its user's id: not who opens the workspace just then, nor who empties /tmp before the next run."""
    for path in (folder.workspace, folder.tmp):
        os.chmod(path, 0)
    workspace = Workspace(Limits(), folder.workspace)
    workspace.take(())
    assert os.listdir(workspace.fd) == []
    workspace.drop()
    folder.renew_tmp()
    assert os.listdir(folder.tmp) == []
    os.chmod(folder.tmp, 0)
    folder.remove()
    assert not os.path.exists(folder.folder)


def test_a_folder_serves_again_as_if_it_were_new(folder: WorkFolder) -> None:
    """Files, a mode and times that a guest has left are gone, and the folder waits beside the next one."""
    folder.note_new()
    before = os.stat(folder.workspace)
    Path(folder.workspace, "left").mkdir()
    os.utime(folder.workspace, (1, 1))
    os.chmod(folder.workspace, 0o1777)
    place = folder.folder
    assert folder.renew(place)
    assert folder.folder == place + SPARE
    after = os.stat(folder.workspace)
    assert (after.st_mode, after.st_size, os.listdir(folder.workspace)) == (before.st_mode, before.st_size, [])
    assert min(after.st_atime, after.st_mtime) >= int(before.st_mtime)


def test_a_folder_that_takes_too_long_to_empty_serves_no_other_run(
    folder: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest may leave so much in its workspace that no time is left for its files in /tmp."""
    folder.note_new()
    Path(folder.tmp, "left").write_text("for the next run")
    monkeypatch.setattr(work_folder, "RENEWAL_S", -1.0)
    assert not folder.renew(folder.folder)


@pytest.mark.parametrize("change", ["size", "flags", "generation"])
def test_a_folder_that_shows_its_past_serves_no_other_run(folder: WorkFolder, change: str) -> None:
    """Many entries leave a folder large on most file systems, and a flag stays where a file system has flags."""
    folder.note_new()
    before = os.stat(folder.tmp).st_size
    opened = os.open(folder.tmp, os.O_RDONLY)
    if change == "size":
        for number in range(300):
            Path(folder.tmp, f"{number:0200}").touch()
            os.unlink(f"{number:0200}", dir_fd=opened)
            Path(folder.tmp, f"{number:0201}").touch()
        is_changed = os.stat(folder.tmp).st_size != before
    else:
        request = FS_IOC_SETFLAGS if change == "flags" else FS_IOC_SETVERSION
        is_changed = attempt("ioctl", opened, request, (0x80).to_bytes(8, "little")) == 0  # no times of reading
    os.close(opened)
    for name in os.listdir(folder.tmp):
        Path(folder.tmp, name).unlink()
    is_changed = is_changed and (change != "size" or os.stat(folder.tmp).st_size != before)
    assert folder.renew(folder.folder) is not is_changed
