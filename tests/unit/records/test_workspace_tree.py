"""A hostile tree is read within bounds, through no link, and whatever is not read is said."""

import errno
import hashlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche import hostfs
from cloche.records.workspace_tree import TreeWalk, Unread, WalkBounds, WorkspaceTree, read_file, read_tree

CANARY = b"canary of the host"
pytestmark = [pytest.mark.both_users, pytest.mark.timeout(120)]  # what is waited for is waited for without end


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    """However it ends, all that was opened is closed."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder; beside it is a file that nobody may get at."""
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/secret").write_bytes(CANARY)
    return tmp_path / "root"


def read(folder: Path, **settings: Any) -> WorkspaceTree:
    """Read the tree below a folder."""
    at = hostfs.open_folder(folder)
    try:
        return read_tree(at, **settings)
    finally:
        os.close(at)


def told(tree: WorkspaceTree) -> list[dict[str, Any]]:
    """Return the entries as a document has them."""
    return [entry.as_dict() for entry in sorted(tree.entries, key=lambda entry: entry.path)]


def sha256(data: bytes) -> str:
    """Return the SHA-256 as text."""
    return hashlib.sha256(data).hexdigest()


def test_each_name_is_told_as_what_it_is(root: Path) -> None:
    """Files with size, mode and hash, links unfollowed, what is too large and what is no file with the reason."""
    (root / "src").mkdir()
    (root / "src/a.py").write_bytes(b"print(1)\n")
    (root / "src/a.py").chmod(0o4751)
    (root / "link").symlink_to("src/a.py")
    (root / "big.bin").touch()
    os.truncate(root / "big.bin", 20 << 20)
    os.mkfifo(root / "pipe")
    (root / "just.bin").touch()
    os.truncate(root / "just.bin", 10 << 20)
    Path(os.fsdecode(bytes(root / "src") + b"/\xff\n")).write_bytes(b"x")
    os.symlink(b"\xfe", bytes(root / "odd"))
    for name in (".git", "src/__pycache__", "node_modules"):
        (root / name).mkdir()
        (root / name / "inside").touch()
    (root / ".DS_Store").touch()
    tree = read(root)
    assert told(tree) == [
        {"path": "big.bin", "size": 20971520, "sha256": "skipped:too-large:20971520"},
        {"path": "just.bin", "size": 10485760, "mode": "0644", "sha256": sha256(bytes(10 << 20))},
        {"path": "link", "link": "src/a.py"},
        {"path": "odd", "linkBase64": "/g=="},
        {"path": "pipe", "sha256": "skipped:fifo"},
        {"path": "src/a.py", "size": 9, "mode": "4751", "sha256": sha256(b"print(1)\n")},
        {"pathBase64": "c3JjL/8K", "size": 1, "mode": "0644", "sha256": sha256(b"x")},
    ]
    assert sorted(tree.excluded) == [b".DS_Store", b".git", b"node_modules", b"src/__pycache__"]
    assert (tree.bytes, tree.partial) == ((10 << 20) + 10, set())


def test_links_are_not_followed_out_or_round(root: Path) -> None:
    """A walk that follows links reads the host's file, and one file again and again; ours has each name once."""
    (root / "a").mkdir()
    (root / "a/file").write_bytes(b"own")
    (root / "a/round").symlink_to("..")
    (root / "out").symlink_to("../outside")
    naive = [Path(above) / name for above, _, names in os.walk(root, followlinks=True) for name in names]
    shortest = sorted(naive, key=lambda path: len(path.parts))[:10]  # at the end of the longest is ELOOP
    assert CANARY in [path.read_bytes() for path in shortest]
    assert len([path for path in naive if path.name == "file"]) > 20
    assert told(read(root)) == [
        {"path": "a/file", "size": 3, "mode": "0644", "sha256": sha256(b"own")},
        {"path": "a/round", "link": ".."},
        {"path": "out", "link": "../outside"},
    ]


def test_what_is_no_file_is_not_opened(root: Path) -> None:
    """`open` waits at a FIFO for a writer for ever; ours tells of it, and of a socket."""
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(root, os.O_PATH)
        one.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    naive = threading.Thread(target=(root / "pipe").read_bytes)
    naive.start()
    os.close(_writer_once_somebody_waits(root / "pipe"))
    naive.join()
    assert told(read(root)) == [
        {"path": "pipe", "sha256": "skipped:fifo"},
        {"path": "socket", "sha256": "skipped:socket"},
    ]


def _writer_once_somebody_waits(fifo: Path) -> int:
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads yet
                raise


@pytest.mark.parametrize(
    "make",
    [
        lambda place, secret: place.symlink_to(secret),
        lambda place, _: os.mkfifo(place),
        lambda place, _: place.mkdir(),
        lambda *_: None,
    ],
    ids=["link", "fifo", "folder", "nothing"],
)
def test_what_takes_a_files_place_after_the_look_is_not_read(root: Path, make: Callable[[Path, Path], object]) -> None:
    """By its path `open` would read what a link there leads to; by descriptor it is told as changed."""
    (root / "file").write_bytes(b"own")
    at = hostfs.open_folder(root)
    for found in TreeWalk(at, WalkBounds(), None):
        assert stat.S_ISREG(found.state.st_mode if found.state else 0)
        (root / "file").unlink()
        make(root / "file", root.parent / "outside/secret")
        assert not (root / "file").is_file() or (root / "file").read_bytes() == CANARY
        with pytest.raises(Unread, match="changed"):
            read_file(found.name, found.folder, 1000)
    os.close(at)


