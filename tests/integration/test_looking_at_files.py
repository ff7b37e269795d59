"""What a guest leaves in its workspace does not keep, fill or mislead whoever looks at it afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

import cloche
from cloche.backends.local.session import LocalSession
from cloche.backends.local.workspace import Workspace
from cloche.backends.saved_files import copy_out
from cloche.core.errors import SandboxFileError, SandboxFileNotFound, SandboxFileRefused
from cloche.core.limits import Limits
from cloche.core.result import FileRecord
from cloche.sync import Session

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

# A process that a cell leaves. It is told when a folder is opened (inotify), and moves a tree of 20,000 folders to
# where whoever walks the workspace comes next; without bounds that is a walk through 20,000,000 of them.
MOVER = r"""
import ctypes, os, struct
FOLDERS, BELOW, OPENED = 1000, 20_000, 0x20
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init1(0)
for number in range(FOLDERS):
    os.mkdir(f"g{number:04}")
last = FOLDERS - 1
tree = f"g{last:04}/tree"
os.mkdir(tree)
for number in range(BELOW):
    os.mkdir(f"{tree}/s{number:05}")
watched = {libc.inotify_add_watch(fd, f"g{n:04}".encode(), OPENED | 0x1000000): n for n in range(FOLDERS)}
trigger = libc.inotify_add_watch(fd, f"{tree}/s10000".encode(), OPENED | 0x1000000)
if os.fork() == 0:
    os.setsid()
    here = last
    while True:
        data = os.read(fd, 65536)
        at, found = 0, []
        while at < len(data):
            wd, _, _, size = struct.unpack_from("iIII", data, at)
            at += 16 + size
            found.append(wd)
        there = here - 1 if trigger in found else here
        passed = [watched[wd] for wd in found if wd in watched and watched[wd] < here]
        if passed:
            there = min(passed) - 20
        if 0 <= there < here:
            try:
                os.rename(f"g{here:04}/tree", f"g{there:04}/tree")
                here = there
            except OSError:
                pass
"""
# 2,000 folders, each with a path of 15,000 characters, one of which takes four bytes.
LONG_NAMES = r"""
import os
os.mkdir("\U0001f514"); os.chdir("\U0001f514")
for _ in range(58):
    os.mkdir("n" * 255); os.chdir("n" * 255)
for number in range(2000):
    os.mkdir(f"{number:04}".ljust(255, "n"))
open("file", "w").close()
os.chdir("/")
"""


@pytest.mark.both_users
def test_folders_that_are_moved_ahead_keep_nobody() -> None:
    """A process of a cell that moves what is walked delays neither the cell, nor the next, nor a list of the files."""

    async def look() -> None:
        async with cloche.AsyncSandbox(live=False, cpus=1) as sandbox:
            session = await sandbox.session()
            async with asyncio.timeout(30):
                assert (await session.run(MOVER, timeout=10)).ok
                again = await session.run("open('new', 'w').write('here')", timeout=10)
                assert [file.path for file in again.files] == ["new"]
                assert await sandbox.list_files() == ("new",)
                assert (await sandbox.run("print(1)")).ok
                assert (await session.run("os.path.exists('g0000')")).value is True

    asyncio.run(look())


@pytest.mark.both_users
def test_many_processes_of_a_cell_do_not_keep_the_helper(caplog: pytest.LogCaptureFixture) -> None:
    """Where there are too many to be stopped, it says so soon: it watches nothing meanwhile, and wakes nobody."""
    many = "import os, time\nfor _ in range(400):\n    if os.fork() == 0: time.sleep(600)"
    with cloche.Sandbox(live=False, pids=500, memory="2g") as sandbox, sandbox.session() as session:
        assert session.run(many, timeout=60).ok
        with caplog.at_level("DEBUG", "cloche.jail"):  # which tells when that took longer than a second
            files = session.run("for n in range(200): _ = open(f'f{n}', 'w').write(str(n))", timeout=10)
        assert len(files.files) == 200
        assert session.run("1 + 1", timeout=20).value == 2
    assert not [said for said in caplog.messages if "runs nothing" in said]


WRITER = """
import os, time
open("log", "w").close()
if os.fork() == 0:
    while True:
        with open("log", "a") as log: log.write("x")
        time.sleep(0.001)
