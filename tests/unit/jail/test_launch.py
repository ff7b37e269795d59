"""What helpers are started from is compiled once per installation, and a kept archive is never trusted blindly."""

import hashlib
import marshal
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cloche.jail.setup import launch
from cloche.jail.syscalls import run_beside


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package of two small modules in the place of our own."""
    for folder in launch.HELPER_PACKAGES:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "jail" / "steps.py").write_text("answer = 1041\n")
    monkeypatch.setattr(launch, "PACKAGE", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def _archive() -> dict[str, bytes]:
    launch._archive.cache_clear()
    try:
        found: dict[str, bytes] = marshal.loads(launch._archive(False))
    finally:
        launch._archive.cache_clear()
    return found


def _answer() -> object:
    names: dict[str, object] = {}
    exec(marshal.loads(_archive()["jail.steps"]), names)
    return names["answer"]


def _kept(package: Path) -> Path:
    (found,) = (package / "jail" / "__pycache__").glob("helper.*.archive")
    return found


def test_an_archive_is_kept_and_used_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process compiles nothing."""
    assert _answer() == 1041
    monkeypatch.setattr(launch, "_compile", lambda path: pytest.fail(f"compiled {path} again"))
    assert _answer() == 1041


def test_a_changed_source_is_compiled_again(package: Path) -> None:
    """What is kept holds for the files that it was made of."""
    assert _answer() == 1041
    launch._compile.cache_clear()
    (package / "jail" / "steps.py").write_text("answer = 4200\n")
    assert _answer() == 4200


@pytest.mark.parametrize(
    "damage",
    [b"", b"nonsense", marshal.dumps(("a", b"b", b"c")), marshal.dumps(7)],
    ids=["empty", "nonsense", "others' words", "a number"],
)
def test_a_damaged_archive_is_made_again(package: Path, damage: bytes) -> None:
    """A file that is cut, foreign or altered is replaced, not believed."""
    assert _answer() == 1041
    _kept(package).write_bytes(damage)
    assert _answer() == 1041
    key, archive, digest = marshal.loads(_kept(package).read_bytes())
    _kept(package).write_bytes(marshal.dumps((key, archive[:-1] + b"x", digest)))
    assert _answer() == 1041


