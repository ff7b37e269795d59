"""Changes are what a commit would do to the host's folder, as that is now, through no link and past no mount."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cloche.workspace.compare import Comparison, compare, find_twins, identify, is_git, make_diff
from cloche.workspace.host_files import HostTree, takes_names_for_equal
from cloche.workspace.snapshot import Snapshot, SnapshotEntry
from tests.harness.changes import by_path, left_out, opened, snapshot_of, told


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Make an empty folder of the host."""
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def entries(*given: SnapshotEntry, is_whole: bool = False, is_partial: bool = False) -> Snapshot:
    """Make a snapshot without contents."""
    return Snapshot(entries={entry.path: entry for entry in given}, is_whole=is_whole, is_partial=is_partial)


def folder(path: bytes, **more: bool) -> SnapshotEntry:
    """Make a directory's entry."""
    return SnapshotEntry(path=path, kind="directory", mode=0o755, **more)


def new(path: bytes, **more: bool | str) -> SnapshotEntry:
    """Make the entry of a file that no host has."""
    return replace(SnapshotEntry(path=path, kind="file", mode=0o644, sha256="no such hash"), **more)


def removed(path: bytes) -> SnapshotEntry:
    """Make a whiteout."""
    return SnapshotEntry(path=path, kind="removed")


def compared(host: Path, snapshot: Snapshot, opened_ns: int | None = None, **more: object) -> Comparison:
    """Compare."""
    with opened(host) as fd:
        return compare(snapshot, fd, opened_ns=opened_ns, **more)  # type: ignore[arg-type]


def later() -> int:
    """Return a time after all that was done, and before all that will be."""
    time.sleep(0.02)
    now = time.time_ns()
    time.sleep(0.02)
    return now


