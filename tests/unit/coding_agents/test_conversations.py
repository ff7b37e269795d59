"""A conversation is resumed if there is one; what a guest puts into its home folder cannot lead out of it."""

from __future__ import annotations

from pathlib import Path

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
