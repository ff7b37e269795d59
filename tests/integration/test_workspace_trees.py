"""Random folders, changed at random: what is compared and then written makes the host's folder equal to the guest's."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from cloche.workspace.commit import commit
from cloche.workspace.compare import make_diff
from tests.harness.workspaces import Tree, content_of, left_in, snapshot_between

pytestmark = pytest.mark.user_soak
NAMES = "abcd"  # few, so that kinds take each other's places
LATER_NS = 1 << 62


def change(root: Path, chance: random.Random, times: int) -> None:
    """Make, write, rename, remove and chmod something, so many times."""
    for _ in range(times):
        folder = root
        while chance.random() < 0.6:
            inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink())
            if not inside:
                break
            folder = chance.choice(inside)
        _change(folder / chance.choice(NAMES), folder / chance.choice(NAMES), chance)


def _change(path: Path, other: Path, chance: random.Random) -> None:
    if os.path.lexists(path) and chance.random() < 0.35:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        if chance.random() < 0.6:
            return
    what = chance.choice(("mkdir", "link", "write", "rename", "chmod"))
    if not os.path.lexists(path):
        if what == "mkdir":
            path.mkdir()
        elif what == "link":
            path.symlink_to(chance.choice(("a", "../b", "/outside")))
        else:
            path.write_bytes(chance.randbytes(chance.randrange(9)))
    elif what == "rename" and not os.path.lexists(other):
        path.rename(other)
    elif what == "chmod" and not path.is_symlink():
        path.chmod(chance.choice((0o755, 0o700, 0o775)) if path.is_dir() else chance.choice((0o644, 0o755, 0o600)))
    elif what == "write" and path.is_file() and not path.is_symlink():
        path.write_bytes(chance.randbytes(chance.randrange(9)))


def written(host: Path, state: Path, old: Tree, new: Tree) -> None:
    """Compare, and commit all of it."""
    snapshot = snapshot_between(old, new)
    at = os.open(host, os.O_RDONLY)
    try:
        diff = make_diff(snapshot, at, hidden=set(), opened_ns=LATER_NS)
        done = commit(at, snapshot, diff.changes, state=os.fspath(state), owner=(os.geteuid(), os.getegid()))
    finally:
        os.close(at)
        snapshot.close()
    assert (diff.left_out, done.left) == ((), {})


@pytest.mark.parametrize("times", [8, pytest.param(400, marks=pytest.mark.soak)])
def test_the_hosts_folder_becomes_what_the_guest_has(tmp_path: Path, times: int) -> None:
    """Whatever was made of what, every path, mode and text is the guest's then, and nothing else is left."""
    seed = random.SystemRandom().randrange(1 << 32)
    for number in range(seed, seed + times):
        chance = random.Random(number)
        host, guest, state = tmp_path / "host", tmp_path / "guest", tmp_path / "state"
        host.mkdir()
        change(host, chance, 25)
        shutil.copytree(host, guest, symlinks=True)
        change(guest, chance, chance.randrange(1, 20))
        old, new = content_of(host), content_of(guest)
        written(host, state, old, new)
        assert content_of(host) == new, f"seed {number}"
        assert left_in(state) == [], f"seed {number}"
        for one in (host, guest):
            shutil.rmtree(one)