def test_a_copy_is_compared_as_a_whole(host: Path, tmp_path: Path) -> None:
    """What a copy lacks is removed, but what is hidden, git's own or on a mount is not; what is old is not read."""
    copy = tmp_path / "copy"
    for top in (host, copy):
        for name in ("kept", "edited", "gone/a", "gone/b/c", "equal"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(name)
    for name in ("key", ".git/HEAD", "partly/.env", "partly/seen"):
        (host / name).parent.mkdir(exist_ok=True)
        (host / name).write_text("x")
    since = later()
    (copy / "edited").write_text("anew!")
    (copy / "equal").write_text("equal")
    (copy / "moved").write_text("gone/b/c")
    os.unlink(copy / "gone/b/c")
    (copy / "gone/b").rmdir()
    with snapshot_of(copy, tmp_path, since=since) as snapshot, opened(host) as fd:
        assert snapshot.entries[b"kept"].kind == "unchanged"
        found = compare(snapshot, fd, hidden=["key", "partly/.env"])
    assert told(found) == {"edited": "modified", "gone/b": "removed", "moved": "renamed", "partly/seen": "removed"}
    assert by_path(found)["moved"].old_path == "gone/b/c"
    assert set(left_out(found)) == {"partly", "partly/.env"}


def test_what_a_copy_lacks_because_it_is_new_on_the_host_stays(host: Path) -> None:
    """A file that appeared after the copy was made is not removed, nor is the folder that it is in; older ones are."""
    (host / "d").mkdir()
    (host / "d/old").touch()
    opened_ns = later()
    (host / "new").touch()
    (host / "d/new").touch()
    found = compared(host, entries(is_whole=True), opened_ns)
    assert told(found) == {"d/old": "removed"}
    assert set(left_out(found)) == {"d", "d/new", "new"}


def test_what_a_partial_snapshot_lacks_is_not_removed(host: Path) -> None:
    """Nothing is concluded from what was not looked at, and that is said."""
    (host / "a").write_text("x")
    found = compared(host, entries(is_whole=True, is_partial=True))
    assert told(found) == {}
    assert set(left_out(found)) == {"."}


def test_nothing_below_a_folder_with_a_problem_is_removed(host: Path) -> None:
    """A folder that could not be looked into is left out with what the host has in it, below an opaque one, too."""
    (host / "d/e/f").mkdir(parents=True)
    (host / "d/x").touch()
    found = compared(host, entries(folder(b"d", is_opaque=True), replace(folder(b"d/e"), problem="it is too deep")))
    assert told(found) == {"d/x": "removed"}
    assert left_out(found) == {"d/e": "it is too deep"}


def test_what_has_changed_on_the_host_is_a_conflict(host: Path) -> None:
    """Edited, replaced, or with something new below a removed folder; what was there before, or is known, is none."""
    for name in ("old", "edited", "replaced", "dropped", "d/old", "e/old"):
        (host / name).parent.mkdir(exist_ok=True)
        (host / name).write_text("1")
    opened_ns = later()
    (host / "edited").write_text("2")
    os.replace(host / "d/old", host / "replaced")
    (host / "appeared").write_text("3")
    (host / "e/new").write_text("4")
    os.unlink(host / "dropped")
    snapshot = entries(
        new(b"old"), new(b"edited"), new(b"replaced"), new(b"appeared"), removed(b"d"), removed(b"e"),
        new(b"dropped", is_copied=True), new(b"added"),
    )  # fmt: skip
    found = by_path(compared(host, snapshot, opened_ns))
    assert {path for path, change in found.items() if change.conflict} == {
        "edited", "replaced", "appeared", "d", "e", "e/new", "dropped",
    }  # fmt: skip
    assert not any(change.conflict for change in compared(host, snapshot).changes)
    facts = os.stat(host / "edited")
    again = by_path(compared(host, snapshot, opened_ns, committed={"edited": (facts.st_ino, facts.st_ctime_ns)}))
    assert not again["edited"].conflict


def test_a_file_that_was_moved_inside_is_not_taken_for_one_that_is_gone(host: Path) -> None:
    """A copy under a name that the host never had is no conflict while nobody has changed its folder."""
    (host / "d").mkdir()
    opened_ns = later()
    snapshot = entries(folder(b"d"), new(b"d/moved", is_copied=True))
    assert not by_path(compared(host, snapshot, opened_ns))["d/moved"].conflict
    (host / "d/passing").touch()
    assert by_path(compared(host, snapshot, opened_ns))["d/moved"].conflict


def test_no_link_of_the_host_is_followed(host: Path, tmp_path: Path) -> None:
    """Where the host has a link in place of a folder, what is behind it is neither read nor removed."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("x")
    (host / "d").symlink_to(tmp_path / "outside")
    found = compared(host, entries(folder(b"d", is_opaque=True), new(b"d/file"), removed(b"d/other")))
    assert told(found) == {"d": "modified", "d/file": "added"}
    assert by_path(found)["d"].old_target == str(tmp_path / "outside")
    assert told(compared(host, entries(removed(b"d/file")))) == {}


def test_special_files_of_the_host_are_left_alone(host: Path) -> None:
    """A pipe is not opened, replaced or removed, and a folder that holds one stays."""
    (host / "d").mkdir()
    os.mkfifo(host / "d/pipe")
    os.mkfifo(host / "pipe")
    found = compared(host, entries(removed(b"d"), new(b"pipe")))
    assert told(found) == {}
    assert set(left_out(found)) == {"d", "d/pipe", "pipe"}


def test_no_other_file_system_is_entered() -> None:
    """What is mounted below the folder is another one's, whatever is asked for there."""
    with opened(Path("/")) as fd, HostTree(fd) as tree:
        for path in (b"proc/version", b"proc/self/status"):
            with pytest.raises(OSError) as caught:
                tree.look(path)
            assert caught.value.errno == errno.EXDEV
        found = compare(entries(new(b"proc/new"), removed(b"proc/version")), fd)
    assert told(found) == {}
    assert set(left_out(found)) == {"proc/new", "proc/version"}


_MOUNTED = """
import os, subprocess, sys
from cloche.workspace.archive import pack, paths_below
from cloche.workspace.compare import make_diff
from cloche.workspace.snapshot import SnapshotEntry, Snapshot
host, outside = sys.argv[1:]
subprocess.run(["mount", "--bind", outside, f"{host}/folder"], check=True)
subprocess.run(["mount", "--bind", f"{outside}/secret", f"{host}/above/file"], check=True)
given = [
    SnapshotEntry(path=b"above", kind="removed"),
    SnapshotEntry(path=b"fine", kind="file", mode=0o600, size=1, sha256="other"),
    SnapshotEntry(path=b"folder", kind="directory", mode=0o755),
    SnapshotEntry(path=b"folder/secret", kind="file", mode=0o600, size=1, sha256="other"),
]
fd, contents = os.open(host, os.O_RDONLY), os.memfd_create("contents")
os.write(contents, b"0")
diff = make_diff(Snapshot(entries={one.path: one for one in given}, contents=contents), fd)
with pack(fd, paths_below(fd), max_bytes=1 << 20).file as file:
    file.seek(0)
    copied = file.read()
print([one.path for one in diff.changes], [one.path for one in diff.left_out], "CANARY" in diff.patch + str(copied))
"""


def test_what_is_mounted_below_is_neither_read_nor_in_the_way(host: Path, tmp_path: Path) -> None:
    """A bind mount of the same file system, of a folder or a file, is named; others are compared, nothing is read."""
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret").write_text("CANARY\n")
    for name in ("folder/secret", "above/file", "above/other", "fine"):
        (host / name).parent.mkdir(exist_ok=True)
        (host / name).write_text("host's\n")
    words = ["unshare", "-Urm", sys.executable, "-c", _MOUNTED, os.fspath(host), os.fspath(outside)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "['above/other', 'fine'] ['above', 'above/file', 'folder'] False\n"


def test_descriptors_are_closed(host: Path) -> None:
    """A comparison of a deep tree leaves none open, and what is too deep is left out."""
    before = len(os.listdir("/proc/self/fd"))
    path = b"d"
    given = [folder(path)]
    for _ in range(140):
        path += b"/d"
        given.append(folder(path))
    os.makedirs(host / os.fsdecode(path))
    found = compared(host, entries(*given, new(path + b"/x")))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(left_out(found)) == 1
    whole = compared(host, entries(removed(b"d")))
    assert told(whole) == {}
    assert "d" in left_out(whole)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_id_is_of_what_would_be_written(host: Path) -> None:
    """It is the same for the same paths, kinds, modes and contents, in whatever order they came, and no other's."""
    (host / "a").write_text("x")
    given = (new(b"a"), new(b"b"), SnapshotEntry(path=b"l", kind="link", target=b"t"), removed(b"c"))
    first = compared(host, entries(*given)).changes
    assert identify(first) == identify(compared(host, entries(*reversed(given))).changes)
    with opened(host) as fd:
        assert make_diff(entries(removed(b"a")), fd).id == identify(compared(host, entries(removed(b"a"))).changes)
    others = [
        replace(first[0], **change)  # type: ignore[arg-type]
        for change in ({"path": "z"}, {"what": "added"}, {"kind": "link"}, {"mode": 0o600}, {"sha256": "0"},
                       {"target": "t"},
                       {"old_path": "o"})
    ]  # fmt: skip
    ids = {identify([other, *first[1:]]) for other in others} | {identify(first), identify(first[1:])}
    assert len(ids) == len(others) + 2
    assert identify([replace(first[0], conflict="x", dangers=("y",), is_text=True), *first[1:]]) == identify(first)


def test_names_that_the_host_takes_for_equal_are_found() -> None:
    """They differ in case or in Unicode's form alone, among the sandbox's and with the host's."""
    names = [b"a", b"A", b"B", b"c", "é".encode(), "e\u0301".encode(), b"\xff", b"straSSe"]
    assert find_twins(names, [b"b", b"c", "straße".encode()]) == {
        b"a", b"A", b"B", "é".encode(), "e\u0301".encode(), b"straSSe",
    }  # fmt: skip


def test_case_twins_are_two_files_where_the_host_tells_them_apart(host: Path) -> None:
    """A file system is asked, and neither two files nor two names of one file make it say that it cannot."""
    (host / "abc").touch()
    os.link(host / "abc", host / "ABC")
    (host / "d").mkdir()
    (host / "D").mkdir()
    with opened(host) as fd:
        assert not takes_names_for_equal(fd)
    assert told(compared(host, entries(new(b"x"), new(b"X")))) == {"X": "added", "x": "added"}


def test_twins_are_left_out_where_the_host_does_not(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of two such names is a change, nor is what is below them."""
    monkeypatch.setattr("cloche.workspace.compare.takes_names_for_equal", lambda _: True)
    (host / "Readme").write_text("x")
    found = compared(host, entries(folder(b"D"), folder(b"d"), new(b"d/x"), new(b"README"), new(b"fine")))
    assert told(found) == {"fine": "added"}
    assert set(left_out(found)) == {"D", "d", "README"}


@pytest.mark.parametrize("name", [b".git", b".GIT", b".git.", b".git "])
def test_the_names_of_git_are_told(name: bytes) -> None:
    """Also those that some file systems take for them."""
    assert is_git(name)
    assert not is_git(name + b"ignore")


def test_set_id_bits_of_the_host_are_not_the_sandboxs(host: Path) -> None:
    """Bits that the host's folder has itself are not told as left out, for the sandbox has not set them."""
    (host / "d").mkdir()
    (host / "d").chmod(0o2755)
    assert compared(host, entries(replace(folder(b"d"), mode=0o2755))) == Comparison()
