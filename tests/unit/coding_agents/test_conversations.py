"""A conversation is resumed if there is one; what a guest puts into its home folder cannot lead out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.coding_agents import conversations
from cloche.coding_agents.conversations import has_conversation
from cloche.coding_agents.row import CodingAgent

ROW = CodingAgent(name="fake", title="Fake", program="fake", conversations=(".fake/projects/*/*.jsonl",))


def test_a_conversation_is_found_and_no_link_is_followed(tmp_path: Path) -> None:
    """Neither an empty folder counts, nor a folder elsewhere; an agent without patterns always resumes."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home / ".fake/projects/a", elsewhere / "b"):
        folder.mkdir(parents=True)
    (elsewhere / "b/1.jsonl").touch()
    (home / ".fake/projects/link").symlink_to(elsewhere / "b")
    assert not has_conversation(str(home), ROW)
    (home / ".fake/projects/a/1.jsonl").touch()
    assert has_conversation(str(home), ROW)
    assert not has_conversation(str(tmp_path / "none"), ROW)
    assert has_conversation(str(tmp_path / "none"), CodingAgent(name="x", title="x", program="x"))


def test_names_of_all_folders_have_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest can make as many folders as names in each of them, at every level of a pattern."""
    monkeypatch.setattr(conversations, "MOST_NAMES", 20)
    for number in range(20):
        (tmp_path / f".fake/projects/{number}").mkdir(parents=True)
        (tmp_path / f".fake/projects/{number}/1.jsonl").touch()
    assert not has_conversation(str(tmp_path), ROW)
    monkeypatch.undo()
    assert has_conversation(str(tmp_path), ROW)
