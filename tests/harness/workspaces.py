"""A sandbox's changes made by hand, as a snapshot and as changes, and a folder of the host for them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cloche.core.changes import Change, Committed
from cloche.workspace.commit import commit
from cloche.workspace.snapshot import EntryKind, Snapshot, SnapshotEntry

Wanted = tuple[Change, bytes]
Tree = dict[str, tuple[int, int, int, bytes]]  # by path: mode, owner, group, content or target


def file(path: str, data: bytes = b"new\n", what: str = "added", mode: int = 0o644, **more: Any) -> Wanted:
    """Return a file as the sandbox has it."""
    digest = hashlib.sha256(data).hexdigest()
    return Change(path=path, what=what, kind="file", mode=mode, size=len(data), sha256=digest, **more), data  # type: ignore[arg-type]


def folder(path: str, what: str = "added", mode: int = 0o755, **more: Any) -> Wanted:
    """Return a folder as the sandbox has it."""
    return Change(path=path, what=what, kind="directory", mode=mode, **more), b""  # type: ignore[arg-type]


def link(path: str, target: str, what: str = "added", **more: Any) -> Wanted:
    """Return a symbolic link as the sandbox has it."""
    return Change(path=path, what=what, kind="link", mode=0o777, target=target, **more), b""  # type: ignore[arg-type]


def removed(path: str, kind: str = "file", **more: Any) -> Wanted:
    """Return a path that the sandbox has removed."""
    return Change(path=path, what="removed", kind=kind, **more), b""  # type: ignore[arg-type]


def add_content(contents: int, data: bytes) -> int:
    """Append a file's content as the stream of a sandbox's changes holds it; return where it begins."""
    at = os.lseek(contents, 0, os.SEEK_END)
    os.write(contents, (1 << 31 | len(data)).to_bytes(4, "big") + data)
    return at


def snapshot_of(wanted: Iterable[Wanted]) -> Snapshot:
    """Return the snapshot that such changes are from."""
    contents, entries = os.memfd_create("contents"), {}
    for change, data in wanted:
        path = os.fsencode(change.path)
        kind = "removed" if change.what == "removed" else change.kind
        entries[path] = SnapshotEntry(
            path=path, kind=kind, mode=change.mode, size=len(data), offset=add_content(contents, data),
            sha256=change.sha256, target=os.fsencode(change.target),
        )  # fmt: skip
        if change.what == "renamed":
            old = os.fsencode(change.old_path)
            entries[old] = SnapshotEntry(path=old, kind="removed")
    return Snapshot(entries=entries, contents=contents)


def write(host: Path, state: Path, wanted: Iterable[Wanted], **more: Any) -> Committed:
    """Commit such changes to a folder of the host that is this user's."""
    wanted = list(wanted)
    snapshot = snapshot_of(wanted)
    at = os.open(host, os.O_RDONLY | os.O_DIRECTORY)
    try:
        owner = (os.geteuid(), os.getegid())
        more.setdefault("owner", owner)
        return commit(at, snapshot, [change for change, _ in wanted], state=os.fspath(state), **more)
    finally:
        os.close(at)
        snapshot.close()


def snapshot_between(old: Tree, new: Tree) -> Snapshot:
    """Return how one folder differs from another as overlayfs keeps it: one whiteout for a folder that is gone."""
    contents, entries = os.memfd_create("contents"), {}
    wanted = {name for name in new if old.get(name) != new[name]}
    for name in old.keys() - new.keys():
        above = os.path.dirname(name)
        if not above or (above in new and stat.S_ISDIR(new[above][0])):
            entries[os.fsencode(name)] = SnapshotEntry(path=os.fsencode(name), kind="removed")
            wanted |= {above} - {""}
    for name in list(wanted):
        while name := os.path.dirname(name):
            wanted.add(name)
    for name in wanted:
        mode, _, _, data = new[name]
        kind: EntryKind = "link" if stat.S_ISLNK(mode) else "directory" if stat.S_ISDIR(mode) else "file"
        entries[os.fsencode(name)] = SnapshotEntry(
            path=os.fsencode(name), kind=kind, mode=mode & 0o777, size=len(data) if kind == "file" else 0,
            offset=add_content(contents, data) if kind == "file" else 0,
            sha256=hashlib.sha256(data).hexdigest() if kind == "file" else "",
            target=data if kind == "link" else b"",
            is_opaque=kind == "directory" and name in old and not stat.S_ISDIR(old[name][0]),
        )  # fmt: skip
    return Snapshot(entries=dict(sorted(entries.items(), key=lambda item: item[0].split(b"/"))), contents=contents)


def content_of(host: Path) -> Tree:
    """Return everything below a folder: mode, owner and content by path."""
    found = {}
    for above, folders, files in os.walk(host):
        for name in (*folders, *files):
            path = os.path.join(above, name)
            facts = os.lstat(path)
            data = b""
            if stat.S_ISLNK(facts.st_mode):
                data = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(facts.st_mode):
                data = Path(path).read_bytes()
            found[os.path.relpath(path, host)] = (facts.st_mode, facts.st_uid, facts.st_gid, data)
    return found


def left_in(state: Path) -> list[str]:
    """Return the journals that are left."""
    records = state / "workspaces"
    return sorted(name for name in os.listdir(records) if not name.endswith(".lock")) if records.is_dir() else []


def make_old(host: Path, files: int = 2) -> None:
    """Make a folder with something for each kind of change."""
    for name in ("kept", "goes", "goes/deeper", "turns", "shut"):
        (host / name).mkdir()
    for number in range(files):
        (host / "kept" / f"changed{number}").write_text(f"old {number}\n")
        (host / "kept" / f"removed{number}").write_text(f"old removed {number}\n")
    for name in ("goes/deeper/one", "turns/inside", "moved", "script", "turns-too", "shut/in", "untouched"):
        (host / name).write_text(f"old {name}\n")
    (host / "old-link").symlink_to("untouched")
    os.link(host / "moved", host / "moved-twin")
    (host / "kept" / "changed0").chmod(0o600)


def everything(files: int = 2) -> list[Wanted]:
    """Return changes of every kind to that folder."""
    changed = [file(f"kept/changed{n}", b"new %d\n" % n, "modified", 0o640) for n in range(files)]
    added = [file(f"added/deep/{n}", b"added %d\n" % n) for n in range(files)]
    return [
        folder("added", mode=0o750),
        folder("added/deep", mode=0o555),
        *added,
        *changed,
        *(removed(f"kept/removed{n}") for n in range(files)),
        removed("goes", "directory"),
        removed("goes/deeper", "directory"),
        removed("goes/deeper/one"),
        removed("turns/inside"),
        file("turns", b"a file now\n", "modified"),
        folder("turns-too", "modified"),
        file("turns-too/inside", b"in what was a file\n"),
        file("renamed", b"old moved\n", "renamed", old_path="moved"),
        file("script", b"old script\n", "mode", 0o755),
        folder("shut", "mode", 0o500),
        link("old-link", "kept", "modified"),
        link("new-link", "../outside"),
    ]


def interrupted_at(number: int, how: Callable[[], None]) -> tuple[Callable[[str], None], list[str]]:
    """Return a function for `step` that does something when it is called for that time, and the names it was told."""
    told: list[str] = []

    def step(name: str) -> None:
        told.append(name)
        if len(told) - 1 == number:
            how()

    return step, told