@pytest.mark.parametrize(("changes", "expected"), [(1, sha256(b"new")), (9, "skipped:changed")])
def test_a_file_that_changes_while_it_is_read_is_read_again_then_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, changes: int, expected: str
) -> None:
    """Once, and the hash is of what it became; again and again, and there is no hash."""
    (root / "file").write_bytes(b"old")
    really, left = os.read, [changes]

    def read_while_somebody_writes(fd: int, size: int) -> bytes:
        data = really(fd, size)
        if left[0]:
            left[0] -= 1
            (root / "file").write_bytes(b"new")
            os.utime(root / "file", (0, left[0]))  # its clock may be too coarse to tell
        return data

    monkeypatch.setattr(os, "read", read_while_somebody_writes)
    assert told(read(root))[0]["sha256"] == expected


def _many(root: Path) -> None:
    for number in range(200):
        (root / f"{number:03}").touch()


def _deep(root: Path) -> None:
    (root / "/".join(["d"] * 30)).mkdir(parents=True)
    (root / "d/file").write_text("x")


def _long(root: Path) -> None:
    for number in range(50):
        (root / f"{number:0200}").touch()


def _large(root: Path) -> None:
    for number in range(10):
        (root / str(number)).write_bytes(bytes(1000))


@pytest.mark.parametrize(
    ("make", "bounds", "partial", "files", "skipped"),
    [
        (_many, WalkBounds(entries=50), {"entries"}, 50, set()),
        (_deep, WalkBounds(depth=5), {"depth"}, 2, {"too-deep"}),
        (_long, WalkBounds(name_bytes=2000), {"names"}, 10, set()),
        (_large, WalkBounds(total_bytes=3500), {"bytes"}, 10, {"too-many-bytes"}),
    ],
    ids=["entries", "depth", "names", "bytes"],
)
def test_a_bound_that_is_met_is_said(
    root: Path, make: Callable[[Path], None], bounds: WalkBounds, partial: set[str], files: int, skipped: set[str]
) -> None:
    """What is within the bound is told, what is left out is named or given a reason; without it all is there."""
    make(root)
    assert read(root).partial == set()
    tree = read(root, bounds=bounds)
    assert (tree.partial, len(tree.entries)) == (partial, files)
    assert {entry.skipped for entry in tree.entries} - {None} == skipped


def test_names_that_wait_in_the_folders_above_count(root: Path) -> None:
    """Folders in each other, each as full as the bound, would hold that many names in memory each."""
    here = root
    for _ in range(4):
        for number in range(40):
            (here / str(number)).touch()
        (here := here / "a").mkdir()
    at = hostfs.open_folder(root)
    walk = TreeWalk(at, WalkBounds(entries=100), None)
    assert len(list(walk)) <= 100
    os.close(at)
    assert walk.partial == {"entries"}


def test_the_deadline_ends_a_walk_and_is_said(root: Path) -> None:
    """What was found before stands; a deadline that is over finds nothing."""
    _many(root)
    seen: list[str] = []
    deadline = time.monotonic() + 3600

    assert read(root, deadline=deadline, keep=lambda _, sha: seen.append(sha)).partial == set()
    assert len(seen) == 200
    tree = read(root, deadline=time.monotonic())
    assert (tree.partial, tree.entries) == ({"time"}, [])


def test_a_mount_is_not_entered(root: Path) -> None:
    """Another file system may be a stranger's, and answer never: /proc below / is named and left out."""
    at = hostfs.open_folder("/")
    try:
        seen = {found.path: found.skipped for found in TreeWalk(at, WalkBounds(depth=1), None)}
    finally:
        os.close(at)
    assert seen[b"proc"] == "other-filesystem"
    assert seen[b"etc"] == "too-deep"


@pytest.mark.parametrize("what", ["outside", "outside/secret"])
def test_a_bind_mount_of_the_same_file_system_is_not_read(root: Path, what: str) -> None:
    """A folder or a file of elsewhere that is mounted in it: named and left out, and no prune touches it."""
    place = root / "mounted"
    place.touch() if what.endswith("secret") else place.mkdir()
    program = (
        "import os, sys; from cloche.records.workspace_tree import read_tree\n"
        "print([(entry.path, entry.skipped) for entry in read_tree(os.open(sys.argv[1], os.O_RDONLY)).entries])"
    )
    script = 'mount --bind "$1/../$2" "$1/mounted" && exec "$3" -c "$4" "$1"'
    words = ["unshare", "-Urm", "sh", "-c", script, "sh", os.fspath(root), what, sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "[(b'mounted', 'other-filesystem')]\n"


@pytest.mark.user
def test_what_may_not_be_read_is_named(root: Path) -> None:
    """A file, a folder, and what is in a folder that may be listed and not entered."""
    for name in ("shut", "listed"):
        (root / name).mkdir()
        (root / name / "x").touch()
    (root / "file").touch()
    (root / "file").chmod(0)
    (root / "shut").chmod(0)
    (root / "listed").chmod(0o600)
    assert {entry.path: entry.skipped for entry in read(root).entries} == {
        b"file": "unreadable", b"shut": "unreadable", b"listed/x": "unreadable",
    }  # fmt: skip
    for name in ("shut", "listed"):
        (root / name).chmod(0o700)
