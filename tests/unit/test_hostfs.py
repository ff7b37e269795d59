"""Below a descriptor nothing of a stranger's is followed, waited for or written through, whatever stands at a name."""

import errno
import gc
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_config_dir, user_state_dir

from cloche import hostfs

CANARY, OWN, NEW = "canary of the host", "own", b"new"
NAMES = ("a", "b", "file")

pytestmark = [pytest.mark.both_users, pytest.mark.timeout(120)]  # what is waited for is waited for without end


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_to_collect() -> None:
    """Have what earlier tests have left close its descriptors now, not while a test here runs."""
    gc.collect()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    """However it ends, all that was opened is closed."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with a/b/file in it; beside it is the like of that which nobody may get at."""
    for name, text in (("root", OWN), ("outside", CANARY)):
        (tmp_path / name / "a/b").mkdir(parents=True)
        (tmp_path / name / "a/b/file").write_text(text)
    return tmp_path / "root"


def _swap(place: Path, make: Callable[[Path, Path], object]) -> None:
    """Put something in place of what is there; `make` gets the place, and what has it outside."""
    place.rename(place.with_name("before"))
    make(place, Path(str(place).replace("/root/", "/outside/")))


def _link(place: Path, elsewhere: Path) -> None:
    place.symlink_to(elsewhere)


def _relative_link(place: Path, elsewhere: Path) -> None:
    place.symlink_to(os.path.relpath(elsewhere, place.parent))


def _link_to_a_link(place: Path, elsewhere: Path) -> None:
    (hop := place.with_name("hop")).symlink_to(elsewhere)
    place.symlink_to(hop)


def _socket(place: Path, _: Path) -> None:
    here = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{here}/{place.name}")  # the path itself may be longer than an address can be
    os.close(here)


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "a link": _link,
    "a relative link": _relative_link,
    "a link to a link": _link_to_a_link,
}
OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "a link to itself": lambda place, _: place.symlink_to(place),
    "a dangling link": lambda place, _: place.symlink_to("/nowhere"),
    "a fifo": lambda place, _: os.mkfifo(place),
    "a socket": _socket,
}
ALL = LINKS | OTHERS


def _read(root: Path) -> str:
    """Read a/b/file below a folder."""
    at = hostfs.open_folder(root)
    try:
        with hostfs.descended(at, NAMES[:-1]) as here:
            fd, _ = hostfs.open_regular(NAMES[-1], here)
    finally:
        os.close(at)
    with open(fd) as file:
        return file.read()


@pytest.mark.parametrize("what", ALL)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_read_through_what_is_no_folder_and_no_file(tree: Path, depth: int, what: str) -> None:
    """At no place of a path; the control: an ordinary open follows the links, and gets out."""
    _swap(tree.joinpath(*NAMES[:depth]), ALL[what])
    if what in LINKS:
        assert tree.joinpath(*NAMES).read_text() == CANARY
    with pytest.raises(OSError) as caught:
        _read(tree)
    is_file = what in ("a fifo", "a socket") and depth == 3
    assert caught.value.errno in ((errno.EINVAL, errno.ENXIO) if is_file else (errno.ELOOP, errno.ENOTDIR))


