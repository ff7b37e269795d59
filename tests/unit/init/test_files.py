"""Operations on files do what they say with whatever is there, hang on nothing, and name what went wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tarfile
from contextlib import suppress
from typing import Any

import pytest

from cloche.init.folders import MOST_DEPTH
from tests.harness.init import PACKAGES, USER, Files, Refused

MIB = 1 << 20
ODD = os.fsdecode(b"odd-\xff\xc3\xa4")


def rows(files: Files, path: str = "", **order: object) -> list[dict[str, Any]]:
    """List a folder."""
    return [json.loads(line) for line in files.do("list", path, **order)[1].splitlines()]


def mode_of(path: str) -> int:
    """Return permission bits."""
    return stat.S_IMODE(os.stat(path).st_mode)


def test_content_comes_back_whole_and_in_parts(files: Files) -> None:
    """A megabyte is read as it was written; a range of it, too, and what is beyond its end is empty."""
    data = os.urandom(MIB)
    files.write("a/b/c", data, parents=True)
    assert files.read("a/b/c", most=MIB) == data
    assert files.read("a/b/c", most=10, offset=1000, count=10) == data[1000:1010]
    assert files.read("a/b/c", most=10, offset=MIB - 5) == data[-5:]
    assert files.read("a/b/c", most=10, offset=2 * MIB) == b""
    assert files.read("a/b/c") == data  # without a bound, for who takes it piece by piece
    assert files.refused("read", "a/b/c", most=MIB - 1) == "too_large"
    assert files.refused("read", "a/b/c", most=10, offset=5, count=11) == "too_large"


def test_what_has_no_size_is_read_to_its_end(files: Files) -> None:
    """A file of /proc says that it has no bytes, and is bounded all the same; one that is empty is empty."""
    assert b"Uid:" in files.read("/proc/self/status", most=MIB)
    assert files.refused("read", "/proc/self/status", most=100) == "too_large"
    assert len(files.read("/proc/self/status", most=100, count=20)) == 20
    files.write("empty")
    assert files.read("empty", most=0) == b""


def test_links_lead_where_they_lead(files: Files) -> None:
    """Reading and writing go through links, which stay; one that leads nowhere makes its target; a circle is told."""
    files.write("real", b"1")
    os.symlink("real", files / "link")
    os.symlink(files / "new", files / "dangling")
    os.symlink("circle", files / "circle")
    files.write("link", b"22")
    files.write("dangling", b"333")
    assert [files.read(name, most=9) for name in ("real", "link", "new", "dangling")] == [b"22", b"22", b"333", b"333"]
    assert os.path.islink(files / "link")
    assert os.path.islink(files / "dangling")
    assert [files.refused(do, "circle", most=9) for do in ("read", "write")] == ["loop", "loop"]
    assert files.refused("write", "dangling", how="new") == "exists"
    assert files.do("stat", "link")[0].items() >= {"type": "link", "target": "real", "leads_to": "file"}.items()
    assert files.do("stat", "circle")[0]["leads_to"] == ""


def test_what_is_no_regular_file_is_neither_read_nor_written(files: Files) -> None:
    """Pipes, with and without another end, devices, sockets and folders are refused at once."""
    os.mkfifo(files / "pipe")
    files.own("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(files / "socket")
        files.own("socket")
        for path in ("pipe", "socket", "/dev/zero", "/dev/null"):
            kinds = [files.refused("read", path, most=9), files.refused("write", path, b"x")]
            assert [*kinds, files.refused("write", path, b"x", how="append")] == ["not_regular"] * 3
        reading = os.open(files / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        assert files.refused("write", "pipe", b"x", how="append") == "not_regular"
        os.close(reading)
    kinds = [files.refused("read", "", most=9), *(files.refused("write", "", how=how) for how in ("replace", "append"))]
    assert kinds == ["is_directory"] * 3


def test_ways_to_write(files: Files) -> None:
    """A file is replaced with its mode kept, added to, or made only where none is; a mode that is given is set."""
    files.write("f", b"1")
    assert mode_of(files / "f") == 0o644
    files.write("f", b"22", mode=0o700)
    files.write("f", b"333")
    assert (files.read("f", most=9), mode_of(files / "f")) == (b"333", 0o700)
    files.write("f", b"4", how="append")
    files.write("g", b"5", how="append", mode=0o600)
    assert (files.read("f", most=9), files.read("g", most=9), mode_of(files / "g")) == (b"3334", b"5", 0o600)
    assert files.refused("write", "f", b"", how="new") == "exists"
    files.write("h", b"6", how="new")
    assert sorted(os.listdir(files.folder)) == ["f", "g", "h"]
    assert files.refused("write", "no/where", b"") == "not_found"
    assert files.refused("write", "f/below", b"", parents=True) == "not_directory"
    assert files.refused("write", "x/", b"") == "is_directory"
    assert files.refused("write", "x" * 256, b"") == "name_too_long"


def test_a_file_is_whole_or_as_it_was(files: Files) -> None:
    """Who writes and is killed leaves the old file and nothing beside; who has it open keeps reading the old one."""
    files.write("f", b"old")
    operation = files.begin("write", "f")
    os.write(operation.into, b"new")
    with open(files / "f", "rb") as file:
        os.kill(operation.pid, signal.SIGKILL)
        for fd in (operation.into, operation.out, operation.answered):
            if fd == operation.answered:
                assert os.read(fd, 9) == b""
            os.close(fd)
        assert os.listdir(files.folder) == ["f"]
        files.write("f", b"newer")
        assert file.read() == b"old"


@pytest.mark.parametrize(
    ("do", "order", "is_killed"),
    [
        ("write", {}, True),
        ("write", {"how": "new"}, True),
        ("write", {"how": "append"}, True),
        ("unpack", {}, True),
        ("unpack", {}, False),
    ],
)
def test_what_ends_early_leaves_nothing(files: Files, do: str, order: dict[str, str], is_killed: bool) -> None:
    """Half of a content is under no name: of an archive there is what was whole, of a file with two names what was."""
    files.write("two", b"as it was")
    os.link(files / "two", files / "names")
    sent = bytes(3 << 20)
    if do == "unpack":
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as members:
            for name, data in (("whole", b"whole"), ("two", sent), ("half", sent)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                members.addfile(member, io.BytesIO(data))
        sent = archive.getvalue()[: 5 << 20]
    for path in (".",) if do == "unpack" else ("half", "two") if not order else ("half",):
        operation = files.begin(do, path, **order)
        os.write(operation.into, sent)  # which returns when nearly all was taken
        if is_killed:
            os.kill(operation.pid, signal.SIGKILL)
            assert os.read(operation.answered, 1) == b""
            os.close(operation.out)
            os.close(operation.answered)
            os.close(operation.into)
        else:
            with pytest.raises(Refused, match="ends too early"):
                operation.finish()
    assert sorted(os.listdir(files.folder)) == ["names", "two", *["whole"] * (do == "unpack")]
    assert files.read("two") == (b"as it was" if do == "write" else bytes(3 << 20))


def test_what_may_not_be_written_to_stays_as_it_is(files: Files) -> None:
    """A read-only file is refused; in a folder that is closed a file is written in place, and none is added."""
    files.write("d/f", b"1", parents=True)
    files.write("d/closed", b"1", mode=0o400)
    assert [files.refused("write", "d/closed", b"2", how=how) for how in ("replace", "append")] == ["permission"] * 2
    os.chmod(files / "d", 0o500)
    files.write("d/f", b"22")
    assert [files.read(path, most=9) for path in ("d/f", "d/closed")] == [b"22", b"1"]
    assert files.refused("write", "d/new", b"") == "permission"
    assert files.refused("remove", "d/f") == "permission"
    assert files.refused("make_folder", "d/e") == "permission"
    os.chmod(files / "d", 0o000)
    assert [files.refused(do, "d/f", most=9) for do in ("read", "write", "stat")] == ["permission"] * 3
    assert files.refused("list", "d") == "permission"
    os.chmod(files / "d", 0o700)


def test_each_name_of_a_file_sees_what_is_written(files: Files) -> None:
    """What has several names is written to itself; a program that runs is replaced beside it."""
    files.write("f", b"1")
    os.link(files / "f", files / "g")
    files.write("f", b"22")
    assert files.read("g", most=9) == b"22"
    with open("/bin/sleep", "rb") as program:
        files.write("sleep", program.read(), mode=0o755)
    pid = os.posix_spawn(files / "sleep", ["sleep", "100"], {})
    try:
        files.write("sleep", b"new")
        assert files.read("sleep", most=9) == b"new"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.root
def test_what_is_anothers_stays_theirs(files: Files) -> None:
    """A file of another user that all may write to keeps its owner, also in a folder where only owners may rename."""
    os.chmod(files.folder, 0o1777)
    with open(files / "theirs", "w") as file:
        os.fchmod(file.fileno(), 0o666)
    os.chown(files.folder, USER + 1, USER + 1)
    files.write("theirs", b"mine")
    assert (files.read("theirs", most=9), os.stat(files / "theirs").st_uid) == (b"mine", 0)
    assert files.refused("remove", "theirs") == "permission"
    os.chown(files.folder, USER, USER)


def test_names_of_any_bytes_come_through(files: Files) -> None:
    """Also in what is told of them; a name that is none is refused."""
    name = {"hex": os.fsencode(files / ODD).hex()}
    files.begin("write", name).finish(b"1")
    assert os.listdir(files.folder) == [ODD]
    files.own(ODD)
    os.symlink(ODD, files / "link")
    odd = {"hex": os.fsencode(ODD).hex()}
    listed = {json.dumps(row["name"]): row for row in rows(files)}
    assert listed[json.dumps(odd)]["size"] == 1
    assert listed['"link"']["target"] == odd
    assert files.do("stat", "link")[0]["real"] == name
    with pytest.raises(Refused) as caught:
        files.begin("make_folder", name).finish()
    assert (caught.value.kind, caught.value.path) == ("exists", name)
    for bad in ({"hex": "0"}, {"hex": "00"}, {"hex": "61" * 20000}, {}, 5, "a\0b", "\ud800"):
        assert files.refused("move", ODD, target=bad) == "invalid"
        assert Files(files.folder, files.link).refused("move", "none", target=bad) == "invalid"


def test_orders_that_make_no_sense_are_refused(files: Files) -> None:
    """Whatever is wrong with an order, the answer says that it is."""
    files.write("f", b"1")
    wrong: list[tuple[str, dict[str, object]]] = [
        ("none", {}), ("read", {"offset": -1}), ("read", {"count": "1"}), ("read", {"most": 1 << 70}),
        ("write", {"how": "x"}), ("write", {"mode": -1}), ("write", {"mode": "7"}), ("move", {}),
        ("list", {"entries": []}),
    ]  # fmt: skip
    assert [files.refused(do, "f", **order) for do, order in wrong] == ["invalid"] * len(wrong)
    assert files.read("f") == b"1"


def test_lists(files: Files) -> None:
    """Entries come by name, with those below them where it is asked for, and no more than are wanted."""
    files.write("d/e/f", b"123", parents=True)
    files.write("a", b"1", mode=0o640)
    os.symlink("d", files / "link")
    os.mkfifo(files / "pipe")
    flat = [(row["name"], row["type"]) for row in rows(files)]
    assert flat == [("a", "file"), ("d", "directory"), ("link", "link"), ("pipe", "other")]
    deep = [row["name"] for row in rows(files, recursive=True)]
    assert deep == ["a", "d", "d/e", "d/e/f", "link", "pipe"]
    first = rows(files)[0]
    assert (first["size"], first["mode"], first["uid"]) == (1, 0o640, os.stat(files / "a").st_uid)
    assert files.refused("list", "", entries=3) == "too_large"
    assert files.refused("list", "", recursive=True, entries=5) == "too_large"
    os.chmod(files / "d/e", 0)
    answer, _ = files.do("list", "", recursive=True)
    assert (answer["count"], answer["skipped"]) == (5, 1)
    assert [files.refused("list", path) for path in ("none", "a")] == ["not_found", "not_directory"]
    os.chmod(files / "d/e", 0o700)


def test_folders_are_made_moved_and_removed(files: Files) -> None:
    """Parents are made where that is wanted; what is in the way is told; what has content is removed on demand."""
    files.do("make_folder", "a/b/c", parents=True)
    files.do("make_folder", "a/b/c", parents=True)
    assert files.refused("make_folder", "a/b") == "exists"
    files.do("write", "a/file", b"")
    assert files.refused("make_folder", "a/file", parents=True) == "exists"
    assert files.refused("make_folder", "a/file/b", parents=True) == "not_directory"
    assert files.refused("make_folder", "x/y") == "not_found"
    files.write("f", b"1")
    files.write("g", b"2")
    assert files.refused("move", "f", target=files / "g") == "exists"
    assert files.refused("move", "none", target=files / "h") == "not_found"
    assert files.refused("move", "f", target=files / "no/h") == "not_found"
    assert files.refused("move", "f", target=files / "a", replaces=True) == "is_directory"
    assert files.refused("move", "a", target=files / "a/b/inside") == "invalid"
    files.do("move", "f", target=files / "g", replaces=True)
    files.do("move", "a", target=files / "moved")
    assert (files.read("g", most=9), sorted(os.listdir(files.folder))) == (b"1", ["g", "moved"])
    assert files.refused("remove", "moved") == "not_empty"
    os.symlink("moved", files / "link")
    files.do("remove", "link", recursive=True)
    files.do("remove", "moved", recursive=True)
    files.do("remove", "g")
    assert os.listdir(files.folder) == []
    assert files.refused("remove", "g") == "not_found"


def test_a_deep_tree_is_removed(files: Files) -> None:
    """However deep it is, and without going through the links in it; a folder that cannot be changed is named."""
    os.mkdir(files / "kept")
    files.own("kept")
    files.write("kept/file")
    here = os.getcwd()
    try:
        os.chdir(files.folder)
        for _ in range(3000):
            os.mkdir("d")
            if os.geteuid() == 0:
                os.chown("d", USER, USER)
            os.symlink(files / "kept", "link")
            os.chdir("d")
    finally:
        os.chdir(here)
    assert rows(files, "d", recursive=True)[0]["name"] == "d"
    files.do("remove", "d", recursive=True)
    assert os.listdir(files / "kept") == ["file"]
    os.mkdir(files / "kept/closed")
    files.own("kept/closed")
    files.write("kept/closed/f")
    os.chmod(files / "kept/closed", 0o500)
    with pytest.raises(Refused) as caught:
        files.do("remove", "kept", recursive=True)
    assert (caught.value.kind, caught.value.path) == ("permission", files / "kept/closed")
    os.chmod(files / "kept/closed", 0o700)


def test_moves_between_file_systems(files: Files) -> None:
    """A tree is copied with modes, links and times, whole or not at all, and then removed."""
    target = f"/tmp/moved-{os.getpid()}"
    files.write("d/f", b"1", parents=True, mode=0o640)
    files.write("d/e/g", b"2", parents=True)
    os.symlink("f", files / "d/link")
    os.utime(files / "d/f", (1000, 1000))
    os.chmod(files / "d/e", 0o550)
    assert files.refused("move", "d", target=target) == "permission"
    assert (os.path.exists(target), files.read("d/e/g", most=9)) == (False, b"2")
    os.chmod(files / "d/e", 0o750)
    try:
        files.do("move", "d", target=target)
    finally:
        if os.path.exists(target):
            found = {name: os.lstat(f"{target}/{name}") for name in ("f", "e/g", "link", "e")}
            files.do("remove", target, recursive=True)
    modes = [stat.S_IMODE(found[name].st_mode) for name in ("f", "e")]
    assert (modes, found["f"].st_mtime, stat.S_ISLNK(found["link"].st_mode)) == ([0o640, 0o750], 1000, True)
    assert not os.path.exists(files / "d")


def test_archives_are_those_of_others(files: Files) -> None:
    """What is packed, `tarfile` reads; what it writes, in each of its formats, is unpacked."""
    files.write("d/e/run", b"x" * 1000, parents=True, mode=0o755)
    files.write("d/" + "n" * 180, b"y")
    files.begin("write", {"hex": os.fsencode(files / f"d/{ODD}").hex()}).finish(b"z")
    os.symlink("e/" + "t" * 150, files / "d/link")
    os.mkfifo(files / "d/pipe")
    answer, packed = files.do("pack", "d")
    assert answer == {"skipped": 1}
    with tarfile.open(fileobj=io.BytesIO(packed), errors="surrogateescape") as archive:
        members = {member.name: member for member in archive}
        assert {name: member.size for name, member in members.items() if member.isreg()} == {
            "e/run": 1000, "n" * 180: 1, ODD: 1,
        }  # fmt: skip
        assert (members["e/run"].mode, members["e"].isdir(), members["link"].linkname) == (
            0o755,
            True,
            "e/" + "t" * 150,
        )
    assert files.do("unpack", "u0", packed)[0] == {"count": 5}
    for number, kind in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), 1):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=kind, errors="surrogateescape") as archive:
            if kind != tarfile.USTAR_FORMAT:
                archive.add(files / "d/link", "link")
                archive.add(files / f"d/{'n' * 180}", "n" * 180)
                archive.add(files / f"d/{ODD}", ODD)
            archive.add(files / "d/e", "e/./")
        files.do("unpack", f"u{number}", made.getvalue())
    for name in ("u0", "u2", "u3"):
        assert sorted(os.listdir(files / name)) == sorted(["e", "link", "n" * 180, ODD])
    assert [mode_of(files / f"u{number}/e/run") for number in range(4)] == [0o755] * 4
    assert files.do("pack", "d/e/run")[1][:512].startswith(b"run\0")


def test_packing_is_bounded(files: Files) -> None:
    """By entries and by bytes: a file that is mostly holes counts with its length."""
    files.write("d/f", b"1", parents=True)
    os.truncate(files / "d/f", 1 << 40)
    assert files.refused("pack", "d", most=MIB) == "too_large"
    assert files.refused("pack", "", entries=1) == "too_large"
    assert files.refused("pack", "none") == "not_found"


def made_of(*members: tuple[str, bytes, str | bytes]) -> bytes:
    """Return an archive: name, type, and content or target of each member."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o6755
            if isinstance(content, str):
                member.linkname = content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("../x", tarfile.REGTYPE, b"1")],
        [("/tmp/x", tarfile.REGTYPE, b"1")],
        [("a/../../x", tarfile.REGTYPE, b"1")],
        [("link", tarfile.SYMTYPE, ".."), ("link/x", tarfile.REGTYPE, b"1")],
        [("link", tarfile.SYMTYPE, ".."), ("link/x/y", tarfile.DIRTYPE, "")],
        [("a/b", tarfile.SYMTYPE, "../.."), ("a/b/x", tarfile.LNKTYPE, "a")],
        [("f", tarfile.LNKTYPE, "../outside")],
        [("link", tarfile.SYMTYPE, ".."), ("f", tarfile.LNKTYPE, "link/outside")],
        [("f", tarfile.REGTYPE, b"1"), ("f/x", tarfile.REGTYPE, b"1")],
        [("device", tarfile.CHRTYPE, "")],
    ],
    ids=str,
)
def test_an_archive_leads_nowhere_else(files: Files, members: list[tuple[str, bytes, str | bytes]]) -> None:
    """Names that lead out are refused, and so is the way through a link, whoever made it."""
    files.write("outside", b"1")
    assert files.refused("unpack", "d", made_of(*members)) in ("invalid", "not_directory")
    assert sorted(os.listdir(files.folder)) == ["d", "outside"]


