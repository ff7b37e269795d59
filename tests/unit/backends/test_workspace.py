"""Looks at a workspace: the quick one, as it was given or not; and the bounds of the others."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.backends.archive import Spool, pack, unpack
from cloche.backends.containers import run
from cloche.backends.containers.inside import files
from cloche.backends.containers.inside.link import DATA, CallerLink
from cloche.backends.local import workspace as local_workspace
from cloche.backends.local.workspace import Workspace, collect, is_as_given, list_paths, read_regular
from cloche.backends.saved_files import Until
from cloche.core.errors import SandboxFileRefused, SandboxFileTooLarge
from cloche.core.limits import Limits
from cloche.core.request import InputFile

PLACES, FILES = 10, 20
CODE = b"print(1)"
GIVEN = {"main.py": CODE}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """Return a folder that holds what was given."""
    (tmp_path / "main.py").write_bytes(CODE)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_what_was_given_is_recognised(root: int) -> None:
    """The same file, and no other."""
    assert is_as_given(root, GIVEN, entries=2)


def test_what_is_no_file_is_refused_by_its_name(root: int, tmp_path: Path) -> None:
    """Nothing is waited for, and what is wrong is said."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("main.py")
    said = []
    for name in ("fifo", "link", "main.py/x"):
        with pytest.raises(SandboxFileRefused) as caught:
            read_regular(root, name, max_bytes=10)
        said.append(str(caught.value))
    assert said[0] == "'fifo' is not a regular file of the workspace"
    assert all("links are not followed" in one for one in said[1:])


def test_another_entry_is_noticed_by_the_count(root: int) -> None:
    """The file system counts what is there, found or not."""
    assert not is_as_given(root, GIVEN, entries=3)
    assert not is_as_given(root, GIVEN, entries=1)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