@pytest.fixture(params=["unwanted", "in the way"])
def own(package: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's own cache, where nothing is kept beside the package: it is unwanted there, or impossible."""
    if request.param == "unwanted":
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    else:
        (package / "jail" / "__pycache__").write_text(request.param)
    return package / "cache" / "cloche" / "helpers"


def test_what_is_not_kept_beside_the_package_is_in_the_users_cache(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process compiles nothing there, either, and nobody else can write to what it reads."""
    assert _answer() == 1041
    (kept,) = own.iterdir()
    assert (own.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    assert not [*own.parents[1].parent.glob("jail/__pycache__/*")]
    monkeypatch.setattr(launch, "_compile", lambda path: pytest.fail(f"compiled {path} again"))
    assert _answer() == 1041


@pytest.mark.parametrize("place", ["folder", "file", "link"])
def test_what_others_may_have_written_is_not_run(own: Path, place: str) -> None:
    """A folder or a file that others may write to, and a link, is passed by; everything works, and is compiled."""
    assert _answer() == 1041
    (kept,) = own.iterdir()
    key, archive, _ = marshal.loads(kept.read_bytes())
    hostile = archive.replace(
        b"\x11\x04\x00\x00", b"\x12\x04\x00\x00"
    )  # 1042 for 1041; a small one is none of its constants
    assert hostile != archive
    kept.write_bytes(marshal.dumps((key, hostile, hashlib.blake2b(hostile).digest())))
    assert _answer() == 1042  # as long as it is the user's own
    if place == "link":
        kept.rename(own / "elsewhere")
        kept.symlink_to("elsewhere")
    else:
        (own if place == "folder" else kept).chmod(0o777)
    assert _answer() == 1041


def test_where_nothing_can_be_kept_all_works(package: Path) -> None:
    """Files stand where both folders should be."""
    (package / "jail" / "__pycache__").write_text("in the way")
    (package / "cache").write_text("in the way")
    assert _answer() == 1041


def test_helpers_read_from_a_file_that_nobody_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory file serves all helpers of a process, so none of them may alter what the next one reads."""
    monkeypatch.setattr(launch, "_archive_files", {})
    archive = launch._write_archive({"jail": b"one", "jail.steps": b"three", "interpreter": b""})
    try:
        offsets = marshal.loads(os.pread(archive.fd, archive.head, 0))
        found = {name: os.pread(archive.fd, end - start, start) for name, (start, end) in offsets.items()}
        assert found == {"jail": b"one", "jail.steps": b"three", "interpreter": b""}
        assert archive.size == os.fstat(archive.fd).st_size == archive.head + len(b"onethree") + archive.boot
        for change in (lambda: os.pwrite(archive.fd, b"x", 0), lambda: os.truncate(archive.fd, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(archive.fd)


def test_a_descriptor_that_the_caller_closed_is_not_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its number may have become another file's, whose content no helper may ever run."""
    monkeypatch.setattr(launch, "_archive_files", {})
    first = launch._archive_file()
    (tmp_path / "other").write_bytes(bytes(first.size))
    with (tmp_path / "other").open("rb") as other:
        # At once: another thread may want a number, too.
        stranger = os.dup2(other.fileno(), first.fd, inheritable=False)
    try:
        second = launch._archive_file()
        assert second.fd != stranger
        assert launch._archive_file() is second
    finally:
        os.close(stranger)
    os.close(second.fd)


def test_threads_that_come_first_at_once_share_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would leave a descriptor open for as long as the process lives."""
    monkeypatch.setattr(launch, "_archive_files", {})
    barrier, found = threading.Barrier(6), list[int]()

    def come() -> None:
        barrier.wait()
        found.append(launch._archive_file().fd)

    threads = [threading.Thread(target=come) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in set(found):
        os.close(fd)
    assert len(found) == 6
    assert len(set(found)) == 1


LOW_NUMBERS = """
import os, sys
from cloche.jail.setup import launch
for closed in range(3):
    os.close(closed)
process, ours = launch.start_helper()
ours.settimeout(20)
ours.shutdown(1)  # a helper that has its socket ends when nobody is at the other end
os._exit(0 if process.wait(20) == 0 and min(one.fd for one in launch._archive_files.values()) > 2 else 9)
"""


def test_a_caller_without_standard_streams_starts_helpers() -> None:
    """What is opened gets their numbers, which in a helper are its own standard streams."""
    done = subprocess.run([sys.executable, "-c", LOW_NUMBERS], timeout=60, check=False)
    assert done.returncode == 0


def test_a_child_is_let_run_beside_us_and_may_run_anywhere() -> None:
    """Neither it nor we keep fewer processors than before, and a child that is gone is no error."""
    mine = os.sched_getaffinity(0)
    child = subprocess.Popen(["sleep", "60"])
    try:
        for _ in range(50):
            run_beside(child.pid, mine)
        assert os.sched_getaffinity(child.pid) == mine == os.sched_getaffinity(0)
    finally:
        child.kill()
        child.wait()
    run_beside(child.pid, mine)


FORGETTING = """
make_modules({modules!r})
map_archive()
import jail.guest

class Strangers:  # a finder that only looks like ours
    offsets = dict(Archive.offsets)
    def find_spec(name, path=None, target=None): return None

sys.meta_path.append(Strangers)
interpreter = load_interpreter("oneshot")
before, privileges = list(sys.meta_path), jail.guest.forget_helper(interpreter)
assert [finder for finder in before if finder is not Archive] == sys.meta_path != before
assert privileges.archive is Archive and interpreter in jail.guest.never_freed
for name in {modules!r} + ("interpreter", "interpreter.oneshot", "interpreter.session"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(name + " is still to be had")
"""


def test_a_guest_forgets_the_finder_of_our_modules_by_what_it_is_and_not_by_a_name() -> None:
    """Nothing of the helper's can be imported any more, and another finder with the same attributes stays."""
    archive = launch._archive_file()
    program = archive.run_boot() + FORGETTING.format(modules=launch.HELPER_MODULES)
    subprocess.run([sys.executable, "-I", "-S", "-c", program], pass_fds=[archive.fd], timeout=60, check=True)


def test_a_probe_that_takes_too_long_is_an_error_of_the_host(tmp_path: Path) -> None:
    """Whoever asks what a host gives is told that it cannot be found out, by the error that they look for."""
    stopped = tmp_path / "stopped"
    stopped.write_text("#!/bin/sh\nexec sleep 60\n")
    stopped.chmod(0o755)
    with pytest.raises(OSError, match="longer than"):
        launch.run_probe_process(str(stopped), 0.05)


def test_the_end_of_a_probe_process_is_told() -> None:
    """An end by a signal, or with a code and nothing printed, is in the error."""
    killed = subprocess.CompletedProcess([], -9, b"", b"")
    assert launch._end_of_probe(killed) == "was killed by signal 9"
    with pytest.raises(OSError, match=r"^the probe process ended with code 1: it printed nothing$"):
        launch.run_probe_process("/bin/false", 60)
