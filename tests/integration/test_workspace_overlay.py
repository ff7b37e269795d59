"""What a program has done in a real overlay is what the diff says, and its patch makes the same tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cloche.workspace.compare import make_diff
from tests.harness.changes import by_path, changed_inside, left_out, opened, told, tree_of

pytestmark = pytest.mark.both_users
PROGRAM = r"""
echo four >> lines; sed -i 's/^line 500$/five hundred/; s/^line 20$/twenty/' long
printf 'no end' > bare; printf 'now with an end\n' > had-none; : > empty; : > emptied
chmod 755 script; chmod 600 lines
mv old-name "new name"
rm gone; rm -r folder; mkdir folder; echo new > folder/new; echo same > folder/kept
rm -r tree
ln -sfn elsewhere link; ln -s lines "li\\nk"; rm was-file; ln -s lines was-file
rm was-link; echo file > was-link
rm becomes-folder; mkdir becomes-folder; echo in > becomes-folder/in
rm -r becomes-file; echo out > becomes-file
echo odd > "$(printf 'tab\tquote"\nline')"; echo '€' > "$(printf 'bytes-\377')"; echo u > "ümlaut mit leer"
mkdir -p a/b/c; echo deep > a/b/c/d; echo '#!/bin/sh' > run; chmod 755 run
echo touched > back; echo as-it-was > back
printf 'cr\r\nlf\n' > crlf
"""


def make_lower(lower: Path) -> None:
    """Make the host's folder."""
    lower.mkdir()
    files = {
        "lines": "one\ntwo\nthree\n", "long": "".join(f"line {n}\n" for n in range(1000)), "bare": "an end\n",
        "had-none": "none", "emptied": "something\n", "script": "echo\n", "old-name": "to be moved\n", "gone": "x\n",
        "folder/old": "old\n", "folder/kept": "same\n", "folder/in/below": "below\n", "tree/a": "a\n",
        "tree/b/c": "c\n", "was-file": "file\n", "becomes-folder": "file\n", "becomes-file/a": "1\n",
        "becomes-file/b/c": "2\n", "back": "as-it-was\n", "untouched": "untouched\n", "crlf": "cr\nlf\n",
    }  # fmt: skip
    for name, text in files.items():
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).write_text(text)
    (lower / "link").symlink_to("somewhere")
    (lower / "was-link").symlink_to("lines")


def test_the_patch_of_an_overlay_makes_its_tree(tmp_path: Path) -> None:
    """Edits, moves, removals, opaque folders, other kinds and odd names come through `git apply` as they are inside."""
    make_lower(lower := tmp_path / "lower")
    shutil.copytree(lower, applied := tmp_path / "applied", symlinks=True)
    with changed_inside(lower, PROGRAM, tmp_path) as snapshot, opened(lower) as folder:
        diff = make_diff(snapshot, folder)
    assert not diff.is_cut
    assert not diff.left_out
    (tmp_path / "patch").write_bytes(diff.patch.encode())
    command = ["git", "apply", "--whitespace=nowarn", str(tmp_path / "patch")]
    done = subprocess.run(command, cwd=applied, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tree_of(applied) == tree_of(tmp_path / "seen")


def test_each_path_of_an_overlay_has_its_change(tmp_path: Path) -> None:
    """What was written and is as before is no change; a moved file is one; a folder goes with all that is in it."""
    make_lower(lower := tmp_path / "lower")
    with changed_inside(lower, PROGRAM, tmp_path) as snapshot, opened(lower) as folder:
        diff = make_diff(snapshot, folder)
        again = make_diff(snapshot, folder, opened_ns=0)
    found = told(diff)
    assert list(found) == sorted(found, key=lambda path: os.fsencode(path).split(b"/"))
    assert {path: found.pop(path) for path in list(found) if path.startswith(("tree", "folder", "becomes"))} == {
        "tree": "removed", "tree/a": "removed", "tree/b": "removed", "tree/b/c": "removed", "folder/old": "removed",
        "folder/in": "removed", "folder/in/below": "removed", "folder/new": "added", "becomes-folder": "modified",
        "becomes-folder/in": "added", "becomes-file": "modified", "becomes-file/a": "removed",
        "becomes-file/b": "removed", "becomes-file/b/c": "removed",
    }  # fmt: skip
    assert found == {
        "lines": "modified", "long": "modified", "bare": "modified", "had-none": "modified", "empty": "added",
        "emptied": "modified", "script": "mode", "new name": "renamed", "gone": "removed", "link": "modified",
        "li\\nk": "added", "was-file": "modified", "was-link": "modified", 'tab\tquote"\nline': "added",
        os.fsdecode(b"bytes-\xff"): "added", "ümlaut mit leer": "added", "a": "added", "a/b": "added",
        "a/b/c": "added", "a/b/c/d": "added", "run": "added", "crlf": "modified",
    }  # fmt: skip
    changes = by_path(diff)
    assert changes["new name"].old_path == "old-name"
    assert (changes["was-link"].kind, changes["was-link"].old_kind) == ("file", "link")
    assert changes["script"].dangers
    assert changes["run"].dangers
    assert again.id == diff.id
    assert not diff.conflicts
    assert {one.path for one in again.conflicts} >= {"lines", "tree", "becomes-file", "gone"}


def test_what_is_never_committed_is_left_out_of_an_overlay(tmp_path: Path) -> None:
    """Pipes, set-id bits, hidden names, git's own files, and a folder that holds a hidden file, are named."""
    (lower := tmp_path / "lower").mkdir()
    for name in ("secret/key", "with/hidden", "with/shown", "a.py", ".git/config"):
        (lower / name).parent.mkdir(exist_ok=True)
        (lower / name).write_text("x")
    program = """
    mkfifo pipe; echo > tool; chmod 4755 tool; chmod 2644 a.py; mkdir -p deep/.git; echo > deep/.git/HEAD
    echo mine > secret/key; rm -r with; echo > .git/new; rm .git/config
    """
    with changed_inside(lower, program, tmp_path) as snapshot, opened(lower) as folder:
        diff = make_diff(snapshot, folder, hidden=["secret/key", "with/hidden"])
    assert told(diff) == {"deep": "added", "tool": "added", "with/shown": "removed"}
    assert by_path(diff)["tool"].mode == 0o755
    assert set(left_out(diff)) == {
        "pipe", "tool", "a.py", "deep/.git", "secret/key", ".git", "with", "with/hidden",
    }  # fmt: skip