@pytest.mark.parametrize("what", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_what_comes_just_before_the_open_is_not_followed(
    tree: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is not looked at first and opened then; the control: for what was there before, it was opened."""
    assert _read(tree) == OWN
    place, opened = tree.joinpath(*NAMES[: NAMES.index(name) + 1]), os.open

    def swapping(path: Any, *rest: Any, **more: Any) -> int:
        if path == name:
            _swap(place, ALL[what])
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", swapping)
    with pytest.raises(OSError):
        _read(tree)
    monkeypatch.undo()
    assert place.with_name("before").exists()


@pytest.mark.parametrize("name", NAMES[:-1])
def test_what_comes_just_after_the_open_changes_nothing(tree: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a folder open stays in it, wherever it is moved and whatever has its name now."""
    place, opened = tree.joinpath(*NAMES[: NAMES.index(name) + 1]), os.open

    def swapping(path: Any, *rest: Any, **more: Any) -> int:
        fd = opened(path, *rest, **more)
        if path == name:
            _swap(place, _link)
        return fd

    monkeypatch.setattr(os, "open", swapping)
    assert _read(tree) == OWN
    monkeypatch.undo()
    assert tree.joinpath(*NAMES).read_text() == CANARY


@pytest.mark.parametrize(("path", "kind"), [("/dev/null", "character device"), ("/dev/shm", "folder")])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_device_and_a_folder_are_no_files(path: str, kind: str, flags: int) -> None:
    """The error says what it is instead."""
    folder, name = os.path.split(path)
    at = hostfs.open_folder(folder)
    try:
        with pytest.raises(IsADirectoryError if kind == "folder" else hostfs.NotRegular) as caught:
            hostfs.open_regular(name, at, flags)
    finally:
        os.close(at)
    assert not isinstance(caught.value, hostfs.NotRegular) or stat.S_ISCHR(caught.value.mode)


def test_a_hard_link_says_so(tree: Path) -> None:
    """Callers decide about it by what the descriptor says."""
    (tree / "file").hardlink_to(tree.parent / "outside/a/b/file")
    at = hostfs.open_folder(tree)
    fd, facts = hostfs.open_regular("file", at)
    os.close(fd)
    os.close(at)
    assert facts.st_nlink == 2


def test_a_folder_that_the_user_named_may_be_a_link(tree: Path) -> None:
    """No other may."""
    (tree / "link").symlink_to(tree / "a")
    os.close(hostfs.open_folder(tree / "link", follows_link=True))
    with pytest.raises(NotADirectoryError):
        hostfs.open_folder(tree / "link")


@pytest.mark.parametrize("what", [*ALL, "a file"])
@pytest.mark.parametrize("above", [[], ["a"], ["a", "b"]])
def test_no_folder_is_made_through_what_is_in_the_way(tree: Path, above: list[str], what: str) -> None:
    """The control: by a path it would be, where it is a link to a folder."""
    make = ALL.get(what, lambda place, _: place.write_text(OWN))
    make(tree.joinpath(*above, "way"), tree.parent / "outside")
    if what in LINKS:
        tree.joinpath(*above, "way", "control").mkdir()
        (tree.parent / "outside/control").rmdir()
    made: list[str] = []
    at = hostfs.open_folder(tree)
    try:
        with pytest.raises(OSError) as caught:
            hostfs.descend(at, [*above, "way", "new"], mode=0o700, created=made)
    finally:
        os.close(at)
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert (made, os.listdir(tree.parent / "outside")) == ([], ["a"])


def test_folders_that_were_made_are_told(tree: Path) -> None:
    """Also where a later one cannot be made."""
    made: list[str] = []
    at = hostfs.open_folder(tree)
    try:
        with hostfs.descended(at, ["a", "x"], mode=0o750) as here:
            assert os.path.samestat(os.fstat(here), (tree / "a/x").stat())
        with pytest.raises(OSError):
            hostfs.descend(at, ["a", "x", "y", "n" * 300], mode=0o700, created=made)
    finally:
        os.close(at)
    assert made == ["a/x/y"]
    assert [stat.S_IMODE((tree / name).stat().st_mode) & 0o077 for name in ("a/x", "a/x/y")] == [0o050, 0]


def _with_replace(folder: Path, data: bytes) -> None:
    at = hostfs.open_folder(folder)
    try:
        hostfs.replace(at, NAMES[-1], data)
    finally:
        os.close(at)


def _beside(folder: Path, data: bytes) -> None:
    """Write piece by piece, and rename at the end."""
    at = hostfs.open_folder(folder)
    try:
        with hostfs.new_file(at) as (temporary, file), file:
            file.write(data)
        os.rename(temporary, NAMES[-1], src_dir_fd=at, dst_dir_fd=at)
    finally:
        os.close(at)


WRITERS: dict[str, Callable[[Path, bytes], object]] = {
    "replace": _with_replace,
    "new_file": _beside,
    "open_in_place_of": lambda folder, data: hostfs.open_in_place_of(folder, NAMES[-1], data).close(),
    "open_named": lambda folder, data: hostfs.open_named(str(folder / NAMES[-1]), data).close(),
    "open_named, private": lambda folder, data: hostfs.open_named(
        str(folder / NAMES[-1]), data, is_private=True
    ).close(),
}
IN_THE_WAY = ALL | {"a hard link": lambda place, elsewhere: os.link(elsewhere, place), "nothing": lambda *_: None}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_is_there_is_replaced_and_not_written_through(tree: Path, writer: str, what: str) -> None:
    """What has another name elsewhere keeps its content there, and nothing is left beside the file."""
    folder = tree / "a/b"
    _swap(folder / "file", IN_THE_WAY[what])
    if what in LINKS or what == "a hard link":
        assert (folder / "file").read_text() == CANARY
    WRITERS[writer](folder, NEW)
    assert (tree.parent / "outside/a/b/file").read_text() == CANARY
    assert stat.S_ISREG((folder / "file").lstat().st_mode)
    assert (folder / "file").read_bytes() == NEW
    assert set(os.listdir(folder)) - {"hop"} == {"before", "file"}


@pytest.mark.parametrize("writer", sorted(WRITERS.keys() - {"new_file"}))
def test_what_cannot_take_its_place_leaves_nothing(tree: Path, writer: str) -> None:
    """A folder stands there. (Who renames on his own removes on his own, as `backends/saved_files.py` does.)"""
    (tree / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        WRITERS[writer](tree, NEW)
    assert sorted(os.listdir(tree)) == ["a", "file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [None, ".named"])
def test_a_file_that_is_given_up_is_gone(tree: Path, error: type[BaseException], name: str | None) -> None:
    """Whatever the reason; and one whose name something has is never begun."""
    at = hostfs.open_folder(tree)

    def give_up() -> None:
        with hostfs.new_file(at, name=name) as (beside, file):
            file.write(NEW)
            assert beside in os.listdir(tree)
            raise error

    try:
        with pytest.raises(error):
            give_up()
        with pytest.raises(FileExistsError), hostfs.new_file(at, name="a"):
            pass
    finally:
        os.close(at)
    assert os.listdir(tree) == ["a"]


@pytest.mark.parametrize(
    ("mode", "kept", "is_private"), [(0o640, 0o640, False), (0o755, 0o755, False), (0o640, 0o600, True)]
)
def test_a_file_of_ones_own_passes_its_mode_on(tree: Path, mode: int, kept: int, is_private: bool) -> None:
    """Whatever the umask is; one that shall be private does not."""
    place = tree / "a/b/file"
    place.chmod(mode)
    hostfs.open_named(str(place), NEW, is_private=is_private).close()
    assert stat.S_IMODE(place.stat().st_mode) == kept


def test_no_reader_sees_half_a_file(tree: Path) -> None:
    """What was there stays until all is written; one that goes on being written begins with what was given."""
    at = hostfs.open_folder(tree / "a/b")
    with hostfs.new_file(at) as (temporary, file), file:
        file.write(NEW)
        file.flush()
        assert (tree / "a/b/file").read_text() == OWN
        os.unlink(temporary, dir_fd=at)
    os.close(at)
    with hostfs.open_in_place_of(tree / "a/b", "file", NEW) as going_on:
        assert (tree / "a/b/file").read_bytes() == NEW
        going_on.write(NEW)
    assert (tree / "a/b/file").read_bytes() == NEW + NEW


def test_nothing_is_there_or_a_link_is(tree: Path) -> None:
    """A look follows nothing."""
    (tree / "link").symlink_to("/nowhere")
    at = hostfs.open_folder(tree)
    found, nothing = hostfs.look("link", at), hostfs.look("none", at)
    os.close(at)
    assert found is not None
    assert (stat.S_ISLNK(found.st_mode), nothing) == (True, None)


@pytest.mark.parametrize("home", [None, "", "relative", "/", "/home/a", "/home/a/"])
@pytest.mark.parametrize("asked", [None, "", " ", "relative", "/xdg", "/xdg/"])
def test_own_folders_are_those_of_platformdirs(home: str | None, asked: str | None, monkeypatch: Any) -> None:
    """What the environment says itself is read as platformdirs reads it; the rest is left to that."""
    for name, value in {"HOME": home, "XDG_CONFIG_HOME": asked, "XDG_STATE_HOME": asked}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    found = (hostfs.own_folder("XDG_CONFIG_HOME", ".config"), hostfs.own_folder("XDG_STATE_HOME", ".local/state"))
    if "/" in ((home or "")[:1], (asked or "")[:1]):
        assert found == (user_config_dir("cloche", appauthor=False), user_state_dir("cloche", appauthor=False))
    else:
        assert found == (None, None)


@pytest.mark.both_users
def test_temporary_files_go_to_shared_memory_rather_than_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `tempfile` takes where no folder for them can be written; one that TMPDIR names is what was asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert hostfs.temporary_folder() == "/dev/shm"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert hostfs.temporary_folder() == str(tmp_path)
