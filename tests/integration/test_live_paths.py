"""Files of a live sandbox, by the public calls: any path, parts of a file, whole folders in and out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import SandboxFileExists, SandboxFileNotFound, SandboxFileTooLarge
from cloche.core.processes import Transfer

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]


@pytest.fixture(scope="module")
def opened() -> Iterator[cloche.Sandbox]:
    """Open one sandbox for all."""
    with cloche.Sandbox(live=True, files={"given.txt": "given"}) as sandbox:
        yield sandbox


def test_files_at_any_path(opened: cloche.Sandbox) -> None:
    """A file is written, added to, read in part, described, moved and removed, wherever a guest may."""
    opened.write_file("/tmp/a/b.txt", "hello", mode=0o750)
    opened.append_file("/tmp/a/b.txt", " world")
    assert opened.read_file("/tmp/a/b.txt") == b"hello world"
    assert opened.read_file("/tmp/a/b.txt", offset=6, count=3) == b"wor"
    found = opened.stat("/tmp/a/b.txt")
    assert (found.name, found.type, found.size, found.mode) == ("b.txt", "file", 11, 0o750)
    opened.make_dir("/tmp/a/c/d")
    opened.move("/tmp/a/b.txt", "/tmp/a/c/e.txt")
    assert [one.name for one in opened.list_dir("/tmp/a", recursive=True)] == ["c", "c/d", "c/e.txt"]
    opened.write_file("other", "")
    with pytest.raises(SandboxFileExists):
        opened.move("other", "/tmp/a/c/e.txt")
    opened.move("other", "/tmp/a/c/e.txt", replace=True)
    assert opened.read_file("/tmp/a/c/e.txt") == b""
    with pytest.raises(SandboxFileExists):
        opened.remove("/tmp/a")
    opened.remove("/tmp/a", recursive=True)
    assert not opened.exists("/tmp/a")
    with pytest.raises(SandboxFileNotFound, match="/tmp/a"):
        opened.stat("/tmp/a")
    assert opened.read_file("given.txt") == b"given"
    assert opened.exec(["cat", "given.txt"]).stdout == "given"


def test_a_folder_goes_in_and_comes_out(opened: cloche.Sandbox, tmp_path: Path) -> None:
    """A whole folder is copied either way; what a guest made of it leads nowhere else on this machine."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "data").write_bytes(os.urandom(3_000_000))
    (source / "run.sh").write_text("#!/bin/sh\necho ran; ln -s /etc/passwd bad; ln -s deep/data good; mkfifo f\n")
    (source / "run.sh").chmod(0o755)
    (source / "host").symlink_to("/etc")
    assert opened.upload(source, "/tmp/copy") == Transfer(files=2, size=3_000_074, left_out=1)
    assert opened.exec(["./run.sh"], cwd="/tmp/copy").stdout == "ran\n"
    assert opened.download("/tmp/copy", target) == Transfer(files=2, size=3_000_074, left_out=2)
    assert (target / "good").read_bytes() == (source / "deep" / "data").read_bytes()
    assert {one.name for one in target.iterdir()} == {"deep", "run.sh", "good"}
    with pytest.raises(SandboxFileTooLarge, match="max_bytes"):
        opened.download("/tmp/copy", tmp_path / "small", max_bytes=1000)


def test_changes_are_told(opened: cloche.Sandbox) -> None:
    """What is made, written and removed below a watched folder is told, in that order, until the block ends."""
    opened.make_dir("/tmp/watched")
    with opened.watch("/tmp/watched", recursive=True) as changes:
        opened.make_dir("/tmp/watched/a")
        first = changes.next()
        assert first is not None
        assert (first.kind, first.path, first.is_directory) == ("created", "a", True)
        opened.exec(shell="cd /tmp/watched/a; echo x > b; mv b c; rm c")
        seen = []
        for change in changes:
            seen.append((change.kind, change.path, change.target))
            if change.kind == "removed":
                break
    assert list(dict.fromkeys(seen)) == [
        ("created", "a/b", ""), ("changed", "a/b", ""), ("moved", "a/b", "a/c"), ("removed", "a/c", ""),
    ]  # fmt: skip


def test_a_file_goes_in_and_comes_out(opened: cloche.Sandbox, tmp_path: Path) -> None:
    """A single file is copied to the very path that was named, with its mode; through links, with that of the file."""
    (tmp_path / "in").write_text("text")
    (tmp_path / "in").chmod(0o755)
    assert opened.upload(tmp_path / "in", "/tmp/there") == Transfer(files=1, size=4)
    assert opened.stat("/tmp/there").mode == 0o755
    assert opened.download("/tmp/there", tmp_path / "new" / "out") == Transfer(files=1, size=4)
    assert (tmp_path / "new" / "out").read_text() == "text"
    opened.exec(shell="ln -sf /tmp/there /tmp/link; ln -sf link /tmp/further")
    opened.download("/tmp/further", tmp_path / "followed")
    assert (tmp_path / "followed").stat().st_mode & 0o777 == 0o755
    with pytest.raises(cloche.InvalidRequest, match="nothing-here"):
        opened.upload(tmp_path / "nothing-here", "/tmp/x")
    with pytest.raises(SandboxFileNotFound):
        opened.download("/tmp/nothing-there", tmp_path / "x")