"""


@pytest.mark.both_users
def test_forks_stand_still_each_by_itself() -> None:
    """A look at one's files neither begins nor ends with that at another's, though one helper stops both."""

    async def look() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            first, second = await session.fork(2)
            for fork in (first, second):
                assert (await fork.run(WRITER)).ok
            one, other = (cast(LocalSession, fork._interpreter.opened) for fork in (first, second))

            def size() -> int:
                return os.stat("log", dir_fd=one.sandbox.workspace.fd).st_size

            async with one.halted():
                before = size()
                async with other.halted():
                    pass
                await asyncio.sleep(0.1)  # in which a hundred would be written
                assert size() == before
            async with asyncio.timeout(30):
                while size() == before:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.001)

    asyncio.run(look())


@pytest.mark.both_users
def test_long_names_cost_no_memory() -> None:
    """However long the paths of folders are, the caller keeps none of them."""
    tracemalloc.start()
    try:
        result = cloche.run(LONG_NAMES)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.ok, result.stderr
    assert len(result.files) == 1
    assert most < 20 << 20


def test_the_loop_goes_on_while_a_file_without_content_is_read() -> None:
    """A file that says to be large and takes no room is read in a thread."""

    async def longest_pause() -> float:
        loop, beats = asyncio.get_running_loop(), list[float]()

        async def beat() -> None:
            while True:
                beats.append(loop.time())
                await asyncio.sleep(0.005)

        async with cloche.AsyncSandbox(live=False, disk="1g") as sandbox:
            session = await sandbox.session()
            beating = asyncio.create_task(beat())
            result = await session.run("import os; open('x', 'w').truncate(1 << 30)", timeout=2)
            beats.append(loop.time())
            beating.cancel()
            assert result.ok
            assert result.files or result.meta["files_partial"] == "time"
            return max(after - before for before, after in pairwise(beats)) / (beats[-1] - beats[0])

    assert asyncio.run(longest_pause()) < 0.4  # of the time; that of reading is nearly all of it


@pytest.fixture
def endless(tmp_path: Path) -> Workspace:
    """Return a workspace whose only new file takes minutes to read."""
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 38)
    workspace = Workspace(Limits(disk_bytes=1 << 40), str(tmp_path))
    workspace.take([])
    return workspace


def test_what_takes_too_long_is_left_out(endless: Workspace) -> None:
    """The look ends with its time, and the result says what may be missing, and why."""
    found = asyncio.run(endless.collected({}, timeout_s=0.1))
    endless.drop()
    assert found.records == ()
    assert found.meta() == {"files_skipped": 1, "files_partial": "time"}


def test_a_look_can_be_cancelled(endless: Workspace) -> None:
    """Who cancels it gets it back at once, with the thread that looked."""

    async def cancel() -> None:
        looking = asyncio.create_task(endless.collected({}, timeout_s=1e6))
        while not any(link.endswith("/large") for link in _open_files()):  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.001)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert not any(link.endswith("/large") for link in _open_files())

    asyncio.run(asyncio.wait_for(cancel(), 20))
    endless.drop()


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the descriptor of this listing
    return found


# 560 files, each with a path of 16,000 characters, one of which takes four bytes; those of the cell before are gone.
OTHER_FILES = r"""
import os, shutil
os.chdir("/workspace")
for name in os.listdir("."):
    shutil.rmtree(name)
for _ in range(62):
    os.mkdir("\U0001f514" + "n" * 250); os.chdir("\U0001f514" + "n" * 250)
for number in range(560):
    open(f"{os.urandom(8).hex()}-{number}".ljust(255, "x"), "w").close()
