"""Which project a folder belongs to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.coding_agents.places import project_folder


def test_only_a_repository_of_the_users_makes_a_folder_above_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worktree's file counts, and neither an empty `.git` nor one that another user has made."""
    inside = tmp_path / "top/project/src/deep"
    inside.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "top/.git").mkdir()
    assert project_folder(str(inside)) == str(inside)
    (tmp_path / "top/.git/HEAD").touch()
    assert project_folder(str(inside)) == str(tmp_path / "top")
    (tmp_path / "top/project/.git").write_text("gitdir: elsewhere\n")
    assert project_folder(str(inside)) == str(tmp_path / "top/project")
    if os.geteuid() == 0:
        os.chown(tmp_path / "top/project/.git", 61_234, 61_234)
        assert project_folder(str(inside)) == str(tmp_path / "top")
