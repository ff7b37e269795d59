"""The agent's own folders: nothing outside of them is reached, whatever a path or a link says."""

import os
from pathlib import Path

import pytest

from cloche import InvalidRequest, SandboxFileError
from cloche.agent.roots import Roots


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """Hold /memory, with something outside of it to get at."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "secret.txt").write_text("canary")
    (tmp_path / "outside").mkdir()
    return Roots({"/memory": tmp_path / "memory"})


def test_files_are_written_read_and_listed(roots: Roots, tmp_path: Path) -> None:
    """With their folders."""
    roots.write("/memory/notes/a.txt", b"one")
    roots.write("/memory/notes/a.txt", b"two")
    assert roots.read("/memory/notes/a.txt", max_bytes=10) == b"two"
    assert (tmp_path / "memory/notes/a.txt").read_bytes() == b"two"
    assert roots.list_files("/memory") == ("/memory/notes/a.txt",)
    assert roots.list_files("/memory/notes") == ("/memory/notes/a.txt",)


@pytest.mark.parametrize(
    "path", ["/memory/../secret.txt", "/memory/a/../../secret.txt", "/memory/..", "/memory/a\0b", "/memory", "/memory/"]
)
def test_no_path_leads_out(roots: Roots, path: str) -> None:
    """Neither to read nor to write."""
    with pytest.raises(SandboxFileError):
        roots.read(path, max_bytes=10)
    with pytest.raises(SandboxFileError):
        roots.write(path, b"x")


@pytest.mark.parametrize(("link", "path"), [("file", "/memory/file"), ("folder", "/memory/folder/new.txt")])
def test_no_link_is_followed(roots: Roots, tmp_path: Path, link: str, path: str) -> None:
    """The control: an ordinary open follows it and gets out."""
    target = {"file": tmp_path / "secret.txt", "folder": tmp_path / "outside"}[link]
    (tmp_path / "memory" / link).symlink_to(target)
    if link == "file":
        assert (tmp_path / "memory/file").read_text() == "canary"
    else:
        (tmp_path / "memory/folder/control").write_text("out")
        assert (tmp_path / "outside/control").exists()
    for attempt in (lambda: roots.read(path, max_bytes=10), lambda: roots.write(path, b"x")):
        with pytest.raises(SandboxFileError):
            attempt()
    assert (tmp_path / "secret.txt").read_text() == "canary"
    assert not (tmp_path / "outside/new.txt").exists()
    assert roots.list_files("/memory") == ()


def test_what_is_no_regular_file_is_refused(roots: Roots, tmp_path: Path) -> None:
    """A pipe would hold the reader up for ever."""
    os.mkfifo(tmp_path / "memory/pipe")
    for attempt in (lambda: roots.read("/memory/pipe", max_bytes=10), lambda: roots.write("/memory/pipe", b"x")):
        with pytest.raises(SandboxFileError, match="no regular file"):
            attempt()


def test_what_is_too_large_is_refused(roots: Roots) -> None:
    """Nothing of it is returned."""
    roots.write("/memory/big", b"x" * 11)
    with pytest.raises(SandboxFileError, match="more than 10 bytes"):
        roots.read("/memory/big", max_bytes=10)


def test_a_root_without_a_folder_is_not_there(roots: Roots) -> None:
    """And a folder that is not there is the operator's error."""
    with pytest.raises(SandboxFileError, match="/configs has no folder here"):
        roots.read("/configs/a", max_bytes=10)
    with pytest.raises(InvalidRequest, match="which is no folder"):
        Roots({"/memory": "/nowhere/at/all"})
    with pytest.raises(InvalidRequest, match="'/etc' is none of: /memory, /configs"):
        Roots({"/etc": "/etc"})


def test_nothing_of_the_hosts_own_path_is_told(roots: Roots, tmp_path: Path) -> None:
    """A model knows the folder as /memory."""
    with pytest.raises(SandboxFileError) as caught:
        roots.read("/memory/none", max_bytes=10)
    assert str(tmp_path) not in str(caught.value)
