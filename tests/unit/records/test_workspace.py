"""A workspace's snapshot is recorded, compared and restored; nothing outside of the folder is read or written by it."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche import hostfs
from cloche.core.errors import InvalidRequest, NotFound
from cloche.records.blobs import Blobs
from cloche.records.database import Database
from cloche.records.workspace import WorkspaceSnapshots, compare
from cloche.records.workspace_entries import entries_of
from cloche.records.workspace_restore import Restoration, restore
from cloche.records.workspace_tree import WalkBounds

OWN, CANARY, SHA = b"own", b"canary of the host", "0" * 64
MANIFEST = ".cloche-ws-restore.json"
pytestmark = [pytest.mark.user_soak, pytest.mark.timeout(120)]


@pytest.fixture
def records(location: str) -> Iterator[WorkspaceSnapshots]:
    """Give the records in a database of the test's own."""
    database = Database(location)
    yield WorkspaceSnapshots(database)
    database.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a workspace with a/one, b/two and top; beside it is the like of that, which nobody may get at."""
    for name, data in (("root", OWN), ("outside", CANARY)):
        for path in ("a/one", "b/two", "top"):
            place = tmp_path / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    return tmp_path / "root"


@pytest.fixture
def at(root: Path) -> Iterator[int]:
    """Hold the workspace open; however it ends, all else that was opened is closed."""
    fd = hostfs.open_folder(root)
    before = len(os.listdir("/proc/self/fd"))
    yield fd
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the database's own
    os.close(fd)


def sha256(data: bytes) -> str:
    """Return the SHA-256 as text."""
    return hashlib.sha256(data).hexdigest()


def take(records: WorkspaceSnapshots, at: int, **settings: Any) -> str:
    """Make a snapshot with contents and return its id."""
    return str(records.create(at, workspace_path="/w", **{"contents": True, **settings})["id"])


def results(document: dict[str, Any]) -> dict[str, str]:
    """Return the result of each path."""
    return {one["path"]: one["result"] for one in document["results"]}


def outside_is_whole(root: Path) -> bool:
    """Tell whether the folder beside the workspace is what it was."""
    found = {path for path in (root.parent / "outside").rglob("*") if not path.is_dir()}
    return len(found) == 3 and all(path.read_bytes() == CANARY and not path.is_symlink() for path in found)


# Records


def test_the_document_is_that_of_the_reference(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """Every field is there, git's state and the caller's memory and tools among them; a page lacks the files alone."""
    (root / ".git").mkdir()
    document = records.create(at, workspace_path=str(root), session_id="agent-7", memory={"files": ["\ud800"]})
    head = {name: value for name, value in document.items() if name not in ("files", "excluded")}
    assert document["id"].startswith("ws_")
    assert document["files"][0] == {"path": "a/one", "size": 3, "mode": "0644", "sha256": sha256(OWN)}
    assert {**head, "id": 0, "createdAt": 0, "git": document["git"]["isRepository"]} == {
        "id": 0, "createdAt": 0, "sessionId": "agent-7", "workspacePath": str(root), "contents": False, "git": False,
        "memory": {"files": ["\\ud800"]}, "tools": {"offered": [], "pendingApprovals": [], "remembered": []},
        "totals": {"files": 3, "bytes": 9}, "isPartial": False, "partialReasons": [],
    }  # fmt: skip
    assert document["excluded"] == [".git"]
    assert records.get(document["id"]) == document
    assert records.list(session_id="agent-7")["items"] == [head]
    assert records.list(session_id="agent-8")["items"] == []


def test_another_projects_snapshot_is_not_there(records: WorkspaceSnapshots, at: int) -> None:
    """Whoever asks for it learns as much as about one that never was."""
    mine = take(records, at)
    other = WorkspaceSnapshots(records._database, project="other")
    for ask in (other.get, other.delete, lambda id_: other.diff(id_, id_), lambda id_: other.restore(id_, at)):
        with pytest.raises(NotFound):
            ask(mine)
    assert other.list()["items"] == []
    assert records.get(mine)["contents"]


@pytest.mark.parametrize("label", ["", "x" * 65])
def test_a_label_is_bounded(records: WorkspaceSnapshots, at: int, label: str) -> None:
    """At most 64 characters, and not none."""
    with pytest.raises(InvalidRequest, match="sessionId"):
        take(records, at, session_id=label)


def test_contents_are_kept_once_as_long_as_somebody_names_them(
    records: WorkspaceSnapshots, root: Path, at: int
) -> None:
    """A deletion removes what no snapshot names, and what a killed writer left, but nothing while somebody stores."""
    blobs = root.parent / "cloche/blobs/sha256"
    first = take(records, at)
    (kept,) = (path for path in blobs.rglob("*") if path.is_file() and path.name != ".lock")
    assert (f"{kept.parent.name}{kept.name}", stat.S_IMODE(kept.stat().st_mode)) == (sha256(OWN), 0o600)
    before = kept.stat()
    second = take(records, at)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (half := kept.with_name(".1-half.cloche")).write_bytes(b"ha")
    assert records.delete(first) == 1
    assert (kept.exists(), half.exists()) == (True, False)
    with Blobs(str(root.parent / "cloche")).held():
        assert records.delete(second) is None
        assert kept.exists()
    assert records.delete(take(records, at, contents=False)) == 1
    assert not kept.exists()


# Comparison


def test_a_difference_is_that_of_the_reference(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """What was added, removed, modified, got another mode, and what is unknown since one of the two skipped it."""
    (root / "big.bin").touch()
    before = take(records, at)
    os.truncate(root / "big.bin", 11 << 20)
    (root / "a/one").unlink()
    (root / "b/two").write_bytes(b"new")
    (root / "top").chmod(0o755)
    Path(os.fsdecode(bytes(root) + b"/\xff")).touch()
    (root / "link").symlink_to("top")
    after = take(records, at)
    assert records.diff(before, after) == {
        "added": ["link", {"pathBase64": "/w=="}],
        "removed": ["a/one"],
        "modified": [{"path": "b/two", "from": sha256(OWN), "to": sha256(b"new")}],
        "modeChanged": [{"path": "top", "from": "0644", "to": "0755"}],
        "unknown": ["big.bin"],
    }


def file(path: str, sha: str = SHA) -> dict[str, Any]:
    """Return the entry of a file."""
    return {"path": path, "size": 1, "mode": "0644", "sha256": sha}


@pytest.mark.parametrize(
    ("old", "new", "ended", "expected"),
    [
        ([file("d/x")], [{"path": "d", "sha256": "skipped:unreadable"}], [], {"unknown": ["d", "d/x"]}),
        ([file("x"), file("y")], [file("x")], ["time"], {"unknown": ["y"]}),
        ([file("x"), file("y")], [file("x")], ["depth"], {"removed": ["y"]}),
        ([{"path": "l", "link": "a"}], [file("l")], [], {"modified": [{"path": "l", "from": "link:a", "to": SHA}]}),
    ],
    ids=["below what was skipped", "the walk ended", "the walk did not end", "link and file"],
)
def test_what_cannot_be_known_is_not_called_removed(
    old: list[Any], new: list[Any], ended: list[str], expected: dict[str, Any]
) -> None:
    """A side that did not come to a path says nothing about it."""
    found = compare({"files": old, "partialReasons": []}, {"files": new, "partialReasons": ended})
    assert {name: value for name, value in found.items() if value} == expected


# Restoration


def test_files_are_restored_as_they_were(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """Content and mode, but no setuid; what the snapshot does not know stays; the manifest says it all."""
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to("a/one")
    (root / "out").symlink_to("/etc")
    (root / "top").chmod(0o4750)
    (root / "node_modules").mkdir()
    snapshot = take(records, at)
    shutil.rmtree(root / "a")
    (root / "link").unlink()
    (root / "top").write_bytes(b"other")
    (root / "top").chmod(0o600)
    (root / "new").touch()
    planned = results(records.restore(snapshot, at, manifest_only=True))
    assert {planned[name] for name in ("a/one", "top", "link")} == {"skipped:manifest-only"}
    assert ((root / "top").read_bytes(), (root / "a").exists()) == (b"other", False)
    done = records.restore(snapshot, at)
    assert results(done) == {
        "a/one": "restored", "b/two": "unchanged", "link": "restored", "node_modules": "excluded", "out":
        "skipped:leads-out", "pipe": "skipped:fifo", "top": "restored",
    }  # fmt: skip
    assert ((root / "top").read_bytes(), stat.S_IMODE((root / "top").stat().st_mode)) == (OWN, 0o750)
    assert ((root / "a/one").read_bytes(), os.readlink(root / "link"), (root / "new").exists()) == (OWN, "a/one", True)
    manifest = json.loads((root / MANIFEST).read_bytes())
    assert (manifest["snapshot"], manifest["isComplete"]) == (snapshot, True)
    assert manifest["results"] == done["results"]
    assert set(results(records.restore(snapshot, at)).values()) >= {"unchanged"}
    assert MANIFEST not in [one.get("path") for one in records.get(take(records, at))["files"]]


def test_without_contents_files_are_compared_alone(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """What is the same is unchanged; what is not, stays as it is and is told of."""
    snapshot = take(records, at, contents=False)
    (root / "top").write_bytes(b"other")
    (root / "b/two").chmod(0o600)
    assert results(records.restore(snapshot, at)) == {
        "a/one": "unchanged", "b/two": "restored", "top": "skipped:content-not-kept",
    }  # fmt: skip
    assert (root / "top").read_bytes() == b"other"


def test_prune_removes_what_the_snapshot_does_not_know(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """Folders that become empty too; nothing that was excluded or skipped, or that was empty before."""
    for name in (".git", "src/__pycache__", "empty"):
        (root / name).mkdir(parents=True)
    os.mkfifo(root / "pipe")
    snapshot = take(records, at)
    (root / "pipe").unlink()
    (root / "pipe").write_bytes(b"in its place")
    for name in (".git/config", "src/__pycache__/x", "a/new", "d/e/new"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "gone").symlink_to(root.parent / "outside")
    (root / "top").unlink()
    (root / "top").mkdir()
    (root / "top/in the way").touch()
    found = results(records.restore(snapshot, at, prune=True))
    assert {name for name, result in found.items() if result == "removed"} == {
        "a/new", "d/e/new", "gone", "top/in the way",
    }  # fmt: skip
    assert found["top"] == "restored"
    assert sorted(os.listdir(root)) == [MANIFEST, ".git", "a", "b", "empty", "pipe", "src", "top"]
    assert ((root / ".git/config").exists(), (root / "src/__pycache__/x").exists()) == (True, True)
    assert outside_is_whole(root)


def test_who_does_not_know_all_files_removes_none(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """A snapshot that met its bound would prune what it never came to."""
    snapshot = take(records, at, bounds=WalkBounds(entries=2))
    with pytest.raises(InvalidRequest, match="entries"):
        records.restore(snapshot, at, prune=True)
    with pytest.raises(InvalidRequest, match="manifest"):
        records.restore(snapshot, at, prune=True, manifest_only=True)
    assert (root / "top").exists()


def naively(root: Path, path: str, data: bytes = b"old") -> None:
    """Write as a plain restoration does: by path, beside and renamed."""
    place = os.path.join(root, path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    Path(f"{place}.part").write_bytes(data)
    os.rename(f"{place}.part", place)


def _replaced_by_link(root: Path) -> None:
    (root / "b").rename(root / "moved")
    (root / "b").symlink_to("../outside/b")


def test_a_folder_that_became_a_link_is_not_written_through(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """A plain restoration writes into the folder outside; ours leaves the link and says so."""
    snapshot = take(records, at)
    _replaced_by_link(root)
    naively(root, "b/two")
    assert (root.parent / "outside/b/two").read_bytes() == b"old"
    (root.parent / "outside/b/two").write_bytes(CANARY)
    assert results(records.restore(snapshot, at))["b/two"] == "skipped:link"
    assert outside_is_whole(root)


@pytest.mark.parametrize("is_naive", [True, False], ids=["naive", "ours"])
def test_a_folder_that_becomes_a_link_while_a_file_is_written(
    records: WorkspaceSnapshots, root: Path, at: int, monkeypatch: pytest.MonkeyPatch, is_naive: bool
) -> None:
    """Between writing beside and renaming, a plain restoration is led outside; ours stays in the folder it opened."""
    snapshot = take(records, at)
    (root / "b/two").write_bytes(b"changed")
    really, swapped = os.rename, []

    def rename_after_a_swap(source: Any, target: Any, **at: Any) -> None:
        if os.path.basename(target) == "two" and not swapped:
            swapped.append(True)
            really(root / "b", root / "moved")
            (root / "b").symlink_to("../outside/b")
            if is_naive:
                really(root / "moved/two.part", root.parent / "outside/b/two.part")
        really(source, target, **at)

    monkeypatch.setattr(os, "rename", rename_after_a_swap)
    if is_naive:
        naively(root, "b/two")
        assert not outside_is_whole(root)
        return
    assert results(records.restore(snapshot, at))["b/two"] == "restored"
    assert swapped
    assert (root / "moved/two").read_bytes() == OWN
    assert outside_is_whole(root)


def test_another_name_of_a_file_keeps_its_content(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """`open` writes the file outside that has a second name here; ours gives the name a new file."""
    snapshot, elsewhere = take(records, at), root.parent / "outside/top"
    (root / "top").unlink()
    os.link(elsewhere, root / "top")
    (root / "top").write_bytes(OWN)
    assert elsewhere.read_bytes() == OWN
    elsewhere.write_bytes(CANARY)
    assert results(records.restore(snapshot, at))["top"] == "restored"
    assert ((root / "top").read_bytes(), elsewhere.read_bytes()) == (OWN, CANARY)


def test_another_name_of_a_file_keeps_its_mode(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """Where only the mode differs, `chmod` would open the file outside to everybody."""
    (root / "top").chmod(0o666)
    snapshot, elsewhere = take(records, at), root.parent / "outside/top"
    elsewhere.write_bytes(OWN)
    elsewhere.chmod(0o600)
    (root / "top").unlink()
    os.link(elsewhere, root / "top")
    (root / "top").chmod(0o666)
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o666
    elsewhere.chmod(0o600)
    assert results(records.restore(snapshot, at))["top"] == "restored"
    assert [stat.S_IMODE(place.stat().st_mode) for place in (root / "top", elsewhere)] == [0o666, 0o600]


TRICKS: dict[str, dict[str, Any]] = {
    "absolute": file("/OUTSIDE/planted"),
    "upwards": file("a/../../outside/planted"),
    "upwards in base64": {**file("x"), "path": None, "pathBase64": "Li4vb3V0c2lkZS9wbGFudGVk"},
    "nothing": file(""),
    "a NUL": file("a\0b"),
    "two names": {**file("x"), "pathBase64": "eA=="},
    "a lone surrogate": file("\ud800"),
    "a hash that is a path": file("x", "../" * 20),
    "a mode that is none": {**file("x"), "mode": "-100"},
    "an unknown field": {**file("x"), "owner": 0},
    "twice": file("a/one"),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_document_with_a_trick_is_refused_as_a_whole(root: Path, trick: str) -> None:
    """Nothing of it is restored; joined to the folder as it is, a path of these is written outside."""
    item = TRICKS[trick]
    if trick in ("absolute", "upwards"):
        naively(root, item["path"].replace("/OUTSIDE", f"{root.parent}/outside"))
        assert not outside_is_whole(root)
    with pytest.raises(InvalidRequest, match=r"^files: "):
        entries_of([file("a/one"), {name: value for name, value in item.items() if value is not None}])


def test_what_is_excluded_is_not_written_either(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """A document that names git's hooks, or goes through a link of its own, gets neither."""
    files = [file(".git/hooks/post-checkout"), {"path": "l", "link": "../outside"}, file("l/planted"), file(MANIFEST)]
    with Blobs(str(root.parent)).held() as blobs:
        blobs.store(b"x", one := sha256(b"x"))
        entries = entries_of([{**item, **({"sha256": one} if "sha256" in item else {})} for item in files])
        (root / "l").symlink_to("../outside")
        done = restore(Restoration(snapshot="ws_", root=at, entries=entries, excluded=[], blobs=blobs))
    assert results({"results": done}) == {
        ".git/hooks/post-checkout": "excluded", MANIFEST: "excluded", "l/planted": "skipped:link",
        "l": "skipped:leads-out",
    }  # fmt: skip
    assert not (root / ".git").exists()
    assert outside_is_whole(root)


