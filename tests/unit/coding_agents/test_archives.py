"""What is left out of an archive that would be too large, and which archive is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.coding_agents import archives
from cloche.coding_agents.archives import IGNORED, LARGE, left_out_of, pending_archive
from cloche.coding_agents.places import AgentPlace


def test_what_git_ignores_is_left_out_first_and_then_the_largest() -> None:
    """Folders that git ignores go as a whole, the largest first, and no more than is needed."""
    sizes = {"src/a": 30, "src/b": 50, "node_modules/x": 40, "node_modules/y/z": 40, "dist/out": 20}
    ignored = ("node_modules", "dist")
    assert left_out_of(sizes, ignored, 180) == {}
    assert left_out_of(sizes, ignored, 179) == {"node_modules": IGNORED}
    assert left_out_of(sizes, ignored, 85) == {"node_modules": IGNORED, "dist": IGNORED}
    assert left_out_of(sizes, ignored, 79) == {"node_modules": IGNORED, "dist": IGNORED, "src/b": LARGE}
    assert left_out_of(sizes, (), 150) == {"src/b": LARGE}


def test_a_damaged_archive_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one that can be read counts; a file of another kind is none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = AgentPlace(agent="claude", folder="/nowhere")
    assert pending_archive(place) is None
    saved = Path(place.saved)
    saved.mkdir(parents=True)
    whole = archives.MAGIC + (2).to_bytes(8, "big") * 2 + b"{}{}"
    for number, content in enumerate((b"", archives.MAGIC, archives.MAGIC + b"\xff" * 16, whole), 1):
        (saved / f"{number:08d}.saved").write_bytes(content)
    assert archives.archives(place) == ()
    assert pending_archive(place) is None
