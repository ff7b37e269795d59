"""Hunks are taken out of a patch as they were put in, whatever the names and lines are, and applied one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cloche.core.changes import Diff
from cloche.workspace.compare import make_diff
from cloche.workspace.hunks import apply, file_diffs
from tests.harness.changes import opened, snapshot_of


def difference(before: Path, after: Path, scratch: Path) -> Diff:
    """Return the diff of two trees."""
    with snapshot_of(after, scratch, since=0) as snapshot, opened(before) as folder:
        return make_diff(snapshot, folder)


def test_all_hunks_make_the_new_text_and_a_part_leaves_the_others_as_the_next_diff(tmp_path: Path) -> None:
    """Two hundred texts with lines that look like a patch, with and without a last line feed."""
    chance = random.Random(11)
    before, after, part = tmp_path / "before", tmp_path / "after", tmp_path / "part"
    for folder in (before, after, part):
        folder.mkdir()
    texts: dict[str, tuple[str, str]] = {}
    for number in range(200):
        marks = ["@@ -1 +1 @@", "diff --git a/x b/x", "--- a/x", "+x", "\\ No newline at end of file", "\r", "", "z"]
        old = [f"{chance.choice(marks)}\n" for _ in range(40)]
        new = list(old)
        for _ in range(1 + chance.randrange(4)):
            place = chance.randrange(len(new))
            new[place : place + chance.randrange(3)] = [f"new {chance.choice(marks)}\n"] * (1 + chance.randrange(2))
        name = f"{number} b/{number}" if number % 2 else str(number)
        (before / name).parent.mkdir(exist_ok=True)
        (after / name).parent.mkdir(exist_ok=True)
        (part / name).parent.mkdir(exist_ok=True)
        old_text, new_text = "".join(old), "".join(new)
        texts[name] = (old_text[: len(old_text) - number % 3 // 2], new_text[: len(new_text) - number % 5 // 4])
        (before / name).write_text(texts[name][0], newline="")
        (after / name).write_text(texts[name][1], newline="")
    parts = file_diffs(difference(before, after, tmp_path))
    halves = {name: parts[name].hunks[::2] for name in texts}
    for name, (old_text, new_text) in texts.items():
        assert apply(old_text, parts[name].hunks) == new_text
        (part / name).write_text(apply(old_text, halves[name]), newline="")
    rest = file_diffs(difference(part, after, tmp_path))
    for name, (old_text, new_text) in texts.items():
        left = rest[name].hunks if name in rest else ()
        assert len(left) == len(parts[name].hunks) - len(halves[name])
        assert apply(apply(old_text, halves[name]), left) == new_text
    assert sum(len(part.hunks) > 1 for part in parts.values()) > 50


def test_a_hunk_is_not_applied_to_another_text(tmp_path: Path) -> None:
    """A line that the host has changed since is no place for it."""
    for folder, text in (("before", "one\ntwo\n"), ("after", "one\n2\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_text(text)
    hunks = file_diffs(difference(tmp_path / "before", tmp_path / "after", tmp_path))["a"].hunks
    with pytest.raises(ValueError, match="not the one that was compared"):
        apply("ONE\ntwo\n", hunks)


def test_a_rename_with_the_header_of_another_file_takes_none_of_its_lines(tmp_path: Path) -> None:
    """`x` renamed to `x b/x b/x` and a change of `x b/x` begin with the same line."""
    for folder in ("before", "after"):
        (tmp_path / folder / "x b").mkdir(parents=True)
    (tmp_path / "before/x").write_text("moved\n" * 9)
    (tmp_path / "after/x b/x b").mkdir(parents=True)
    (tmp_path / "before/x b/x").write_text("one\n")
    (tmp_path / "after/x b/x").write_text("two\n")
    (tmp_path / "after/x b/x b/x").write_text("moved\n" * 9)
    diff = difference(tmp_path / "before", tmp_path / "after", tmp_path)
    assert diff.patch.count("diff --git a/x b/x b/x b/x\n") == 2
    part = file_diffs(diff)["x b/x"]
    assert (part.added, part.removed) == (1, 1)