os.chdir("/workspace")
"""


@pytest.mark.both_users
def test_files_that_come_and_go_cost_a_session_s_caller_no_memory(session: Session) -> None:
    """What is remembered from cell to cell does not grow with the files that there were."""
    tracemalloc.start()
    try:
        for _ in range(6):
            result = session.run(OTHER_FILES)
            assert result.ok, result.stderr
            assert "paths" in result.meta["files_partial"]
            del result
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 80 << 20  # what one cell found takes 9 MB, what all of them found 200 MB as text


# Result.save


def test_what_is_gone_since_is_not_saved(session: Session, tmp_path: Path) -> None:
    """A file that a later cell removed is named, and nothing of the others is left in the folder."""
    result = session.run("import os; os.mkdir('d'); open('a', 'w').write('1'); open('d/b', 'w').write('2')")
    session.run("os.unlink('d/b')")
    with pytest.raises(SandboxFileNotFound, match=r"'d/b' is no longer in the workspace.*before the next") as told:
        result.save(tmp_path / "out")
    assert told.value.path == "d/b"
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    "change", ["open('b', 'w').write('3')", "os.unlink('b'); os.mkfifo('b')", "os.truncate('b', 9)"]
)
def test_what_has_changed_since_is_not_saved(session: Session, tmp_path: Path, change: str) -> None:
    """What is saved is what the result's hash says; else it is an error, and what was there before stays."""
    result = session.run("import os; open('a', 'w').write('1'); open('b', 'w').write('2')")
    assert session.run(change).ok
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("before")
    if "truncate" in change:  # its first byte is what the result says, and no more than that is taken
        assert result.save(tmp_path / "out") == ("a", "b")
        assert hashlib.sha256((tmp_path / "out" / "b").read_bytes()).hexdigest() == result.files[1].sha256
        return
    with pytest.raises(SandboxFileRefused, match="'b' has changed since"):
        result.save(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["a"]
    assert (tmp_path / "out" / "a").read_text() == "before"


def _records(*paths: str) -> tuple[FileRecord, ...]:
    return tuple(FileRecord(path=path, size=1, sha256=hashlib.sha256(b"x").hexdigest()) for path in paths)


@pytest.mark.parametrize("paths", [("a", "a.b", "a/b"), ("a/b", "a.b", "a"), ("d/a/b/c", "d/a")])
def test_a_file_that_is_a_folder_too_is_not_saved(paths: tuple[str, ...], tmp_path: Path) -> None:
    """As a look beside what moves files about may find it: both are named, and nothing is written."""
    with pytest.raises(SandboxFileRefused, match=r"'(d/)?a' and '(d/)?a/b(/c)?': one is the folder of the other"):
        copy_out(lambda _: nullcontext(io.BytesIO(b"x")), tmp_path / "out", _records(*paths))
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_take_its_place_takes_the_others_along(tmp_path: Path) -> None:
    """Where somebody puts a folder into the way meanwhile, the error names it, and nothing new is left."""

    def read(record: FileRecord) -> AbstractContextManager[io.BytesIO]:
        if record.path == "d/c":
            (tmp_path / "a").mkdir()
        return nullcontext(io.BytesIO(b"x"))

    with pytest.raises(SandboxFileError, match=r"cannot write 'a': Is a directory; .*save into") as told:
        copy_out(read, tmp_path, _records("a", "b", "d/c"))
    assert told.value.path == "a"
    assert os.listdir(tmp_path) == ["a"]


# spill=DIR


IN_THE_WAY: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, elsewhere: place.symlink_to(elsewhere),
    "hard link": lambda place, elsewhere: os.link(elsewhere, place),
    "fifo": lambda place, _: os.mkfifo(place),
}


@pytest.mark.both_users
@pytest.mark.parametrize("make", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_a_spill_replaces_what_is_in_its_place(tmp_path: Path, make: Callable[[Path, Path], object]) -> None:
    """No link that somebody left in the folder is written through, and no FIFO is waited for."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    folder = tmp_path / "full"
    folder.mkdir()
    make(folder / "stdout.txt", elsewhere)
    if os.geteuid() == 0:
        os.chown(folder, 61234, 61234)
        os.chown(folder / "stdout.txt", 61234, 61234, follow_symlinks=False)
    assert cloche.run("print(1)", spill=folder).ok
    assert elsewhere.read_text() == "precious"
    assert (folder / "stdout.txt").read_text() == "1\n"
    assert sorted(os.listdir(folder)) == ["stderr.txt", "stdout.txt"]


def test_a_spill_refuses_a_folder_in_its_place(tmp_path: Path) -> None:
    """What cannot be replaced is named, before anything has run."""
    (tmp_path / "stdout.txt").mkdir()
    with pytest.raises(cloche.InvalidRequest, match=r"spill: cannot write '.*stdout\.txt': Is a directory"):
        cloche.run("print(1)", spill=tmp_path)
    assert os.listdir(tmp_path) == ["stdout.txt"]