CHANGES: dict[str, Callable[[Path], object]] = {
    "other content": lambda path: path.write_bytes(b"print(2)"),
    "more content": lambda path: path.write_bytes(CODE * 2),
    "gone": lambda path: path.rename(path.with_name("other")),
    "a link": _replaced(lambda path: path.symlink_to("/etc/passwd")),
    "a link that leads nowhere": _replaced(lambda path: path.symlink_to("nowhere")),
    "a folder": _replaced(lambda path: path.mkdir()),
    "a fifo": _replaced(os.mkfifo),
    "large": lambda path: os.truncate(path, 1 << 30),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed(root: int, tmp_path: Path, change: Callable[[Path], object]) -> None:
    """Whatever lies there in place of the file; nothing is followed, waited for, or read without end."""
    change(tmp_path / "main.py")
    assert not is_as_given(root, GIVEN, entries=2)


def test_folders_and_many_files_are_left_to_the_walk(root: int) -> None:
    """The quick look is for the quick case."""
    assert not is_as_given(root, {"folder/main.py": CODE}, entries=2)
    assert not is_as_given(root, {str(number): CODE for number in range(10)}, entries=11)


class Moving(Until):
    """Move a folder to another place each time that the walk goes on."""

    def __init__(self, root: Path):
        super().__init__(60)
        self.root, self.here, self.steps = root, 0, 0
        for number in range(PLACES):
            (root / str(number)).mkdir()
        (root / "0" / "tree").mkdir()
        for number in range(FILES):
            (root / "0" / "tree" / f"file{number}").write_bytes(CODE)

    def is_over(self) -> bool:
        """Say no, and move it."""
        self.steps += 1
        there = (self.here + 1) % PLACES
        os.rename(self.root / str(self.here) / "tree", self.root / str(there) / "tree")
        self.here = there
        return False


def test_a_folder_that_is_moved_ahead_is_walked_once(root: int, tmp_path: Path) -> None:
    """However often it is met, what is in it is looked at once."""
    until = Moving(tmp_path)
    collect(root, {}, GIVEN, max_bytes=1 << 20, until=until)
    assert until.steps <= 2 * (PLACES + FILES) + PLACES  # each file once when met and once when read


@pytest.mark.parametrize("walker", ["container", "host"])
def test_what_exceeds_a_bound_is_said(walker: str, root: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many entries, too long paths and too deep folders end the look or are left out, each with its reason."""
    monkeypatch.setattr(files, "WORKSPACE", str(tmp_path))
    for module in (local_workspace, files):
        monkeypatch.setattr(module, "MAX_DEPTH", 2)
        monkeypatch.setattr(module, "MAX_PATH_CHARS", 20)
    (tmp_path / "a" / "b" / "too deep").mkdir(parents=True)
    (tmp_path / ("n" * 30)).write_bytes(b"")
    (tmp_path / "a" / "link").symlink_to("/etc/passwd")

    def look(max_entries: int) -> tuple[set[str], int, set[str]]:
        if walker == "host":
            found = collect(root, {}, {}, max_bytes=1 << 20, until=Until(60), max_entries=max_entries)
            return set(map(os.fsdecode, found.known)), found.skipped, set(found.partial)
        walk = files.WorkspaceWalk(60)
        walk.left = max_entries
        return set(files.file_states(walk)), walk.skipped, walk.reasons

    paths, skipped, reasons = look(100)
    assert paths <= {"main.py"}  # which comes after the long name, or before it
    assert (skipped, reasons) == (3 if paths else 4, {"depth", "paths"})
    assert "entries" in look(2)[2]


def test_a_program_is_no_file_of_the_users(root: int, tmp_path: Path) -> None:
    """It is neither listed nor reported where it lies; deeper, the same name is the guest's own."""
    (tmp_path / "d").mkdir()
    for path in ("cloche-main.py", "cloche-main.go", "d/cloche-main.py"):
        (tmp_path / path).write_bytes(b"changed")
    assert list_paths(root, ".", Until(60)) == ("d/cloche-main.py", "main.py")
    found = collect(root, {}, GIVEN, max_bytes=1 << 20, until=Until(60))
    assert ([record.path for record in found.changed], found.skipped) == (["d/cloche-main.py"], 0)


@pytest.mark.parametrize("walker", ["container", "host"])
def test_too_much_is_not_listed_in_part(
    walker: str, root: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of some of the files would look like a list of all of them."""
    monkeypatch.setattr(files, "WORKSPACE", str(tmp_path))
    for module in (local_workspace, files):
        monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    assert list_paths(root, ".", Until(60)) == ("main.py",)
    for name in "abc":
        (tmp_path / name).mkdir()
    if walker == "host":
        with pytest.raises(SandboxFileTooLarge, match="list a folder below it"):
            list_paths(root, ".", Until(60))
    else:
        with pytest.raises(files.FileRequestRefused, match="too much"):
            files.list_files(CallerLink())


class _Said(CallerLink):
    """Keep as a container's caller does what is said of files."""

    def __init__(self) -> None:
        super().__init__()
        self.spool, self.longest, self.gone_bytes = Spool(1 << 20), 0, 0

    def send(self, tag: bytes, body: bytes = b"") -> None:
        self.longest = max(self.longest, len(body))
        if tag == DATA:
            self.spool.add(body)

    def send_json(self, tag: bytes, **body: object) -> None:
        gone = body.get("gone_bytes", 0)
        self.gone_bytes = gone if isinstance(gone, int) else 0
        super().send_json(tag, **body)


def test_names_come_out_of_a_container_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many and long they are, and whatever is in them, no frame of them is long."""
    monkeypatch.setattr(files, "WORKSPACE", str(tmp_path))
    names = [*(f"{number}{chr(0xE9) * 100}" for number in range(2000)), "a\nb", os.fsdecode(b"\xff")]
    for name in names:
        (tmp_path / name).touch()
    listed, handed = _Said(), _Said()
    files.list_files(listed)
    assert listed.spool.take_names(listed.spool.size) == sorted(names)
    before = dict.fromkeys([*names, "gone", "gone too"], (0, 0, 0))
    files.hand_files(handed, before, 1 << 20)
    assert handed.spool.take_names(handed.gone_bytes) == ["gone", "gone too"]
    assert set(unpack(handed.spool, Until(60))[0]) == set(names)
    handed.spool.file.close()
    assert max(listed.longest, handed.longest) <= 1 << 16


# What is remembered


def test_what_a_look_left_out_is_remembered_and_what_is_gone_is_not(root: int, tmp_path: Path) -> None:
    """Where all was seen, what is not there is forgotten; where the look ended early, nothing is."""
    (tmp_path / "gone").write_bytes(b"")
    known = collect(root, {}, {}, max_bytes=100, until=Until(60)).known
    (tmp_path / "gone").unlink()
    (tmp_path / "main.py").write_bytes(CODE * 100)
    seen = collect(root, known, {}, max_bytes=100, until=Until(60))
    assert (seen.partial, seen.known) == ({"bytes"}, {b"main.py": known[b"main.py"]})
    assert collect(root, known, {}, max_bytes=100, until=Until(60), max_entries=0).known == known


@pytest.mark.parametrize("walker", ["host", "container", "caller of a container"])
def test_paths_that_are_remembered_have_bounds(
    walker: str, root: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files were there at one time or another, and were never seen to be gone."""
    monkeypatch.setattr(files, "WORKSPACE", str(tmp_path))
    for module in (local_workspace, files, run):
        monkeypatch.setattr(module, "MAX_PATH_CHARS", 1000)
    names = [f"{number}".ljust(100, "n") for number in range(20)]
    known = collect(root, {}, {}, max_bytes=100, until=Until(60)).known
    state = known[b"main.py"]
    seen, workspace = files.Seen(), run.WorkspaceHashes()
    for name in names:
        if walker == "host":
            known = {os.fsencode(name): state, **known}
            known = collect(root, known, {}, max_bytes=100, until=Until(60), max_entries=0).known
            kept = {os.fsdecode(path) for path in known}
        elif walker == "container":
            seen.files = {name: (0, 0, 0), **seen.files}
            seen.renew(0)
            kept = set(seen.files)
        else:
            (spool := Spool(100)).add(pack([InputFile(path=name, data=b"")]))
            workspace._changes(spool, {}, {"partial": ["time"]}, Until(60))
            kept = {path.decode() for path in workspace._hashes}
    assert 8 <= len(kept) <= 10
    assert set(names[-8:]) <= kept


def test_a_reader_that_is_cancelled_does_not_read_on_by_a_number_of_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox may be closed by then, and another file have the number of its workspace."""
    (tmp_path / "file").write_text("mine")
    begun, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def slow(root_fd: int, path: str, *, max_bytes: int) -> bytes:
        begun.set()
        assert go_on.wait(9)
        found.append(read_regular(root_fd, path, max_bytes=max_bytes))
        return found[0]

    monkeypatch.setattr(local_workspace, "read_regular", slow)

    async def main() -> None:
        held = Workspace(Limits(), str(tmp_path))
        held.take(())
        reading = asyncio.create_task(held.read("file", max_bytes=9))
        await asyncio.to_thread(begun.wait, 9)
        reading.cancel()
        await asyncio.sleep(0)
        held.drop()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(main())
    assert found == [b"mine"]
