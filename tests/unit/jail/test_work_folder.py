"""What the folders hold that stand in for a workspace below level jail: measured beside a guest that is at work."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from cloche.backends.local.workspace import Workspace
from cloche.core.limits import Limits
from cloche.jail.work_folder import WorkFolder


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
