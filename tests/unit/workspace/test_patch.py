"""Patches are what `git apply` takes, whatever the files and names are, and are bounded."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cloche.core.changes import Diff
from cloche.workspace import patch as patches
from cloche.workspace.compare import compare, make_diff
from cloche.workspace.host_files import HostTree
from cloche.workspace.lines import Work
from tests.harness.changes import by_path, opened, snapshot_of, tree_of


def difference(before: Path, after: Path, scratch: Path) -> Diff:
    """Return the diff of two trees."""
    with snapshot_of(after, scratch, since=0) as snapshot, opened(before) as folder:
        return make_diff(snapshot, folder)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Make two folders."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    return tmp_path / "before", tmp_path / "after"


def test_random_texts_come_through_git(two: tuple[Path, Path], tmp_path: Path) -> None:
    """A hundred pairs of texts, with and without a last line feed, are one patch, which makes one of the other."""
    chance = random.Random(7)
    before, after = two
    for number in range(100):
        lines = [f"{chance.randrange(8)}{chance.choice(['', '', '', chr(13)])}\n" for _ in range(60)]
        old = "".join(lines)
        for _ in range(chance.randrange(6)):
            at = chance.randrange(len(lines))
            lines[at : at + chance.randrange(3)] = [f"new {chance.randrange(3)}\n"] * chance.randrange(3)
        new = "".join(lines)
        (before / str(number)).write_bytes(old.encode()[: len(old) - chance.randrange(2)])
        (after / str(number)).write_bytes(new.encode()[: max(0, len(new) - chance.randrange(2))])
    found = difference(before, after, tmp_path)
    shutil.copytree(before, applied := tmp_path / "applied")
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, cwd=applied, input=found.patch.encode(), check=True)
    assert tree_of(applied) == tree_of(after)


@pytest.mark.parametrize(
    "name",
    [
        b"a b", b" a", b"a ", b"a\tb", b"a\nb", b'"', b"\\", b"\xff", b"\xc3\xa4\xff", b"\xe2\x80\xaeevil", b"x b/x",
        b"\x7f",
    ],
    ids=repr,
)  # fmt: skip
def test_hostile_names_come_through_git(name: bytes, two: tuple[Path, Path], tmp_path: Path) -> None:
    """A name of any bytes is written so that git reads the same one, for a new file and for a mode alone."""
    before, after = two
    text = os.fsdecode(name)
    for path in (after / text, after / f"x{text}", before / f"x{text}"):
        path.parent.mkdir(exist_ok=True)
    (after / text).write_text("text\n")
    (before / f"x{text}").write_text("same\n")
    (after / f"x{text}").write_text("same\n")
    (after / f"x{text}").chmod(0o755)
    shutil.copytree(before, applied := tmp_path / "applied")
    found = difference(before, after, tmp_path)
    subprocess.run(["git", "apply", "-"], cwd=applied, input=found.patch.encode(), check=True)
    assert tree_of(applied) == tree_of(after)


def test_binaries_are_sizes_and_git_takes_the_rest(two: tuple[Path, Path], tmp_path: Path) -> None:
    """What is no text is a line, also where only its old content is none, and the other files can still be applied."""
    before, after = two
    (before / "a").write_bytes(b"\0\1")
    (after / "a").write_bytes(b"\0\1\2")
    (before / "b").write_bytes(b"\xff")
    (after / "b").write_text("text\n")
    (after / "c").write_bytes(b"\0")
    (before / "d").write_bytes(b"\0gone")
    (after / "e").write_text("text\n")
    (before / "f").write_text("f")
    (after / "f").write_text("f")
    (before / "f").chmod(0o644)
    (after / "f").chmod(0o600)
    found = difference(before, after, tmp_path)
    assert found.patch.splitlines() == [
        "Binary files a/a and b/a differ (2 bytes, 3 bytes)",
        "Binary files a/b and b/b differ (1 bytes, 5 bytes)",
        "Binary files /dev/null and b/c differ (1 bytes)",
        "Binary files a/d and /dev/null differ (5 bytes)",
        "diff --git a/e b/e", "new file mode 100644", "--- /dev/null", "+++ b/e", "@@ -0,0 +1 @@", "+text",
        "Permissions of b/f: 644 to 600",
    ]  # fmt: skip
    assert not by_path(found)["b"].is_text
    assert by_path(found)["e"].is_text
    subprocess.run(["git", "apply", "-"], cwd=before, input=found.patch.encode(), check=True)
    assert (before / "e").read_text() == "text\n"


def test_a_mode_beside_another_content_is_shown(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Of text, of what is none, of a program, and of what is new, where git's word for it does not say it."""
    before, after = two
    modes = {"text": (0o600, 0o644), "blob": (0o640, 0o600), "run": (0o600, 0o755), "usual": (0o644, 0o755)}
    for name, (old, new) in modes.items():
        data = b"\0" if name == "blob" else b"text\n"
        (before / name).write_bytes(data)
        (after / name).write_bytes(data + data)
        (before / name).chmod(old)
        (after / name).chmod(new)
    for name, mode in {"new": 0o600, "new2": 0o644}.items():
        (after / name).write_text("text\n")
        (after / name).chmod(mode)
    found = difference(before, after, tmp_path)
    assert [line for line in found.patch.splitlines() if line.startswith("Permissions")] == [
        "Permissions of b/blob: 640 to 600", "Permissions of b/new: 600", "Permissions of b/run: 600 to 755",
        "Permissions of b/text: 600 to 644",
    ]  # fmt: skip
    assert {path: one.mode_note for path, one in by_path(found).items() if one.mode_note} == {
        "blob": "mode 0640 -> 0600", "new": "mode 0600", "run": "mode 0600 -> 0755", "text": "mode 0600 -> 0644",
        "usual": "mode 0644 -> 0755",
    }  # fmt: skip
    os.unlink(before / "blob")
    subprocess.run(["git", "apply", "-"], cwd=before, input=found.patch.encode(), check=True)
    assert {name: (before / name).read_bytes() for name in ("text", "run", "new")} == {
        name: (after / name).read_bytes() for name in ("text", "run", "new")
    }


