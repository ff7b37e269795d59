"""The agent's own folders: nothing outside of them is reached, whatever a path or a link says."""

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cloche import InvalidRequest, SandboxFileError
from cloche.agent.host import Roots


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
        with pytest.raises(SandboxFileError, match="not a regular file"):
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
    with pytest.raises(InvalidRequest, match="is not a folder; make it first"):
        Roots({"/memory": "/nowhere/at/all"})
    with pytest.raises(InvalidRequest, match="'/etc' is none of: /memory, /configs"):
        Roots({"/etc": "/etc"})


def test_nothing_of_the_hosts_own_path_is_told(roots: Roots, tmp_path: Path) -> None:
    """A model knows the folder as /memory."""
    with pytest.raises(SandboxFileError) as caught:
        roots.read("/memory/none", max_bytes=10)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("path", ["/memory/" + "a/" * 1500 + "x", "/memory/\ud800"])
def test_a_path_that_nothing_should_have_is_refused(roots: Roots, path: str) -> None:
    """A very deep one could be listed by nobody, and hardly removed."""
    for attempt in (lambda: roots.write(path, b"x"), lambda: roots.read(path, max_bytes=1)):
        with pytest.raises(SandboxFileError):
            attempt()


def test_a_deep_folder_is_listed_as_deep_as_paths_go(roots: Roots, tmp_path: Path) -> None:
    """Somebody else may have made it."""
    roots.write("/memory/a.txt", b"")
    at = os.open(tmp_path / "memory", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    try:
        assert roots.list_files("/memory") == ("/memory/a.txt",)
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "memory" / "d"], check=True)


def test_a_file_keeps_its_mode(roots: Roots, tmp_path: Path) -> None:
    """What was private stays so."""
    roots.write("/memory/a", b"one")
    (tmp_path / "memory/a").chmod(0o600)
    roots.write("/memory/a", b"two")
    assert (tmp_path / "memory/a").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "memory") == ["a"]


def test_a_hard_link_is_not_read_and_its_file_not_changed(roots: Roots, tmp_path: Path) -> None:
    """The control: an ordinary read gets the file outside."""
    os.link(tmp_path / "secret.txt", tmp_path / "memory/link")
    assert (tmp_path / "memory/link").read_text() == "canary"
    with pytest.raises(SandboxFileError, match="hard link"):
        roots.read("/memory/link", max_bytes=10)
    roots.write("/memory/link", b"mine")
    assert (tmp_path / "secret.txt").read_text() == "canary"


def test_the_longest_names_can_be_written(roots: Roots) -> None:
    """Whatever the file beside it is called meanwhile."""
    path = "/memory/" + "\N{GRINNING FACE}" * 63
    roots.write(path, b"x")
    assert roots.read(path, max_bytes=1) == b"x"


def test_a_folder_that_went_away_is_told_without_its_path(roots: Roots, tmp_path: Path) -> None:
    """As an error for the model."""
    (tmp_path / "memory").rmdir()
    for attempt in (lambda: roots.read("/memory/a", max_bytes=1), lambda: roots.list_files("/memory")):
        with pytest.raises(SandboxFileError) as caught:
            attempt()
        assert str(tmp_path) not in str(caught.value)


def test_while_folders_become_links_nothing_outside_is_read_or_written(roots: Roots, tmp_path: Path) -> None:
    """A race, tried for a second."""
    (tmp_path / "outside/f").write_text("canary")
    memory = tmp_path / "memory"
    (memory / "real").mkdir()
    (memory / "real/f").write_text("inside")
    (memory / "link").symlink_to(tmp_path / "outside")
    (memory / "at").mkdir()
    stopped = threading.Event()

    def swap() -> None:
        while not stopped.is_set():
            for name in ("real", "link"):
                with suppress(OSError):
                    os.rename(memory / name, memory / "at/d")
                    os.rename(memory / "at/d", memory / name)
                if (memory / name).exists():  # then what is there was made by a write
                    shutil.rmtree(memory / "at/d", ignore_errors=True)

    swapping = threading.Thread(target=swap)
    swapping.start()
    end = time.monotonic() + 1
    try:
        while time.monotonic() < end:
            with suppress(SandboxFileError):
                assert roots.read("/memory/at/d/f", max_bytes=10) in (b"inside", b"mine")
            with suppress(SandboxFileError):
                roots.write("/memory/at/d/f", b"mine")
    finally:
        stopped.set()
        swapping.join()
    assert (tmp_path / "outside/f").read_text() == "canary"
    assert os.listdir(tmp_path / "outside") == ["f"]
