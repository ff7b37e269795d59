"""A sandbox's changes without a sandbox: snapshots from trees on the host, and from overlays in a namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloche
from cloche.core.changes import Change, Diff
from cloche.workspace.compare import Comparison
from cloche.workspace.snapshot import Snapshot, SnapshotReader

PACKAGES = Path(cloche.__file__).parent
WALKER = """
import json, os, sys
os.dup2(int(sys.argv[3]), 3)
sys.path.insert(0, sys.argv[1])
from init.files import serve
serve({"do": "changes", **json.loads(sys.argv[2])})
"""
BOUNDS: Mapping[str, int] = {"most": 1 << 30, "entries": 200_000}
# The arguments: lower folder, program inside, where its tree is copied to, and the walker's command.
OVERLAY = """
set -e
mount -t tmpfs none "$3"
mkdir "$3/upper" "$3/work" "$3/merged"
mount -t overlay none -o userxattr,lowerdir="$1",upperdir="$3/upper",workdir="$3/work" "$3/merged"
(cd "$3/merged" && sh -eu -c "$2") >&2
cp -a "$3/merged" "$4/seen" >&2
shift 4
exec "$@"
"""


def read_stream(stream: bytes, answer: Mapping[str, Any], folder: Path, *, is_whole: bool = False) -> Snapshot:
    """Return the snapshot that a stream holds."""
    reader = SnapshotReader(folder, is_whole=is_whole)
    try:
        reader.feed(stream)
        return reader.finish(answer)
    except BaseException:
        reader.close()
        raise


def _walk(command: list[str], folder: Path, *, is_whole: bool) -> Snapshot:
    into, out = os.pipe()
    try:
        done = subprocess.run([*command, str(out)], pass_fds=[out], capture_output=True, check=False)
    finally:
        os.close(out)
    with os.fdopen(into, "rb") as answered:
        answer = json.loads(answered.read() or b"null")
    assert done.returncode == 0, done.stderr.decode()
    assert "error" not in answer, answer
    return read_stream(done.stdout, answer, folder, is_whole=is_whole)


def _command(path: str, order: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", WALKER, str(PACKAGES), json.dumps({"path": path, **BOUNDS, **order})]


@contextmanager
def snapshot_of(folder: Path, scratch: Path, **order: object) -> Iterator[Snapshot]:
    """Give what the walker says of a folder: a whole snapshot where there is a time `since`."""
    snapshot = _walk(_command(str(folder), order), scratch, is_whole="since" in order)
    try:
        yield snapshot
    finally:
        snapshot.close()


@contextmanager
def changed_inside(lower: Path, program: str, scratch: Path, **order: object) -> Iterator[Snapshot]:
    """Run a program in an overlay over a folder, in a namespace; what it has seen at the end is in `scratch/seen`."""
    (place := scratch / "overlay").mkdir(exist_ok=True)
    inside = ["sh", "-c", OVERLAY, "sh", str(lower), program, str(place), str(scratch)]
    snapshot = _walk(["unshare", "-rm", *inside, *_command(str(place / "upper"), order)], scratch, is_whole=False)
    try:
        yield snapshot
    finally:
        snapshot.close()


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Give a descriptor of a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def by_path(found: Diff | Comparison) -> dict[str, Change]:
    """Return changes by their paths."""
    return {change.path: change for change in found.changes}


def told(found: Diff | Comparison) -> dict[str, str]:
    """Return what becomes of each path, in a word."""
    return {change.path: change.what for change in found.changes}


def left_out(found: Diff | Comparison) -> dict[str, str]:
    """Return why paths are left out."""
    return {one.path: one.reason for one in found.left_out}


def tree_of(folder: Path) -> dict[str, tuple[str, bytes, int]]:
    """Return what is in a tree: by path the kind, content or target, and whether a file is executable."""
    found: dict[str, tuple[str, bytes, int]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.fsencode(path.readlink()), 0)
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mode & 0o100)
    return found
