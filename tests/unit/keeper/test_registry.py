"""Names of sandboxes that are kept: who has one, what is left of the dead, and folders that somebody else has made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.keeper import registry


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a runtime folder, and no other place."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(registry, "SYSTEM", str(tmp_path / "none" / "system"))
    return folder


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a/b", "..", "a" * 64, "a\n", "ä", None, 1])
def test_what_is_no_name_is_refused(name: object) -> None:
    """A name is a label as in DNS: nothing of a path, and nothing that two users could write differently."""
    with pytest.raises(InvalidRequest, match="name: "):
        registry.check_name(name)


@pytest.mark.usefixtures("runtime")
def test_a_name_has_one_holder_until_nobody_holds_its_descriptor() -> None:
    """A second one is told so, whichever descriptor is open; what the dead left is in nobody's way."""
    first = registry.claim("x")
    first.describe({"version": 1})
    again = os.dup(first.lock)
    first.release()
    with pytest.raises(InvalidRequest, match="'x' already"):
        registry.claim("x")
    assert [one.name for one in registry.found()] == ["x"]
    assert registry.find("x").entry == {"version": 1}
    os.close(again)
    assert registry.found() == []
    with pytest.raises(InvalidRequest, match="no sandbox of yours"):
        registry.find("x")
    registry.claim("x").give_up()


def test_clearing_removes_what_the_dead_left_and_nothing_of_the_living(runtime: Path) -> None:
    """Socket, entry and lock of the dead go, also one alone."""
    dead, living = registry.claim("dead"), registry.claim("living")
    dead.describe({})
    dead.release()
    (runtime / "cloche" / "half.sock").touch(0o600)
    assert registry.clear() == [
        f"{runtime}/cloche/{name}" for name in ("dead.sock", "dead.json", "dead.lock", "half.sock", "half.lock")
    ]
    assert sorted(os.listdir(runtime / "cloche")) == ["living.lock", "living.sock"]
    living.give_up()
    assert os.listdir(runtime / "cloche") == []


def test_a_lock_that_was_removed_while_it_was_taken_is_not_one(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened the file of a keeper that then removed it and ended would hold a name beside the next one."""
    flock, removed = registry.fcntl.flock, []

    def take(fd: int, how: int) -> None:
        if not removed and os.readlink(f"/proc/self/fd/{fd}").endswith("x.lock"):
            removed.append(fd)
            (runtime / "cloche" / "x.lock").unlink()
        flock(fd, how)

    monkeypatch.setattr(registry.fcntl, "flock", take)
    held = registry.claim("x")
    assert removed
    assert os.path.samestat(os.fstat(held.lock), os.stat(runtime / "cloche" / "x.lock"))
    held.give_up()


def _linked(runtime: Path) -> None:
    (runtime.parent / "elsewhere").mkdir(mode=0o700)
    (runtime / "cloche").symlink_to(runtime.parent / "elsewhere")


def _open_to_others(runtime: Path) -> None:
    (runtime / "cloche").mkdir()
    (runtime / "cloche").chmod(0o750)


def _no_folder(runtime: Path) -> None:
    (runtime / "cloche").touch()


def _anothers(runtime: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    (runtime / "cloche").mkdir(mode=0o700)
    os.chown(runtime / "cloche", 65534, 65534)


@pytest.mark.parametrize("made", [_linked, _open_to_others, _no_folder, _anothers])
def test_a_folder_that_is_not_ours_alone_is_refused(runtime: Path, made: object) -> None:
    """Whoever made it could put a socket or a lock of theirs in it; nothing is written there."""
    made(runtime)  # type: ignore[operator]
    for use in (registry.found, registry.clear, lambda: registry.claim("x"), lambda: registry.find("x")):
        with pytest.raises(BackendUnavailable, match="Remove what is there"):
            use()
    assert not (runtime.parent / "elsewhere").exists() or os.listdir(runtime.parent / "elsewhere") == []


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_lock_that_is_no_file_is_refused(runtime: Path, kind: str) -> None:
    """No link is followed, and nothing waited for; the list, and clearing up, know the other names all the same."""
    other = registry.claim("y")
    lock = runtime / "cloche" / "x.lock"
    if kind == "link":
        lock.symlink_to(runtime / "target")
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(BackendUnavailable, match=r"x\.lock is not a lock file of this user"):
        registry.claim("x")
    assert not (runtime / "target").exists()
    assert [one.name for one in registry.found()] == ["y"]
    assert registry.clear() == []
    other.give_up()
    assert registry.found() == []


def test_a_runtime_folder_that_others_write_to_is_passed_over(runtime: Path) -> None:
    """As `/tmp` would be: the next place is the state folder, made for its user alone."""
    runtime.chmod(0o777)
    registry.claim("x").release()
    assert os.listdir(runtime) == []
    assert (runtime.parent / "state" / "cloche" / "run").stat().st_mode & 0o777 == 0o700


def test_a_name_that_is_taken_in_one_place_is_taken_in_all(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell without a runtime folder must not open a second sandbox of the same name."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    held = registry.claim("x")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with pytest.raises(InvalidRequest, match="'x' already"):
        registry.claim("x")
    assert registry.find("x").path == str(tmp_path / "state" / "cloche" / "run")
    held.give_up()


@pytest.fixture
def temporary(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have no runtime folder, a home that nobody can write to, and a folder for temporary files."""
    (runtime.parent / "file").touch()
    folder = runtime.parent / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(runtime.parent / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_without_a_home_names_are_among_temporary_files(
    runtime: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of this user's alone, which is found again, also by who has a runtime folder."""
    held = registry.claim("x")
    own = temporary / f"cloche-{os.geteuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    assert registry.find("x").path == str(own / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with pytest.raises(InvalidRequest, match="'x' already"):
        registry.claim("x")
    held.give_up()


@pytest.mark.parametrize("what", ["a link", "a folder of others'", "a folder that anybody may replace"])
def test_a_temporary_folder_that_others_made_is_refused(temporary: Path, what: str) -> None:
    """Whoever comes first to a folder for all users could have the sockets of another one."""
    own = temporary / f"cloche-{os.geteuid()}"
    if what == "a link":
        (temporary.parent / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(temporary.parent / "elsewhere")
    elif what == "a folder of others'":
        own.mkdir()
        own.chmod(0o777)
    else:
        temporary.chmod(0o777)
    with pytest.raises(BackendUnavailable, match="no folder for the sockets"):
        registry.claim("x")