@pytest.mark.parametrize(
    ("harm", "why"),
    [(lambda blob: blob.write_bytes(b"bad"), "content-damaged"), (lambda blob: blob.unlink(), "content-missing")],
    ids=["damaged", "missing"],
)
def test_content_is_checked_before_it_is_used(
    records: WorkspaceSnapshots, root: Path, at: int, harm: Callable[[Path], object], why: str
) -> None:
    """A blob that is not what its name says replaces nothing."""
    snapshot = take(records, at)
    harm(root.parent / "cloche/blobs/sha256" / sha256(OWN)[:2] / sha256(OWN)[2:])
    (root / "top").write_bytes(b"later")
    assert results(records.restore(snapshot, at))["top"] == f"skipped:{why}"
    assert (root / "top").read_bytes() == b"later"


KILLED = """
import os, sys
from cloche import hostfs
from cloche.records.database import Database
from cloche.records.workspace import WorkspaceSnapshots

really = os.rename
def rename_once_told(source, target, **at):
    if target == "two":
        print("written beside", flush=True)
        sys.stdin.read()
    really(source, target, **at)
os.rename = rename_once_told
WorkspaceSnapshots(Database(sys.argv[1])).restore(sys.argv[2], hostfs.open_folder(sys.argv[3]))
"""


