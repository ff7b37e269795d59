"""Folders that go in and come out: nothing is written, or read, outside of the folder that was named."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest, SandboxFileError
from cloche.core.processes import Transfer
from cloche.execution.folders import pack_folder, read_host_file, stays_inside, unpack_folder, write_host_file

MOST = 1 << 20
Fill = Callable[[tarfile.TarFile], None]


def archive_of(*members: tuple[str, bytes, bytes | str], **settings: object) -> io.BytesIO:
    """Return an archive of members: name, kind, and content or what a link leads to."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, what in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o6777
            if isinstance(what, str):
                member.linkname = what
            else:
                member.size = len(what)
            for field, value in settings.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(what) if isinstance(what, bytes) else None)
    return packed


FILE, LINK, SAME, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def names_in(folder: Path) -> set[str]:
    """Return what is below a folder, links as links."""
    return {
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    """Files, modes, folders, long names and links inside survive the way out and in; all else is counted."""
    source, target = tmp_path / "source", tmp_path / "target"
    deep = source / "a" / ("n" * 150) / ("m" * 150)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x" * 100_000)
    (source / "run.sh").write_text("")
    (source / "run.sh").chmod(0o755)
    (source / "empty").mkdir()
    (source / "inside").symlink_to(f"a/{'n' * 150}/{'m' * 150}/file")
    (source / "a" / "up").symlink_to("../run.sh")
    (source / "folder").symlink_to("a")
    (source / "outside").symlink_to("/etc")
    (source / "above").symlink_to("../x")
    os.mkfifo(source / "fifo")
    packed = io.BytesIO()
    assert pack_folder(str(source), packed, MOST) == Transfer(files=2, size=100_000, left_out=3)
    assert unpack_folder(packed, str(target), MOST) == Transfer(files=2, size=100_000)
    assert names_in(target) == names_in(source) - {"outside", "above", "fifo"}
    assert (target / "inside").read_bytes() == b"x" * 100_000
    assert (target / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(target / "folder") == "a"


def test_what_is_too_much_is_refused(tmp_path: Path) -> None:
    """More bytes than were allowed are an error either way."""
    (tmp_path / "big").write_bytes(bytes(MOST + 1))
    with pytest.raises(InvalidRequest, match="max_bytes"):
        pack_folder(str(tmp_path), io.BytesIO(), MOST)
    with pytest.raises(InvalidRequest, match="max_bytes"):
        read_host_file(str(tmp_path / "big"), MOST)
    packed = archive_of(("a", FILE, bytes(700_000)), ("b", FILE, bytes(700_000)))
    with pytest.raises(SandboxFileError, match="max_bytes"):
        unpack_folder(packed, str(tmp_path / "target"), MOST)


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, b"bad")],
        [("/tmp/out-of-the-folder", FILE, b"bad")],
        [("a/../../out", FILE, b"bad")],
        [("link", LINK, "../outside"), ("link/out", FILE, b"bad")],
        [("link", LINK, "."), ("link/out", FILE, b"bad")],
        [("link", LINK, "/etc")],
        [("link", LINK, "..")],
        [("a/link", LINK, "../../out")],
        # Lexically inside: `p/q/x/../..` is `p`; through x, which is inside, it is the folder above.
        [("r/keep", FILE, b""), ("p/q/x", LINK, "../../r"), ("escape", LINK, "p/q/x/../..")],
        [("same", SAME, "/etc/passwd")],
        [("same", SAME, "there")],
        [("dev", tarfile.CHRTYPE, b"")],
        [("there", FOLDER, b""), ("fifo", tarfile.FIFOTYPE, b"")],
    ],
)
def test_nothing_is_written_outside(tmp_path: Path, members: list[tuple[str, bytes, bytes | str]]) -> None:
    """A name or a link that leads out of the folder, or through a link, is left out; the rest of the archive is not."""
    target, outside = tmp_path / "target", tmp_path / "outside"
    for folder in (target, outside):
        folder.mkdir()
    (target / "there").write_text("mine")
    transfer = unpack_folder(archive_of(*members, ("last", FILE, b"z")), str(target), MOST)
    assert transfer.left_out == 1 + (members[0][0] == "there")
    assert (target / "last").read_text() == "z"
    assert names_in(tmp_path) - {"target", "outside"} == {f"target/{name}" for name in names_in(target)}
    for name in names_in(target):
        assert (target / name).resolve().is_relative_to(target)
    assert not (target / "same").exists()


def test_what_is_there_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    """A link, or another name of a file, in the place of a file is replaced; a folder in its place is left alone."""
    target, other = tmp_path / "target", tmp_path / "other"
    (target / "folder").mkdir(parents=True)
    other.write_text("keep")
    (target / "link").symlink_to(other)
    (target / "same").hardlink_to(other)
    packed = archive_of(("link", FILE, b"new"), ("same", FILE, b"new"), ("folder", FILE, b"new"), ("f", SAME, "link"))
    assert unpack_folder(packed, str(target), MOST) == Transfer(files=3, size=9, left_out=1)
    assert other.read_text() == "keep"
    assert (target / "link").read_text() == (target / "f").read_text() == "new"
    assert (target / "link").stat().st_mode & 0o7777 == 0o755  # nobody becomes somebody else, others may not write
    write_host_file(str(target / "same"), b"newer", 0o644)
    assert other.read_text() == "keep"


@pytest.mark.parametrize("cut", [100, 600, 1100])
def test_an_archive_that_makes_no_sense_is_an_error(tmp_path: Path, cut: int) -> None:
    """One that is cut off, has a sum that is wrong, or a size below zero, ends there."""
    data = archive_of(("a", FILE, b"x" * 1000)).getvalue()
    with pytest.raises(SandboxFileError, match="is invalid from some point on"):
        unpack_folder(io.BytesIO(data[:cut]), str(tmp_path / "target"), MOST)


def test_an_extended_header_is_not_read(tmp_path: Path) -> None:
    """A member whose name stands in one, or that is sparse, is left out: no word of it is looked at."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("é" * 200)
        member.pax_headers = {"GNU.sparse.major": "1"}
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("plain"))
    assert unpack_folder(packed, str(tmp_path), MOST) == Transfer(files=1, size=0, left_out=1)
    assert names_in(tmp_path) == {"plain"}


@pytest.mark.parametrize(
    ("path", "target", "is_inside"),
    [
        ("a", "b", True), ("a", "./b/c", True), ("a/b", "../c", True), ("a/b/c", "../../d/e", True),
        ("a", "..", False), ("a/b", "../../c", False), ("a", "b/../c", False), ("a", "/b", False), ("a", "", False),
        ("a", "b\0c", False), ("a/b", "../.", True),
    ],
)  # fmt: skip
def test_where_a_link_leads(path: str, target: str, is_inside: bool) -> None:
    """It goes up first, no further than the folder, and then down."""
    assert stays_inside(path, target) is is_inside


def test_headers_without_a_member_are_counted(tmp_path: Path) -> None:
    """Gigabytes of headers that say something of what never comes keep nobody waiting until their end."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.XGLTYPE
    with pytest.raises(SandboxFileError, match="more than 8 headers of one member"):
        unpack_folder(io.BytesIO(header.tobuf() * 9), str(tmp_path / "out"), MOST)