def test_what_is_there_gives_way_to_an_archive(files: Files) -> None:
    """A link is replaced and not followed; a folder is not replaced by a file; nothing runs with another's rights."""
    files.write("outside", b"1")
    files.do("make_folder", "d")
    os.symlink("../outside", files / "d/f")
    files.do("unpack", "d", made_of(("f", tarfile.REGTYPE, b"2"), ("again", tarfile.LNKTYPE, "f")))
    assert (files.read("d/f", most=9), files.read("outside", most=9)) == (b"2", b"1")
    assert (mode_of(files / "d/f"), os.stat(files / "d/f").st_nlink) == (0o755, 2)
    files.do("make_folder", "d/e")
    assert files.refused("unpack", "d", made_of(("e", tarfile.REGTYPE, b"2"))) == "is_directory"
    os.symlink(files / "d", files / "way")
    files.do("unpack", "way", made_of(("g", tarfile.REGTYPE, b"3")))
    assert files.read("d/g", most=9) == b"3"


def test_a_read_only_folder_of_an_archive_is_filled_first(files: Files) -> None:
    """Its permissions are set when all is there."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        folder = tarfile.TarInfo("d")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o555
        archive.addfile(folder)
        archive.addfile(tarfile.TarInfo("d/f"))
    files.do("unpack", "u", made.getvalue())
    assert (mode_of(files / "u/d"), os.listdir(files / "u/d")) == (0o555, ["f"])
    os.chmod(files / "u/d", 0o755)


def test_what_is_no_archive_is_refused(files: Files) -> None:
    """Text, an archive that is cut off, or whose checksum is wrong; and one with more entries than are wanted."""
    whole = made_of(("f", tarfile.REGTYPE, b"x" * 3000), ("l" * 150, tarfile.SYMTYPE, "x" * 150))
    damaged = [b"text " * 200, b"", whole[:700], whole[:4000], b"\0" * 100, whole[:100] + b"9" + whole[101:]]
    assert [files.refused("unpack", f"u{n}", data) for n, data in enumerate(damaged)] == ["invalid"] * len(damaged)
    assert files.refused("unpack", "u", whole, entries=1) == "too_large"


def watched(files: Files, path: str = "", **order: object) -> Any:
    """Watch; return what returns the next events, up to one that satisfies it."""
    operation = files.begin("watch", path, **order)
    os.close(operation.into)
    lines = os.fdopen(operation.out, "rb")
    assert json.loads(lines.readline())["event"] == "watching"

    def until(event: str, path: str) -> list[tuple[str, ...]]:
        found = []
        while True:
            row = json.loads(lines.readline())
            found.append((row["event"], row["path"], *([row["target"]] if "target" in row else [])))
            if found[-1][:2] == (event, path):
                return found

    def end() -> None:
        with suppress(ProcessLookupError):  # it ends by itself once the folder is gone
            os.kill(operation.pid, signal.SIGKILL)
        lines.close()
        os.close(operation.answered)

    until.end, until.operation = end, operation  # type: ignore[attr-defined]
    return until


def test_a_watch_tells_of_changes(files: Files) -> None:
    """Files that are made, written, moved, removed; not of what is below, nor of what is being written."""
    files.do("make_folder", "d")
    until = watched(files)
    files.write("f", b"1")
    files.write("f", b"2")
    files.write("d/unseen", b"1")
    files.do("move", "f", target=files / "g")
    files.do("move", "g", target=files / "d/g")
    files.do("move", "d/g", target=files / "h")
    files.do("remove", "h")
    wanted = [
        ("created", "f"),
        ("changed", "f"),
        ("moved", "f", "g"),
        ("removed", "g"),
        ("created", "h"),
        ("removed", "h"),
    ]
    assert until("removed", "h") == wanted
    os.rename(files.folder, f"{files.folder}-moved")
    os.rename(f"{files.folder}-moved", files.folder)
    assert until("over", "") == [("over", "")]
    until.end()


def test_a_watch_follows_folders_that_come_and_move(files: Files) -> None:
    """What is in a new folder is told once, and a folder that is moved is watched by its new name."""
    until = watched(files, recursive=True)
    files.write("a/b/f", b"1", parents=True)
    found = until("created", "a/b/f")  # a folder that is listed has no order: only then the next file
    files.write("a/b/last", b"1")
    found += until("created", "a/b/last")
    assert [path for event, path, *_ in found if event == "created"] == ["a", "a/b", "a/b/f", "a/b/last"]
    files.do("move", "a", target=files / "c")
    files.write("c/b/g")
    assert until("created", "c/b/g")[-2:] == [("moved", "a", "c"), ("created", "c/b/g")]
    files.do("remove", "c", recursive=True)
    assert ("removed", "c/b/g") in until("removed", "c")
    until.end()


def test_a_file_is_watched_by_its_name(files: Files) -> None:
    """Also when another file takes it."""
    files.write("f", b"1")
    until = watched(files, "f")
    files.write("other")
    files.write("f", b"2", how="append")
    assert until("changed", "") == [("changed", "")]
    files.do("remove", "f")
    assert until("removed", "")[-1] == ("removed", "")
    files.write("f", b"3")
    assert until("created", "")[-1] == ("created", "")
    until.end()


def test_a_watch_that_nobody_reads_says_what_it_lost(files: Files) -> None:
    """The kernel keeps so many changes and no more; what nobody has read is bounded, and the loss is told."""
    until = watched(files)
    for number in range(10_000):
        os.close(os.open(files / f"f{number % 50}", os.O_CREAT | os.O_WRONLY))
        os.unlink(files / f"f{number % 50}")
    files.write("end")
    found = until("lost", "")
    assert len(found) < 20_000
    files.write("later")
    assert until("created", "later")[-1] == ("created", "later")
    until.end()


def test_a_watch_of_too_much_begins_all_the_same(files: Files) -> None:
    """That it is not told of all comes right after its beginning."""
    files.do("make_folder", "d/" * (MOST_DEPTH + 2), parents=True)
    until = watched(files, recursive=True)
    files.write("f")
    assert until("created", "f") == [("lost", ""), ("created", "f")]
    until.end()


def test_nothing_large_is_imported() -> None:
    """What pid 1 of a sandbox loads for files is small: neither tarfile, nor shutil, nor ctypes."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); import init.files; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"tarfile", "shutil", "ctypes", "subprocess", "asyncio", "tempfile"} & set(done.stdout.split())