def test_a_restoration_that_is_killed_leaves_whole_files(
    records: WorkspaceSnapshots, location: str, root: Path, at: int
) -> None:
    """Each name has the file of before or of the snapshot; the manifest says that it is not complete."""
    snapshot = take(records, at)
    for name in ("a/one", "b/two", "top"):
        (root / name).write_bytes(b"later")
    command = [sys.executable, "-c", KILLED, location, snapshot, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written beside\n"
        child.send_signal(signal.SIGKILL)
    assert [(root / name).read_bytes() for name in ("a/one", "b/two", "top")] == [OWN, b"later", b"later"]
    assert json.loads((root / MANIFEST).read_bytes())["isComplete"] is False
    assert results(records.restore(snapshot, at, prune=True))["b/two"] == "restored"
    assert sorted(os.listdir(root / "b")) == ["two"]


def test_a_manifest_that_cannot_be_written_stops_it_all(records: WorkspaceSnapshots, root: Path, at: int) -> None:
    """Nothing is restored then; a link that has its name is replaced, and not written through."""
    snapshot = take(records, at)
    (root / "top").write_bytes(b"later")
    (root / MANIFEST).mkdir()
    with pytest.raises(InvalidRequest, match="cannot be written"):
        records.restore(snapshot, at)
    assert (root / "top").read_bytes() == b"later"
    (root / MANIFEST).rmdir()
    (root / MANIFEST).symlink_to("../outside/top")
    records.restore(snapshot, at)
    assert not (root / MANIFEST).is_symlink()
    assert outside_is_whole(root)