def test_content_stays_below_its_own_header(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Lines that look like a patch are content: git applies no more than the one file."""
    before, after = two
    evil = "--- a/evil\n+++ b/evil\n@@ -0,0 +1 @@\n+evil\n"
    (after / "a").write_text(f"{evil}diff --git a/evil b/evil\nnew file mode 100644\n{evil}")
    found = difference(before, after, tmp_path)
    subprocess.run(["git", "apply", "-"], cwd=before, input=found.patch.encode(), check=True)
    assert tree_of(before) == tree_of(after)


def test_a_patch_is_bounded(two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text has a line that says so, in the total only what fits is shown, and the rest is cut and said."""
    before, after = two
    (after / "a").write_text("line\n" * 100)
    (after / "b").write_text("short\n")
    (after / "c").write_text("x" * 2000)
    with snapshot_of(after, tmp_path, since=0) as snapshot, opened(before) as folder, HostTree(folder) as tree:
        changes = compare(snapshot, folder).changes
        found = patches.make_patch(changes, snapshot, tree, max_bytes=300)
        monkeypatch.setattr(patches, "MOST_FILE_BYTES", 1000)
        monkeypatch.setattr(patches, "MOST_LINES", 50)
        other = patches.make_patch(changes, snapshot, tree)
        monkeypatch.undo()
        monkeypatch.setattr(patches, "MOST_ALL_LINES", 1)
        third = patches.make_patch(changes, snapshot, tree)
    assert len(found.text) <= 300
    assert found.is_cut
    assert "Not shown, for it is too long: b/a\n" in found.text
    assert "+short\n" in found.text
    assert "+short\n" in third.text
    assert "+x" not in third.text
    assert third.is_cut
    assert other.is_cut
    assert "Long files /dev/null and b/a differ (500 bytes)\n" in other.text
    assert "Long files /dev/null and b/c differ (2000 bytes)\n" in other.text


def test_hostile_pairs_share_what_work_there_is(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Many pairs of texts that are costly to compare end after so many steps in all, with right patches."""
    before, after = two
    chance = random.Random(3)
    for number in range(20):
        for folder in two:
            (folder / str(number)).write_text("".join(chance.choice("ab") + "\n" for _ in range(3000)))
    work = Work(100_000)
    with snapshot_of(after, tmp_path, since=0) as snapshot, opened(before) as folder, HostTree(folder) as tree:
        text = patches.make_patch(compare(snapshot, folder).changes, snapshot, tree, work=work).text
    assert work.done < 100_000 + 20 * 400
    subprocess.run(["git", "apply", "-"], cwd=before, input=text.encode(), check=True)
    assert tree_of(before) == tree_of(after)
