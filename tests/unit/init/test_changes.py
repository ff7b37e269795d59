"""What a folder holds comes as a stream: each path once, folders first, and nothing waits or is followed."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import time
from pathlib import Path

from cloche.workspace.snapshot import PROBLEMS, Snapshot
from tests.harness.changes import read_stream
from tests.harness.init import Files

MIB = 1 << 20


def walked(files: Files, folder: Path, **order: object) -> Snapshot:
    """Return what the walker says of the whole folder; the contents are closed."""
    order = {"most": MIB, "entries": 1000, **order}
    answer, stream = files.do("changes", "", **order)
    snapshot = read_stream(stream, answer, folder, is_whole="since" in order)
    snapshot.close()
    return snapshot


def test_the_marks_of_an_overlay_are_told(files: Files, tmp_path: Path) -> None:
    """A device 0:0 is a whiteout, `y` makes a folder opaque and nothing else does, and a copied file is one."""
    for name in ("opaque", "other", "copied"):
        files.write(f"{name}/file", parents=True)
    os.mknod(files / "gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    os.setxattr(files / "opaque", "user.overlay.opaque", b"y")
    os.setxattr(files / "other", "user.overlay.opaque", b"x")
    os.setxattr(files / "copied/file", "user.overlay.origin", b"")
    found = walked(files, tmp_path).entries
    assert found[b"gone"].kind == "removed"
    assert [path for path, entry in found.items() if entry.is_opaque] == [b"opaque"]
    assert [path for path, entry in found.items() if entry.is_copied] == [b"copied/file"]
    whole = walked(files, tmp_path, since=0).entries
    assert whole[b"gone"].kind == "other"
    assert not any(entry.is_opaque for entry in whole.values())


def test_special_files_are_said_and_not_opened(files: Files, tmp_path: Path) -> None:
    """Pipes, sockets and devices make nobody wait; links are not followed, in place of folders, too."""
    os.mkfifo(files / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(files / "socket")
    if os.geteuid() == 0:
        os.mknod(files / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # which has no end
    os.symlink("/etc", files / "folder")
    os.symlink("/etc/passwd", files / "file")
    found = dict(walked(files, tmp_path).entries)
    if os.geteuid() == 0:
        assert found.pop(b"device").kind == "other"
    assert {path: entry.kind for path, entry in found.items()} == {
        b"pipe": "other", b"socket": "other", b"folder": "link", b"file": "link",
    }  # fmt: skip
    assert found[b"folder"].target == b"/etc"


def test_any_name_comes_through(files: Files, tmp_path: Path) -> None:
    """Line feeds, quotes and bytes that are no text are names as any other, and so are targets of links."""
    names = [b"a\nb", b'"', b"\xff\xfe", "\u202eü".encode(), b"x" * 255]
    for name in names:
        Path(files / os.fsdecode(name)).write_bytes(name)
    os.symlink(b"\xff", os.fsencode(files / "link"))
    found = walked(files, tmp_path).entries
    assert sorted(found) == sorted([*names, b"link"])
    assert found[b"link"].target == b"\xff"


def test_what_is_old_in_a_copy_is_unchanged(files: Files, tmp_path: Path) -> None:
    """What has not changed since a time has no content, what has, has; a folder says whether it has changed itself."""
    files.write("d/old", b"old", parents=True)
    files.write("e/old", parents=True)
    os.symlink("x", files / "link")
    time.sleep(0.02)
    since = time.time_ns()
    time.sleep(0.02)
    files.write("d/new", b"new")
    found = walked(files, tmp_path, since=since, most=3).entries
    assert {path: entry.kind for path, entry in found.items()} == {
        b"d": "directory", b"d/old": "unchanged", b"d/new": "file", b"e": "directory", b"e/old": "unchanged",
        b"link": "unchanged",
    }  # fmt: skip
    assert found[b"e"].is_copied
    assert not found[b"d"].is_copied


def test_what_was_moved_with_its_folder_has_its_content(files: Files, tmp_path: Path) -> None:
    """The times of a file do not change when a folder above it is renamed, so neither path nor time say what it is."""
    for path in ("a/deep/x", "b/deep/x", "c/y"):
        files.write(path, path.encode(), parents=True)
    time.sleep(0.02)
    since = time.time_ns()
    time.sleep(0.02)
    for old, new in (("a", "t"), ("b", "a"), ("t", "b")):
        os.rename(files / old, files / new)
    found = walked(files, tmp_path, since=since)
    assert {path: entry.kind for path, entry in found.entries.items() if entry.kind != "directory"} == {
        b"a/deep/x": "file", b"b/deep/x": "file", b"c/y": "unchanged",
    }  # fmt: skip
    assert found.entries[b"a/deep/x"].sha256 == hashlib.sha256(b"b/deep/x").hexdigest()


def test_bounds_cut_and_are_said(files: Files, tmp_path: Path) -> None:
    """Beyond so many bytes a file has no content, and the next that fits has; beyond so many rows nothing comes."""
    for name in "abc":
        files.write(name, b"x" * 60)
    os.truncate(files / "a", 1 << 40)
    found = walked(files, tmp_path, most=100).entries
    assert sorted(entry.size for entry in found.values()) == [0, 0, 60]
    assert {entry.problem for entry in found.values()} == {"", "it is larger than the maximum for one diff"}
    cut = walked(files, tmp_path, entries=2)
    assert len(cut.entries) == 2
    assert cut.is_partial
    assert not walked(files, tmp_path, entries=3).is_partial


def test_what_is_not_asked_for_is_not_looked_at(files: Files, tmp_path: Path) -> None:
    """A path that is skipped is not there; a name that is only said is there, and nothing below it."""
    for name in ("a/b/c", "a/x", "n/.git/objects/ab", ".git"):
        files.write(name, b"x", parents=True)
    found = walked(files, tmp_path, skip=["a/b"], names=[".git"]).entries
    assert sorted(found) == [b".git", b"a", b"a/x", b"n", b"n/.git"]


def test_a_deep_tree_is_said_and_not_gone_into(files: Files, tmp_path: Path) -> None:
    """A thousand folders, one in the other, come to so many rows, of which the last says why."""
    here = os.open(files.folder, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=here)
        os.chmod("d", 0o777, dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        found = list(walked(files, tmp_path).entries.values())
    finally:
        files.do("remove", "d", recursive=True)
    assert 64 <= len(found) <= 128
    assert [entry.problem for entry in found if entry.problem] == [PROBLEMS["too_deep"]]
    assert found[-1].problem


def test_what_may_not_be_read_is_said(files: Files, tmp_path: Path) -> None:
    """A file and a folder that the user may not read have a problem, and the rest comes."""
    for name in ("file", "folder/x", "fine"):
        files.write(name, b"x", parents=True)
    for name in ("file", "folder"):
        os.chmod(files / name, 0)
    try:
        found = walked(files, tmp_path).entries
    finally:
        os.chmod(files / "folder", 0o700)
    assert {path: entry.problem for path, entry in found.items()} == {
        b"file": "it cannot be read inside", b"folder": "it cannot be read inside", b"fine": "",
    }  # fmt: skip
